//! The model's operators. Each module holds one operator: its kernels, their launches and its gradients.
//!
//! On CubeCL devices, kernels fuse the operations between GEMMs into few launches. For inference, kernels also compute
//! the GEMVs. On other devices Burn's own operators compute the same results. On the CPU the module `linear` also has
//! GEMMs of its own.
//!
//! In training on CubeCL devices, kernels of this module compute norms, residual additions, RoPE, GeGLU, the choice of
//! experts, cross entropy, GEMMs and optimizer updates. Burn's operators compute the rest.

pub(crate) mod adamw;
pub(crate) mod argmax;
pub(crate) mod attach;
pub(crate) mod column_slice;
pub(crate) mod columns;
pub(crate) mod cross_entropy;
pub(crate) mod dequantize;
pub(crate) mod device_memory;
pub(crate) mod device_use;
#[cfg(feature = "cube")]
pub(crate) mod drafter_head;
#[cfg(feature = "cube")]
pub(crate) mod embed;
pub(crate) mod geglu;
#[cfg(feature = "cube")]
pub(crate) mod gemv;
#[cfg(feature = "cube")]
pub(crate) mod graph_capture;
#[cfg(feature = "cube")]
pub(crate) mod in_place;
#[cfg(feature = "cube")]
mod launch;
pub(crate) mod linear;
pub(crate) mod lora;
#[cfg(feature = "cube")]
pub(crate) mod merge_heads;
#[cfg(feature = "cube")]
pub(crate) mod mlp;
#[cfg(feature = "cube")]
pub(crate) mod moe_gemm;
#[cfg(feature = "cube")]
pub(crate) mod moe_router;
pub(crate) mod norm;
pub(crate) mod quantized_matmul;
#[cfg(feature = "cube")]
pub(crate) mod reading;
pub(crate) mod residual;
#[cfg(feature = "cube")]
pub(crate) mod ring_mask;
pub(crate) mod rope;
pub(crate) mod sample;
pub(crate) mod static_range;
#[cfg(feature = "cube")]
pub(crate) mod store;
#[cfg(feature = "cube")]
pub(crate) mod stream;
#[cfg(feature = "cube")]
mod sums;

#[cfg(feature = "cube")]
use crate::op::device_memory::DeviceMemory;
use burn::tensor::Tensor;
#[cfg(feature = "cube")]
use burn::{
    backend::DispatchDevice,
    tensor::{DType, Device, Int},
};

/// True if the device can run the kernels on `dtype`, and does not track gradients.
#[cfg(feature = "cube")]
pub(crate) fn serves(device: &Device, dtype: DType) -> bool {
    !device.is_autodiff() && runs(device, dtype)
}

/// True if the device can run the kernels on `dtype`, with or without autodiff.
#[cfg(feature = "cube")]
pub(crate) fn runs(device: &Device, dtype: DType) -> bool {
    match device.clone().without_autodiff().as_dispatch() {
        DispatchDevice::Cube(device) => launch::serves(device, dtype),
        #[allow(
            unreachable_patterns,
            reason = "with only the Cube backend, no other device exists"
        )]
        _ => false,
    }
}

/// True if the device is a Hopper card.
pub(crate) fn is_hopper(device: &burn::tensor::Device) -> bool {
    #[cfg(feature = "cuda")]
    if let DispatchDevice::Cube(device @ burn::backend::CubeDevice::Cuda(_)) =
        device.clone().without_autodiff().as_dispatch()
    {
        return cube_kit::hopper::is_hopper(&device.client());
    }
    #[cfg(not(feature = "cuda"))]
    let _ = device;
    false
}

/// Lets consecutive launches of the CUDA graph that is being captured overlap, if the device supports PDL: see
/// [`cube_kit::pdl`]. The graph's last launch must write `last`.
#[cfg(feature = "cube")]
pub(crate) fn make_edges_programmatic(last: &Tensor<1, Int>) {
    #[cfg(feature = "cuda")]
    if let DispatchDevice::Cube(cube @ burn::backend::CubeDevice::Cuda(device)) =
        last.device().as_dispatch()
        // Require PDL. `cube_kit::pdl::graph::make_edges_programmatic` lets each kernel with `_pdl` in its name start
        // before the previous launch has ended. On devices without PDL, these kernels do not wait for the previous
        // launch, and would read unfinished data.
        && cube_kit::pdl::supports_pdl(&cube.client())
    {
        if let Ok(last) = last.clone().try_into_primitive::<burn::backend::Cube>() {
            // Launch the operations that Burn's fusion has deferred, so that the graph contains their launches. Ignore
            // an error, because the later read of the tokens reports the same error.
            let _ = last.client.try_sync(|| ());
        }
        let count = cube_kit::pdl::graph::make_edges_programmatic(device);
        log::debug!(
            "decode: {count} launches of the CUDA graph may overlap the previous one (PDL)"
        );
    }
    #[cfg(not(feature = "cuda"))]
    let _ = last;
}

/// Returns the memory sizes that the device reports, or `None` if the device cannot run the kernels.
#[cfg(feature = "cube")]
pub(crate) fn memory(device: &Device) -> Option<DeviceMemory> {
    match device.clone().without_autodiff().as_dispatch() {
        DispatchDevice::Cube(device) => Some(launch::memory(device)),
        #[allow(
            unreachable_patterns,
            reason = "with only the Cube backend, no other device exists"
        )]
        _ => None,
    }
}

/// True if the kernels support this tensor's device and dtype.
#[cfg(feature = "cube")]
pub(crate) fn serve<const D: usize>(tensor: &Tensor<D>) -> bool {
    serves(&tensor.device(), tensor.dtype())
}

/// True if the kernels support this tensor together with `weight`, which must have the tensor's dtype.
#[cfg(feature = "cube")]
pub(crate) fn serve_with<const D: usize>(tensor: &Tensor<D>, weight: &Tensor<1>) -> bool {
    serve(tensor) && weight.dtype() == tensor.dtype()
}

/// Reshapes the tensor to `[rows, columns]`. All dimensions but the last become `rows`.
pub(crate) fn flat_rows<const D: usize>(tensor: Tensor<D>) -> Tensor<2> {
    let shape = tensor.dims();
    let columns = shape[D - 1];
    with_shape(tensor, [shape.iter().product::<usize>() / columns, columns])
}

/// Reshapes the tensor to `E` dimensions. If `D` equals `E`, the function returns the tensor unchanged, because Burn's
/// fusion would copy the tensor for a reshape.
pub(crate) fn with_shape<const D: usize, const E: usize>(
    tensor: Tensor<D>,
    shape: [usize; E],
) -> Tensor<E> {
    match D == E {
        true => Tensor::from_dispatch(tensor.into_dispatch()),
        false => tensor.reshape(shape),
    }
}
