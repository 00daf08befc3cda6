//! Runs a test case on a device: the forward, and the gradients of all differentiable inputs.

use super::case::Case;
use super::compare::Named;
use super::dense::{Dense, Layout, host, rms};
use super::inputs::{Extras, Inputs};
use attention_cube::{
    AttentionError, AttentionOptions, AttentionProblem, BlockMask, attention_with_lse, reference,
};
use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};

/// The operator under test, or its reference implementation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    /// [`attention_with_lse`].
    Fused,
    /// [`reference::attention`].
    Reference,
}

impl Operator {
    /// Computes output and logsumexp.
    ///
    /// # Shapes
    /// - `query`: `[batch, q_heads, q_len, head_dim]`
    /// - `key`: `[batch, kv_heads, kv_len, head_dim]`
    /// - `value`: `[batch, kv_heads, kv_len, value_dim]`
    /// - output: `[batch, q_heads, q_len, value_dim]`
    /// - logsumexp: `[batch, q_heads, q_len]`, natural logarithm
    ///
    /// # Errors
    /// Returns the errors of the operator.
    pub fn call(
        self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
        options: AttentionOptions,
    ) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
        match self {
            Self::Fused => attention_with_lse(query, key, value, options),
            Self::Reference => reference::attention(query, key, value, options),
        }
    }
}

impl Case {
    /// Returns the options of an attention call for this case. `extras` holds the tensors of the options, such as the mask.
    pub fn options(&self, extras: Extras) -> AttentionOptions {
        let options = AttentionOptions::new().window(self.window.0, self.window.1);
        let mut options = self.with_code(options, &extras.device);
        if let Some(alignment) = self.causal {
            options = options.causal_aligned(alignment);
        }
        if let Some(scale) = self.scale {
            options = options.scale(scale);
        }
        if let Some(softcap) = self.softcap {
            options = options.softcap(softcap);
        }
        let expand = |shape| if self.expanded { self.scores() } else { shape };
        if let Some(mask) = extras.mask {
            let shape = expand(mask.dims());
            options = match extras.mask_block {
                None => options.mask(mask.expand(shape)),
                Some(block) => {
                    let [batch, heads, q_len, kv_len] = shape;
                    let shape = match self.expanded {
                        true => [
                            batch,
                            heads,
                            q_len.div_ceil(block[0]),
                            kv_len.div_ceil(block[1]),
                        ],
                        false => shape,
                    };
                    options.block_mask(BlockMask::new(mask.expand(shape), block))
                }
            };
        }
        if let Some(bias) = extras.bias {
            let shape = expand(bias.dims());
            options = options.bias(bias.expand(shape));
        }
        if let Some(lengths) = extras.kv_lengths {
            options = options.kv_lengths(lengths.expand([self.batch]));
        }
        if let Some(lengths) = extras.query_lengths {
            options = options.query_lengths(lengths.expand([self.batch]));
        }
        if let Some((queries, keys)) = extras.segments {
            let queries = queries.expand([self.batch, self.q_len]);
            options = options.segments(queries, keys.expand([self.batch, self.kv_len]));
        }
        for (start, end) in extras.intervals {
            let shape = [self.batch, self.q_len];
            options = options.visible_between(start.expand(shape), end.expand(shape));
        }
        if let Some((probability, seed)) = self.dropout {
            options = options.dropout(probability, seed);
        }
        if let Some(sinks) = extras.sinks {
            options = options.sinks(sinks.expand([self.q_heads]));
        }
        options
    }

    /// Returns the description of the case for [`explain`](attention_cube::explain).
    ///
    /// # Errors
    /// Returns an error if the case's sizes do not fit each other.
    pub fn problem(
        &self,
        inputs: &Inputs,
        device: &Device,
    ) -> Result<AttentionProblem, AttentionError> {
        let device = &device.clone().autodiff();
        let tensor = |dense: &Dense| dense.tensor(device, self.dtype);
        AttentionProblem::new(
            &tensor(&inputs.query),
            &tensor(&inputs.key),
            &tensor(&inputs.value),
            &self.options(inputs.extras(device, self.extras_dtype())),
        )
    }

    /// Computes output and logsumexp with the option `kv_lengths_ahead`. With this option, the caller promises that no
    /// kernel launch in the same CUDA graph writes the lengths.
    ///
    /// # Panics
    /// Panics if the operator refuses the case.
    pub fn run_ahead(&self, inputs: &Inputs, device: &Device) -> Vec<Named> {
        let Prepared { leaves, extras, .. } = self.prepare(inputs, device, self.dtype);
        let shapes = [inputs.query.shape, inputs.key.shape, inputs.value.shape];
        let [query, key, value] =
            [0, 1, 2].map(|i| self.layouts[i].view(leaves[i].clone(), shapes[i]));
        let options = self.options(extras).kv_lengths_ahead(true);
        let (output, logsumexp) = Operator::Fused
            .call(query, key, value, options)
            .unwrap_or_else(|error| panic!("{self:?}: {error}"));
        let named = |name, data| Named {
            name,
            values: host(data),
            magnitude: 0.0,
            stored: 0.0,
        };
        vec![
            named("output", output.inner().into_data()),
            named("logsumexp", logsumexp.inner().into_data()),
        ]
    }

    /// Creates the case's tensors on a device. The tensors can be used for any number of runs.
    pub fn prepare<'a>(
        &'a self,
        inputs: &'a Inputs,
        device: &Device,
        dtype: DType,
    ) -> Prepared<'a> {
        let device = device.clone().autodiff();
        let leaf = |dense: &Dense, layout: Layout| {
            layout.store(dense).tensor(&device, dtype).require_grad()
        };
        let extras_dtype = if dtype == self.dtype {
            self.extras_dtype()
        } else {
            dtype
        };
        Prepared {
            case: self,
            inputs,
            dtype,
            leaves: [
                leaf(&inputs.query, self.layouts[0]),
                leaf(&inputs.key, self.layouts[1]),
                leaf(&inputs.value, self.layouts[2]),
            ],
            extras: inputs.extras(&device, extras_dtype),
            device,
        }
    }

    /// Computes output, logsumexp and the gradients of all differentiable inputs, for the loss
    /// `Σ output ∘ output_gradient + Σ logsumexp ∘ lse_gradient`.
    ///
    /// # Panics
    /// Panics if the operator refuses the case, or if a gradient is missing.
    pub fn run(
        &self,
        inputs: &Inputs,
        device: &Device,
        dtype: DType,
        operator: Operator,
    ) -> Vec<Named> {
        let results = self.prepare(inputs, device, dtype).run(operator);
        let results = results.into_iter().map(|(name, data)| {
            let values = host(data);
            Named {
                name,
                values,
                magnitude: 0.0,
                stored: 0.0,
            }
        });
        let mut results: Vec<_> = results.collect();
        let magnitudes = Magnitudes::new(self, inputs, rms(&results[0].values));
        for result in &mut results {
            let factor = match result.name {
                "output" => continue,
                "logsumexp" => {
                    result.magnitude = magnitudes.score;
                    continue;
                }
                "query gradient" => magnitudes.query,
                "key gradient" => magnitudes.key,
                "bias gradient" => magnitudes.bias,
                "sinks gradient" => magnitudes.sinks,
                _ => 0.0,
            };
            result.magnitude = factor * magnitudes.difference;
            result.stored = factor * magnitudes.stored;
        }
        results
    }
}

/// The tensors of a test case on a device.
pub struct Prepared<'a> {
    case: &'a Case,
    inputs: &'a Inputs,
    dtype: DType,
    leaves: [Tensor<4>; 3],
    extras: Extras,
    device: Device,
}

impl Prepared<'_> {
    /// Runs the case like [`Case::run`]. Returns the name and the data of each result. The data have the dtype in which
    /// the device returned them.
    ///
    /// # Panics
    /// Panics if the operator refuses the case, or if a gradient is missing.
    pub fn run(&self, operator: Operator) -> Vec<(&'static str, TensorData)> {
        let (case, inputs, dtype, leaves) = (self.case, self.inputs, self.dtype, &self.leaves);
        let shapes = [inputs.query.shape, inputs.key.shape, inputs.value.shape];
        let [query, key, value] =
            [0, 1, 2].map(|i| case.layouts[i].view(leaves[i].clone(), shapes[i]));
        let options = case.options(self.extras.clone());

        let (output, lse) = operator
            .call(query, key, value, options)
            .unwrap_or_else(|error| panic!("{case:?}: {error}"));
        let wide = if dtype == DType::F64 {
            DType::F64
        } else {
            DType::F32
        };
        assert_eq!((output.dtype(), lse.dtype()), (dtype, wide), "{case:?}");
        let wide_output = if dtype == wide {
            output.clone()
        } else {
            output.clone().cast(wide)
        };
        let layout = case.layouts[3];
        let mut loss = layout.weigh(wide_output, &inputs.output_gradient, &self.device);
        if let Some(weights) = &inputs.lse_gradient {
            loss = loss + layout.weigh(lse.clone().unsqueeze_dim(3), weights, &self.device);
        }
        let gradients = loss.backward();

        let [query, key, value] = leaves;
        let mut found = vec![
            ("query gradient", gradient(query, &gradients)),
            ("key gradient", gradient(key, &gradients)),
            ("value gradient", gradient(value, &gradients)),
        ];
        if let Some(bias) = &self.extras.bias {
            found.push(("bias gradient", gradient(bias, &gradients)));
        }
        if let Some(sinks) = &self.extras.sinks {
            found.push(("sinks gradient", gradient(sinks, &gradients)));
        }
        let mut results = vec![
            ("output", output.inner().into_data()),
            ("logsumexp", lse.inner().into_data()),
        ];
        results.extend(found.into_iter().map(|(name, gradient)| {
            let gradient = gradient.unwrap_or_else(|| panic!("{case:?}: no {name}"));
            (name, gradient)
        }));
        results
    }
}

/// Returns the gradient of a leaf tensor, or `None` if the leaf has no gradient. The gradient must have the leaf's shape and
/// dtype.
fn gradient<const D: usize>(leaf: &Tensor<D>, gradients: &Gradients) -> Option<TensorData> {
    let gradient = leaf.grad(gradients)?;
    assert_eq!(
        (gradient.dims(), gradient.dtype()),
        (leaf.dims(), leaf.dtype())
    );
    Some(gradient.into_data())
}

/// The magnitudes of the terms that cancel in gradients.
///
/// The gradient of a score is `ds = p (do·v − Δ)`. Here `p` is the probability, `do` is the output gradient, `v` is the
/// value, and `Δ` is `do·o` for the output `o`. The terms `do·v` and `Δ` have the magnitude `√value_dim · |do| · |v|`.
/// If the loss depends on the logsumexp, the magnitude of the logsumexp's gradient is added.
struct Magnitudes {
    score: f64,
    difference: f64,
    /// The magnitude of `Δ = rowsum(do ∘ o)`, which is computed from the stored output.
    stored: f64,
    query: f64,
    key: f64,
    bias: f64,
    sinks: f64,
}

impl Magnitudes {
    fn new(case: &Case, inputs: &Inputs, output: f64) -> Self {
        let finite = |dense: &Dense| {
            let finite: Vec<f64> = dense
                .values
                .iter()
                .copied()
                .filter(|x| x.is_finite())
                .collect();
            rms(&finite)
        };
        let (query, key) = (finite(&inputs.query), finite(&inputs.key));
        let scale = case
            .scale
            .unwrap_or(1.0 / (case.head_dim as f64).sqrt())
            .abs();
        let dot = (case.value_dim as f64).sqrt() * finite(&inputs.output_gradient);
        let queries = (case.q_len * case.q_heads / case.kv_heads.max(1)) as f64;
        // If several heads or sequences share one stored tensor, the gradient of the stored tensor is the sum of their
        // gradients. The sum has the magnitude of one gradient, times the square root of the number of gradients.
        let shared = |layout, heads: usize| match layout {
            Layout::SharedHeads => (heads as f64).sqrt(),
            Layout::SharedBatch => (case.batch as f64).sqrt(),
            _ => 1.0,
        };
        let scores = case.scores().iter().product::<usize>() as f64;
        let rows = scores / case.kv_len as f64;
        let parts = |extra: &Option<Dense>| {
            extra
                .as_ref()
                .map_or(1.0, |extra| extra.values.len().max(1) as f64)
        };
        Self {
            score: 1.0 + scale * (case.head_dim as f64).sqrt() * query * key,
            difference: dot * finite(&inputs.value)
                + inputs.lse_gradient.as_ref().map_or(0.0, finite),
            stored: dot * output,
            query: scale * key * shared(case.layouts[0], case.q_heads),
            key: scale * query * queries.sqrt() * shared(case.layouts[1], case.kv_heads),
            bias: (scores / parts(&inputs.bias)).sqrt(),
            sinks: (rows / parts(&inputs.sinks)).sqrt(),
        }
    }
}
