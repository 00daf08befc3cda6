//! GEMMs on NVIDIA GPUs, forward and backward, where Burn's matmul is too imprecise or too slow:
//!
//! - Burn rounds f32 matrices to tf32. A significand has 24 bits in f32, and 11 bits in tf32. No setting disables the
//!   rounding.
//! - Burn 0.22's matmuls in f16 and bf16 reach a tenth of a Hopper GPU's speed until they are tuned, which takes
//!   minutes. On other GPUs since Ampere, they need the same tuning.
//!
//! Each GEMM is an operator with its own backward, so that the gradients are also computed by these GEMMs.

use burn::{
    backend::{
        Autodiff, Backend, Dispatch,
        autodiff::{
            NodeId,
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind, binary},
        },
        backend_extension,
        tensor::FloatTensor,
    },
    tensor::{FloatDType, Tensor},
};
#[cfg(feature = "cuda")]
use burn::{
    backend::{fusion::custom::TensorSpec, ops::FloatTensorOps},
    tensor::Shape,
};

/// Multiplies `[…, rows, inner]` by `[…, inner, columns]`, both in f32. The batch dimensions must be equal, because the
/// gradients do not sum over expanded ones.
pub(crate) fn in_f32<const D: usize>(lhs: Tensor<D>, rhs: Tensor<D>) -> Tensor<D> {
    assert_eq!(
        lhs.dims()[..D - 2],
        rhs.dims()[..D - 2],
        "matrices: expected equal batch dimensions"
    );
    Tensor::from_dispatch(Dispatch::product_in_f32(
        lhs.into_dispatch(),
        rhs.into_dispatch(),
    ))
}

/// Multiplies `[rows, inner]` by `[inner, columns]`, both in f16 or both in bf16.
pub(crate) fn of_halves(lhs: Tensor<2>, rhs: Tensor<2>) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::product_of_halves(
        lhs.into_dispatch(),
        rhs.into_dispatch(),
    ))
}

/// Returns the GEMM of this module for the matrix's device and dtype, or `None` if Burn's matmul should run.
#[cfg(feature = "cuda")]
pub(crate) fn operator(matrix: &Tensor<2>) -> Option<fn(Tensor<2>, Tensor<2>) -> Tensor<2>> {
    use burn::{
        backend::{CubeDevice, DispatchDevice},
        tensor::DType,
    };
    let device = matrix.device().without_autodiff();
    let DispatchDevice::Cube(CubeDevice::Cuda(_)) = device.as_dispatch() else {
        return None;
    };
    match matrix.dtype() {
        DType::F32 => Some(in_f32::<2>),
        DType::F16 | DType::BF16 => Some(of_halves),
        _ => None,
    }
}

/// The backend operators that compute the GEMMs.
#[backend_extension(
    Cube: cfg(feature = "cuda"),
    Flex: cfg(feature = "flex"),
    Autodiff,
    Fusion: cfg(feature = "cuda")
)]
pub trait ProductBackend: Backend {
    /// See [`in_f32`].
    #[fusion(default)]
    fn product_in_f32(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        let (lhs, rhs) = (Parts::<Self>::of(lhs), Parts::<Self>::of(rhs));
        let product = |lhs: &FloatTensor<Self>, rhs: &FloatTensor<Self>| {
            Self::float_matmul(lhs.clone(), rhs.clone())
        };
        // Add the products with small magnitudes first, to lose the fewest bits. The product of the two low matrices is
        // the smallest.
        let sum = Self::float_add(product(&lhs.low, &rhs.low), product(&lhs.high, &rhs.low));
        let sum = Self::float_add(sum, product(&lhs.low, &rhs.high));
        Self::float_add(sum, product(&lhs.high, &rhs.high))
    }

    /// See [`of_halves`].
    #[fusion(meta = product_metadata)]
    fn product_of_halves(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_matmul(lhs, rhs)
    }
}

/// Returns the shape and dtype of the output of a GEMM, which Burn's fusion needs before it runs the operator.
#[cfg(feature = "cuda")]
fn product_metadata(lhs: &TensorSpec, rhs: &TensorSpec) -> TensorSpec {
    TensorSpec::new(Shape::new([lhs.shape[0], rhs.shape[1]]), lhs.dtype)
}

/// An f32 matrix as the sum of a high and a low matrix, for tf32 matmuls (Ootomo and Yokota 2022, arXiv:2203.03341).
/// The high matrix has 8 significant bits, which tf32 represents exactly. tf32 rounds the low matrix to 11 significant
/// bits.
struct Parts<B: Backend> {
    high: FloatTensor<B>,
    low: FloatTensor<B>,
}

impl<B: Backend> Parts<B> {
    fn of(matrix: FloatTensor<B>) -> Self {
        let high = B::float_cast(
            B::float_cast(matrix.clone(), FloatDType::BF16),
            FloatDType::F32,
        );
        Self {
            low: B::float_sub(matrix, high.clone()),
            high,
        }
    }
}

#[cfg(feature = "cuda")]
impl ProductBackend for burn_cubecl::CubeBackend {
    fn product_of_halves(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        use cube_kit::{ampere, hopper};
        let product = match hopper::gemm::matrix_product(&lhs, &rhs) {
            Ok(None) => ampere::gemm::matrix_product(&lhs, &rhs),
            other => other,
        };
        match product {
            Ok(Some(product)) => product,
            Ok(None) => Self::float_matmul(lhs, rhs),
            Err(error) => panic!("{error}"),
        }
    }
}

#[cfg(feature = "flex")]
impl ProductBackend for burn::backend::Flex {}

/// The backward of the GEMM operators `in_f32` and `of_halves`. The backward computes both gradients with the same
/// operator as the forward.
#[derive(Debug)]
struct ProductBackward<B: Backend> {
    product: fn(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
}

impl<B: ProductBackend> Backward<B, 2> for ProductBackward<B> {
    /// The saved left and right matrices. Each matrix is needed only for the gradient with respect to the other matrix.
    type State = [Option<NodeId>; 2];

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        gradients: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let [lhs, rhs] = ops
            .state
            .map(|node| node.map(|node| checkpointer.retrieve_node_output::<FloatTensor<B>>(node)));
        let saved = "the forward saved it, since the other matrix was tracked";
        binary::<B, _, _>(
            ops.parents,
            ops.node,
            gradients,
            |gradient| (self.product)(gradient, B::float_transpose(rhs.expect(saved))),
            // Compute the transpose of the gradient and transpose it back, so that the gradient has the memory layout
            // of the weight.
            |gradient| {
                let of_weight = (self.product)(B::float_transpose(gradient), lhs.expect(saved));
                B::float_transpose(of_weight)
            },
        );
    }
}

impl<B: ProductBackend, C: CheckpointStrategy> ProductBackend for Autodiff<B, C> {
    fn product_in_f32(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        let product = B::product_in_f32;
        ProductBackward { product }.forward::<C>(lhs, rhs)
    }

    fn product_of_halves(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        let product = B::product_of_halves;
        ProductBackward { product }.forward::<C>(lhs, rhs)
    }
}

impl<B: ProductBackend> ProductBackward<B> {
    fn forward<C: CheckpointStrategy>(
        self,
        lhs: FloatTensor<Autodiff<B, C>>,
        rhs: FloatTensor<Autodiff<B, C>>,
    ) -> FloatTensor<Autodiff<B, C>> {
        let product = self.product;
        let (lhs_tracked, rhs_tracked) = (lhs.is_tracked(), rhs.is_tracked());
        match self
            .prepare::<C>([lhs.node(), rhs.node()])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(mut preparation) => {
                let saved = [
                    rhs_tracked.then(|| preparation.checkpoint(&lhs)),
                    lhs_tracked.then(|| preparation.checkpoint(&rhs)),
                ];
                let result = product(lhs.into_primitive(), rhs.into_primitive());
                preparation.finish(saved, result)
            }
            OpsKind::UnTracked(preparation) => {
                preparation.finish(product(lhs.into_primitive(), rhs.into_primitive()))
            }
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::tensor::{Device, Distribution};

    type Product = fn(Tensor<2>, Tensor<2>) -> Tensor<2>;

    /// Returns the output of `product`, and the gradients with respect to both leaves. The matrices are not the leaves
    /// themselves, but are computed from the leaves, so the gradients also pass through other operators.
    fn outcome(product: Product, matrices: &[Tensor<2>; 2], device: &Device) -> Vec<Vec<f32>> {
        let leaves = matrices.each_ref().map(|matrix| {
            Tensor::<2>::from_data(matrix.clone().into_data(), device).require_grad()
        });
        let [lhs, rhs] = leaves.each_ref().map(|leaf| leaf.clone().tanh() * 3.0);
        let result = product(lhs, rhs.transpose());
        let gradients = result.clone().square().sum().backward();
        let [lhs, rhs] = leaves.map(|leaf| leaf.grad(&gradients).expect("the leaf has a gradient"));
        [result.inner(), lhs, rhs]
            .map(|tensor| tensor.into_data().iter::<f32>().collect())
            .into()
    }

    #[test]
    fn product_and_gradients_match_matmul() {
        let device = Device::flex();
        device.seed(1);
        let random = |shape: [usize; 2]| Tensor::<2>::random(shape, Distribution::Default, &device);
        let matrices = [random([5, 70]), random([9, 70])];
        let tracked = device.clone().autodiff();
        for device in [tracked.clone(), tracked.gradient_checkpointing()] {
            let expected = outcome(Tensor::matmul, &matrices, &device);
            for product in [in_f32::<2>, of_halves] {
                let found = outcome(product, &matrices, &device);
                for (found, expected) in found.iter().zip(&expected) {
                    let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
                    for (found, expected) in found.iter().zip(expected) {
                        assert!((found - expected).abs() <= 1e-5 * largest);
                    }
                }
            }
        }
    }

    #[test]
    fn product_with_one_tracked_matrix_gives_its_gradient() {
        let device = Device::flex();
        let ones = |device: &Device| Tensor::<2>::ones([3, 3], device);
        let tracked = ones(&device.clone().autodiff()).require_grad();
        for product in [
            in_f32(tracked.clone(), ones(&device)),
            in_f32(ones(&device), tracked.clone()),
        ] {
            let gradient = tracked.grad(&product.sum().backward());
            let gradient = gradient.expect("the leaf has a gradient").into_data();
            assert!(gradient.iter::<f32>().all(|x| x == 3.0));
        }
    }
}
