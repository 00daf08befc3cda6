//! A product of what the residual stream is when a block's output has been added to it: of one row in one launch, where few cubes make the product
//! on matrix units.

use super::{
    Factors, Origin, ProductOptions, ProductTensors, ProductTensorsMetadata, launch::multiply,
    metadata,
};
#[cfg(feature = "cuda")]
use super::{MaybeMatrix, launch::LaunchOptions, matrix_units};
use crate::op::residual::{Added, Next, ResidualBackend};
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension, fusion::custom::TensorSpec,
        tensor::FloatTensor,
    },
    tensor::Tensor,
};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};

/// The stream with what is added, as [`residual`](crate::op::residual) has it, and the product of it, or where there is a `next` norm of that, with
/// factors of one launch.
pub(crate) fn multiply_after_residual(
    added: Added,
    next: Option<Next>,
    factors: Factors,
    origin: Origin,
) -> (Tensor<2>, Tensor<2>) {
    let (tensors, options) = ProductTensors::new(added.stream, factors, origin);
    let (scalar, next) = match next {
        Some(next) => (next.scalar, Some(next.weight)),
        None => (None, None),
    };
    let parameter = |parameter: Option<Tensor<1>>| match parameter {
        Some(parameter) => MaybeParameter::There(parameter.into_dispatch()),
        None => MaybeParameter::Absent,
    };
    let block = Block {
        added: added.added.into_dispatch(),
        weight: added.weight.into_dispatch(),
        scalar: parameter(scalar),
        next_weight: parameter(next),
    };
    let found: AfterResidual<Dispatch> =
        Dispatch::product_after_residual(tensors, block, options, added.epsilon);
    (
        Tensor::from_dispatch(found.stream),
        Tensor::from_dispatch(found.product),
    )
}

/// What may be lacking.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub enum MaybeParameter<B: Backend> {
    Absent,
    There(FloatTensor<B>),
}

/// What is added to the stream, which is the input of the product's tensors, the weight of its norm, and what becomes of the sum.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct Block<B: Backend> {
    pub added: FloatTensor<B>,
    pub weight: FloatTensor<B>,
    /// Absent where the next norm is.
    #[extension_type]
    pub scalar: MaybeParameter<B>,
    #[extension_type]
    pub next_weight: MaybeParameter<B>,
}

/// The stream, and its product.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct AfterResidual<B: Backend> {
    pub stream: FloatTensor<B>,
    pub product: FloatTensor<B>,
}

/// The kernel as an operator of a backend.
#[backend_extension(Cube, Fusion)]
pub trait AfterResidualBackend: Backend {
    /// See [`multiply_after_residual`].
    #[fusion(meta = |tensors, _block, options, _epsilon| both(tensors, options))]
    fn product_after_residual(
        #[extension_type] tensors: ProductTensors<Self>,
        #[extension_type] block: Block<Self>,
        options: ProductOptions,
        epsilon: f64,
    ) -> AfterResidual<Self>;
}

/// What Burn's fusion must know of both before they exist.
fn both(tensors: &ProductTensorsMetadata, options: &ProductOptions) -> AfterResidualMetadata {
    let product: TensorSpec = metadata(tensors, options);
    AfterResidualMetadata {
        stream: tensors.input.clone(),
        product,
    }
}

impl AfterResidualBackend for CubeBackend {
    fn product_after_residual(
        tensors: ProductTensors<Self>,
        block: Block<Self>,
        options: ProductOptions,
        epsilon: f64,
    ) -> AfterResidual<Self> {
        let parameter = |parameter| match parameter {
            MaybeParameter::Absent => None,
            MaybeParameter::There(parameter) => Some(parameter),
        };
        let row = Row {
            stream: tensors.input.clone(),
            added: block.added,
            weight: block.weight,
            scalar: parameter(block.scalar),
            next_weight: parameter(block.next_weight),
            epsilon,
        };
        #[cfg(feature = "cuda")]
        if let MaybeMatrix::Whole(first) = &tensors.first {
            let launched = LaunchOptions::of(&tensors, options);
            if let Some(plan) = matrix_units::plan_after_residual(&row, first, &launched) {
                return matrix_units::multiply_after_residual(row, first.clone(), launched, plan);
            }
        }
        let (stream, input) = row.computed();
        AfterResidual {
            stream,
            product: multiply(ProductTensors { input, ..tensors }, options),
        }
    }
}

/// What a product's row is made of.
pub(super) struct Row {
    pub stream: CubeTensor,
    pub added: CubeTensor,
    pub weight: CubeTensor,
    pub scalar: Option<CubeTensor>,
    pub next_weight: Option<CubeTensor>,
    pub epsilon: f64,
}

impl Row {
    /// The stream, and what is multiplied, by a launch of its own.
    fn computed(self) -> (CubeTensor, CubeTensor) {
        let Self {
            stream,
            added,
            weight,
            scalar,
            next_weight,
            epsilon,
        } = self;
        let found = match (scalar, next_weight) {
            (_, None) => {
                let stream = CubeBackend::residual(stream, added, weight, epsilon);
                return (stream.clone(), stream);
            }
            (None, Some(next)) => CubeBackend::residual_norm(stream, added, weight, next, epsilon),
            (Some(scalar), Some(next)) => {
                CubeBackend::residual_scale_norm(stream, added, weight, scalar, next, epsilon)
            }
        };
        (found.stream, found.normed)
    }
}
