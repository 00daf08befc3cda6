//! The attention of a conformer layer: local, causal, with relative positions (Dai et al. 2019, arXiv:1901.02860).

use crate::config::audio::ConformerConfig;
use crate::model::layer::{Linear, constant};
use crate::model::multimodal::{ClippedLinear, DEVIATION};
use crate::op::linear;
use burn::{
    module::{Module, Param},
    tensor::{
        DType, Device, Tensor, TensorData,
        activation::{softmax, softplus},
    },
};
use std::f64::consts::{E, LN_2};

/// The longest wavelength of the sinusoids of relative positions, divided by 2π.
const LONGEST_SCALE: f64 = 10_000.0;

/// The value that is added to the scores of hidden keys. The softmax of such a score is 0 in f32.
const HIDDEN: f32 = -1e9;

/// Attention in which each row sees its own key and the keys before it, up to the window.
///
/// The rows are divided into blocks of the window's length. A block sees its own keys and those of the block before, so
/// the scores take memory in proportion to the rows.
///
/// The score of a query and a key is `softcap(q·k + q·r)`, where `r` is the projected sinusoid of their distance.
/// Burn's operators compute it, because `fused_attention` adds a bias after the softcap.
#[derive(Module, Debug)]
pub(super) struct LocalAttention {
    q_proj: ClippedLinear,
    k_proj: ClippedLinear,
    v_proj: ClippedLinear,
    post: ClippedLinear,
    relative_k_proj: Linear,
    /// A learned scale of each channel of a head, before softplus.
    per_dim_scale: Param<Tensor<1>>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    window: usize,
    #[module(skip)]
    softcap: f64,
}

/// The tensors that are equal in all layers of a call.
#[derive(Clone, Debug)]
pub(super) struct CallTables {
    /// The sinusoids of the distances from the window's length to 0, `[window + 1, hidden]`.
    distances: Tensor<2>,
    /// 0 for each visible key and [`HIDDEN`] for all others, `[blocks, 1, window, 2 · window]`.
    hidden_keys: Tensor<4>,
}

impl CallTables {
    /// Creates the tables of a call with `rows` rows.
    pub fn new(rows: usize, window: usize, hidden: usize, dtype: DType, device: &Device) -> Self {
        let channels = hidden / 2;
        let step = LONGEST_SCALE.ln() / (channels.max(2) - 1) as f64;
        let angles = |distance: usize| {
            (0..channels).map(move |channel| {
                let frequency = (channel as f32 * -(step as f32)).exp();
                distance as f32 * frequency
            })
        };
        let sinusoids = (0..=window).rev().flat_map(|distance| {
            let sines = angles(distance).map(f32::sin);
            sines.chain(angles(distance).map(f32::cos))
        });
        let sinusoids = TensorData::new(sinusoids.collect::<Vec<f32>>(), [window + 1, hidden]);

        let blocks = rows.div_ceil(window);
        let hidden_keys = (0..blocks).flat_map(|block| {
            (0..window).flat_map(move |query| {
                (0..2 * window).map(move |key| {
                    let is_before_start = block == 0 && key < window;
                    // The key `window + query` is the query's own.
                    let is_visible = (query + 1..=query + window).contains(&key);
                    match is_visible && !is_before_start {
                        true => 0.0,
                        false => HIDDEN,
                    }
                })
            })
        });
        let shape = [blocks, 1, window, 2 * window];
        let hidden_keys = TensorData::new(hidden_keys.collect::<Vec<f32>>(), shape);
        Self {
            distances: Tensor::from_data(sinusoids, (device, dtype)),
            hidden_keys: Tensor::from_data(hidden_keys, (device, DType::F32)),
        }
    }
}

impl LocalAttention {
    pub fn new(tower: &ConformerConfig, device: &Device) -> Self {
        let hidden = tower.hidden_size;
        let linear = || ClippedLinear::new(hidden, hidden, tower.use_clipped_linears, device);
        Self {
            q_proj: linear(),
            k_proj: linear(),
            v_proj: linear(),
            post: linear(),
            relative_k_proj: Linear::new(hidden, hidden, DEVIATION, device),
            per_dim_scale: constant(0.0, [hidden / tower.num_attention_heads], device),
            heads: tower.num_attention_heads,
            window: tower.window,
            softcap: tower.logit_cap,
        }
    }

    /// Returns each linear layer that may have bounds, with its path.
    pub fn linears_mut(&mut self, path: &str) -> Vec<(String, &mut ClippedLinear)> {
        let modules = [
            ("q_proj", &mut self.q_proj),
            ("k_proj", &mut self.k_proj),
            ("v_proj", &mut self.v_proj),
            ("post", &mut self.post),
        ];
        let linears = modules.map(|(name, linear)| (format!("{path}.{name}"), linear));
        linears.into()
    }

    /// Attends over `[rows, hidden]`. Scores and probabilities are f32.
    pub fn forward(&self, input: Tensor<2>, tables: &CallTables) -> Tensor<2> {
        let dtype = input.dtype();
        let [rows, hidden] = input.dims();
        let (heads, window) = (self.heads, self.window);
        let head_dim = hidden / heads;
        let blocks = rows.div_ceil(window);

        let scale = softplus(self.per_dim_scale.val().cast(DType::F32), 1.0)
            * ((head_dim as f64).powf(-0.5) / LN_2);
        let query =
            self.blocks(self.q_proj.rows(input.clone())) * scale.reshape([1, 1, 1, head_dim]);
        let key = self.blocks(self.k_proj.rows(input.clone())) * ((1.0 + E).ln() / LN_2);
        let value = self.blocks(self.v_proj.rows(input));

        let relative = self.relative_k_proj.rows(tables.distances.clone());
        let relative = relative
            .cast(DType::F32)
            .reshape([1, window + 1, heads, head_dim])
            .permute([0, 2, 3, 1]);
        // The product's gradients need equal numbers of batches.
        let relative = relative.expand([blocks, heads, head_dim, window + 1]);
        let relative = linear::batches(query.clone(), relative);
        let keys = with_block_before(key).swap_dims(2, 3);
        let scores = linear::batches(query, keys) + shifted(relative);
        let capped = (scores / self.softcap).tanh() * self.softcap;
        let probabilities = softmax(capped + tables.hidden_keys.clone(), 3);
        let attended = linear::batches(probabilities, with_block_before(value));

        let attended = attended
            .swap_dims(1, 2)
            .reshape([blocks * window, hidden])
            .narrow(0, 0, rows);
        self.post.rows(attended.cast(dtype))
    }

    /// Divides rows into blocks and heads, `[blocks, heads, window, head_dim]` in f32. Zeros fill the last block.
    fn blocks(&self, rows: Tensor<2>) -> Tensor<4> {
        let [count, hidden] = rows.dims();
        let blocks = count.div_ceil(self.window);
        let missing = blocks * self.window - count;
        let rows = rows.cast(DType::F32);
        let zeros = Tensor::zeros([missing, hidden], (&rows.device(), DType::F32));
        let rows = match missing {
            0 => rows,
            _ => Tensor::cat(vec![rows, zeros], 0),
        };
        rows.reshape([blocks, self.window, self.heads, hidden / self.heads])
            .swap_dims(1, 2)
    }
}

/// Puts the rows of the block before in front of each block, `[blocks, heads, 2 · window, head_dim]`. Zeros stand
/// before the first block.
fn with_block_before(blocks: Tensor<4>) -> Tensor<4> {
    let [count, heads, window, head_dim] = blocks.dims();
    let zeros = Tensor::zeros([1, heads, window, head_dim], (&blocks.device(), DType::F32));
    let before = match count {
        1 => zeros,
        _ => Tensor::cat(vec![zeros, blocks.clone().narrow(0, 0, count - 1)], 0),
    };
    Tensor::cat(vec![before, blocks], 2)
}

/// Moves the products of a query with the distances to the keys at these distances: from
/// `[blocks, heads, window, window + 1]` to `[blocks, heads, window, 2 · window]`. Query `i` moves by `i` keys. The keys
/// at other distances are hidden.
fn shifted(products: Tensor<4>) -> Tensor<4> {
    let [blocks, heads, window, distances] = products.dims();
    let length = 2 * window + 1;
    let shape = [blocks, heads, window, length - distances];
    let zeros = Tensor::zeros(shape, (&products.device(), DType::F32));
    Tensor::cat(vec![products, zeros], 3)
        .reshape([blocks, heads, window * length])
        .narrow(2, 0, window * (length - 1))
        .reshape([blocks, heads, window, length - 1])
}
