//! The backward of the RMS norm with a weight.

use super::{NormBackend, NormGradients};
use burn::{
    backend::{
        Autodiff, TensorMetadata,
        autodiff::{
            NodeId,
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
        tensor::FloatTensor,
    },
    tensor::FloatDType,
};

#[derive(Debug)]
struct NormBackward;

#[derive(Clone, Debug)]
struct NormState {
    input: NodeId,
    weight: NodeId,
    epsilon: f64,
}

impl<B: NormBackend> Backward<B, 2> for NormBackward {
    type State = NormState;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        gradients: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let mut saved = |node| checkpointer.retrieve_node_output::<FloatTensor<B>>(node);
        let (input, weight) = (saved(ops.state.input), saved(ops.state.weight));
        let dtype: FloatDType = weight.dtype().into();
        let columns = weight.shape();
        let gradient = gradients.consume::<B>(&ops.node);
        let NormGradients {
            input: of_input,
            weight: parts,
        } = B::norm_gradients(input, weight, gradient, ops.state.epsilon);
        let [input, weight] = ops.parents;
        if let Some(input) = input {
            gradients.register::<B>(input.id, of_input);
        }
        if let Some(weight) = weight {
            let sum = B::float_reshape(B::float_sum_dim(parts, 0), columns);
            gradients.register::<B>(weight.id, B::float_cast(sum, dtype));
        }
    }
}

impl<B: NormBackend, C: CheckpointStrategy> NormBackend for Autodiff<B, C> {
    fn norm(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        match NormBackward
            .prepare::<C>([input.node(), weight.node()])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(mut preparation) => {
                let state = NormState {
                    input: preparation.checkpoint(&input),
                    weight: preparation.checkpoint(&weight),
                    epsilon,
                };
                let output = B::norm(input.into_primitive(), weight.into_primitive(), epsilon);
                preparation.finish(state, output)
            }
            OpsKind::UnTracked(preparation) => preparation.finish(B::norm(
                input.into_primitive(),
                weight.into_primitive(),
                epsilon,
            )),
        }
    }

    fn norm_gradients(
        _input: FloatTensor<Self>,
        _weight: FloatTensor<Self>,
        _gradient: FloatTensor<Self>,
        _epsilon: f64,
    ) -> NormGradients<Self> {
        unreachable!(
            "second-order gradients are unsupported: the backward runs on the inner backend"
        )
    }
}
