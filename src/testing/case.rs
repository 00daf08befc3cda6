//! One attention to test: sizes and options, its random inputs, and the comparison with the oracle.

use super::compare::Precision;
use super::definition::Definition;
use super::dense::{Dense, Layout};
use super::devices::{TestDevice, devices};
use super::inputs::Inputs;
use super::run::Operator;
use attention_cube::CausalAlignment;
use burn::tensor::DType;
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Which dimensions of `[batch, q_heads, q_len, kv_len]` a mask or a bias has; the others are 1.
pub type Extent = [bool; 4];
/// All dimensions.
pub const FULL: Extent = [true; 4];

/// Sizes and options of one attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Sequences.
    pub batch: usize,
    /// Query heads.
    pub q_heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Queries a sequence.
    pub q_len: usize,
    /// Keys a sequence.
    pub kv_len: usize,
    /// Columns of queries and keys.
    pub head_dim: usize,
    /// Columns of values.
    pub value_dim: usize,
    /// Of query, keys, values and output.
    pub dtype: DType,
    /// Factor on `q·k`; `None` for the default.
    pub scale: Option<f64>,
    /// Bound of the scores.
    pub softcap: Option<f64>,
    /// Whether no query sees a later key.
    pub causal: Option<CausalAlignment>,
    /// How far a query sees to the left and to the right.
    pub window: (Option<usize>, Option<usize>),
    /// The dimensions of a random mask, seven of ten elements of which are visible.
    pub mask: Option<Extent>,
    /// The dimensions of a random bias.
    pub bias: Option<Extent>,
    /// How many keys of each sequence exist.
    pub kv_lengths: Option<Vec<i64>>,
    /// Ids of the queries and of the keys, sequence after sequence.
    pub segments: Option<(Vec<i64>, Vec<i64>)>,
    /// Whether each query head has a random sink.
    pub sinks: bool,
    /// Bias and sinks in f32, whatever the query is.
    pub f32_extras: bool,
    /// Whether the loss depends on the logsumexp too.
    pub lse_gradient: bool,
    /// Of the query, the keys, the values and the output's gradient.
    pub layouts: [Layout; 4],
    /// Everything optional is expanded, with stride 0, before the call: mask and bias from the
    /// dimensions that they have, sinks from one, lengths and segments from one sequence.
    pub expanded: bool,
    /// Whether gradients have to be equal bit by bit.
    pub deterministic: bool,
    /// Factor on the queries and keys.
    pub amplitude: f64,
}

impl Case {
    /// `[batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim]` in f32, or what
    /// `ATTENTION_TEST_DTYPE` says, without options, with a loss over output and logsumexp.
    pub fn new(sizes: [usize; 7]) -> Self {
        let [batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim] = sizes;
        Self {
            batch,
            q_heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            value_dim,
            dtype: dtype(),
            scale: None,
            softcap: None,
            causal: None,
            window: (None, None),
            mask: None,
            bias: None,
            kv_lengths: None,
            segments: None,
            sinks: false,
            f32_extras: false,
            lse_gradient: true,
            layouts: [Layout::Contiguous; 4],
            expanded: false,
            deterministic: false,
            amplitude: 1.0,
        }
    }

    /// The shape of the scores.
    pub fn scores(&self) -> [usize; 4] {
        [self.batch, self.q_heads, self.q_len, self.kv_len]
    }

    fn extent(&self, extent: Extent) -> [usize; 4] {
        let scores = self.scores();
        [0, 1, 2, 3].map(|dim| if extent[dim] { scores[dim] } else { 1 })
    }

    /// Of bias and sinks.
    pub fn extras_dtype(&self) -> DType {
        if self.f32_extras {
            DType::F32
        } else {
            self.dtype
        }
    }

    /// Random inputs: a function of the case and of `ATTENTION_TEST_SEED`.
    pub fn inputs(&self) -> Inputs {
        self.seeded(seed())
    }

    /// Random inputs: a function of the case and of `seed`.
    pub fn seeded(&self, seed: u64) -> Inputs {
        let mut hasher = DefaultHasher::new();
        format!("{self:?}").hash(&mut hasher);
        let mut rng = StdRng::seed_from_u64(hasher.finish() ^ seed);
        let Self {
            batch,
            q_heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            value_dim,
            dtype,
            ..
        } = *self;
        let extras = self.extras_dtype();
        let mut normal = |shape, dtype| Dense::normal(shape, dtype, &mut rng);
        let amplified = |dense: Dense| {
            if self.amplitude == 1.0 {
                dense
            } else {
                dense.scaled(self.amplitude).rounded(dtype)
            }
        };
        Inputs {
            query: amplified(normal([batch, q_heads, q_len, head_dim], dtype)),
            key: amplified(normal([batch, kv_heads, kv_len, head_dim], dtype)),
            value: normal([batch, kv_heads, kv_len, value_dim], dtype),
            output_gradient: normal([batch, q_heads, q_len, value_dim], dtype),
            lse_gradient: self
                .lse_gradient
                .then(|| normal([batch, q_heads, q_len, 1], DType::F32)),
            bias: self.bias.map(|extent| normal(self.extent(extent), extras)),
            sinks: self
                .sinks
                .then(|| normal([1, if self.expanded { 1 } else { q_heads }, 1, 1], extras)),
            mask: self.mask.map(|extent| {
                Dense::from_fn(self.extent(extent), |_| f64::from(rng.random_bool(0.7)))
            }),
            kv_lengths: self.kv_lengths.clone(),
            segments: self.segments.clone(),
        }
    }

    /// How many roundings its results go through.
    pub fn precision(&self) -> Precision {
        let queries = self.q_len * self.q_heads / self.kv_heads.max(1);
        let terms = [self.head_dim, self.value_dim, self.kv_len, queries];
        Precision {
            dtype: self.dtype,
            terms: terms.into_iter().max().unwrap_or(1),
        }
    }

    /// Checks output, logsumexp and every gradient on every device that has the dtype.
    ///
    /// # Panics
    /// Where one is further from the oracle than the dtype explains.
    pub fn check(&self) {
        let inputs = self.inputs();
        self.check_inputs(&inputs, &inputs);
    }

    /// The same with `given` on the devices and `equivalent` in the oracle: what differs between the
    /// two must not matter.
    ///
    /// # Panics
    /// As [`check`](Self::check).
    pub fn check_inputs(&self, given: &Inputs, equivalent: &Inputs) {
        self.check_on(&devices(), given, equivalent);
    }

    /// The same on some of the devices.
    ///
    /// # Panics
    /// As [`check`](Self::check).
    pub fn check_on(&self, devices: &[TestDevice], given: &Inputs, equivalent: &Inputs) {
        let definition = Definition::new(self, equivalent);
        for device in devices.iter().filter(|device| device.supports(self.dtype)) {
            let got = self.run(given, &device.device, self.dtype, Operator::Fused);
            let faults = definition.faults(&got);
            assert!(
                faults.is_empty(),
                "{}, seed {}: {self:?}: {}",
                device.name,
                seed(),
                faults.join("; ")
            );
        }
    }
}

/// Of the cases that name none.
fn dtype() -> DType {
    match std::env::var("ATTENTION_TEST_DTYPE").as_deref() {
        Err(_) | Ok("f32") => DType::F32,
        Ok("f16") => DType::F16,
        Ok("bf16") => DType::BF16,
        Ok(other) => panic!("ATTENTION_TEST_DTYPE={other}: f32, f16 or bf16"),
    }
}

/// What the environment adds to every seed.
///
/// # Panics
/// Where `ATTENTION_TEST_SEED` is no number.
pub fn seed() -> u64 {
    match std::env::var("ATTENTION_TEST_SEED") {
        Ok(seed) => seed
            .parse()
            .unwrap_or_else(|_| panic!("ATTENTION_TEST_SEED={seed}: no number")),
        Err(_) => 0,
    }
}
