//! GEMMs with float matrices. On NVIDIA GPUs the GEMMs of `product.rs` run. On the CPU the GEMMs of `flex.rs` run if
//! they are faster than Burn's matmul. In all other cases Burn's matmul runs.

#[cfg(feature = "cuda")]
use super::product::operator;
#[cfg(feature = "cube")]
use burn::backend::{ops::FloatTensorOps, tensor::FloatTensor};
use burn::tensor::Tensor;
#[cfg(feature = "cuda")]
use burn::{
    backend::{CubeDevice, DispatchDevice},
    tensor::{DType, Device},
};
#[cfg(feature = "cube")]
use burn_cubecl::CubeBackend;

/// Multiplies `[rows, columns in]` by the transpose of `weight`, `[columns out, columns in]`. The output is
/// `[rows, columns out]`.
pub(crate) fn whole_rows(input: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    #[cfg(feature = "flex")]
    if super::flex::serves(&input, &weight) {
        return super::flex::rows_of_floats(input, weight);
    }
    #[cfg(feature = "cuda")]
    if input.dims()[0] == 1 && input.dtype() == DType::F32 && operator(&input).is_some() {
        let outputs = weight.dims()[0];
        return (weight * input).sum_dim(1).reshape([1, outputs]);
    }
    product(input, weight.transpose())
}

/// Multiplies `[rows, inner]` by `[inner, columns]`, and accumulates in f32.
pub(crate) fn product(lhs: Tensor<2>, rhs: Tensor<2>) -> Tensor<2> {
    #[cfg(feature = "cuda")]
    if let Some(operator) = operator(&lhs) {
        return operator(lhs, rhs);
    }
    lhs.matmul(rhs)
}

/// Multiplies batches of matrices in f32, `[…, rows, inner]` by `[…, inner, columns]`.
pub(crate) fn batches<const D: usize>(lhs: Tensor<D>, rhs: Tensor<D>) -> Tensor<D> {
    #[cfg(feature = "cuda")]
    if is_on_cuda(&lhs.device()) {
        return super::product::in_f32(lhs, rhs);
    }
    lhs.matmul(rhs)
}

/// True if [`product`] runs on NVIDIA's tensor cores for matrices in `dtype`.
#[cfg(feature = "cuda")]
pub(crate) fn on_tensor_cores(device: &Device, dtype: DType) -> bool {
    is_on_cuda(device) && matches!(dtype, DType::F16 | DType::BF16)
}

#[cfg(feature = "cuda")]
fn is_on_cuda(device: &Device) -> bool {
    let device = device.clone().without_autodiff();
    matches!(
        device.as_dispatch(),
        DispatchDevice::Cube(CubeDevice::Cuda(_))
    )
}

/// Computes [`product`] with the tensors of a CubeCL backend.
#[cfg(feature = "cube")]
pub(crate) fn product_of_cube(
    lhs: FloatTensor<CubeBackend>,
    rhs: FloatTensor<CubeBackend>,
) -> FloatTensor<CubeBackend> {
    #[cfg(feature = "cuda")]
    if matches!(lhs.device, burn::backend::CubeDevice::Cuda(_)) {
        use super::product::ProductBackend;
        return match lhs.dtype {
            DType::F32 => CubeBackend::product_in_f32(lhs, rhs),
            _ => CubeBackend::product_of_halves(lhs, rhs),
        };
    }
    CubeBackend::float_matmul(lhs, rhs)
}
