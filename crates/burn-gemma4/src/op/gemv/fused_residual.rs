//! A residual addition and a GEMV of the sum, fused into one launch for a single row on tensor cores. Every cube of
//! this launch computes the whole row of the sum. Large GEMVs need many cubes, so they are not fused.

#[cfg(feature = "cuda")]
use super::launch_options::LaunchOptions;
use super::residual_row::{AfterResidual, AfterResidualMetadata, Row};
use super::{
    Factors, Origin, ProductOptions, ProductTensors, ProductTensorsMetadata, launch::multiply,
    metadata,
};
#[cfg(feature = "cuda")]
use super::{MaybeMatrix, tensor_core};
use crate::op::residual::{Next, ResidualAdd, ResidualBackend};
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension, fusion::custom::TensorSpec,
        tensor::FloatTensor,
    },
    tensor::Tensor,
};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};

/// Adds a block's output to the residual stream as [`residual`](crate::op::residual) does. Then multiplies the stream,
/// or its norm if `next` is given, by the matrices of `factors`. All matrices must have the same quantization format,
/// so that one launch can multiply by all of them. Returns the stream, `[rows, columns]`, and the GEMV's output,
/// `[rows, columns out]`.
pub(crate) fn multiply_after_residual(
    added: ResidualAdd,
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

/// An optional parameter.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub enum MaybeParameter<B: Backend> {
    Absent,
    There(FloatTensor<B>),
}

/// The inputs of the residual addition except the stream. These are the block's output, the weight of this output's
/// norm, the optional scalar factor of the sum, and the optional weight of the sum's norm.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct Block<B: Backend> {
    pub added: FloatTensor<B>,
    pub weight: FloatTensor<B>,
    /// The scalar factor of the sum. If it is absent, the factor is 1.
    #[extension_type]
    pub scalar: MaybeParameter<B>,
    #[extension_type]
    pub next_weight: MaybeParameter<B>,
}

/// The fused kernel as an operator of a backend.
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

/// Returns the shapes and dtypes of the stream and the GEMV's output, which Burn's fusion needs before it runs the
/// operator.
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
            if let Some(plan) = tensor_core::plan_after_residual(&row, first, &launched) {
                return tensor_core::multiply_after_residual(row, first.clone(), launched, plan);
            }
        }
        let (stream, input) = row.computed();
        AfterResidual {
            stream,
            product: multiply(ProductTensors { input, ..tensors }, options),
        }
    }
}

impl Row {
    /// Computes the residual stream and the GEMV's input in one launch. The caller then launches the GEMV separately.
    /// This method serves GEMVs that cannot be fused with the residual addition.
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
