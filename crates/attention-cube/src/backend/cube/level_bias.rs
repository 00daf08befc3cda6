//! A bias of one number a head, without a look at any score.
//!
//! It moves all scores of a query alike. The softmax does not notice, and the logsumexp moves along: so kernels do without it, it
//! is added to the logsumexps, and its gradient is the sum of theirs. Where it is −∞ its head sees nothing.

use super::*;
use burn::tensor::BoolDType;

/// Such a bias.
pub(super) struct LevelBias {
    /// In f32, `[batch or 1, q_heads or 1, 1, 1]`.
    numbers: CubeTensor,
    /// Where it is −∞.
    hides: CubeTensor,
}

impl LevelBias {
    /// The problem's bias, if it is of this kind.
    pub fn of(inputs: &AttentionInputs<CubeBackend>, problem: &AttentionProblem) -> Option<Self> {
        let bias = inputs.bias.as_option()?;
        if !problem.has_level_bias() {
            return None;
        }
        let numbers = CubeBackend::float_cast(bias.clone(), burn::tensor::FloatDType::F32);
        let hides = CubeBackend::float_equal_elem(
            numbers.clone(),
            f64::NEG_INFINITY.into(),
            BoolDType::U32,
        );
        Some(Self { numbers, hides })
    }

    /// The attention of `inputs`, which are the problem's without the bias.
    pub fn forward(
        &self,
        inputs: AttentionInputs<CubeBackend>,
        problem: &AttentionProblem,
    ) -> AttentionOutput<CubeBackend> {
        let inputs = AttentionInputs {
            bias: MaybeFloat::Absent,
            ..inputs
        };
        let result = CubeBackend::attention_forward(inputs, problem.without_bias());
        let rows = self.to_rows(result.logsumexp, problem);
        let moved = CubeBackend::float_add(rows, self.numbers.clone());
        AttentionOutput {
            output: self.filled(result.output, 0.0),
            logsumexp: to_logsumexps(self.filled(moved, f64::NEG_INFINITY), problem),
        }
    }

    /// The gradients. What a head that sees nothing holds goes nowhere, whatever it is.
    pub fn backward(
        &self,
        inputs: AttentionInputs<CubeBackend>,
        saved: AttentionSaved<CubeBackend>,
        problem: &AttentionProblem,
        request: BackwardRequest,
    ) -> AttentionGradients<CubeBackend> {
        let bias = inputs.bias.as_option().filter(|_| request.bias);
        let bias = bias.map(|bias| self.gradient(bias, &saved, problem));
        let rows = self.to_rows(saved.logsumexp, problem);
        let unmoved = CubeBackend::float_sub(rows, self.numbers.clone());
        let inputs = AttentionInputs {
            query: self.filled(inputs.query, 0.0),
            bias: MaybeFloat::Absent,
            ..inputs
        };
        let saved = AttentionSaved {
            logsumexp: to_logsumexps(self.filled(unmoved, f64::NEG_INFINITY), problem),
            output_gradient: self.filled(saved.output_gradient, 0.0),
            ..saved
        };
        let request = BackwardRequest {
            bias: false,
            ..request
        };
        let rest = CubeBackend::attention_backward(inputs, saved, problem.without_bias(), request);
        AttentionGradients {
            bias: bias.into(),
            ..rest
        }
    }

    /// The bias's gradient: that of the logsumexps of all queries that see something.
    fn gradient(
        &self,
        bias: &CubeTensor,
        saved: &AttentionSaved<CubeBackend>,
        problem: &AttentionProblem,
    ) -> CubeTensor {
        let dtype = bias.dtype.into();
        let own = bias.meta.shape().clone();
        let Some(gradient) = saved.logsumexp_gradient.as_option() else {
            return CubeBackend::float_zeros(own, &bias.device.clone(), dtype);
        };
        let blind = CubeBackend::float_equal_elem(
            saved.logsumexp.clone(),
            f64::NEG_INFINITY.into(),
            BoolDType::U32,
        );
        let gradient = CubeBackend::float_mask_fill(gradient.clone(), blind, 0.0.into());
        let mut sum = self.to_rows(gradient, problem);
        for dim in 0..3 {
            if own[dim] == 1 && sum.meta.shape()[dim] != 1 {
                sum = CubeBackend::float_sum_dim(sum, dim);
            }
        }
        CubeBackend::float_cast(sum, dtype)
    }

    /// `[batch, q_heads, q_len]` as rows of one column.
    fn to_rows(&self, tensor: CubeTensor, problem: &AttentionProblem) -> CubeTensor {
        let [batch, q_heads, q_len] = problem.logsumexp_shape();
        CubeBackend::float_reshape(tensor, Shape::new([batch, q_heads, q_len, 1]))
    }

    /// The tensor, `[batch, q_heads, …]`, with `value` in the heads that see nothing.
    fn filled(&self, tensor: CubeTensor, value: f64) -> CubeTensor {
        let hides = CubeBackend::bool_expand(self.hides.clone(), tensor.meta.shape().clone());
        CubeBackend::float_mask_fill(tensor, hides, value.into())
    }
}

fn to_logsumexps(rows: CubeTensor, problem: &AttentionProblem) -> CubeTensor {
    CubeBackend::float_reshape(rows, Shape::new(problem.logsumexp_shape()))
}
