//! The backward of GEMMs with LoRA-adapted matrices.

use super::{
    AdaptedBackend, AdaptedGradients, AdaptedMatrix, AdaptedOptions, AdaptedRows, Base, OfBase,
};
use burn::backend::{
    Autodiff, AutodiffBackend, Backend,
    autodiff::{
        NodeId,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    tensor::{FloatTensor, IntTensor},
};

/// A LoRA-adapted matrix in the form that the autodiff graph saves for the backward.
#[derive(Clone, Debug)]
pub(in crate::op) struct SavedMatrix<B: Backend> {
    base: SavedBase<B>,
    reads: NodeId,
    writes: NodeId,
}

#[derive(Clone, Debug)]
enum SavedBase<B: Backend> {
    Whole(NodeId),
    Quantized(IntTensor<B>),
}

impl<B: Backend> SavedMatrix<B> {
    /// Saves an adapted matrix. `save` saves one float tensor for the backward, and returns the id of the tensor's node
    /// in the autodiff graph.
    pub fn new<C: CheckpointStrategy>(
        matrix: &AdaptedMatrix<Autodiff<B, C>>,
        mut save: impl FnMut(&FloatTensor<Autodiff<B, C>>) -> NodeId,
    ) -> Self {
        Self {
            base: match &matrix.base {
                Base::Whole(base) => SavedBase::Whole(save(base)),
                Base::Quantized(words) => SavedBase::Quantized(words.clone()),
            },
            reads: save(&matrix.reads),
            writes: save(&matrix.writes),
        }
    }

    pub fn retrieved(self, checkpointer: &mut Checkpointer) -> AdaptedMatrix<B> {
        let mut saved = |node| checkpointer.retrieve_node_output::<FloatTensor<B>>(node);
        AdaptedMatrix {
            base: match self.base {
                SavedBase::Whole(node) => Base::Whole(saved(node)),
                SavedBase::Quantized(words) => Base::Quantized(words),
            },
            reads: saved(self.reads),
            writes: saved(self.writes),
        }
    }
}

impl<B: Backend, C: CheckpointStrategy> AdaptedMatrix<Autodiff<B, C>> {
    /// Returns the matrix with the tensors of the inner backend, without autodiff.
    pub(in crate::op) fn constant(self) -> AdaptedMatrix<B> {
        AdaptedMatrix {
            base: match self.base {
                Base::Whole(base) => Base::Whole(base.into_primitive()),
                Base::Quantized(words) => Base::Quantized(words),
            },
            reads: self.reads.into_primitive(),
            writes: self.writes.into_primitive(),
        }
    }
}

#[derive(Debug)]
struct AdaptedBackward;

#[derive(Clone, Debug)]
struct State<B: Backend> {
    input: NodeId,
    inner: FloatTensor<B>,
    matrix: SavedMatrix<B>,
    options: AdaptedOptions,
}

impl<B: AdaptedBackend> Backward<B, 4> for AdaptedBackward {
    type State = State<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 4>,
        gradients: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let [input, reads, writes, base] = ops.parents;
        let state = ops.state;
        let is_whole = matches!(state.matrix.base, SavedBase::Whole(_));
        let base = base.filter(|_| is_whole);
        let rows = checkpointer.retrieve_node_output::<FloatTensor<B>>(state.input);
        let matrix = state.matrix.retrieved(checkpointer);
        let gradient = gradients.consume::<B>(&ops.node);
        let found = B::adapted_gradients(
            gradient,
            rows,
            state.inner,
            matrix,
            state.options,
            base.is_some(),
        );
        let of_base = match found.base {
            OfBase::Absent => None,
            OfBase::Present(gradient) => Some(gradient),
        };
        for (parent, gradient) in [
            (input, Some(found.input)),
            (reads, Some(found.reads)),
            (writes, Some(found.writes)),
            (base, of_base),
        ] {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                gradients.register::<B>(parent.id, gradient);
            }
        }
    }
}

impl<B: AdaptedBackend, C: CheckpointStrategy> AdaptedBackend for Autodiff<B, C> {
    fn adapted(
        input: FloatTensor<Self>,
        matrix: AdaptedMatrix<Self>,
        options: AdaptedOptions,
    ) -> AdaptedRows<Self> {
        let base = match &matrix.base {
            Base::Whole(base) => base.node(),
            // Use the node of the input instead of the base matrix's node, because quantized words have no gradient.
            // Autodiff needs a node for every parent.
            Base::Quantized(_) => input.node(),
        };
        let nodes = [
            input.node(),
            matrix.reads.node(),
            matrix.writes.node(),
            base,
        ];
        let (output, inner) = match AdaptedBackward
            .prepare::<C>(nodes)
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(mut preparation) => {
                let node = preparation.checkpoint(&input);
                let saved = SavedMatrix::new(&matrix, |tensor| preparation.checkpoint(tensor));
                let rows = B::adapted(input.into_primitive(), matrix.constant(), options);
                let state = State {
                    input: node,
                    inner: rows.inner.clone(),
                    matrix: saved,
                    options,
                };
                (preparation.finish(state, rows.output), rows.inner)
            }
            OpsKind::UnTracked(preparation) => {
                let rows = B::adapted(input.into_primitive(), matrix.constant(), options);
                (preparation.finish(rows.output), rows.inner)
            }
        };
        AdaptedRows {
            output,
            inner: <Self as AutodiffBackend>::from_inner(inner),
        }
    }

    fn adapted_gradients(
        _gradient: FloatTensor<Self>,
        _input: FloatTensor<Self>,
        _inner: FloatTensor<Self>,
        _matrix: AdaptedMatrix<Self>,
        _options: AdaptedOptions,
        _of_base: bool,
    ) -> AdaptedGradients<Self> {
        unreachable!(
            "second-order gradients are unsupported: the backward runs on the inner backend"
        )
    }
}
