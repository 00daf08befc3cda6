//! What launches have in common: what a device serves, teams, vectors.

use super::sums::Team;
use crate::DeviceMemory;
use burn::{
    backend::{CubeDevice, cubecl::dtype_to_storage_type},
    tensor::DType,
};
use burn_cubecl::{
    cubecl,
    kernel::{into_contiguous, untile},
    tensor::CubeTensor,
};
use cubecl::{
    client::Client,
    ir::features::{Plane, TypeUsage},
};

/// Buffers that a kernel binds at most: the product of three matrices' words, each of which is bound twice, with its input and output. What
/// the runtime itself adds is not among those that a device tells.
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

/// What the device says of its memory.
pub(super) fn memory(device: &CubeDevice) -> DeviceMemory {
    let client = device.client();
    let memory = &client.properties().memory;
    let bytes = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
    DeviceMemory {
        largest_buffer: Some(bytes(memory.max_page_size)),
        total: memory.max_memory().map(bytes),
    }
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

/// Whether the device makes f32 of f16's bits, of the smallest numbers, too: scales of scales are such. Vulkan and WGSL leave it to the
/// driver whether those are zero.
pub(super) fn converts_f16(device: &CubeDevice) -> bool {
    match device {
        #[cfg(feature = "cuda")]
        CubeDevice::Cuda(_) => true,
        #[allow(
            unreachable_patterns,
            reason = "without other backends it is the only device"
        )]
        _ => false,
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

/// The tensor side by side, and in nobody else's hands.
pub(super) fn own(tensor: CubeTensor) -> CubeTensor {
    let tensor = into_contiguous(tensor);
    match tensor.can_mut() {
        true => tensor,
        // A copy of Burn's may have room between its rows.
        false => into_contiguous(tensor.copy()),
    }
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
