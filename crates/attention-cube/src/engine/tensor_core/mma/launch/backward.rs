//! The launches of the backward. The first kernel computes LSE and delta. The second kernel computes dQ. One or two
//! more kernels compute dK and dV.

use crate::engine::backward_pass::BackwardPass;
use crate::engine::tensor_core::common::bias::BiasReads;
use crate::engine::tensor_core::common::gradient_launch::{GradientArguments, GradientLaunch};
use crate::engine::tensor_core::common::launch::{gradients, joined_sizes};
use crate::engine::tensor_core::common::scoring::GradientOperandsLaunch;
use crate::engine::tensor_core::mma::backward::split_d::backward_split_d;
use crate::engine::tensor_core::mma::backward::split_m::backward_split_m;
use crate::engine::tensor_core::mma::plan::{MmaBackwardPlan, MmaGradientTiles};
use crate::kernel_args::tensor_arg;
use crate::problem::AttentionProblem;
use crate::types::request::BackwardRequest;
use crate::types::tensors::{AttentionGradients, AttentionInputs, AttentionSaved};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::cube_count;
use cubecl::prelude::CubeDim;

/// Launches the backward for the requested gradients. Each gradient has the shape and dtype of its input.
pub(crate) fn backward(
    inputs: AttentionInputs<CubeBackend>,
    saved: AttentionSaved<CubeBackend>,
    problem: &AttentionProblem,
    plan: MmaBackwardPlan,
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

/// Launches one gradient kernel. Returns an array of two gradients: first the gradient of Q or K, then the gradient of
/// V. A gradient is `None` if the kernel does not compute it.
fn launch_gradient(launch: &GradientLaunch<'_, MmaGradientTiles>) -> [Option<CubeTensor>; 2] {
    let tiles = launch.tiles;
    let bias_reads = match launch.pass.optional_inputs.has_bias_of_head() {
        true => BiasReads::OnceAHead,
        false => BiasReads::There,
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
    } = launch.arguments(tiles.sums(), bias_reads);
    let client = lse_delta.client.clone();
    let addresses = launch.addresses([
        stationary_qk,
        stationary_v_do,
        q_or_k,
        v_or_do,
        &qk_target,
        &value_target,
        lse_delta,
    ]);
    macro_rules! launch {
        ($kernel:ident, $tiles:expr) => {
            // SAFETY: the kernel reads the operands and writes the gradients only inside their shapes: at rows below
            // `q_len` or `kv_len` and at columns below the head size. The launch passes an operand in place of an
            // absent gradient, and the kernel never writes to this operand.
            unsafe {
                $kernel::launch_unchecked(
                    &client,
                    cube_count(&client, cubes),
                    CubeDim::new_1d(tiles.units() as u32),
                    addresses,
                    GradientOperandsLaunch::new(
                        tensor_arg(stationary_qk),
                        tensor_arg(stationary_v_do),
                        tensor_arg(q_or_k),
                        tensor_arg(v_or_do),
                        tensor_arg(lse_delta),
                    ),
                    launch.scoring(bias),
                    qk_target.into_tensor_arg(),
                    value_target.into_tensor_arg(),
                    launch.grid(grid),
                    $tiles,
                    kind,
                    elements,
                    joined_sizes(vectors, $tiles.vectors()),
                )
            }
        };
    }
    match tiles {
        MmaGradientTiles::SplitM(tiles) => launch!(backward_split_m, tiles),
        MmaGradientTiles::SplitD(tiles) => launch!(backward_split_d, tiles),
    }
    launch.results(gradients, [stationary_qk, stationary_v_do])
}
