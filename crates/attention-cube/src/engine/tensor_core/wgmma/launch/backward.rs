//! Launches the kernels of the wgmma engine's backward. The first kernel computes LSE and delta. The second kernel
//! computes dQ. One or two more kernels compute dK and dV.

use crate::engine::backward_pass::BackwardPass;
use crate::engine::tensor_core::common::bias::BiasReads;
use crate::engine::tensor_core::common::gradient_launch::{GradientArguments, GradientLaunch};
use crate::engine::tensor_core::common::launch::{gradients, joined_sizes};
use crate::engine::tensor_core::wgmma::backward::load::GradientMapsLaunch;
use crate::engine::tensor_core::wgmma::backward::load::GradientStepsLaunch;
use crate::engine::tensor_core::wgmma::backward::split_d::backward_split_d;
use crate::engine::tensor_core::wgmma::backward::split_m::backward_split_m;
use crate::engine::tensor_core::wgmma::plan::{
    WgmmaBackwardPlan, WgmmaGradientSplitDTiles, WgmmaGradientTiles, WgmmaSplitDTiles,
};
use crate::math::side::Sums;
use crate::problem::AttentionProblem;
use crate::types::request::BackwardRequest;
use crate::types::tensors::{AttentionGradients, AttentionInputs, AttentionSaved};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::hopper::PRODUCT_ROWS;
use cube_kit::hopper::tma::{is_single, map};
use cube_kit::launch::cube_count;
use cubecl::prelude::{CubeDim, TensorMapArg, Tiled, TiledArgs};

pub(crate) fn launch(
    inputs: AttentionInputs<CubeBackend>,
    saved: AttentionSaved<CubeBackend>,
    problem: &AttentionProblem,
    plan: WgmmaBackwardPlan,
    request: BackwardRequest,
) -> AttentionGradients<CubeBackend> {
    let launch = |pass: &BackwardPass, tiles, offsets, mask, division| {
        launch_gradient(&GradientLaunch {
            pass,
            tiles,
            offsets,
            mask,
            division,
        })
    };
    gradients(inputs, saved, problem, plan, request, launch)
}

/// Builds the TMA tensor map of the tensor that holds LSE and delta. A box covers `columns` queries, and has the first
/// `count` f32 of each of these queries.
fn term_map(lse_delta: &CubeTensor, count: usize, columns: usize) -> TensorMapArg<Tiled> {
    let args = TiledArgs {
        tile_size: Shape::new([1, 1, count, columns]),
    };
    TensorMapArg::new(
        args,
        lse_delta.clone().into_tensor_arg(),
        dtype_to_storage_type(DType::F32),
    )
}

/// Launches one gradient kernel. Returns an array of two gradients: first the gradient of Q or K, then the gradient of
/// V. A gradient is `None` if the kernel does not compute it.
fn launch_gradient(launch: &GradientLaunch<'_, WgmmaGradientTiles>) -> [Option<CubeTensor>; 2] {
    let splits = launch.division.splits;
    let sums = launch.tiles.sums();
    let optional_inputs = &launch.pass.optional_inputs;
    let bias_reads = match (
        optional_inputs.half_of_bias(),
        optional_inputs.has_bias_of_head(),
    ) {
        (Some(half), _) if launch.tiles.has_bias_boxes() => BiasReads::Ahead(half),
        (_, true) => BiasReads::OnceAHead,
        (_, false) => BiasReads::There,
    };
    let GradientArguments {
        stationary_qk,
        stationary_v_do,
        q_or_k,
        v_or_do,
        lse_delta,
        gradients,
        qk_target,
        value_target,
        bias,
        cubes,
        grid,
        kind,
        elements,
        vectors,
    } = launch.arguments(sums, bias_reads);
    let client = lse_delta.client.clone();
    let step = |tensor: &CubeTensor, dim| u32::from(!is_single(tensor, dim));
    let bias_step = |dim| bias.as_ref().map_or(0, |bias| step(bias, dim));
    let steps = GradientStepsLaunch::new(
        step(stationary_qk, 0),
        step(stationary_qk, 1),
        step(stationary_v_do, 0),
        step(stationary_v_do, 1),
        step(q_or_k, 0),
        step(q_or_k, 1),
        step(v_or_do, 0),
        step(v_or_do, 1),
        bias_step(0),
        bias_step(1),
    );
    // If TMA does not store a gradient, the kernel ignores the tensor map of this gradient. The launch then passes a
    // map of `stationary_qk` instead. A map of the gradient itself may be impossible, because its rows may violate
    // TMA's alignment.
    let boxes = |boxed: bool, target: &CubeTensor| {
        map(
            if boxed && splits == 1 {
                target
            } else {
                stationary_qk
            },
            [1, PRODUCT_ROWS],
            None,
        )
    };
    let addresses = launch.addresses([&qk_target, &value_target, lse_delta]);
    match launch.tiles {
        // SAFETY: TMA accesses only elements inside the tensors' shapes. The kernel accesses `lse_delta`, the bias, the
        // mask and the gradients only at rows below `q_len` or `kv_len` and at columns below their widths. The launch
        // passes another tensor in place of an absent gradient, and the kernel does not write to that tensor.
        WgmmaGradientTiles::SplitM(tiles) => unsafe {
            backward_split_m::launch_unchecked(
                &client,
                cube_count(&client, cubes),
                CubeDim::new_1d(tiles.units() as u32),
                addresses,
                GradientMapsLaunch::new(
                    map(stationary_qk, [1, tiles.rows()], Some(tiles.dot_subtiles())),
                    map(
                        stationary_v_do,
                        [1, tiles.rows()],
                        Some(tiles.value_subtiles()),
                    ),
                    map(q_or_k, [1, tiles.columns], Some(tiles.dot_subtiles())),
                    map(v_or_do, [1, tiles.columns], Some(tiles.value_subtiles())),
                    match &bias {
                        Some(bias) if tiles.bias_boxes => map(bias, [1, tiles.bias_rows()], None),
                        // If TMA does not copy biases, the kernel ignores the tensor map of the bias, and the launch passes a
                        // map of `q_or_k`.
                        _ => map(q_or_k, [1, tiles.columns], Some(tiles.dot_subtiles())),
                    },
                    term_map(lse_delta, tiles.lse_delta, tiles.columns),
                    boxes(
                        sums.has_q_or_k() && tiles.stores_q_or_k_by_tma(),
                        &qk_target,
                    ),
                    boxes(
                        sums.has_values() && tiles.stores_values_by_tma(),
                        &value_target,
                    ),
                    steps,
                ),
                lse_delta.clone().into_tensor_arg(),
                launch.scoring(bias.clone()),
                qk_target.clone().into_tensor_arg(),
                value_target.clone().into_tensor_arg(),
                launch.grid(grid),
                tiles,
                kind,
                elements,
                joined_sizes(vectors, tiles.fragments()),
            );
        },
        // SAFETY: TMA accesses only elements inside the tensors' shapes. The kernel accesses all other tensors only at rows
        // below `q_len` or `kv_len` and at columns below their widths.
        WgmmaGradientTiles::SplitD(tiles) => unsafe {
            let (summed, target) = match sums {
                Sums::Values => (v_or_do, &value_target),
                Sums::QOrK | Sums::Both => (q_or_k, &qk_target),
            };
            let whole_sums = tiles.has_whole_sums().then_some(tiles.own_subtiles());
            backward_split_d::launch_unchecked(
                &client,
                cube_count(&client, cubes),
                CubeDim::new_1d(WgmmaSplitDTiles::UNITS as u32),
                addresses,
                GradientMapsLaunch::new(
                    map(stationary_qk, [1, PRODUCT_ROWS], Some(tiles.dot_chunks())),
                    map(
                        stationary_v_do,
                        [1, PRODUCT_ROWS],
                        Some(tiles.value_chunks()),
                    ),
                    map(q_or_k, [1, WgmmaGradientSplitDTiles::COLUMNS], Some(1)),
                    map(v_or_do, [1, WgmmaGradientSplitDTiles::COLUMNS], Some(1)),
                    map(summed, [1, WgmmaSplitDTiles::VALUE_KEYS], whole_sums),
                    term_map(
                        lse_delta,
                        tiles.lse_delta,
                        WgmmaGradientSplitDTiles::COLUMNS,
                    ),
                    boxes(tiles.stores_gradient_by_tma(), target),
                    // The kernel computes one gradient only, so it ignores the tensor map of the second gradient. The
                    // launch passes the first gradient's map again.
                    boxes(tiles.stores_gradient_by_tma(), target),
                    steps,
                ),
                lse_delta.clone().into_tensor_arg(),
                launch.scoring(bias.clone()),
                target.clone().into_tensor_arg(),
                launch.grid(grid),
                tiles,
                kind,
                elements,
                joined_sizes(vectors, tiles.fragments()),
            );
        },
    }
    launch.results(gradients, [stationary_qk, stationary_v_do])
}
