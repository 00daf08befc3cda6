//! One attention to run: its sizes, its options and its data.

use crate::Dtype;
use attention_cube::{
    AttentionError, AttentionOptions, AttentionProblem, quantized::QuantizedRows,
};
use burn::tensor::{Bool, DType, Device, Distribution, Int, Tensor, TensorData};

/// The sizes and options.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Workload {
    pub batch: usize,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub q_len: usize,
    pub kv_len: usize,
    pub head_dim: usize,
    pub dtype: Dtype,
    pub causal: bool,
    /// How many keys a query sees, its own included.
    pub window: Option<usize>,
    /// `None` for 1/√head_dim.
    pub scale: Option<f64>,
    pub softcap: Option<f64>,
    /// A mask that hides a tenth of all keys at random, the same for all heads and sequences.
    pub mask: bool,
    /// A random bias for every head, the same for all sequences.
    pub bias: bool,
    /// Keys and values in int8.
    pub int8: bool,
    /// Keys that each sequence has, of those that there is room for.
    pub kv_length: Option<usize>,
}

/// The data, without autodiff.
#[derive(Clone)]
pub struct Inputs {
    pub query: Tensor<4>,
    pub key: Tensor<4>,
    pub value: Tensor<4>,
    /// Keys and values in int8, which the others are then what they stand for.
    pub quantized: Option<[QuantizedRows; 2]>,
    /// `[batch]`, where sequences are shorter than keys and values.
    pub kv_lengths: Option<Tensor<1, Int>>,
    /// `[1, 1, q_len, kv_len]`.
    pub mask: Option<Tensor<4, Bool>>,
    /// `[1, q_heads, q_len, kv_len]`.
    pub bias: Option<Tensor<4>>,
    /// What reaches the output in the backward.
    pub gradient: Tensor<4>,
}

impl Workload {
    /// As the operator takes them.
    pub fn options(&self, inputs: &Inputs) -> AttentionOptions {
        let mut options = AttentionOptions::new();
        if let Some(scale) = self.scale {
            options = options.scale(scale);
        }
        if self.causal {
            options = options.causal();
        }
        if let Some(window) = self.window {
            options = options.window(Some(window.saturating_sub(1)), Some(0));
        }
        if let Some(softcap) = self.softcap {
            options = options.softcap(softcap);
        }
        if let Some(lengths) = &inputs.kv_lengths {
            options = options.kv_lengths(lengths.clone());
        }
        if let Some(mask) = &inputs.mask {
            options = options.mask(mask.clone());
        }
        if let Some(bias) = &inputs.bias {
            options = options.bias(bias.clone());
        }
        options
    }

    /// Normal random data that gives scores of variance one.
    ///
    /// # Errors
    /// Where keys and values cannot be quantized.
    pub fn inputs(&self, device: &Device) -> Result<Inputs, AttentionError> {
        device.seed(42);
        let random = |heads, length, deviation| {
            let shape = [self.batch, heads, length, self.head_dim];
            let normal = Distribution::Normal(0.0, deviation);
            Tensor::<4>::random(shape, normal, (device, DType::F32)).cast(self.dtype.burn())
        };
        let pairs = |heads, distribution| {
            let shape = [1, heads, self.q_len, self.kv_len];
            Tensor::<4>::random(shape, distribution, (device, DType::F32))
        };
        let width = (self.head_dim as f64).sqrt();
        let deviation = self
            .scale
            .map_or(1.0, |scale| 1.0 / (scale.abs().max(1e-6) * width));
        let query = random(self.q_heads, self.q_len, deviation);
        let mut key = random(self.kv_heads, self.kv_len, 1.0);
        let mut value = random(self.kv_heads, self.kv_len, 1.0);
        let mut quantized = None;
        if self.int8 {
            let rows = [QuantizedRows::try_new(key)?, QuantizedRows::try_new(value)?];
            key = rows[0].clone().dequantize(self.dtype.burn())?;
            value = rows[1].clone().dequantize(self.dtype.burn())?;
            quantized = Some(rows);
        }
        Ok(Inputs {
            query,
            key,
            value,
            quantized,
            kv_lengths: self.kv_length.map(|length| {
                let lengths = vec![length as i32; self.batch];
                Tensor::from_data(TensorData::new(lengths, [self.batch]), (device, DType::I32))
            }),
            mask: self
                .mask
                .then(|| pairs(1, Distribution::Uniform(0.0, 1.0)).greater_elem(0.1)),
            bias: self.bias.then(|| {
                pairs(self.q_heads, Distribution::Normal(0.0, 1.0)).cast(self.dtype.burn())
            }),
            gradient: random(self.q_heads, self.q_len, 1.0),
        })
    }

    /// As [`explain`](attention_cube::explain) takes it.
    ///
    /// # Errors
    /// Where the sizes do not fit each other.
    pub fn problem(&self, inputs: &Inputs) -> Result<AttentionProblem, AttentionError> {
        let options = self.options(inputs);
        match &inputs.quantized {
            Some([key, value]) => AttentionProblem::quantized(&inputs.query, key, value, &options),
            None => AttentionProblem::new(&inputs.query, &inputs.key, &inputs.value, &options),
        }
    }

    /// Whether it reads more than it computes: a few queries against a cache of keys.
    pub fn is_decode(&self) -> bool {
        self.q_len * self.q_heads <= 64 * self.kv_heads && self.q_len < self.kv_len
    }

    /// Bytes of keys and values.
    pub fn key_value_bytes(&self) -> f64 {
        let of_row = match self.int8 {
            true => self.head_dim + size_of::<f32>(),
            false => self.head_dim * self.dtype.burn().size(),
        };
        let length = self.kv_length.unwrap_or(self.kv_len);
        (2 * self.batch * self.kv_heads * length * of_row) as f64
    }

    /// Bytes of all scores in f32.
    pub fn score_bytes(&self) -> f64 {
        4.0 * (self.batch * self.q_heads) as f64 * self.q_len as f64 * self.kv_len as f64
    }
}

impl std::fmt::Display for Workload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "B{} H{}", self.batch, self.q_heads)?;
        if self.kv_heads != self.q_heads {
            write!(f, ":{}", self.kv_heads)?;
        }
        match self.q_len == self.kv_len {
            true => write!(f, " S{}", self.q_len)?,
            false => write!(f, " S{}/{}", self.q_len, self.kv_len)?,
        }
        write!(f, " D{}", self.head_dim)?;
        if self.int8 {
            write!(f, " int8")?;
        }
        match self.kv_length {
            Some(length) => write!(f, " length {length}"),
            None => Ok(()),
        }
    }
}

/// Operations of the forward: two products over the visible pairs.
pub fn forward_operations(problem: &AttentionProblem) -> f64 {
    2.0 * problem.visible_pairs() as f64 * (problem.head_dim + problem.value_dim) as f64
}

/// Operations of the backward: five products, whatever a kernel computes twice.
pub fn backward_operations(problem: &AttentionProblem) -> f64 {
    2.5 * forward_operations(problem)
}
