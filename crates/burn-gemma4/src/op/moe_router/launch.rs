//! Launches the MoE router. A team is a group of units that computes logits together.

use super::{
    NUMBERS, RouteBackend, Routed,
    kernel::{RoutePlan, choose, route},
};
use crate::op::{
    launch::{plane_width, vector_size},
    sums::Team,
};
use burn::{
    backend::{
        cubecl::dtype_to_storage_type,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::DType,
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous};
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::{client::Client, prelude::CubeDim};

/// The number of units in a cube that chooses experts from given probabilities.
const UNITS: usize = 64;
/// The number of experts whose logits a team of units computes at the same time.
const AT_ONCE: usize = 4;
/// The number of rows that a cube routes if there are more than [`FEW_ROWS`] rows. The rows of a cube share each read
/// of the router's matrix.
const ROWS: usize = 4;
/// The largest number of rows for which each row has its own cube.
const FEW_ROWS: usize = 64;
/// The largest number of units in a cube that routes several rows. This limit is lower than the device's limit, because
/// the sums of several rows take more registers.
const UNITS_OF_ROWS: usize = 512;
/// The number of units in a team on devices without plane operations. A team computes logits together.
const TEAM: usize = 8;

impl RouteBackend for CubeBackend {
    fn choose(probabilities: FloatTensor<Self>, top_k: usize) -> IntTensor<Self> {
        let client = probabilities.client.clone();
        let probabilities = into_contiguous(probabilities);
        let [rows, experts] = probabilities.meta.shape().dims();
        let chosen = empty(&probabilities, [rows, top_k], NUMBERS);
        // SAFETY: cube `r` works only if `r` is below `rows`. The cube reads row `r` of `probabilities`, which has
        // `experts` elements. The cube writes row `r` of `chosen`, only at ranks below `top_k`.
        unsafe {
            choose::launch_unchecked(
                &client,
                cube_count(&client, rows),
                CubeDim::new_1d(UNITS as u32),
                address_type([&probabilities]),
                probabilities.into_tensor_arg(),
                chosen.clone().into_tensor_arg(),
                rows as u32,
                experts,
                top_k,
                UNITS,
            );
        }
        chosen
    }

    fn route(
        input: FloatTensor<Self>,
        proj: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        per_expert_scale: FloatTensor<Self>,
        top_k: usize,
        epsilon: f64,
    ) -> Routed<Self> {
        let client = input.client.clone();
        let (input, proj) = (into_contiguous(input), into_contiguous(proj));
        let [rows, columns] = input.meta.shape().dims();
        let [experts, _] = proj.meta.shape().dims();
        let chosen = empty(&input, [rows, top_k], NUMBERS);
        let shares = empty(&input, [rows, top_k], DType::F32);
        let vector = vector_size(&client, input.dtype.size(), &[columns]);
        let plan = plan(&client, rows, experts, top_k);
        let element = dtype_to_storage_type(input.dtype);
        // SAFETY: a cube has `plan.rows` rows. The cube reads its rows of `input`, where the last row replaces rows
        // beyond the end. It also reads all `experts` rows of `proj`. Each row has `columns` elements. In `chosen` and
        // `shares`, the cube writes only the `top_k` elements of each of its rows that is below `rows`.
        unsafe {
            route::launch_unchecked(
                &client,
                cube_count(&client, rows.div_ceil(plan.rows)),
                CubeDim::new_2d(plan.team.units as u32, plan.teams as u32),
                address_type([&input, &proj]),
                input.into_tensor_arg(),
                proj.into_tensor_arg(),
                into_contiguous(scale).into_tensor_arg(),
                into_contiguous(per_expert_scale).into_tensor_arg(),
                chosen.clone().into_tensor_arg(),
                shares.clone().into_tensor_arg(),
                rows as u32,
                (columns / vector) as u32,
                columns as f32,
                epsilon as f32,
                plan,
                element,
                vector,
            );
        }
        Routed {
            experts: chosen,
            shares,
        }
    }
}

/// Plans enough teams of units to read the router's matrix fast, but no more than the experts need.
fn plan(client: &Client, rows: usize, experts: usize, top_k: usize) -> RoutePlan {
    let width = plane_width(client);
    let limit = client.properties().hardware.max_units_per_cube as usize;
    // Without plane operations, the sums of several rows would exceed the shared memory.
    let of_cube = match width > 1 && rows > FEW_ROWS {
        true => ROWS,
        false => 1,
    };
    let (units, most) = match (width, of_cube) {
        (1, _) => (TEAM, 64),
        (width, 1) => (width, limit.min(1024)),
        (width, _) => (width, limit.min(UNITS_OF_ROWS)),
    };
    let teams = experts.div_ceil(AT_ONCE).min(most / units).max(1);
    RoutePlan {
        experts,
        top_k,
        team: Team { units, width },
        teams,
        at_once: AT_ONCE,
        rows: of_cube,
    }
}
