//! The backward of the residual addition `(stream + norm(added)) · scalar`. The gradient of the stream is the result's
//! gradient times the optional scalar. From this gradient, the norm's backward computes two gradients: the gradient of
//! the block's output `added`, and the gradient of the norm's weight.

use super::{AddNormedBackend, Scalar};
use crate::op::norm::NormGradients;
use burn::{
    backend::{
        Autodiff, Backend, TensorMetadata,
        autodiff::{
            NodeId,
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
        tensor::FloatTensor,
    },
    tensor::{FloatDType, Shape},
};

#[derive(Debug)]
struct AddNormedBackward;

#[derive(Clone, Debug)]
struct State<B: Backend> {
    added: NodeId,
    weight: NodeId,
    scalar: Scalar<B>,
    epsilon: f64,
}

impl<B: AddNormedBackend> Backward<B, 3> for AddNormedBackward {
    type State = State<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        gradients: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let [stream, added, weight] = ops.parents;
        let state = ops.state;
        let mut saved = |node| checkpointer.retrieve_node_output::<FloatTensor<B>>(node);
        let (of_block, of_norm) = (saved(state.added), saved(state.weight));
        let gradient = gradients.consume::<B>(&ops.node);
        let gradient = match state.scalar {
            Scalar::Absent => gradient,
            Scalar::Present(scalar) => {
                let scalar = B::float_reshape(scalar, Shape::new([1, 1]));
                B::float_mul(gradient, scalar)
            }
        };
        if added.is_some() || weight.is_some() {
            let dtype: FloatDType = of_norm.dtype().into();
            let columns = of_norm.shape();
            let NormGradients {
                input,
                weight: parts,
            } = B::norm_gradients(of_block, of_norm, gradient.clone(), state.epsilon);
            if let Some(added) = added {
                gradients.register::<B>(added.id, input);
            }
            if let Some(weight) = weight {
                let sum = B::float_reshape(B::float_sum_dim(parts, 0), columns);
                gradients.register::<B>(weight.id, B::float_cast(sum, dtype));
            }
        }
        if let Some(stream) = stream {
            gradients.register::<B>(stream.id, gradient);
        }
    }
}

impl<B: AddNormedBackend, C: CheckpointStrategy> AddNormedBackend for Autodiff<B, C> {
    fn add_normed(
        stream: FloatTensor<Self>,
        added: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        scalar: Scalar<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let scalar = match scalar {
            Scalar::Absent => Scalar::Absent,
            Scalar::Present(scalar) => Scalar::Present(scalar.into_primitive()),
        };
        let nodes = [stream.node(), added.node(), weight.node()];
        match AddNormedBackward
            .prepare::<C>(nodes)
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(mut preparation) => {
                let state = State {
                    added: preparation.checkpoint(&added),
                    weight: preparation.checkpoint(&weight),
                    scalar: scalar.clone(),
                    epsilon,
                };
                let [stream, added, weight] =
                    [stream, added, weight].map(|tensor| tensor.into_primitive());
                let sum = B::add_normed(stream, added, weight, scalar, epsilon);
                preparation.finish(state, sum)
            }
            OpsKind::UnTracked(preparation) => {
                let [stream, added, weight] =
                    [stream, added, weight].map(|tensor| tensor.into_primitive());
                preparation.finish(B::add_normed(stream, added, weight, scalar, epsilon))
            }
        }
    }
}
