//! Lays the operators out for a CubeCL device and launches them.

mod norms;
mod product;

use super::{
    HeadOptions, InferenceBackend, NUMBERS, Residual,
    argmax::{UNITS as ARGMAX_UNITS, argmax, overwrite},
    heads::{Columns, HeadStridesLaunch, place_heads},
    sums::Team,
};
use burn::{
    backend::{
        CubeDevice,
        cubecl::dtype_to_storage_type,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Shape},
};
use burn_cubecl::{
    CubeBackend, cubecl,
    kernel::{into_contiguous, slice, untile},
    ops::numeric::empty_device_contiguous_dtype,
    tensor::CubeTensor,
};
use cubecl::{
    client::Client,
    ir::features::{Plane, TypeUsage},
    prelude::{AddressType, CubeCount, CubeDim},
};

use norms::{launch_norm, launch_residual};
use product::{ProductOptions, launch_product};

/// Buffers that a kernel binds at most, and what the runtime adds.
const BINDINGS: u32 = 8;

/// Bytes of a load at most, to a multiple of which kernels take tensors to begin.
const WIDEST_LOAD: u64 = 16;

/// Whether the device has the dtype, and room for every kernel's tensors.
pub(super) fn serves(device: &CubeDevice, dtype: DType) -> bool {
    let client = device.client();
    let properties = client.properties();
    let usage = properties.type_usage(dtype_to_storage_type(dtype));
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
        && usage.contains(TypeUsage::Buffer)
        && usage.contains(TypeUsage::Conversion)
        && properties.hardware.max_bindings >= BINDINGS
        && properties.hardware.max_units_per_cube >= 256
}

/// Units that one plane operation adds up; 1 where the device has no such operations, or planes of several sizes.
fn plane_width(client: &Client) -> usize {
    let properties = client.properties();
    let hardware = &properties.hardware;
    let constant = hardware.plane_size_min == hardware.plane_size_max;
    match constant && properties.features.plane.contains(Plane::Ops) {
        true => hardware.plane_size_max as usize,
        false => 1,
    }
}

/// A cube that adds up as one team, for `work` steps.
fn team(client: &Client, work: usize) -> Team {
    let width = plane_width(client);
    // Without plane operations every unit adds up what all the others have found.
    let limit = client.properties().hardware.max_units_per_cube as usize;
    let (least, most) = match width {
        1 => (32, 64),
        width => (width, limit.min(512).max(width)),
    };
    Team {
        units: work.next_power_of_two().clamp(least, most),
        width,
    }
}

/// The widest vector in which `rows` of so many elements can be read, each row's start included.
fn vector_size(client: &Client, size: usize, multiples: &[usize]) -> usize {
    let fits = |width: &usize| multiples.iter().all(|multiple| multiple % width == 0);
    let widths = client.io_optimized_vector_sizes(size);
    widths.filter(fits).max().unwrap_or(1)
}

fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(
        like.client.clone(),
        like.device.clone(),
        shape.into(),
        dtype,
    )
}

fn cube_count(client: &Client, cubes: usize) -> CubeCount {
    let count = at_least(client, cubes);
    let CubeCount::Static(columns, rows, _) = count else {
        unreachable!("it is static");
    };
    assert_eq!(
        columns as usize * rows as usize,
        cubes,
        "{cubes} cubes fit no grid of this device"
    );
    count
}

/// A grid of as many cubes, and sometimes of a few more, which a kernel must look for.
fn at_least(client: &Client, cubes: usize) -> CubeCount {
    let limit = client.properties().hardware.max_cube_count.0 as usize;
    let rows = cubes.div_ceil(limit);
    CubeCount::Static(cubes.div_ceil(rows) as u32, rows as u32, 1)
}

fn addresses<'a>(tensors: impl IntoIterator<Item = &'a CubeTensor>) -> AddressType {
    tensors
        .into_iter()
        .map(|tensor| tensor.required_address_type())
        .max()
        .unwrap_or_default()
}

/// Rows whose elements lie together.
fn rows_of(tensor: CubeTensor) -> CubeTensor {
    let tensor = untile(tensor);
    let last = tensor.meta.strides().len() - 1;
    match tensor.meta.strides()[last] {
        1 => tensor,
        _ => into_contiguous(tensor),
    }
}

/// What scales and rotates heads.
struct HeadWeights {
    weight: CubeTensor,
    cos: CubeTensor,
    sin: CubeTensor,
}

/// `[rows, heads, 1, head_dim]`, of a projection and its rotation's table.
fn heads(projected: &CubeTensor, cos: &CubeTensor) -> [usize; 4] {
    let head_dim = 2 * cos.meta.shape()[1];
    let [rows, columns] = [projected.meta.shape()[0], projected.meta.shape()[1]];
    [rows, columns / head_dim, 1, head_dim]
}

/// Where a head's channels go.
struct Placing {
    columns: Columns,
    rotated: usize,
}

impl Placing {
    const CHANNELS: Self = Self {
        columns: Columns::Channels,
        rotated: 0,
    };

    /// In `columns`, where `compact` pairs are rotated; in order, where slots are not shared.
    fn of(compact: Option<usize>, columns: Columns) -> Self {
        match compact {
            Some(rotated) => Self { columns, rotated },
            None => Self::CHANNELS,
        }
    }
}

/// Without `positions`, rows are at the tables' positions in their order, and from their beginning again after the last.
fn launch_heads(
    projected: CubeTensor,
    weights: Option<HeadWeights>,
    positions: Option<CubeTensor>,
    target: &CubeTensor,
    placing: Placing,
    epsilon: f64,
) {
    let client = projected.client.clone();
    let projected = into_contiguous(projected);
    let shape = target.meta.shape();
    let [rows, heads, slots] = [shape[0], shape[1], shape[2]];
    let head_dim = projected.meta.shape()[1] / heads;
    let strides = target.meta.strides();
    assert_eq!(strides[3], 1, "a head's columns lie together");
    assert!(2 * placing.rotated <= head_dim, "rotated are channels");
    let team = team(&client, head_dim / 2);
    let positions_in_order = match &weights {
        Some(HeadWeights { cos, .. }) => cos.meta.shape()[0],
        None => 1,
    };
    let (weight, cos, sin) = match weights {
        Some(HeadWeights { weight, cos, sin }) => (Some(weight), Some(cos), Some(sin)),
        None => (None, None, None),
    };
    let argument =
        |tensor: Option<CubeTensor>| tensor.map(|tensor| into_contiguous(tensor).into_tensor_arg());
    let (element, integer) = (
        dtype_to_storage_type(projected.dtype),
        dtype_to_storage_type(
            positions
                .as_ref()
                .map_or(NUMBERS, |positions| positions.dtype),
        ),
    );
    // SAFETY: a cube reads one head of one row, its position's row of the tables, which reach every position that the
    // cache has room for, and writes one slot of that head, which has columns for all that are placed.
    unsafe {
        place_heads::launch_unchecked(
            &client,
            at_least(&client, rows * heads),
            CubeDim::new_1d(team.units as u32),
            addresses([&projected, target]),
            projected.into_tensor_arg(),
            argument(weight).into(),
            argument(cos).into(),
            argument(sin).into(),
            argument(positions).into(),
            target.clone().into_tensor_arg(),
            HeadStridesLaunch::new(strides[0] as u32, strides[1] as u32, strides[2] as u32),
            rows as u32,
            positions_in_order as u32,
            heads as u32,
            (head_dim / 2) as u32,
            placing.rotated as u32,
            slots as u32,
            epsilon as f32,
            placing.columns,
            team,
            element,
            integer,
        );
    }
}

fn launch_argmax(
    values: CubeTensor,
    columns_of_values: Option<CubeTensor>,
    stretches: usize,
) -> [CubeTensor; 2] {
    let client = values.client.clone();
    let values = into_contiguous(values);
    let [rows, columns] = [values.meta.shape()[0], values.meta.shape()[1]];
    let largest = empty(&values, [rows, stretches], DType::F32);
    let numbers = empty(&values, [rows, stretches], NUMBERS);
    let element = dtype_to_storage_type(values.dtype);
    // SAFETY: a cube reads a stretch of one of `rows` rows of `columns`, and writes what it found at its own place.
    unsafe {
        argmax::launch_unchecked(
            &client,
            cube_count(&client, rows * stretches),
            CubeDim::new_1d(ARGMAX_UNITS as u32),
            addresses([&values]),
            values.into_tensor_arg(),
            columns_of_values.map(CubeTensor::into_tensor_arg).into(),
            largest.clone().into_tensor_arg(),
            numbers.clone().into_tensor_arg(),
            columns as u32,
            stretches as u32,
            element,
            dtype_to_storage_type(NUMBERS),
        );
    }
    [largest, numbers]
}

impl InferenceBackend for CubeBackend {
    fn project_rows(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cap: Option<f64>,
    ) -> FloatTensor<Self> {
        let options = ProductOptions {
            cap,
            ..ProductOptions::default()
        };
        launch_product(input, weight, options)
    }

    fn project_gated(
        input: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        through: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let options = ProductOptions {
            gelu: true,
            through: Some(through),
            ..ProductOptions::default()
        };
        launch_product(input, gate, options)
    }

    fn project_gate_of(
        input: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        through: FloatTensor<Self>,
        start: usize,
    ) -> FloatTensor<Self> {
        let options = ProductOptions {
            gelu: true,
            factor: Some((through, start)),
            ..ProductOptions::default()
        };
        launch_product(input, gate, options)
    }

    fn residual(
        stream: FloatTensor<Self>,
        added: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        launch_residual(stream, added, weight, None, None, epsilon).stream
    }

    fn residual_norm(
        stream: FloatTensor<Self>,
        added: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        next_weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> Residual<Self> {
        launch_residual(stream, added, weight, None, Some(next_weight), epsilon)
    }

    fn residual_scale_norm(
        stream: FloatTensor<Self>,
        added: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        scalar: FloatTensor<Self>,
        next_weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> Residual<Self> {
        let next = Some(next_weight);
        launch_residual(stream, added, weight, Some(scalar), next, epsilon)
    }

    fn query_heads(
        projected: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        positions: IntTensor<Self>,
        options: HeadOptions,
    ) -> FloatTensor<Self> {
        let target = empty(&projected, heads(&projected, &cos), projected.dtype);
        let weights = Some(HeadWeights { weight, cos, sin });
        let placing = Placing::of(options.compact, Columns::CompactQueries);
        launch_heads(
            projected,
            weights,
            Some(positions),
            &target,
            placing,
            options.epsilon,
        );
        target
    }

    fn heads_in_order(
        projected: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let target = empty(&projected, heads(&projected, &cos), projected.dtype);
        let weights = HeadWeights { weight, cos, sin };
        let placing = Placing::CHANNELS;
        launch_heads(projected, Some(weights), None, &target, placing, epsilon);
        target
    }

    fn norm_without_weight(input: FloatTensor<Self>, epsilon: f64) -> FloatTensor<Self> {
        launch_norm(input, None, epsilon)
    }

    fn write_keys(
        projected: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        positions: IntTensor<Self>,
        buffer: FloatTensor<Self>,
        options: HeadOptions,
    ) -> FloatTensor<Self> {
        let weights = Some(HeadWeights { weight, cos, sin });
        let placing = Placing::of(options.compact, Columns::CompactKeys);
        launch_heads(
            projected,
            weights,
            Some(positions),
            &buffer,
            placing,
            options.epsilon,
        );
        buffer
    }

    fn write_values(
        projected: FloatTensor<Self>,
        positions: IntTensor<Self>,
        buffer: FloatTensor<Self>,
        options: HeadOptions,
    ) -> FloatTensor<Self> {
        let placing = Placing::of(options.compact, Columns::CompactValues);
        launch_heads(
            projected,
            None,
            Some(positions),
            &buffer,
            placing,
            options.epsilon,
        );
        buffer
    }

    fn columns(slots: FloatTensor<Self>, start: usize, count: usize) -> FloatTensor<Self> {
        let slots = untile(slots);
        let [batch, heads, rows, width] = slots.meta.shape().dims();
        assert!(start + count <= width, "the columns are there");
        let strides = slots.meta.strides();
        let bytes = |columns: usize| (columns * strides[3] * slots.dtype.size()) as u64;
        let (before, behind) = (bytes(start), bytes(width - start - count));
        let by_pointers = matches!(slots.client.name(), "cuda" | "hip");
        if !by_pointers || !before.is_multiple_of(WIDEST_LOAD) {
            return slice(slots, &[0..batch, 0..heads, 0..rows, start..start + count]);
        }
        let mut view = slots;
        view.handle = view.handle.offset_start(before).offset_end(behind);
        view.meta.shape_mut()[3] = count;
        view
    }

    fn argmax(logits: FloatTensor<Self>) -> IntTensor<Self> {
        let rows = logits.meta.shape()[0];
        let columns = logits.meta.shape()[1];
        let stretches = columns.div_ceil(16 * ARGMAX_UNITS);
        let [largest, numbers] = launch_argmax(logits, None, stretches);
        let numbers = match stretches {
            1 => numbers,
            _ => launch_argmax(largest, Some(numbers), 1)[1].clone(),
        };
        burn_cubecl::ops::reshape(numbers, Shape::new([rows]))
    }

    fn overwrite(target: IntTensor<Self>, source: IntTensor<Self>) -> IntTensor<Self> {
        let client = target.client.clone();
        let count = target.meta.shape().num_elements();
        assert_eq!(source.meta.shape(), target.meta.shape(), "one for each");
        assert_eq!(source.dtype, target.dtype, "of one dtype");
        let units = 64;
        let integer = dtype_to_storage_type(target.dtype);
        // SAFETY: both tensors have `count` elements, side by side.
        unsafe {
            overwrite::launch_unchecked(
                &client,
                cube_count(&client, count.div_ceil(units)),
                CubeDim::new_1d(units as u32),
                into_contiguous(source).into_tensor_arg(),
                target.clone().into_tensor_arg(),
                count as u32,
                integer,
            );
        }
        target
    }
}
