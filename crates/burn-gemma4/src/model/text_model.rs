//! The parameters of the Gemma 4 text model.

use super::host_table::HostTable;
use super::layer::{DecoderLayer, Embedding, Linear, RmsNorm, Weight};
use super::placement::TablePlacement;
use super::split_table::SplitTable;
use crate::config::Gemma4Config;
use crate::op::linear::Matrix;
use crate::op::rope::tables::Rope;
use burn::{
    module::Module,
    tensor::{DType, Device},
};
use std::sync::Arc;

/// A Gemma 4 text model.
///
/// The path of each parameter equals the name of its tensor in the checkpoint.
///
/// # Training
/// [`forward`](Self::forward) and [`forward_packed`](Self::forward_packed) are differentiable through Burn's autodiff.
///
/// An example:
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_gemma4::{Gemma4Config, Gemma4Model, LayerType};
///
/// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
/// let config = Gemma4Config {
///     vocab_size: 100,
///     hidden_size: 32,
///     intermediate_size: 64,
///     layer_types: vec![LayerType::Sliding, LayerType::Full],
///     num_attention_heads: 2,
///     sliding_head_dim: 16,
///     global_head_dim: 32,
///     num_kv_shared_layers: 0,
///     hidden_size_per_layer_input: 0,
///     ..Gemma4Config::e2b()
/// };
/// let device = Device::flex().autodiff();
/// let model = Gemma4Model::new(&config, &device);
/// let tokens = Tensor::<2, Int>::from_data([[2, 17, 5, 44]], &device);
/// let logits = model.forward(tokens)?; // [1, 4, 100]
/// let next = Tensor::<3, Int>::from_data([[[17], [5], [44], [1]]], &device);
/// let loss = -burn::tensor::activation::log_softmax(logits, 2).gather(2, next).mean();
/// let gradients = loss.backward();
/// assert!(model.norm.weight.val().grad(&gradients).is_some());
/// # Ok(())
/// # }
/// ```
///
/// [`loss`](Self::loss) computes the loss from [`hidden`](Self::hidden) and never stores the logits, which would be by
/// far the largest tensor.
#[derive(Module, Debug)]
pub struct Gemma4Model {
    /// The token embedding table. It is also the weight of the head if the model has no `lm_head`.
    pub embed_tokens: Embedding,
    /// The table of per-layer embeddings (PLE), if the table is one parameter on the device.
    pub embed_tokens_per_layer: Option<Embedding>,
    /// The PLE table on the device, if it is split into several buffers.
    pub(crate) split_table: Option<SplitTable>,
    /// The PLE table on the host, if it is read from the checkpoint's mapped files.
    #[module(skip)]
    pub(crate) host_table: Option<HostTable>,
    #[module(skip)]
    pub(crate) placement: Option<TablePlacement>,
    /// Warnings about settings in the checkpoint's files that this crate ignores.
    #[module(skip)]
    pub(crate) warnings: Vec<String>,
    /// The dtype of the checkpoint's weights, or `None` if the model was not loaded from a checkpoint.
    #[module(skip)]
    pub(crate) written: Option<DType>,
    /// True if the model was loaded from a mobile checkpoint (`quant_method` "gemma"), whose static scales round the
    /// activations.
    #[module(skip)]
    pub(crate) is_mobile: bool,
    /// The projection of the scaled token embeddings. Its output is added to the per-layer embeddings. `None` if the model
    /// has no per-layer embeddings.
    pub per_layer_model_projection: Option<Linear>,
    /// The norm of the projected token embeddings. It applies before the per-layer embeddings are added.
    pub per_layer_projection_norm: Option<RmsNorm>,
    /// The decoder layers.
    pub layers: Vec<DecoderLayer>,
    /// The norm of the last layer's output, before the head.
    pub norm: RmsNorm,
    /// The projection to logits, or `None` if the head's weight is the token embedding table.
    pub lm_head: Option<Linear>,
    /// True if the backward pass recomputes the activations inside the dense MLPs that have LoRA adapters.
    #[module(skip)]
    pub(crate) mlp_recompute: bool,
    #[module(skip)]
    pub(crate) config: Arc<Gemma4Config>,
    #[module(skip)]
    pub(crate) rope: Rope,
}

impl Gemma4Model {
    /// Creates a model with random weights in the device's default dtype.
    ///
    /// # Panics
    /// Panics if the configuration is not [valid](Gemma4Config::validate).
    pub fn new(config: &Gemma4Config, device: &Device) -> Self {
        if let Err(error) = config.validate() {
            panic!("{error}");
        }
        Self::of(config, device)
    }

    /// Returns warnings to the user about settings in the checkpoint's files that this crate ignores.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Creates a model as [`new`](Self::new) does, but from a configuration that is already validated. Unlike in `new`,
    /// all layers may be shared KV layers, as in a drafter.
    pub(crate) fn of(config: &Gemma4Config, device: &Device) -> Self {
        let (hidden, columns) = (config.hidden_size, config.hidden_size_per_layer_input);
        let layers = config.num_layers();
        let deviation = config.initializer_range;
        let per_layer_embeddings = config.has_per_layer_embeddings();
        Self {
            embed_tokens: Embedding::new(
                config.vocab_size,
                hidden,
                (hidden as f64).sqrt(),
                deviation,
                device,
            ),
            embed_tokens_per_layer: per_layer_embeddings.then(|| {
                Embedding::new(
                    config.vocab_size_per_layer_input,
                    layers * columns,
                    (columns as f64).sqrt(),
                    deviation,
                    device,
                )
            }),
            split_table: None,
            host_table: None,
            placement: None,
            warnings: Vec::new(),
            written: None,
            is_mobile: false,
            per_layer_model_projection: per_layer_embeddings
                .then(|| Linear::new(hidden, layers * columns, deviation, device)),
            per_layer_projection_norm: per_layer_embeddings
                .then(|| RmsNorm::new(columns, config.rms_norm_eps, device)),
            layers: (0..layers)
                .map(|layer| DecoderLayer::new(config, layer, device))
                .collect(),
            norm: RmsNorm::new(hidden, config.rms_norm_eps, device),
            lm_head: (!config.tie_word_embeddings)
                .then(|| Linear::new(hidden, config.vocab_size, deviation, device)),
            rope: Rope::new(config),
            mlp_recompute: false,
            config: Arc::new(config.clone()),
        }
    }

    /// Returns the model's configuration, with its shapes and hyperparameters.
    pub fn config(&self) -> &Gemma4Config {
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

    /// Returns the weight of the head, `[vocabulary, hidden]`, which projects normalized hidden states to logits.
    pub(crate) fn head(&self) -> Matrix {
        self.head_weight().matrix()
    }

    pub(crate) fn head_weight(&self) -> &Weight<2> {
        match &self.lm_head {
            Some(head) => &head.weight,
            None => &self.embed_tokens.weight,
        }
    }
}
