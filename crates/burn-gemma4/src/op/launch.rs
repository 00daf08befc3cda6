//! Helpers that several launches share: the dtypes that a device supports, teams of units, and vector sizes.

use super::sums::Team;
use crate::op::device_memory::DeviceMemory;
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

/// The number of buffers that a device must be able to bind in one kernel. The quantized GEMV with three matrices needs
/// 8: two for each matrix, one for the input and one for the output. The runtime's own bindings do not count. The RoPE
/// kernel binds more buffers if it computes a layer's queries, keys and values in one launch. On a device that cannot
/// bind so many buffers, the queries, keys and values need separate launches.
const BINDINGS: u32 = 8;

/// True if the device supports the dtype, and has enough bindings ([`BINDINGS`]) and units per cube for the kernels.
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

/// Returns the memory sizes that the device reports.
pub(super) fn memory(device: &CubeDevice) -> DeviceMemory {
    let client = device.client();
    let memory = &client.properties().memory;
    let bytes = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
    DeviceMemory {
        largest_buffer: Some(bytes(memory.max_page_size)),
        total: memory.max_memory().map(bytes),
    }
}

/// The number of units over which one plane operation sums. The result is 1 if the device has no plane operations, or
/// if its planes have different sizes.
pub(super) fn plane_width(client: &Client) -> usize {
    let properties = client.properties();
    let hardware = &properties.hardware;
    let constant = hardware.plane_size_min == hardware.plane_size_max;
    match constant && properties.features.plane.contains(Plane::Ops) {
        true => hardware.plane_size_max as usize,
        false => 1,
    }
}

/// True if the device is known to convert subnormal f16 values to f32 exactly. The conversion matters for formats with
/// quantized group scales, because the f16 scale of a block may be subnormal. Vulkan and WGSL let the driver flush
/// subnormal values to zero.
pub(super) fn converts_f16(device: &CubeDevice) -> bool {
    match device {
        #[cfg(feature = "cuda")]
        CubeDevice::Cuda(_) => true,
        #[allow(
            unreachable_patterns,
            reason = "with only the Cube backend, no other device exists"
        )]
        _ => false,
    }
}

/// Returns a team that consists of all units of a cube. The units of a team reduce a value together. The number of
/// units is chosen for `work` vectors or elements.
pub(super) fn team(client: &Client, work: usize) -> Team {
    let width = plane_width(client);
    // If the device has no plane operations, use few units, because every unit then adds up the partial results of all
    // units.
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

/// Returns the largest vector width, for elements of `size` bytes, that divides all `multiples`, such as row lengths
/// and strides.
pub(super) fn vector_size(client: &Client, size: usize, multiples: &[usize]) -> usize {
    let fits = |width: &usize| multiples.iter().all(|multiple| multiple % width == 0);
    let widths = client.io_optimized_vector_sizes(size);
    widths.filter(fits).max().unwrap_or(1)
}

/// Returns the tensor with contiguous elements, in a buffer that no other handle shares.
pub(super) fn own(tensor: CubeTensor) -> CubeTensor {
    let tensor = into_contiguous(tensor);
    match tensor.can_mut() {
        true => tensor,
        // Make the copy contiguous too, because Burn's copy may pad its rows.
        false => into_contiguous(tensor.copy()),
    }
}

/// Returns the tensor with contiguous elements within each row. Rows may be padded.
pub(super) fn rows_of(tensor: CubeTensor) -> CubeTensor {
    let tensor = untile(tensor);
    let last = tensor.meta.strides().len() - 1;
    match tensor.meta.strides()[last] {
        1 => tensor,
        _ => into_contiguous(tensor),
    }
}
