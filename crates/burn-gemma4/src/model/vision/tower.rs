//! The vision tower: a transformer over the patches of an image, and the pooling of its output.

use super::Grid;
use super::rotation::AxialRotation;
use crate::config::vision::{TowerConfig, VisionConfig};
use crate::error::Gemma4Error;
use crate::model::layer::{Linear, RmsNorm, constant, random};
use crate::model::multimodal::{ClippedLinear, DEVIATION};
use crate::op::geglu::gated;
use crate::op::norm::normalize;
use crate::vision::patches::Patches;
use attention_cube::{AttentionOptions, fused_attention};
use burn::{
    module::{Module, Param},
    tensor::{DType, Device, Tensor, TensorData},
};

/// A pass of a vision tower over an image, which may pause between two layers.
#[derive(Clone, Debug)]
pub(crate) struct TowerPass {
    /// The residual stream, `[patches, hidden]`.
    stream: Tensor<2>,
    rotation: AxialRotation,
    /// The number of layers that have run.
    layers: usize,
    /// The number of patches in each row, and the number of rows.
    grid: [usize; 2],
}

/// A vision tower. The names of the fields are those of the checkpoint's tensors.
#[derive(Module, Debug)]
pub(super) struct VisionTower {
    patch_embedder: PatchEmbedder,
    encoder: Encoder,
    std_bias: Option<Param<Tensor<1>>>,
    std_scale: Option<Param<Tensor<1>>>,
    /// The width and height, in patches, of the square that becomes one soft token.
    #[module(skip)]
    side: usize,
    #[module(skip)]
    head_dim: usize,
    #[module(skip)]
    rope_theta: f64,
}

#[derive(Module, Debug)]
struct PatchEmbedder {
    input_proj: Linear,
    /// The embeddings of columns and of rows, `[2, positions, hidden]`.
    position_embedding_table: Param<Tensor<3>>,
}

#[derive(Module, Debug)]
struct Encoder {
    layers: Vec<EncoderLayer>,
}

#[derive(Module, Debug)]
struct EncoderLayer {
    self_attn: EncoderAttention,
    mlp: EncoderMlp,
    input_layernorm: RmsNorm,
    post_attention_layernorm: RmsNorm,
    pre_feedforward_layernorm: RmsNorm,
    post_feedforward_layernorm: RmsNorm,
}

#[derive(Module, Debug)]
struct EncoderAttention {
    q_proj: ClippedLinear,
    k_proj: ClippedLinear,
    v_proj: ClippedLinear,
    o_proj: ClippedLinear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
}

#[derive(Module, Debug)]
struct EncoderMlp {
    gate_proj: ClippedLinear,
    up_proj: ClippedLinear,
    down_proj: ClippedLinear,
}

impl VisionTower {
    pub fn new(config: &VisionConfig, tower: &TowerConfig, device: &Device) -> Self {
        let hidden = tower.hidden_size;
        let pixels = config.patch_size.pow(2) * 3;
        let positions = tower.position_embedding_size;
        let standardized = |value| tower.standardize.then(|| constant(value, [hidden], device));
        Self {
            patch_embedder: PatchEmbedder {
                input_proj: Linear::new(pixels, hidden, DEVIATION, device),
                position_embedding_table: random([2, positions, hidden], DEVIATION, device),
            },
            encoder: Encoder {
                layers: (0..tower.num_hidden_layers)
                    .map(|_| EncoderLayer::new(tower, device))
                    .collect(),
            },
            std_bias: standardized(0.0),
            std_scale: standardized(1.0),
            side: config.pooling_kernel_size,
            head_dim: tower.head_dim,
            rope_theta: tower.rope_theta,
        }
    }

    /// Returns each linear layer that may have bounds, with its path. `path` is the tower's path.
    pub fn linears_mut(&mut self, path: &str) -> Vec<(String, &mut ClippedLinear)> {
        let layers = self.encoder.layers.iter_mut().enumerate();
        layers
            .flat_map(|(index, layer)| {
                let EncoderAttention {
                    q_proj,
                    k_proj,
                    v_proj,
                    o_proj,
                    ..
                } = &mut layer.self_attn;
                let EncoderMlp {
                    gate_proj,
                    up_proj,
                    down_proj,
                } = &mut layer.mlp;
                let modules = [
                    ("self_attn.q_proj", q_proj),
                    ("self_attn.k_proj", k_proj),
                    ("self_attn.v_proj", v_proj),
                    ("self_attn.o_proj", o_proj),
                    ("mlp.gate_proj", gate_proj),
                    ("mlp.up_proj", up_proj),
                    ("mlp.down_proj", down_proj),
                ];
                let in_tower = format!("{path}.encoder.layers.{index}");
                modules.map(|(name, linear)| (format!("{in_tower}.{name}"), linear))
            })
            .collect()
    }

    /// Embeds the patches of an image, before the first layer.
    pub fn begin(&self, patches: &Patches) -> Result<TowerPass, Gemma4Error> {
        let table = self.patch_embedder.position_embedding_table.val();
        let (device, dtype) = (table.device(), table.dtype());
        let [_, positions, hidden] = table.dims();
        let grid = Grid::new(patches.columns, patches.rows, positions)?;
        let rotation = AxialRotation::new(&grid, self.rope_theta, self.head_dim, dtype, &device);

        // The channels of pixels are from -1 to 1.
        let numbers = patches.numbers(1, 2.0, -1.0);
        let count = patches.columns * patches.rows;
        let pixels = numbers.len() / count;
        let numbers = TensorData::new(numbers, [count, pixels]);
        let numbers = Tensor::<2>::from_data(numbers, (&device, dtype));
        let tables = [0, 1].map(|axis| {
            table
                .clone()
                .narrow(0, axis, 1)
                .reshape([positions, hidden])
        });
        let embedded = self.patch_embedder.input_proj.rows(numbers) + grid.embeddings(tables);
        Ok(TowerPass {
            stream: embedded,
            rotation,
            layers: 0,
            grid: [patches.columns, patches.rows],
        })
    }

    /// Runs up to `layers` further layers. After the last layer, returns the pooled output for each square of patches,
    /// `[squares, hidden]` in f32.
    pub fn advance(&self, pass: &mut TowerPass, layers: usize) -> Option<Tensor<2>> {
        for layer in self.encoder.layers.iter().skip(pass.layers).take(layers) {
            pass.stream = layer.forward(pass.stream.clone(), &pass.rotation);
            pass.layers += 1;
        }
        let is_last = pass.layers == self.encoder.layers.len();
        is_last.then(|| self.pooled(pass.stream.clone(), pass.grid))
    }

    /// Averages the rows of each square of patches, and standardizes the averages. The result is f32, because its
    /// values may exceed the range of f16.
    fn pooled(&self, rows: Tensor<2>, [columns, lines]: [usize; 2]) -> Tensor<2> {
        let dtype = rows.dtype();
        let [_, hidden] = rows.dims();
        let side = self.side;
        let (height, width) = (lines / side, columns / side);
        let squares = rows
            .cast(DType::F32)
            .reshape([height, side, width, side, hidden]);
        let means = squares
            .mean_dim(3)
            .mean_dim(1)
            .reshape([height * width, hidden]);
        // Round the averages before the scaling, as Hugging Face Transformers does.
        let scaled = means.cast(dtype).cast(DType::F32) * (hidden as f64).sqrt();
        match (&self.std_bias, &self.std_scale) {
            (Some(bias), Some(scale)) => {
                let [bias, scale] =
                    [bias, scale].map(|param| param.val().cast(DType::F32).unsqueeze::<2>());
                (scaled - bias) * scale
            }
            _ => scaled,
        }
    }
}

impl EncoderLayer {
    fn new(tower: &TowerConfig, device: &Device) -> Self {
        let norm = || RmsNorm::new(tower.hidden_size, tower.rms_norm_eps, device);
        let linear =
            |input, output| ClippedLinear::new(input, output, tower.use_clipped_linears, device);
        let of_head = || RmsNorm::new(tower.head_dim, tower.rms_norm_eps, device);
        let (hidden, intermediate) = (tower.hidden_size, tower.intermediate_size);
        let queries = tower.num_attention_heads * tower.head_dim;
        let keys = tower.num_key_value_heads * tower.head_dim;
        Self {
            self_attn: EncoderAttention {
                q_proj: linear(hidden, queries),
                k_proj: linear(hidden, keys),
                v_proj: linear(hidden, keys),
                o_proj: linear(queries, hidden),
                q_norm: of_head(),
                k_norm: of_head(),
            },
            mlp: EncoderMlp {
                gate_proj: linear(hidden, intermediate),
                up_proj: linear(hidden, intermediate),
                down_proj: linear(intermediate, hidden),
            },
            input_layernorm: norm(),
            post_attention_layernorm: norm(),
            pre_feedforward_layernorm: norm(),
            post_feedforward_layernorm: norm(),
        }
    }

    /// Runs the layer on the residual stream, `[patches, hidden]`.
    fn forward(&self, stream: Tensor<2>, rotation: &AxialRotation) -> Tensor<2> {
        let normed = self.input_layernorm.forward(stream.clone());
        let attended = self.self_attn.forward(normed, rotation);
        let stream = stream + self.post_attention_layernorm.forward(attended);
        let normed = self.pre_feedforward_layernorm.forward(stream.clone());
        let output = self.mlp.forward(normed);
        stream + self.post_feedforward_layernorm.forward(output)
    }
}

impl EncoderAttention {
    /// Lets each patch see all patches, `[patches, hidden]`.
    fn forward(&self, input: Tensor<2>, rotation: &AxialRotation) -> Tensor<2> {
        let [patches, _] = input.dims();
        let [head_dim] = self.q_norm.weight.val().dims();
        let heads = |linear: &ClippedLinear| {
            let rows = linear.rows(input.clone());
            let count = rows.dims()[1] / head_dim;
            rows.reshape([patches, count, head_dim])
        };
        let query = rotation.rotated(self.q_norm.forward(heads(&self.q_proj)));
        let key = rotation.rotated(self.k_norm.forward(heads(&self.k_proj)));
        let value = normalize(heads(&self.v_proj), self.q_norm.epsilon());
        let [_, count, _] = query.dims();
        let [query, key, value] =
            [query, key, value].map(|heads| heads.swap_dims(0, 1).unsqueeze::<4>());
        // The scale is 1, because the weights of the norms contain the scale.
        let options = AttentionOptions::new().scale(1.0);
        let attended = fused_attention(query, key, value, options);
        let rows = attended
            .swap_dims(1, 2)
            .reshape([patches, count * head_dim]);
        self.o_proj.rows(rows)
    }
}

impl EncoderMlp {
    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        let gate = self.gate_proj.rows(input.clone());
        let through = self.up_proj.rows(input);
        self.down_proj.rows(gated(gate, through))
    }
}
