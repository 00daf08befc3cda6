//! The tensors that all kernels of one backward read. This module also computes the gradients of bias, sinks and
//! table, after the engine's kernels.

use crate::auxiliary::backward_kind::BackwardKind;
use crate::auxiliary::delta::rows_of_queries;
use crate::auxiliary::lengths::{Blocks, BoundsOffsets};
use crate::auxiliary::reduce::sum_parts;
use crate::engine::bias_gradient::launch::bias_gradient;
use crate::engine::bias_gradient::plan::BiasGradientPlan;
use crate::engine::optional_inputs::OptionalInputs;
use crate::engine::table_gradient::launch::table_gradient;
use crate::engine::table_gradient::plan::TableGradientPlan;
use crate::kernel_args::tensor_arg;
use crate::kernel_args::{score_kind, structure};
use crate::math::inputs::BackwardInputsLaunch;
use crate::math::lse_form::LogsumexpForm;
use crate::math::side::Side;
use crate::problem::AttentionProblem;
use crate::reference;
use crate::tile_ops::tiles::UnitTiles;
use crate::types::request::BackwardRequest;
use crate::types::tensors::{AttentionGradients, AttentionInputs, AttentionSaved};
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::address_type;
use cubecl::prelude::*;

/// The plans of the gradients that are computed after those of query, key and value. A gradient without a plan is not
/// computed.
#[derive(Clone, Copy)]
pub(crate) struct RestPlans {
    bias: Option<BiasGradientPlan>,
    table: Option<TableGradientPlan>,
}

impl RestPlans {
    /// Keeps the plans of the requested gradients.
    pub(crate) fn new(
        bias: Option<BiasGradientPlan>,
        table: Option<TableGradientPlan>,
        request: BackwardRequest,
    ) -> Self {
        Self {
            bias: bias.filter(|_| request.bias),
            table: table.filter(|_| request.table),
        }
    }

    /// Returns the block sizes of the kernels, first of the bias and then of the table.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = Blocks> + use<> {
        let bias = self.bias.map(|plan| Blocks {
            queries: plan.tiles.rows(),
            keys: plan.tiles.columns(),
            stationary_side: Side::Queries,
            longest_first: false,
        });
        let table = self.table.map(|plan| Blocks {
            queries: plan.tiles.rows(),
            keys: plan.tiles.columns(),
            stationary_side: Side::Queries,
            longest_first: false,
        });
        bias.into_iter().chain(table)
    }
}

/// The gradients of query, key and value that the engine's kernels have computed so far.
#[derive(Default)]
pub(crate) struct Gradients {
    pub query: Option<CubeTensor>,
    pub key: Option<CubeTensor>,
    pub value: Option<CubeTensor>,
}

/// The tensors that every kernel of one backward reads.
pub(crate) struct BackwardPass<'a> {
    pub inputs: AttentionInputs<CubeBackend>,
    pub output_gradient: CubeTensor,
    pub rows: CubeTensor,
    pub logsumexp: CubeTensor,
    pub logsumexp_gradient: Option<CubeTensor>,
    pub optional_inputs: OptionalInputs,
    pub problem: &'a AttentionProblem,
}

impl<'a> BackwardPass<'a> {
    /// Computes LSE and delta of all queries, and collects the tensors that the kernels read.
    ///
    /// The kernel that computes delta loads vectors of `vector` elements. `form` selects how the LSE is stored.
    pub(crate) fn new(
        inputs: AttentionInputs<CubeBackend>,
        saved: AttentionSaved<CubeBackend>,
        optional_inputs: OptionalInputs,
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
            optional_inputs,
            problem,
        }
    }

    /// Returns query, key, value, the output's gradient and the LSE/delta tensor as kernel arguments.
    pub(crate) fn operands<E: Float, N: Size>(&self) -> BackwardInputsLaunch<E, N> {
        BackwardInputsLaunch::new(
            tensor_arg(&self.inputs.query),
            tensor_arg(&self.inputs.key),
            tensor_arg(&self.inputs.value),
            tensor_arg(&self.output_gradient),
            tensor_arg(&self.rows),
        )
    }

    pub(crate) fn kind(&self, tiles: UnitTiles) -> BackwardKind {
        BackwardKind {
            tiles,
            structure: structure(self.problem),
            score: score_kind(self.problem),
        }
    }

    /// Completes `gradients` with the gradients of bias, sinks and table, and drops gradients that were not requested.
    /// `offsets` locates the sequence lengths and segment bounds in the buffer that packs them, for each kernel of
    /// `rest`.
    pub(crate) fn with_rest(
        &self,
        gradients: Gradients,
        rest: RestPlans,
        offsets: &[BoundsOffsets],
        request: BackwardRequest,
    ) -> AttentionGradients<CubeBackend> {
        let bias = rest.bias.zip(offsets.first());
        let bias = self.inputs.bias.as_option().zip(bias);
        let bias = bias.map(|(bias, (plan, offsets))| bias_gradient(self, bias, plan, *offsets));
        let table = rest.table.zip(offsets.last());
        let table = self.inputs.score_table.as_option().zip(table);
        let table =
            table.map(|(table, (plan, offsets))| table_gradient(self, table, plan, *offsets));
        let sinks = self.inputs.sinks.as_option().filter(|_| request.sinks);
        let sinks = sinks.map(|sinks| self.sinks(sinks));
        AttentionGradients {
            query: gradients.query.filter(|_| request.query).into(),
            key: gradients.key.filter(|_| request.key).into(),
            value: gradients.value.filter(|_| request.value).into(),
            bias: bias.into(),
            sinks: sinks.into(),
            table: table.into(),
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
            .chain(self.optional_inputs.tensors())
            .chain(outputs.iter().copied()),
        )
    }

    /// Computes the gradient of the sinks, which has one element per query head. If the sinks have half precision, the
    /// kernel `sum_parts` rounds the result, because the rounding of Burn's conversion depends on the driver.
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
            _ => sum_parts(&into_contiguous(gradient), 0, 1, sinks, None, 1),
        }
    }
}
