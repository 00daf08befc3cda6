//! An attention problem that a benchmark runs: its sizes, its options and its data.

use crate::Dtype;
use attention_cube::{
    AttentionError, AttentionOptions, AttentionProblem,
    quantized::{CodeFormat, QuantizedRows},
};
use burn::tensor::{Bool, DType, Device, Distribution, Int, Tensor, TensorData};

/// The sizes and options of an attention problem.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Workload {
    /// The number of sequences.
    pub batch: usize,
    /// The number of query heads.
    pub q_heads: usize,
    /// The number of key and value heads.
    pub kv_heads: usize,
    /// The number of queries per sequence.
    pub q_len: usize,
    /// The number of keys per sequence.
    pub kv_len: usize,
    /// The number of columns of queries, keys and values.
    pub head_dim: usize,
    /// The dtype of the inputs.
    pub dtype: Dtype,
    /// True for causal attention, in which no query sees a later key.
    pub causal: bool,
    /// The size of a causal window: the number of keys that a query sees, including the key at its own position.
    pub window: Option<usize>,
    /// The scale of the scores, or `None` for 1/√head_dim.
    pub scale: Option<f64>,
    /// The softcap of the scores, or `None` without a softcap.
    pub softcap: Option<f64>,
    /// True for a random mask that hides a tenth of all keys. All heads and sequences share the mask.
    pub mask: bool,
    /// True for a random bias per head. All sequences share the bias.
    pub bias: bool,
    /// The format of quantized keys and values, or `None` for floats.
    #[serde(serialize_with = "serialize_codes")]
    pub codes: Option<CodeFormat>,
    /// The number of valid keys per sequence, or `None` if all `kv_len` keys are valid.
    pub kv_length: Option<usize>,
}

/// The input tensors of an attention problem, without autodiff.
#[derive(Clone)]
pub struct Inputs {
    /// The query, `[batch, q_heads, q_len, head_dim]`.
    pub query: Tensor<4>,
    /// The keys, `[batch, kv_heads, kv_len, head_dim]`.
    pub key: Tensor<4>,
    /// The values, `[batch, kv_heads, kv_len, head_dim]`.
    pub value: Tensor<4>,
    /// The quantized keys and values. If they are present, `key` and `value` hold their dequantized elements.
    pub quantized: Option<[QuantizedRows; 2]>,
    /// The number of valid keys per sequence, `[batch]`, or `None` if all `kv_len` keys are valid.
    pub kv_lengths: Option<Tensor<1, Int>>,
    /// The mask, `[1, 1, q_len, kv_len]`.
    pub mask: Option<Tensor<4, Bool>>,
    /// The bias, `[1, q_heads, q_len, kv_len]`.
    pub bias: Option<Tensor<4>>,
    /// The output gradient for the backward, in the output's shape `[batch, q_heads, q_len, head_dim]`.
    pub gradient: Tensor<4>,
}

impl Workload {
    /// Returns the options for a call of the attention operator.
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

    /// Creates normally distributed inputs, scaled so that the scores have a variance of one.
    ///
    /// # Errors
    /// Returns an error if keys and values cannot be quantized.
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
        if let Some(format) = self.codes {
            let rows = [quantized_rows(key, format)?, quantized_rows(value, format)?];
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

    /// Returns the description of the attention problem for [`explain`](attention_cube::explain).
    ///
    /// # Errors
    /// Returns an error if the sizes do not fit each other.
    pub fn problem(&self, inputs: &Inputs) -> Result<AttentionProblem, AttentionError> {
        let options = self.options(inputs);
        match &inputs.quantized {
            Some([key, value]) => AttentionProblem::quantized(&inputs.query, key, value, &options),
            None => AttentionProblem::new(&inputs.query, &inputs.key, &inputs.value, &options),
        }
    }

    /// True if the attention is memory-bound, that is, if a few queries attend to many cached keys.
    pub fn is_decode(&self) -> bool {
        self.q_len * self.q_heads <= 64 * self.kv_heads && self.q_len < self.kv_len
    }

    /// Returns the number of bytes of all valid keys and values. Each row of int8 codes also has an f32 scale.
    pub fn key_value_bytes(&self) -> f64 {
        let of_row = match self.codes {
            Some(CodeFormat::Int8) => self.head_dim + size_of::<f32>(),
            Some(_) => self.head_dim,
            None => self.head_dim * self.dtype.burn().size(),
        };
        let length = self.kv_length.unwrap_or(self.kv_len);
        (2 * self.batch * self.kv_heads * length * of_row) as f64
    }

    /// Returns the number of bytes that all scores together would take in f32.
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
        if let Some(format) = self.codes {
            write!(f, " {format}")?;
        }
        match self.kv_length {
            Some(length) => write!(f, " length {length}"),
            None => Ok(()),
        }
    }
}

/// Writes the name of the format.
fn serialize_codes<S: serde::Serializer>(
    codes: &Option<CodeFormat>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serde::Serialize::serialize(&codes.map(|format| format.to_string()), serializer)
}

/// Quantizes rows of normally distributed elements. In e4m3, the whole tensor has a single scale.
fn quantized_rows(rows: Tensor<4>, format: CodeFormat) -> Result<QuantizedRows, AttentionError> {
    match format {
        CodeFormat::Int8 => QuantizedRows::try_new(rows),
        _ => {
            let scale = Tensor::<3>::full([1, 1, 1], 0.02, (&rows.device(), DType::F32));
            QuantizedRows::try_e4m3(rows, scale)
        }
    }
}

/// Returns the number of floating-point operations of the forward, which has two GEMMs over the visible query-key pairs.
pub fn forward_operations(problem: &AttentionProblem) -> f64 {
    2.0 * problem.visible_pairs() as f64 * (problem.head_dim + problem.value_dim) as f64
}

/// Returns the number of floating-point operations of the backward, which has five GEMMs. If a kernel computes a GEMM
/// twice, the GEMM still counts once.
pub fn backward_operations(problem: &AttentionProblem) -> f64 {
    2.5 * forward_operations(problem)
}
