//! The backward of the LoRA-adapted MLP.

use super::{AdaptedMlpBackend, MlpOptions};
use crate::op::lora::{AdaptedMatrix, AdaptedRows, SavedMatrix};
use burn::backend::{
    Autodiff, Backend,
    autodiff::{
        NodeId,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    tensor::FloatTensor,
};

#[derive(Debug)]
struct MlpBackward;

#[derive(Clone, Debug)]
struct State<B: Backend> {
    input: NodeId,
    gate: SavedMatrix<B>,
    up: SavedMatrix<B>,
    down: SavedMatrix<B>,
    /// The outputs of the gate and up projections, or `None` if the backward recomputes them.
    inside: Option<[AdaptedRows<B>; 2]>,
    /// The gated activations times the transpose of the down projection's first LoRA factor, `[rows, rank]`.
    inner: FloatTensor<B>,
    options: MlpOptions,
}

impl<B: AdaptedMlpBackend> Backward<B, 7> for MlpBackward {
    type State = State<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 7>,
        gradients: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let State {
            input,
            gate,
            up,
            down,
            inside,
            inner,
            options,
        } = ops.state;
        let input = checkpointer.retrieve_node_output::<FloatTensor<B>>(input);
        let [gate, up, down] = [gate, up, down].map(|saved| saved.retrieved(checkpointer));
        let [open, through] = inside.unwrap_or_else(|| {
            [(&gate, options.gate), (&up, options.up)]
                .map(|(matrix, options)| B::adapted(input.clone(), matrix.clone(), options))
        });
        let gradient = gradients.consume::<B>(&ops.node);

        let gated = B::gated(open.output.clone(), through.output.clone());
        let of_down = B::adapted_gradients(gradient, gated, inner, down, options.down, false);
        let of_gated = B::gate_gradients(open.output, through.output, of_down.input);
        let of_gate = B::adapted_gradients(
            of_gated.gate,
            input.clone(),
            open.inner,
            gate,
            options.gate,
            false,
        );
        let of_up = B::adapted_gradients(
            of_gated.through,
            input,
            through.inner,
            up,
            options.up,
            false,
        );

        let [input, factors @ ..] = ops.parents;
        if let Some(input) = input {
            gradients.register::<B>(input.id, B::float_add(of_gate.input, of_up.input));
        }
        let found = [
            of_gate.reads,
            of_gate.writes,
            of_up.reads,
            of_up.writes,
            of_down.reads,
            of_down.writes,
        ];
        for (parent, gradient) in factors.into_iter().zip(found) {
            if let Some(parent) = parent {
                gradients.register::<B>(parent.id, gradient);
            }
        }
    }
}

impl<B: AdaptedMlpBackend, C: CheckpointStrategy> AdaptedMlpBackend for Autodiff<B, C> {
    fn adapted_mlp(
        input: FloatTensor<Self>,
        gate: AdaptedMatrix<Self>,
        up: AdaptedMatrix<Self>,
        down: AdaptedMatrix<Self>,
        options: MlpOptions,
    ) -> FloatTensor<Self> {
        let nodes = [
            input.node(),
            gate.reads.node(),
            gate.writes.node(),
            up.reads.node(),
            up.writes.node(),
            down.reads.node(),
            down.writes.node(),
        ];
        match MlpBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut preparation) => {
                let node = preparation.checkpoint(&input);
                let mut saved =
                    |matrix| SavedMatrix::new(matrix, |tensor| preparation.checkpoint(tensor));
                let saved = [saved(&gate), saved(&up), saved(&down)];
                let input = input.into_primitive();
                let open = B::adapted(input.clone(), gate.constant(), options.gate);
                let through = B::adapted(input, up.constant(), options.up);
                let gated = B::gated(open.output.clone(), through.output.clone());
                let rows = B::adapted(gated, down.constant(), options.down);
                let [gate, up, down] = saved;
                let state = State {
                    input: node,
                    gate,
                    up,
                    down,
                    inside: (!options.recompute).then_some([open, through]),
                    inner: rows.inner,
                    options,
                };
                preparation.finish(state, rows.output)
            }
            OpsKind::UnTracked(preparation) => {
                let input = input.into_primitive();
                let [gate, up, down] = [gate, up, down].map(AdaptedMatrix::constant);
                preparation.finish(B::adapted_mlp(input, gate, up, down, options))
            }
        }
    }
}
