//! A test case of attention: sizes and options, random inputs, and the comparison of results with the reference implementation.

pub use super::code::{Change, Hide};
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

/// The extent of a mask or a bias. Each flag belongs to one dimension of the scores, `[batch, q_heads, q_len, kv_len]`.
/// If a flag is true, the mask or bias has the full size of the dimension. Otherwise it has the size 1 and is
/// broadcast.
pub type Extent = [bool; 4];
/// The extent that has the full size in all four dimensions.
pub const FULL: Extent = [true; 4];

/// The sizes and options of an attention call.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
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
    /// The number of columns of queries and keys.
    pub head_dim: usize,
    /// The number of columns of values.
    pub value_dim: usize,
    /// The dtype of query, keys, values and output.
    pub dtype: DType,
    /// The scale of the scores `q·k`, or `None` for the default scale.
    pub scale: Option<f64>,
    /// The softcap of the scores, or `None` without a softcap.
    pub softcap: Option<f64>,
    /// The alignment of the causal mask, or `None` without a causal mask.
    pub causal: Option<CausalAlignment>,
    /// The attention window. A query sees the first number of keys to the left of its own position, and the second
    /// number of keys to the right. `None` means no limit.
    pub window: (Option<usize>, Option<usize>),
    /// The extent of a random mask, or `None` without a mask. About seven of ten elements of the mask are visible.
    pub mask: Option<Extent>,
    /// The numbers of queries and of keys per element of the mask, or `None` for a mask with one element per score.
    pub mask_block: Option<[usize; 2]>,
    /// The extent of a random bias, or `None` without a bias.
    pub bias: Option<Extent>,
    /// The number of valid keys per sequence, or `None` if all keys are valid.
    pub kv_lengths: Option<Vec<i64>>,
    /// The number of queries per sequence, or `None` if every sequence has `q_len` queries.
    pub query_lengths: Option<Vec<i64>>,
    /// The segment ids of all queries, and the segment ids of all keys. Each list has the ids of sequence 0 first, then
    /// those of sequence 1, and so on. `None` means no segments.
    pub segments: Option<(Vec<i64>, Vec<i64>)>,
    /// The interval sets. A set is a pair of lists over `[batch, q_len]`: the first visible key of each query, and the end
    /// (one past the last visible key). A query sees a key that lies in the query's interval of at least one set.
    pub intervals: Vec<(Vec<i64>, Vec<i64>)>,
    /// The dropout probability and the dropout seed, or `None` without dropout.
    pub dropout: Option<(f64, u64)>,
    /// The score mod, or `None` without one.
    pub score_mod: Option<Change>,
    /// The mask mod, or `None` without one.
    pub mask_mod: Option<Hide>,
    /// True if each query head has a sink with a random value.
    pub sinks: bool,
    /// True if the bias and the sinks are in f32, whatever the query's dtype is.
    pub f32_extras: bool,
    /// True if the loss also depends on the logsumexp.
    pub lse_gradient: bool,
    /// The memory layouts of the query, the keys, the values and the output gradient.
    pub layouts: [Layout; 4],
    /// True if every optional tensor is expanded with stride 0 before the call.
    pub expanded: bool,
    /// The factor by which the random queries and keys are multiplied.
    pub amplitude: f64,
}

impl Case {
    /// Creates a case without options. The loss of the case depends on the output and the logsumexp. `sizes` is `[batch,
    /// q_heads, kv_heads, q_len, kv_len, head_dim, value_dim]`. The dtype is f32, or the value of `ATTENTION_TEST_DTYPE`.
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
            dtype: dtype_under_test().unwrap_or(DType::F32),
            scale: None,
            softcap: None,
            causal: None,
            window: (None, None),
            mask: None,
            mask_block: None,
            bias: None,
            kv_lengths: None,
            query_lengths: None,
            segments: None,
            intervals: Vec::new(),
            dropout: None,
            score_mod: None,
            mask_mod: None,
            sinks: false,
            f32_extras: false,
            lse_gradient: true,
            layouts: [Layout::Contiguous; 4],
            expanded: false,
            amplitude: 1.0,
        }
    }

    /// Returns the shape of the scores, `[batch, q_heads, q_len, kv_len]`.
    pub fn scores(&self) -> [usize; 4] {
        [self.batch, self.q_heads, self.q_len, self.kv_len]
    }

    fn extent(&self, extent: Extent) -> [usize; 4] {
        let scores = self.scores();
        [0, 1, 2, 3].map(|dim| if extent[dim] { scores[dim] } else { 1 })
    }

    /// Returns the dtype of the bias and the sinks.
    pub fn extras_dtype(&self) -> DType {
        if self.f32_extras {
            DType::F32
        } else {
            self.dtype
        }
    }

    /// Returns random inputs, which depend only on the case and on `ATTENTION_TEST_SEED`.
    pub fn inputs(&self) -> Inputs {
        self.seeded(seed())
    }

    /// Returns random inputs, which depend only on the case and on `seed`.
    pub fn seeded(&self, seed: u64) -> Inputs {
        let mut hasher = DefaultHasher::new();
        // The hash of the case seeds the random numbers. Absent options are left out of the hash, so that a new option does
        // not change the inputs of existing cases.
        let absent = [
            "mask_block: None, ",
            "query_lengths: None, ",
            "dropout: None, ",
            "score_mod: None, ",
            "mask_mod: None, ",
        ];
        let all = format!("{self:?}");
        let drawn = absent.iter().fold(all, |text, name| text.replace(name, ""));
        drawn.hash(&mut hasher);
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
        let mut inputs = Inputs {
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
            mask_block: self.mask_block,
            kv_lengths: self.kv_lengths.clone(),
            query_lengths: self.query_lengths.clone(),
            segments: self.segments.clone(),
            intervals: self.intervals.clone(),
        };
        inputs.coarsen_mask();
        inputs
    }

    /// Returns the case's dtype, and the largest number of addends that a sum of this case has. Both determine how
    /// large rounding errors may be.
    pub fn precision(&self) -> Precision {
        let queries = self.q_len * self.q_heads / self.kv_heads.max(1);
        let terms = [self.head_dim, self.value_dim, self.kv_len, queries];
        Precision {
            dtype: self.dtype,
            terms: terms.into_iter().max().unwrap_or(1),
        }
    }

    /// Checks output, logsumexp and every gradient on every device that supports the dtype.
    ///
    /// # Panics
    /// Panics if the dtype's rounding errors do not explain the error of a result.
    pub fn check(&self) {
        let inputs = self.inputs();
        self.check_inputs(&inputs, &inputs.with_mask_of_scores());
    }

    /// Checks like [`check`](Self::check), but with two sets of inputs. The devices compute with `given`, and the
    /// reference implementation computes with `equivalent`. Correct results are the same for both sets.
    ///
    /// # Panics
    /// Panics like [`check`](Self::check).
    pub fn check_inputs(&self, given: &Inputs, equivalent: &Inputs) {
        self.check_on(&devices(), given, equivalent);
    }

    /// Checks like [`check_inputs`](Self::check_inputs), but only on the given devices.
    ///
    /// # Panics
    /// Panics like [`check`](Self::check).
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

/// Returns the dtype in `ATTENTION_TEST_DTYPE`, or `None` if the variable is not set.
///
/// # Panics
/// Panics if `ATTENTION_TEST_DTYPE` is not `f32`, `f16` or `bf16`.
pub fn dtype_under_test() -> Option<DType> {
    match std::env::var("ATTENTION_TEST_DTYPE").as_deref() {
        Err(_) => None,
        Ok("f32") => Some(DType::F32),
        Ok("f16") => Some(DType::F16),
        Ok("bf16") => Some(DType::BF16),
        Ok(other) => panic!("ATTENTION_TEST_DTYPE={other}: expected f32, f16 or bf16"),
    }
}

/// Returns the number in `ATTENTION_TEST_SEED`, or 0 if the variable is not set. A different number gives different random
/// data.
///
/// # Panics
/// Panics if `ATTENTION_TEST_SEED` is not a number.
pub fn seed() -> u64 {
    match std::env::var("ATTENTION_TEST_SEED") {
        Ok(seed) => seed
            .parse()
            .unwrap_or_else(|_| panic!("ATTENTION_TEST_SEED={seed}: expected a number")),
        Err(_) => 0,
    }
}
