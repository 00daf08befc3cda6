//! Gradients that are known before the backward, as an operator.

use burn::{
    backend::{
        Autodiff, Backend, Dispatch, TensorMetadata,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
        backend_extension,
        tensor::FloatTensor,
    },
    tensor::{FloatDType, Shape, Tensor},
};

/// `value` `[1]` as it is, of which `gradient` is the gradient by `source`, beside those that it has already.
pub(crate) fn attach<const D: usize>(
    value: Tensor<1>,
    source: Tensor<D>,
    gradient: Tensor<D>,
) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::attach_gradient(
        value.into_dispatch(),
        source.into_dispatch(),
        gradient.into_dispatch(),
    ))
}

/// The operator of a backend.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Autodiff,
    Fusion: cfg(feature = "cube")
)]
pub trait AttachBackend: Backend {
    /// See [`attach`].
    #[fusion(default)]
    fn attach_gradient(
        value: FloatTensor<Self>,
        _source: FloatTensor<Self>,
        _gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        value
    }
}

#[cfg(feature = "cube")]
impl AttachBackend for burn_cubecl::CubeBackend {}

#[cfg(feature = "flex")]
impl AttachBackend for burn::backend::Flex {}

#[derive(Debug)]
struct AttachBackward;

impl<B: AttachBackend> Backward<B, 2> for AttachBackward {
    /// The gradient by the source.
    type State = FloatTensor<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [value, source] = ops.parents;
        let after = gradients.consume::<B>(&ops.node);
        if let Some(source) = source {
            let dtype: FloatDType = ops.state.dtype().into();
            let factor = B::float_cast(after.clone(), dtype);
            let ones = vec![1; ops.state.shape().num_dims()];
            let factor = B::float_reshape(factor, Shape::from(ones));
            gradients.register::<B>(source.id, B::float_mul(ops.state, factor));
        }
        if let Some(value) = value {
            gradients.register::<B>(value.id, after);
        }
    }
}

impl<B: AttachBackend, C: CheckpointStrategy> AttachBackend for Autodiff<B, C> {
    fn attach_gradient(
        value: FloatTensor<Self>,
        source: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        match AttachBackward
            .prepare::<C>([value.node(), source.node()])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(preparation) => {
                preparation.finish(gradient.into_primitive(), value.into_primitive())
            }
            OpsKind::UnTracked(preparation) => preparation.finish(value.into_primitive()),
        }
    }
}
