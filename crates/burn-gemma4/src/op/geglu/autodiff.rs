//! The backward pass of GeGLU.

use super::{GateBackend, GateGradients};
use burn::backend::{
    Autodiff,
    autodiff::{
        NodeId,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    tensor::FloatTensor,
};

#[derive(Debug)]
struct GateBackward;

impl<B: GateBackend> Backward<B, 2> for GateBackward {
    /// The saved inputs: the outputs of the gate projection and of the up projection.
    type State = [NodeId; 2];

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        gradients: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let [gate, through] = ops
            .state
            .map(|node| checkpointer.retrieve_node_output::<FloatTensor<B>>(node));
        let gradient = gradients.consume::<B>(&ops.node);
        let found = B::gate_gradients(gate, through, gradient);
        let GateGradients {
            gate: of_gate,
            through: of_through,
        } = found;
        for (parent, gradient) in ops.parents.into_iter().zip([of_gate, of_through]) {
            if let Some(parent) = parent {
                gradients.register::<B>(parent.id, gradient);
            }
        }
    }
}

impl<B: GateBackend, C: CheckpointStrategy> GateBackend for Autodiff<B, C> {
    fn gated(gate: FloatTensor<Self>, through: FloatTensor<Self>) -> FloatTensor<Self> {
        match GateBackward
            .prepare::<C>([gate.node(), through.node()])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(mut preparation) => {
                let saved = [
                    preparation.checkpoint(&gate),
                    preparation.checkpoint(&through),
                ];
                let output = B::gated(gate.into_primitive(), through.into_primitive());
                preparation.finish(saved, output)
            }
            OpsKind::UnTracked(preparation) => {
                preparation.finish(B::gated(gate.into_primitive(), through.into_primitive()))
            }
        }
    }

    fn gate_gradients(
        _gate: FloatTensor<Self>,
        _through: FloatTensor<Self>,
        _gradient: FloatTensor<Self>,
    ) -> GateGradients<Self> {
        unreachable!(
            "second-order gradients are unsupported: the backward runs on the inner backend"
        )
    }
}
