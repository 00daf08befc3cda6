//! GEMMs of one input with several weights in one launch, with concatenated outputs. Inference on Hopper GPUs uses
//! these GEMMs.

use burn::{
    backend::{
        Backend, CubeDevice, Dispatch, DispatchDevice, backend_extension,
        fusion::custom::TensorSpec, ops::FloatTensorOps, tensor::FloatTensor,
    },
    tensor::{Shape, Tensor},
};
use burn_cubecl::CubeBackend;
use cube_kit::hopper::gemm::{matrix_products, multiplies_side_by_side};

/// Multiplies `[rows, columns in]` by the transposes of two or three weights, `[columns out, columns in]` each, and
/// concatenates the outputs. Returns `None` if one launch cannot compute all outputs.
pub(crate) fn side_by_side(input: &Tensor<2>, weights: Vec<Tensor<2>>) -> Option<Tensor<2>> {
    let device = input.device();
    let DispatchDevice::Cube(device @ CubeDevice::Cuda(_)) = device.as_dispatch() else {
        return None;
    };
    let dtype = input.dtype();
    let counts: Vec<_> = weights.iter().map(|weight| weight.dims()[0]).collect();
    let serves = weights.iter().all(|weight| weight.dtype() == dtype)
        && multiplies_side_by_side(&device.client(), dtype, &counts);
    let mut weights = weights
        .into_iter()
        .map(|weight| weight.transpose().into_dispatch());
    let input = || input.clone().into_dispatch();
    let product = match (weights.next(), weights.next(), weights.next()) {
        _ if !serves => return None,
        (Some(first), Some(second), None) => Dispatch::product_of_two(input(), first, second),
        (Some(first), Some(second), Some(third)) => {
            Dispatch::product_of_three(input(), first, second, third)
        }
        _ => return None,
    };
    Some(Tensor::from_dispatch(product))
}

/// The backend operators that compute the GEMMs. Each operator multiplies `[rows, inner]` by several matrices `[inner,
/// columns]`.
#[backend_extension(Cube, Fusion)]
pub trait SidesBackend: Backend {
    #[fusion(meta = |lhs, first, second| metadata(lhs, &[first, second]))]
    fn product_of_two(
        lhs: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |lhs, first, second, third| metadata(lhs, &[first, second, third]))]
    fn product_of_three(
        lhs: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        third: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

/// Returns the shape and dtype of the output of a GEMM, which Burn's fusion needs before it runs the operator.
fn metadata(lhs: &TensorSpec, sides: &[&TensorSpec]) -> TensorSpec {
    let columns = sides.iter().map(|side| side.shape[1]).sum();
    TensorSpec::new(Shape::new([lhs.shape[0], columns]), lhs.dtype)
}

impl SidesBackend for CubeBackend {
    fn product_of_two(
        lhs: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        product(lhs, vec![first, second])
    }

    fn product_of_three(
        lhs: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        third: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        product(lhs, vec![first, second, third])
    }
}

fn product(
    lhs: FloatTensor<CubeBackend>,
    sides: Vec<FloatTensor<CubeBackend>>,
) -> FloatTensor<CubeBackend> {
    match matrix_products(&lhs, &sides) {
        Ok(Some(product)) => product,
        // Fall back to separate GEMMs, because TMA cannot read one of the matrices in its memory layout.
        Ok(None) => {
            let one = |side| super::product_of_cube(lhs.clone(), side);
            CubeBackend::float_cat(sides.into_iter().map(one).collect(), 1)
        }
        Err(error) => panic!("{error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::linear::rows;
    use burn::tensor::{DType, Device, Distribution};

    /// Checks that the concatenated output has the same bits as the outputs of separate GEMMs.
    #[test]
    fn side_by_side_matches_separate_products() {
        let device = Device::default();
        for dtype in [DType::F16, DType::BF16] {
            if !crate::op::serves(&device, dtype) {
                continue;
            }
            for counts in [vec![256, 64, 40], vec![192, 256], vec![64, 64, 64]] {
                let drawn = |shape: [usize; 2]| {
                    Tensor::<2>::random(shape, Distribution::Normal(0.0, 1.0), &device).cast(dtype)
                };
                let input = drawn([150, 200]);
                let weights: Vec<_> = counts.iter().map(|count| drawn([*count, 200])).collect();
                let Some(found) = side_by_side(&input, weights.clone()) else {
                    continue;
                };
                let one = |weight: &Tensor<2>| rows(input.clone(), weight.clone());
                let expected = Tensor::cat(weights.iter().map(one).collect(), 1);
                assert_eq!(found.into_data(), expected.into_data(), "{counts:?}");
            }
        }
    }
}
