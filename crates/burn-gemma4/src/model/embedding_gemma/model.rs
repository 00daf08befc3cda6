//! The parameters and the forward pass of EmbeddingGemma 2.

use super::PackedTexts;
use crate::config::embedding_gemma::EmbeddingGemmaConfig;
use crate::error::Gemma4Error;
use crate::model::layer::ops::ResidualStream;
use crate::model::layer::{DecoderLayer, Embedding, Linear, RmsNorm};
use crate::model::observe::{Observer, Site};
use crate::model::prefill_ops::{KvDestination, PrefillOps, Rotations};
use crate::model::row_rules::RowRules;
use crate::op::column_slice::ColumnSlice;
use crate::op::flat_rows;
use crate::op::linear::{self, Matrix};
use crate::op::rope::tables::Rope;
use burn::{
    module::Module,
    tensor::{DType, Device, Int, Tensor, TensorData},
};
use std::sync::Arc;

/// The EmbeddingGemma 2 model, without its tokenizer. Attention sees both directions: each token attends to its whole
/// text, or in sliding layers to a window around the token.
///
/// The definition is the class `EmbeddingGemma2TextModel` of Hugging Face Transformers, with the mean pooling of
/// sentence-transformers.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use burn_gemma4::{EmbeddingGemmaConfig, EmbeddingGemmaModel, Gemma4Config, LayerType};
///
/// let config = EmbeddingGemmaConfig {
///     text: Gemma4Config {
///         vocab_size: 100,
///         hidden_size: 32,
///         intermediate_size: 64,
///         layer_types: vec![LayerType::Sliding, LayerType::Full],
///         num_attention_heads: 2,
///         sliding_head_dim: 16,
///         global_head_dim: 32,
///         num_kv_shared_layers: 0,
///         use_double_wide_mlp: false,
///         hidden_size_per_layer_input: 8,
///         ..Gemma4Config::e2b()
///     },
///     embedding_dim: 24,
/// };
/// let model = EmbeddingGemmaModel::new(&config, &Device::flex());
/// let pooled = model.forward(&[&[2, 17, 5, 44], &[2, 9]])?;
/// assert_eq!(pooled.dims(), [2, 24]);
/// # }
/// # Ok::<(), burn_gemma4::Gemma4Error>(())
/// ```
#[derive(Module, Debug)]
pub struct EmbeddingGemmaModel {
    /// The token embedding table.
    pub embed_tokens: Embedding,
    /// The projection from token embeddings to per-layer embeddings.
    pub ple: PerLayerProjection,
    /// The layers.
    pub layers: Vec<DecoderLayer>,
    /// The norm after the last layer.
    pub norm: RmsNorm,
    /// The projection to embeddings, `[embedding_dim, hidden]`.
    pub embedding_projection: Linear,
    #[module(skip)]
    config: Arc<EmbeddingGemmaConfig>,
    #[module(skip)]
    rope: Rope,
}

/// The projection from token embeddings to per-layer embeddings (PLE). In contrast to Gemma 4, there is no table of
/// per-layer embeddings.
#[derive(Module, Debug)]
pub struct PerLayerProjection {
    /// The projection, `[layers · columns, hidden]`.
    pub per_layer_model_projection: Linear,
    /// The norm of each layer's columns.
    pub per_layer_projection_norm: RmsNorm,
}

impl PerLayerProjection {
    /// Computes the per-layer embeddings of token embeddings, `[rows, hidden]`. Returns `[rows, layers · columns]`.
    fn forward(&self, embedded: Tensor<2>) -> Tensor<2> {
        let [rows, hidden] = embedded.dims();
        let dtype = embedded.dtype();
        let projected = self.per_layer_model_projection.rows(embedded);
        let [_, all] = projected.dims();
        let [columns] = self.per_layer_projection_norm.weight.val().dims();
        let of_layers = projected.reshape([rows, all / columns, columns]);
        // Multiply in f32, because half precision cannot represent the constant.
        let scaled = of_layers.cast(DType::F32) * (hidden as f64).powf(-0.5);
        let normed = self.per_layer_projection_norm.forward(scaled);
        normed.cast(dtype).reshape([rows, all])
    }
}

impl EmbeddingGemmaModel {
    /// Creates a model with random weights in the device's default dtype.
    ///
    /// # Panics
    /// Panics if the configuration is not [valid](EmbeddingGemmaConfig::validate).
    pub fn new(config: &EmbeddingGemmaConfig, device: &Device) -> Self {
        if let Err(error) = config.validate() {
            panic!("{error}");
        }
        let text = &config.text;
        let (hidden, columns) = (text.hidden_size, text.hidden_size_per_layer_input);
        let (layers, deviation) = (text.num_layers(), text.initializer_range);
        let scale = (hidden as f64).sqrt();
        Self {
            embed_tokens: Embedding::new(text.vocab_size, hidden, scale, deviation, device),
            ple: PerLayerProjection {
                per_layer_model_projection: Linear::new(
                    hidden,
                    layers * columns,
                    deviation,
                    device,
                ),
                per_layer_projection_norm: RmsNorm::new(columns, text.rms_norm_eps, device),
            },
            layers: (0..layers)
                .map(|layer| DecoderLayer::new(text, layer, device))
                .collect(),
            norm: RmsNorm::new(hidden, text.rms_norm_eps, device),
            embedding_projection: Linear::new(hidden, config.embedding_dim, deviation, device),
            rope: Rope::new(text),
            config: Arc::new(config.clone()),
        }
    }

    /// Returns the model's configuration, with its shapes and hyperparameters.
    pub fn config(&self) -> &EmbeddingGemmaConfig {
        &self.config
    }

    /// Returns the dtype in which the model computes, which is the dtype of its weights.
    pub fn dtype(&self) -> DType {
        self.embed_tokens.weight.dtype()
    }

    /// Returns the device that holds the weights.
    pub fn device(&self) -> Device {
        self.embed_tokens.weight.device()
    }

    /// Computes the mean of each text's hidden states, and projects the means. The embedding of a text is its row,
    /// divided by the row's norm. All texts run in one pass, without padding.
    ///
    /// # Shapes
    /// The result is `[texts, embedding_dim]` in f32.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if there are no texts, if a text has no tokens, or if a token is outside the
    /// vocabulary.
    pub fn forward(&self, texts: &[&[u32]]) -> Result<Tensor<2>, Gemma4Error> {
        self.forward_observed(texts, &mut ())
    }

    /// Computes [`forward`](Self::forward), and passes intermediate tensors to the observer. The tensors have one
    /// sequence, in which the texts follow one another.
    ///
    /// # Errors
    /// Returns the errors of [`forward`](Self::forward).
    pub fn forward_observed<O: Observer>(
        &self,
        texts: &[&[u32]],
        observer: &mut O,
    ) -> Result<Tensor<2>, Gemma4Error> {
        let refuse = |reason: String| Gemma4Error::Argument {
            argument: "texts",
            reason,
        };
        if texts.is_empty() {
            return Err(refuse("is empty; expected a text".into()));
        }
        if let Some(index) = texts.iter().position(|text| text.is_empty()) {
            return Err(refuse(format!("text {index} has no tokens")));
        }
        let tokens = texts.concat();
        let text = &self.config.text;
        text.check_tokens(tokens.iter().map(|token| i64::from(*token)))?;

        let device = self.device();
        let packed = PackedTexts::new(texts.iter().map(|text| text.len()), &device);
        let states = self.states(&tokens, &packed, observer);
        let [rows, hidden] = states.dims();
        observer.observe(Site::FinalNorm, || {
            states.clone().reshape([1, rows, hidden])
        });

        // The mean runs over the rows of one text alone. A product by 0 and 1 would let NaN reach other texts.
        let means = packed.rows().iter().map(|rows| {
            let states = states.clone().slice([rows.clone()]);
            states.cast(DType::F32).mean_dim(0)
        });
        let means = Tensor::cat(means.collect(), 0);
        let projection = self.embedding_projection.weight.matrix();
        let projection = Matrix::Whole(projection.whole(DType::F32).cast(DType::F32));
        // Transformers projects each token and then computes the mean. Both orders give the same result, because the
        // projection has no bias. This order has one row per text.
        Ok(linear::rows(means, projection))
    }

    /// Returns the normalized output of the last layer, `[tokens, hidden]`.
    fn states<O: Observer>(
        &self,
        tokens: &[u32],
        packed: &PackedTexts,
        observer: &mut O,
    ) -> Tensor<2> {
        let (device, text) = (self.device(), &self.config.text);
        let ids: Vec<i32> = tokens.iter().map(|token| *token as i32).collect();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, tokens.len()]), &device);
        let embedded = self.embed_tokens.forward(ids);
        observer.observe(Site::Embedding, || embedded.clone());
        let embedded = flat_rows(embedded);
        let embeddings = self.ple.forward(embedded.clone());
        let columns = text.hidden_size_per_layer_input;
        observer.observe(Site::PerLayerEmbeddings, || {
            let shape = [1, tokens.len(), text.num_layers(), columns];
            embeddings.clone().reshape(shape)
        });

        let mut operators = PrefillOps {
            batch: 1,
            rotations: Rotations::new(&self.rope, &packed.positions(), self.dtype(), &device),
            window: text.sliding_window,
            rules: RowRules::default(),
            destination: KvDestination::Encoder(packed),
            adapters: None,
            mlp_recompute: false,
            observer,
        };
        let mut stream = ResidualStream::new(embedded);
        for (index, layer) in self.layers.iter().enumerate() {
            let embedding = ColumnSlice {
                rows: embeddings.clone(),
                start: index * columns,
                count: columns,
            };
            let next = match self.layers.get(index + 1) {
                Some(next) => &next.input_layernorm,
                None => &self.norm,
            };
            (stream, _) = layer.forward(stream, Some(embedding), None, next, &mut operators);
        }
        stream.norm(&self.norm)
    }
}
