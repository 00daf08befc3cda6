//! The launches of the mma engine's kernels.

pub(super) mod backward;
mod bias_gradient;
mod diagonal_sums;
mod score_gradient;

use super::forward::split_d::forward_split_d;
use super::forward::split_m::forward_split_m;
use super::forward::split_n::forward_split_n_pdl;
use super::plan::{MmaForwardPlan, MmaForwardTiles};
use crate::auxiliary::lengths::is_as_read;
use crate::engine::api::RowScales;
use crate::engine::tensor_core::common::launch::{BiasesAhead, ForwardPass, ForwardTiling};
use crate::engine::tensor_core::common::scoring::ForwardOperandsLaunch;
use crate::math::schedule::ScheduleLaunch;
use crate::problem::AttentionProblem;
use crate::types::tensors::{AttentionInputs, AttentionOutput};
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::cube_count;
use cube_kit::pdl::supports_pdl;
use cubecl::ir::{ElemType, UIntKind};
use cubecl::prelude::CubeDim;

/// Launches the forward. If `scales` are present, K and V are 8-bit codes, packed four to a `u32`. Otherwise K and V
/// are floats.
///
/// # Shapes
/// The output is `[batch, q_heads, q_len, value_dim]`. The logsumexp is `[2 · batch, q_heads, q_len]`, f32. Its first half
/// holds the row maxima, its second half the natural logarithms of the row sums.
pub(super) fn forward(
    inputs: AttentionInputs<CubeBackend>,
    scales: Option<RowScales>,
    problem: &AttentionProblem,
    plan: MmaForwardPlan,
) -> AttentionOutput<CubeBackend> {
    let client = inputs.query.client.clone();
    let tiles = plan.tiles;
    let division = ForwardTiling {
        rows: tiles.rows(),
        keys: tiles.keys(),
        heads: plan.heads,
        splits: plan.splits,
        together: plan.together,
    };
    // Do not prefetch biases, since the biases of a block would need as many registers as the block's scores.
    let mut pass = ForwardPass::new(&inputs, problem, division, BiasesAhead::Never);
    let structure = &mut pass.kind.fragment.structure;
    let lengths = inputs.kv_lengths.as_option();
    structure.lengths_ahead = problem.kv_lengths_ahead
        && matches!(tiles, MmaForwardTiles::SplitN(_))
        && supports_pdl(&client)
        && !structure.is_irregular()
        && !structure.query_lengths
        && lengths.is_some_and(is_as_read);
    let cubes = pass.work_tiles as u32;
    let element = dtype_to_storage_type(problem.dtype);
    // Codes of every format have the element type u32, because the kernel copies K and V as bytes. The code format is a
    // field of the tiles.
    let key_element = match scales {
        Some(_) => ElemType::UInt(UIntKind::U32),
        None => element,
    };
    let page_table = inputs.page_table.into_option();
    let (key_scales, value_scales) = scales.map(|scales| (scales.key, scales.value)).unzip();
    macro_rules! launch {
        ($kernel:ident, $tiles:expr, $elements:expr $(, $pdl:expr)?) => {
            // SAFETY: the kernel reads the operands and writes the output only inside their shapes: at rows below `q_len` or
            // `kv_len` and at columns below the head size. The kernel clamps page table entries to existing pages.
            unsafe {
                $kernel::launch_unchecked(
                    &client,
                    cube_count(&client, pass.work_tiles),
                    CubeDim::new_1d(tiles.units() as u32),
                    pass.addresses(
                        [&inputs.query, &inputs.key, &inputs.value]
                            .into_iter()
                            .chain(&key_scales)
                            .chain(&value_scales)
                            .chain(&page_table),
                    ),
                    ForwardOperandsLaunch::new(
                        inputs.query.into_tensor_arg(),
                        inputs.key.into_tensor_arg(),
                        inputs.value.into_tensor_arg(),
                        key_scales.map(CubeTensor::into_tensor_arg).into(),
                        value_scales.map(CubeTensor::into_tensor_arg).into(),
                        page_table.map(CubeTensor::into_tensor_arg).into(),
                    ),
                    pass.scoring(problem),
                    pass.sinks().into(),
                    pass.output.clone().into_tensor_arg(),
                    pass.logsumexp.clone().into_tensor_arg(),
                    pass.scheduler(problem, ScheduleLaunch::new(cubes, cubes, 0)),
                    pass.scale_log2,
                    $tiles,
                    pass.kind,
                    $($pdl,)?
                    $elements,
                    pass.sizes($tiles.vectors()),
                );
            }
        };
    }
    let elements = pass.elements(problem);
    match tiles {
        MmaForwardTiles::SplitM(tiles) => launch!(forward_split_m, tiles, elements),
        MmaForwardTiles::SplitN(tiles) => {
            let [element, output, bias, sink] = elements;
            let elements = [element, key_element, output, bias, sink];
            launch!(forward_split_n_pdl, tiles, elements, supports_pdl(&client))
        }
        MmaForwardTiles::SplitD(tiles) => launch!(forward_split_d, tiles, elements),
    }
    pass.results(problem)
}
