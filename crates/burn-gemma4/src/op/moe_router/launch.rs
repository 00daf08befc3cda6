//! Launches the MoE router. A team is a group of units that computes logits together.

use super::{
    NUMBERS, RouteBackend, RouteOptions, Routed,
    few_rows::{LogitsPlan, TopPlan, router_logits_pdl, top_experts_pdl},
    kernel::{RoutePlan, choose, route},
};
use crate::op::{
    gemv::Origin,
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
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count, empty, exact_cube_count};
use cube_kit::pdl::{LOAD_BYTES, supports_pdl};
use cubecl::{client::Client, prelude::CubeDim};

/// The number of units in a cube that chooses experts from given probabilities.
const UNITS: usize = 64;
/// The number of experts whose logits a team of units computes at the same time.
const AT_ONCE: usize = 4;
/// The number of rows that a cube routes if there are more than [`FEW_ROWS`] rows. The rows of a cube share each read
/// of the router's matrix.
const ROWS: usize = 4;
/// The largest number of rows that two launches route: see [`few_rows`](super::few_rows). If one launch has to route so
/// few rows, each row has its own cube.
const FEW_ROWS: usize = 64;
/// The number of planes in a cube that computes logits of a few rows.
const PLANES: usize = 4;
/// The largest number of vectors of a row that a unit holds in registers.
const MOST_HELD: usize = 16;
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
        options: RouteOptions,
    ) -> Routed<Self> {
        let is_unchanged =
            options.origin == Origin::Parameters && proj.is_contiguous() && scale.is_contiguous();
        let arguments = Arguments {
            input: into_contiguous(input),
            proj: into_contiguous(proj),
            scale: into_contiguous(scale),
            per_expert_scale: into_contiguous(per_expert_scale),
            options,
            is_unchanged,
        };
        let output = arguments.output();
        let client = &arguments.input.client;
        match plans_of_few_rows(client, &arguments) {
            Some((logits, top)) => launch_few_rows(arguments, &output, logits, top),
            None => {
                let [experts, _] = arguments.proj.meta.shape().dims();
                let plan = plan(client, arguments.rows(), experts, options.top_k);
                launch_in_one(arguments, &output, plan);
            }
        }
        output
    }
}

/// The tensors of the router, all contiguous, and its options.
struct Arguments {
    input: CubeTensor,
    proj: CubeTensor,
    scale: CubeTensor,
    per_expert_scale: CubeTensor,
    options: RouteOptions,
    /// True if no launch writes `proj` and `scale`.
    is_unchanged: bool,
}

impl Arguments {
    fn rows(&self) -> usize {
        self.input.meta.shape()[0]
    }

    fn columns(&self) -> usize {
        self.input.meta.shape()[1]
    }

    /// The number of elements per vector of a row.
    fn vector(&self) -> usize {
        vector_size(
            &self.input.client,
            self.input.dtype.size(),
            &[self.columns()],
        )
    }

    fn output(&self) -> Routed<CubeBackend> {
        let shape = [self.rows(), self.options.top_k];
        Routed {
            experts: empty(&self.input, shape, NUMBERS),
            shares: empty(&self.input, shape, DType::F32),
        }
    }
}

/// Routes the rows in one launch.
fn launch_in_one(arguments: Arguments, output: &Routed<CubeBackend>, plan: RoutePlan) {
    let client = arguments.input.client.clone();
    let (rows, columns) = (arguments.rows(), arguments.columns());
    let vector = arguments.vector();
    let element = dtype_to_storage_type(arguments.input.dtype);
    // SAFETY: a cube has `plan.rows` rows. The cube reads its rows of `input`, where the last row replaces rows beyond
    // the end. It also reads all `experts` rows of `proj`. Each row has `columns` elements. In the outputs, the cube
    // writes only the `top_k` elements of each of its rows that is below `rows`.
    unsafe {
        route::launch_unchecked(
            &client,
            cube_count(&client, rows.div_ceil(plan.rows)),
            CubeDim::new_2d(plan.team.units as u32, plan.teams as u32),
            address_type([&arguments.input, &arguments.proj]),
            arguments.input.into_tensor_arg(),
            arguments.proj.into_tensor_arg(),
            arguments.scale.into_tensor_arg(),
            arguments.per_expert_scale.into_tensor_arg(),
            output.experts.clone().into_tensor_arg(),
            output.shares.clone().into_tensor_arg(),
            rows as u32,
            (columns / vector) as u32,
            columns as f32,
            arguments.options.epsilon as f32,
            plan,
            element,
            vector,
        );
    }
}

/// Routes a few rows in two launches.
fn launch_few_rows(
    arguments: Arguments,
    output: &Routed<CubeBackend>,
    plan: LogitsPlan,
    top: TopPlan,
) {
    let client = arguments.input.client.clone();
    let (rows, columns) = (arguments.rows(), arguments.columns());
    let vector = arguments.vector();
    let element = dtype_to_storage_type(arguments.input.dtype);
    let logits = empty(&arguments.input, [rows, plan.experts], DType::F32);
    // SAFETY: a plane reads a row of `input`, a row of `proj` and `scale`, which have `columns` elements each. The index
    // of the row of `proj` is at most `experts - 1`. The plane writes one element of `logits` if it has an expert.
    unsafe {
        router_logits_pdl::launch_unchecked(
            &client,
            exact_cube_count(&client, rows * plan.cubes()),
            CubeDim::new_2d(plan.width as u32, plan.planes as u32),
            address_type([&arguments.input, &arguments.proj]),
            arguments.input.into_tensor_arg(),
            arguments.proj.into_tensor_arg(),
            arguments.scale.into_tensor_arg(),
            logits.clone().into_tensor_arg(),
            (columns / vector) as u32,
            columns as f32,
            arguments.options.epsilon as f32,
            plan,
            element,
            vector,
        );
    }
    // SAFETY: a unit reads a logit of its row at an index of at most `experts - 1`. In the outputs, a cube writes only
    // the `top_k` elements of its row.
    unsafe {
        top_experts_pdl::launch_unchecked(
            &client,
            exact_cube_count(&client, rows),
            CubeDim::new_1d(top.team.units as u32),
            address_type([&logits]),
            logits.into_tensor_arg(),
            arguments.per_expert_scale.into_tensor_arg(),
            output.experts.clone().into_tensor_arg(),
            output.shares.clone().into_tensor_arg(),
            top,
            element,
        );
    }
}

/// Returns the plans of the two launches that route a few rows, or `None` if the rows are routed in one launch.
fn plans_of_few_rows(client: &Client, arguments: &Arguments) -> Option<(LogitsPlan, TopPlan)> {
    let width = plane_width(client);
    let [experts, columns] = arguments.proj.meta.shape().dims();
    let vector = arguments.vector();
    let held = (columns / vector).div_ceil(width);
    let units = experts.next_multiple_of(width);
    let is_served = width > 1
        && (1..=FEW_ROWS).contains(&arguments.rows())
        && held <= MOST_HELD
        && units.max(width * PLANES) <= client.properties().hardware.max_units_per_cube as usize;
    let pdl = supports_pdl(client);
    let is_of_load = vector * arguments.input.dtype.size() == LOAD_BYTES;
    let logits = LogitsPlan {
        experts,
        width,
        planes: PLANES,
        held,
        pdl,
        reads_ahead: pdl && arguments.is_unchanged && is_of_load,
    };
    let top = TopPlan {
        experts,
        top_k: arguments.options.top_k,
        team: Team { units, width },
        pdl,
    };
    is_served.then_some((logits, top))
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
