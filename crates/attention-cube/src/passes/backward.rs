//! What the kernels of a backward share, whichever engine's they are.

use crate::AttentionProblem;
use crate::arguments::{Extras, score_kind, structure};
use crate::backend::{AttentionGradients, AttentionInputs, AttentionSaved};
use crate::math::score::{ScoreArguments, ScoreKind};
use crate::math::side::Side;
use crate::math::visibility::Structure;
use crate::passes::bias_gradient::plan::BiasGradientPlan;
use crate::passes::delta::form::LogsumexpForm;
use crate::passes::delta::rows_of_queries;
use crate::passes::lengths::{Blocks, Places};
use crate::reference;
use crate::select::BackwardRequest;
use crate::tile::tiles::UnitTiles;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::address_type;
use cubecl::prelude::*;

/// What a backward kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BackwardKind {
    pub tiles: UnitTiles,
    pub structure: Structure,
    pub score: ScoreKind,
}

/// What the gradients of queries and keys are multiplied by at the end: the scale where half precision has had those of the scores
/// without it.
#[cube]
pub(crate) fn late_scale(score: &ScoreArguments, #[comptime] tiles: UnitTiles) -> f32 {
    let mut scale = f32::new(1.0);
    if comptime!(tiles.has_fragments()) {
        scale = score.scale;
    }
    scale
}

/// The blocks of the bias's gradient, which come last, if it is asked for.
pub(crate) fn blocks_of_bias(
    plan: Option<BiasGradientPlan>,
    request: BackwardRequest,
) -> Option<Blocks> {
    let plan = plan.filter(|_| request.bias);
    plan.map(|plan| Blocks {
        queries: plan.tiles.rows(),
        keys: plan.tiles.columns(),
        held: Side::Queries,
    })
}

/// Gradients of the operands, as far as kernels gave them.
#[derive(Default)]
pub(crate) struct Gradients {
    pub query: Option<CubeTensor>,
    pub key: Option<CubeTensor>,
    pub value: Option<CubeTensor>,
}

/// What every kernel of one backward reads.
pub(crate) struct BackwardPass<'a> {
    pub inputs: AttentionInputs<CubeBackend>,
    pub output_gradient: CubeTensor,
    pub rows: CubeTensor,
    pub logsumexp: CubeTensor,
    pub logsumexp_gradient: Option<CubeTensor>,
    pub extras: Extras,
    pub problem: &'a AttentionProblem,
}

impl<'a> BackwardPass<'a> {
    /// With the terms of the queries, read by vectors of `vector`; with logsumexps in this form.
    pub(crate) fn new(
        inputs: AttentionInputs<CubeBackend>,
        saved: AttentionSaved<CubeBackend>,
        extras: Extras,
        problem: &'a AttentionProblem,
        vector: usize,
        form: LogsumexpForm,
    ) -> Self {
        Self {
            rows: rows_of_queries(&saved, problem, vector, form),
            inputs,
            output_gradient: saved.output_gradient,
            logsumexp: saved.logsumexp,
            logsumexp_gradient: saved.logsumexp_gradient.into_option(),
            extras,
            problem,
        }
    }

    pub(crate) fn kind(&self, tiles: UnitTiles) -> BackwardKind {
        BackwardKind {
            tiles,
            structure: structure(self.problem),
            score: score_kind(self.problem),
        }
    }

    /// The gradients asked for, with those of bias and sinks. The bias's kernel finds the integers at `places`.
    pub(crate) fn with_rest(
        &self,
        gradients: Gradients,
        bias: Option<BiasGradientPlan>,
        places: Option<&Places>,
        request: BackwardRequest,
    ) -> AttentionGradients<CubeBackend> {
        let bias = bias.filter(|_| request.bias).zip(places);
        let bias = self.inputs.bias.as_option().zip(bias);
        let bias = bias.map(|(bias, (plan, places))| self.bias(bias, plan, *places));
        let sinks = self.inputs.sinks.as_option().filter(|_| request.sinks);
        let sinks = sinks.map(|sinks| self.sinks(sinks));
        AttentionGradients {
            query: gradients.query.filter(|_| request.query).into(),
            key: gradients.key.filter(|_| request.key).into(),
            value: gradients.value.filter(|_| request.value).into(),
            bias: bias.into(),
            sinks: sinks.into(),
        }
    }

    pub(crate) fn addresses(&self, outputs: &[&CubeTensor]) -> AddressType {
        let inputs = &self.inputs;
        address_type(
            [
                &inputs.query,
                &inputs.key,
                &inputs.value,
                &self.output_gradient,
                &self.rows,
            ]
            .into_iter()
            .chain(self.extras.tensors())
            .chain(outputs.iter().copied()),
        )
    }

    pub(crate) fn arg(tensor: &CubeTensor) -> TensorArg {
        tensor.clone().into_tensor_arg()
    }

    /// One number a head: Burn's own operations do, over the logsumexps and Δ, except for converting it: that
    /// rounds as the driver likes.
    fn sinks(&self, sinks: &CubeTensor) -> CubeTensor {
        let problem = self.problem;
        let [batch, q_heads, q_len] = problem.logsumexp_shape();
        let rows = Shape::new([batch, q_heads, q_len, 1]);
        let parts = reference::parts::<CubeBackend>(self.logsumexp.clone(), problem);
        let [reference, logarithm] =
            parts.map(|part| CubeBackend::float_reshape(part, rows.clone()));
        let deltas = CubeBackend::float_slice(
            self.rows.clone(),
            &[
                (0..batch).into(),
                (0..q_heads).into(),
                (1..2).into(),
                (0..q_len).into(),
            ],
        );
        let deltas = CubeBackend::float_swap_dims(deltas, 2, 3);
        let gradient = reference::gradients::sinks_gradient::<CubeBackend>(
            sinks.clone(),
            reference,
            logarithm,
            deltas,
            problem,
        );
        match sinks.dtype {
            DType::F32 => gradient,
            _ => self.sum(&into_contiguous(gradient), 0, 1, sinks, None, 1),
        }
    }
}
