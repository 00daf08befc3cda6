//! The model's operators: each with its kernels, their launches and its gradients.
//!
//! Kernels are for CubeCL devices: what lies between products, of any rows, in as few launches as possible, and for inference
//! products of a few rows, bound by the memory's rate. Other devices, and training but for norms, gates, products and updates, go through
//! Burn's own operators, which compute the same.

pub(crate) mod argmax;
pub(crate) mod attach;
pub(crate) mod columns;
pub(crate) mod cross_entropy;
pub(crate) mod dequantize;
#[cfg(feature = "cube")]
pub(crate) mod embed;
pub(crate) mod gate;
#[cfg(feature = "cube")]
pub(crate) mod guess;
pub(crate) mod linear;
#[cfg(feature = "cube")]
pub(crate) mod mlp;
pub(crate) mod norm;
#[cfg(feature = "cube")]
pub(crate) mod overwrite;
#[cfg(feature = "cube")]
pub(crate) mod reading;
#[cfg(feature = "cube")]
pub(crate) mod recorded;
pub(crate) mod residual;
#[cfg(feature = "cube")]
pub(crate) mod ring;
pub(crate) mod rope;
#[cfg(feature = "cube")]
pub(crate) mod route;
#[cfg(feature = "cube")]
pub(crate) mod rows_of_heads;
pub(crate) mod sample;
#[cfg(feature = "cube")]
pub(crate) mod store;
pub(crate) mod update;

#[cfg(feature = "cube")]
mod launch;
#[cfg(feature = "cube")]
mod sums;

#[cfg(feature = "cube")]
use crate::DeviceMemory;
use burn::tensor::Tensor;
#[cfg(feature = "cube")]
use burn::{
    backend::DispatchDevice,
    tensor::{DType, Device, Int},
};

/// Whether the kernels serve tensors of `dtype` on `device`.
#[cfg(feature = "cube")]
pub(crate) fn serves(device: &Device, dtype: DType) -> bool {
    !device.is_autodiff() && runs(device, dtype)
}

/// Whether the device, tracking gradients or not, runs kernels on `dtype`: those with a backward of their own serve it.
#[cfg(feature = "cube")]
pub(crate) fn runs(device: &Device, dtype: DType) -> bool {
    match device.clone().without_autodiff().as_dispatch() {
        DispatchDevice::Cube(device) => launch::serves(device, dtype),
        #[allow(
            unreachable_patterns,
            reason = "without other backends it is the only device"
        )]
        _ => false,
    }
}

/// Lets the launches that are being captured overlap, where the device can: see [`cube_kit::overlap`]. The last of them makes `last`, whose launch, and
/// others before it, Burn's fusion may still hold: so they are asked for first.
#[cfg(feature = "cube")]
pub(crate) fn overlap_launches(last: &Tensor<1, Int>) {
    #[cfg(feature = "cuda")]
    if let DispatchDevice::Cube(cube @ burn::backend::CubeDevice::Cuda(device)) =
        last.device().as_dispatch()
        // Kernels of older cards have the same names, and do not wait.
        && cube_kit::overlap::overlaps(&cube.client())
    {
        if let Ok(last) = last.clone().try_into_primitive::<burn::backend::Cube>() {
            // Where that fails, whoever reads the tokens is told.
            let _ = last.client.try_sync(|| ());
        }
        let count = cube_kit::overlap::graph::overlap_launches(device);
        log::debug!("decode: {count} launches begin before the ones before them have ended");
    }
    #[cfg(not(feature = "cuda"))]
    let _ = last;
}

/// What the device says of its memory, if it runs kernels.
#[cfg(feature = "cube")]
pub(crate) fn memory(device: &Device) -> Option<DeviceMemory> {
    match device.clone().without_autodiff().as_dispatch() {
        DispatchDevice::Cube(device) => Some(launch::memory(device)),
        #[allow(
            unreachable_patterns,
            reason = "without other backends it is the only device"
        )]
        _ => None,
    }
}

/// Whether the kernels serve this tensor.
#[cfg(feature = "cube")]
pub(crate) fn serve<const D: usize>(tensor: &Tensor<D>) -> bool {
    serves(&tensor.device(), tensor.dtype())
}

/// Whether the kernels serve this tensor with a weight beside it, which they read in the same dtype.
#[cfg(feature = "cube")]
pub(crate) fn serve_with<const D: usize>(tensor: &Tensor<D>, weight: &Tensor<1>) -> bool {
    serve(tensor) && weight.dtype() == tensor.dtype()
}

/// All dimensions but the last as one.
pub(crate) fn flat_rows<const D: usize>(tensor: Tensor<D>) -> Tensor<2> {
    let shape = tensor.dims();
    let columns = shape[D - 1];
    with_shape(tensor, [shape.iter().product::<usize>() / columns, columns])
}

/// The tensor in another shape; itself where it has as many dimensions, all of whose sizes are then the same. Burn's fusion
/// would make a copy of it.
pub(crate) fn with_shape<const D: usize, const E: usize>(
    tensor: Tensor<D>,
    shape: [usize; E],
) -> Tensor<E> {
    match D == E {
        true => Tensor::from_dispatch(tensor.into_dispatch()),
        false => tensor.reshape(shape),
    }
}
