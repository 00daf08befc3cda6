//! What launches have in common: what a device serves, teams, grids, vectors, empty outputs.

use super::sums::Team;
use burn::{
    backend::{CubeDevice, cubecl::dtype_to_storage_type},
    tensor::{DType, Shape},
};
use burn_cubecl::{
    cubecl,
    kernel::{into_contiguous, untile},
    ops::numeric::empty_device_contiguous_dtype,
    tensor::CubeTensor,
};
use cubecl::{
    client::Client,
    ir::features::{Plane, TypeUsage},
    prelude::{AddressType, CubeCount},
};

/// Buffers that a kernel binds at most, and what the runtime adds.
const BINDINGS: u32 = 8;

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
pub(super) fn plane_width(client: &Client) -> usize {
    let properties = client.properties();
    let hardware = &properties.hardware;
    let constant = hardware.plane_size_min == hardware.plane_size_max;
    match constant && properties.features.plane.contains(Plane::Ops) {
        true => hardware.plane_size_max as usize,
        false => 1,
    }
}

/// A cube that adds up as one team, for `work` steps.
pub(super) fn team(client: &Client, work: usize) -> Team {
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
pub(super) fn vector_size(client: &Client, size: usize, multiples: &[usize]) -> usize {
    let fits = |width: &usize| multiples.iter().all(|multiple| multiple % width == 0);
    let widths = client.io_optimized_vector_sizes(size);
    widths.filter(fits).max().unwrap_or(1)
}

pub(super) fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(
        like.client.clone(),
        like.device.clone(),
        shape.into(),
        dtype,
    )
}

pub(super) fn cube_count(client: &Client, cubes: usize) -> CubeCount {
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
pub(super) fn at_least(client: &Client, cubes: usize) -> CubeCount {
    let limit = client.properties().hardware.max_cube_count.0 as usize;
    let rows = cubes.div_ceil(limit);
    CubeCount::Static(cubes.div_ceil(rows) as u32, rows as u32, 1)
}

pub(super) fn addresses<'a>(tensors: impl IntoIterator<Item = &'a CubeTensor>) -> AddressType {
    tensors
        .into_iter()
        .map(|tensor| tensor.required_address_type())
        .max()
        .unwrap_or_default()
}

/// Rows whose elements lie together.
pub(super) fn rows_of(tensor: CubeTensor) -> CubeTensor {
    let tensor = untile(tensor);
    let last = tensor.meta.strides().len() - 1;
    match tensor.meta.strides()[last] {
        1 => tensor,
        _ => into_contiguous(tensor),
    }
}
