//! One run of a case on a device: forward, and the gradients of everything differentiable.

use super::case::Case;
use super::compare::Named;
use super::dense::{Dense, Layout, read, rms};
use super::inputs::{Extras, Inputs};
use attention_cube::{
    AttentionError, AttentionOptions, AttentionProblem, attention_with_lse, reference,
};
use burn::tensor::{DType, Device, Gradients, Tensor};

/// The operator under test, or its definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    /// [`attention_with_lse`].
    Fused,
    /// [`reference::attention`].
    Reference,
}

impl Operator {
    /// Output and logsumexp.
    ///
    /// # Errors
    /// The operator's.
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
    /// The operator's options, with the tensors in `extras`.
    pub fn options(&self, extras: Extras) -> AttentionOptions {
        let mut options = AttentionOptions::new()
            .window(self.window.0, self.window.1)
            .deterministic(self.deterministic);
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
            options = options.mask(mask.expand(shape));
        }
        if let Some(bias) = extras.bias {
            let shape = expand(bias.dims());
            options = options.bias(bias.expand(shape));
        }
        if let Some(lengths) = extras.kv_lengths {
            options = options.kv_lengths(lengths.expand([self.batch]));
        }
        if let Some((queries, keys)) = extras.segments {
            let queries = queries.expand([self.batch, self.q_len]);
            options = options.segments(queries, keys.expand([self.batch, self.kv_len]));
        }
        if let Some(sinks) = extras.sinks {
            options = options.sinks(sinks.expand([self.q_heads]));
        }
        options
    }

    /// What [`explain`](attention_cube::explain) takes.
    ///
    /// # Errors
    /// Where the case's sizes do not fit each other.
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

    /// Output, logsumexp and the gradients of everything differentiable, for the loss
    /// `Σ output ∘ output_gradient + Σ logsumexp ∘ lse_gradient`.
    ///
    /// # Panics
    /// Where the operator refuses the case, or leaves a gradient out.
    pub fn run(
        &self,
        inputs: &Inputs,
        device: &Device,
        dtype: DType,
        operator: Operator,
    ) -> Vec<Named> {
        let device = device.clone().autodiff();
        let leaf = |dense: &Dense, layout: Layout| {
            layout.store(dense).tensor(&device, dtype).require_grad()
        };
        let extras_dtype = if dtype == self.dtype {
            self.extras_dtype()
        } else {
            dtype
        };
        let leaves = [
            leaf(&inputs.query, self.layouts[0]),
            leaf(&inputs.key, self.layouts[1]),
            leaf(&inputs.value, self.layouts[2]),
        ];
        let shapes = [inputs.query.shape, inputs.key.shape, inputs.value.shape];
        let [query, key, value] =
            [0, 1, 2].map(|i| self.layouts[i].view(leaves[i].clone(), shapes[i]));
        let extras = inputs.extras(&device, extras_dtype);
        let (bias, sinks) = (extras.bias.clone(), extras.sinks.clone());

        let (output, lse) = operator
            .call(query, key, value, self.options(extras))
            .unwrap_or_else(|error| panic!("{self:?}: {error}"));
        let wide = if dtype == DType::F64 {
            DType::F64
        } else {
            DType::F32
        };
        assert_eq!((output.dtype(), lse.dtype()), (dtype, wide), "{self:?}");
        let wide_output = if dtype == wide {
            output.clone()
        } else {
            output.clone().cast(wide)
        };
        let mut loss = self.layouts[3].weigh(wide_output, &inputs.output_gradient, &device);
        if let Some(weights) = &inputs.lse_gradient {
            loss = loss + self.layouts[3].weigh(lse.clone().unsqueeze_dim(3), weights, &device);
        }
        let gradients = loss.backward();

        let output = read(output.inner());
        let magnitudes = Magnitudes::new(self, inputs, rms(&output));
        let mut results = vec![
            Named {
                name: "output",
                values: output,
                magnitude: 0.0,
                stored: 0.0,
            },
            Named {
                name: "logsumexp",
                values: read(lse.inner()),
                magnitude: magnitudes.score,
                stored: 0.0,
            },
        ];
        let [query, key, value] = leaves;
        let mut add = |name, gradient: Option<Vec<f64>>, factor: f64| {
            let values = gradient.unwrap_or_else(|| panic!("{self:?}: no {name}"));
            let Magnitudes {
                difference, stored, ..
            } = magnitudes;
            let (magnitude, stored) = (factor * difference, factor * stored);
            results.push(Named {
                name,
                values,
                magnitude,
                stored,
            });
        };
        add(
            "query gradient",
            gradient(&query, &gradients),
            magnitudes.query,
        );
        add("key gradient", gradient(&key, &gradients), magnitudes.key);
        add("value gradient", gradient(&value, &gradients), 0.0);
        if let Some(bias) = bias {
            add(
                "bias gradient",
                gradient(&bias, &gradients),
                magnitudes.bias,
            );
        }
        if let Some(sinks) = sinks {
            add(
                "sinks gradient",
                gradient(&sinks, &gradients),
                magnitudes.sinks,
            );
        }
        results
    }
}

/// The gradient of a leaf, which has its shape and dtype.
fn gradient<const D: usize>(leaf: &Tensor<D>, gradients: &Gradients) -> Option<Vec<f64>> {
    let gradient = leaf.grad(gradients)?;
    assert_eq!(
        (gradient.dims(), gradient.dtype()),
        (leaf.dims(), leaf.dtype())
    );
    Some(read(gradient))
}

/// The sizes of the terms that cancel. `ds = p (do·v − Δ)` is a difference of terms of size
/// `√value_dim · |do| · |v|`, to which the logsumexp's gradient adds its own; every gradient but the
/// value's is made of it, times a factor.
struct Magnitudes {
    score: f64,
    difference: f64,
    /// The size of `Δ = rowsum(do ∘ o)`.
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
        // The gradient of what heads or sequences share is the sum of theirs.
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
