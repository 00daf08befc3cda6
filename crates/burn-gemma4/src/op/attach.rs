//! An operator that attaches a gradient to the autodiff graph. The gradient is computed before the backward pass runs.

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

/// Returns `value`, `[1]`, unchanged. In the backward pass, `value` receives the gradient of the output. `source`
/// receives `gradient` times the gradient of the output. `gradient` may have a wider dtype than `source`.
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

/// The backend operator that attaches a gradient.
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
    /// The gradient with respect to the source, and the source's dtype.
    type State = (FloatTensor<B>, FloatDType);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [value, source] = ops.parents;
        let after = gradients.consume::<B>(&ops.node);
        if let Some(source) = source {
            let (gradient, of_source) = ops.state;
            let dtype: FloatDType = gradient.dtype().into();
            let factor = B::float_cast(after.clone(), dtype);
            let ones = vec![1; gradient.shape().num_dims()];
            let factor = B::float_reshape(factor, Shape::from(ones));
            let scaled = B::float_mul(gradient, factor);
            let scaled = match dtype == of_source {
                true => scaled,
                false => B::float_cast(scaled, of_source),
            };
            gradients.register::<B>(source.id, scaled);
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
        let of_source: FloatDType = source.dtype().into();
        match AttachBackward
            .prepare::<C>([value.node(), source.node()])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(preparation) => {
                let state = (gradient.into_primitive(), of_source);
                preparation.finish(state, value.into_primitive())
            }
            OpsKind::UnTracked(preparation) => preparation.finish(value.into_primitive()),
        }
    }
}
