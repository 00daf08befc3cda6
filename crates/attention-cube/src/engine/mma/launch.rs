//! Launches the mma engine's kernels.

pub(super) mod backward;
mod bias_gradient;

use super::forward::split_d::forward_split_d;
use super::forward::split_m::forward_split_m;
use super::forward::split_n::forward_split_n_overlapped;
use super::plan::{ForwardPlan, ForwardTiles};
use crate::AttentionProblem;
use crate::arguments::score_arguments;
use crate::backend::{AttentionInputs, AttentionOutput};
use crate::fragment::launch::{BiasesAhead, Division, ForwardPass};
use crate::math::schedule::ScheduleLaunch;
use crate::passes::lengths::lie_as_read;
use crate::tiled::launch::forward::Scales;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::cube_count;
use cube_kit::overlap::overlaps;
use cubecl::ir::{ElemType, UIntKind};
use cubecl::prelude::CubeDim;

/// Of keys and values as they are, or of their words and `scales`.
pub(super) fn forward(
    inputs: AttentionInputs<CubeBackend>,
    scales: Option<Scales>,
    problem: &AttentionProblem,
    plan: ForwardPlan,
) -> AttentionOutput<CubeBackend> {
    let client = inputs.query.client.clone();
    let tiles = plan.tiles;
    let division = Division {
        rows: tiles.rows(),
        keys: tiles.keys(),
        heads: plan.heads,
        splits: plan.splits,
        together: plan.together,
    };
    // A block's biases would take the registers of its scores once more.
    let mut pass = ForwardPass::new(&inputs, problem, division, BiasesAhead::Never);
    let structure = &mut pass.kind.fragment.structure;
    let lengths = inputs.kv_lengths.as_option();
    structure.lengths_ahead = problem.kv_lengths_ahead
        && matches!(tiles, ForwardTiles::SplitN(_))
        && overlaps(&client)
        && !structure.is_irregular()
        && lengths.is_some_and(|lengths| lie_as_read(lengths, problem.batch));
    let cubes = pass.work_tiles as u32;
    let element = dtype_to_storage_type(problem.dtype);
    let key_element = match scales {
        Some(_) => ElemType::UInt(UIntKind::U32),
        None => element,
    };
    let (key_scales, value_scales) = scales.map(|scales| (scales.key, scales.value)).unzip();
    macro_rules! launch {
        ($kernel:ident, $tiles:expr $(, $key_scales:expr, $value_scales:expr, $key_element:expr, $overlaps:expr)?) => {
            // SAFETY: copies and everything else stay inside the shapes that the kernel was given.
            unsafe {
                $kernel::launch_unchecked(
                    &client,
                    cube_count(&client, pass.work_tiles),
                    CubeDim::new_1d(tiles.units() as u32),
                    pass.addresses(
                        [&inputs.query, &inputs.key, &inputs.value]
                            .into_iter()
                            .chain(&key_scales)
                            .chain(&value_scales),
                    ),
                    inputs.query.into_tensor_arg(),
                    inputs.key.into_tensor_arg(),
                    inputs.value.into_tensor_arg(),
                    $($key_scales, $value_scales,)?
                    pass.mask.argument().into(),
                    pass.extras.bias().into(),
                    pass.extras.lengths_and_ids().into(),
                    pass.sinks().into(),
                    pass.output.clone().into_tensor_arg(),
                    pass.logsumexp.clone().into_tensor_arg(),
                    pass.grid(problem),
                    ScheduleLaunch::new(cubes, cubes, 0),
                    pass.extent(problem),
                    score_arguments(problem),
                    pass.mask.places(),
                    problem.group() as u32,
                    pass.power,
                    $tiles,
                    pass.kind,
                    $($overlaps,)?
                    element,
                    $($key_element,)?
                    dtype_to_storage_type(pass.output.dtype),
                    pass.extras.bias_element,
                    pass.sink_element,
                    pass.output_vector,
                    pass.bias_vector,
                    $tiles.vectors(),
                );
            }
        };
    }
    match tiles {
        ForwardTiles::SplitM(tiles) => launch!(forward_split_m, tiles),
        ForwardTiles::SplitN(tiles) => {
            launch!(
                forward_split_n_overlapped,
                tiles,
                key_scales.map(CubeTensor::into_tensor_arg).into(),
                value_scales.map(CubeTensor::into_tensor_arg).into(),
                key_element,
                overlaps(&client)
            )
        }
        ForwardTiles::SplitD(tiles) => launch!(forward_split_d, tiles),
    }
    pass.results(problem)
}
