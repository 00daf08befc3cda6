//! The backward of MoE GEMMs, which runs MoE GEMMs too.

use super::{GroupedBackend, Stacked};
use burn::{
    backend::{
        Autodiff, Backend, TensorMetadata,
        autodiff::{
            NodeId,
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
        tensor::{FloatTensor, IntTensor},
    },
    tensor::Shape,
};

/// The (row, chosen expert) pairs grouped by expert: see [`Groups`](super::Groups).
#[derive(Clone, Debug)]
struct ExpertOffsets<B: Backend> {
    order: IntTensor<B>,
    starts: IntTensor<B>,
    of_row: usize,
}

impl<B: GroupedBackend> ExpertOffsets<B> {
    /// Adds up the gradients of all (row, chosen expert) pairs of each row: `[pairs, columns]` to `[rows, columns]`.
    fn of_inputs(&self, of_places: FloatTensor<B>) -> FloatTensor<B> {
        if self.of_row == 1 {
            return of_places;
        }
        let shape = of_places.shape();
        let [places, columns] = [shape[0], shape[1]];
        let rows = places / self.of_row;
        let of_rows = B::float_reshape(of_places, Shape::new([rows, self.of_row, columns]));
        B::float_reshape(B::float_sum_dim(of_rows, 1), Shape::new([rows, columns]))
    }
}

#[derive(Debug)]
struct GroupedBackward;

#[derive(Clone, Debug)]
struct GroupedState<B: Backend> {
    places: ExpertOffsets<B>,
    /// The saved input, which the weight's gradient needs. The next field is the saved weight, which the input's
    /// gradient needs.
    input: Option<NodeId>,
    weight: Option<NodeId>,
}

impl<B: GroupedBackend> Backward<B, 2> for GroupedBackward {
    type State = GroupedState<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        gradients: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let GroupedState {
            places,
            input,
            weight,
        } = ops.state;
        let [of_input, of_weight] = ops.parents;
        let gradient = gradients.consume::<B>(&ops.node);
        let (order, starts) = (places.order.clone(), places.starts.clone());
        let mut saved = |node| checkpointer.retrieve_node_output::<FloatTensor<B>>(node);
        if let (Some(parent), Some(weight)) = (of_input, weight) {
            let weight = saved(weight);
            let of_places =
                B::grouped_columns(gradient.clone(), weight, order.clone(), starts.clone());
            gradients.register::<B>(parent.id, places.of_inputs(of_places));
        }
        if let (Some(parent), Some(input)) = (of_weight, input) {
            let input = saved(input);
            let of_weight = B::grouped_weight(gradient, input, order, starts, places.of_row);
            gradients.register::<B>(parent.id, of_weight);
        }
    }
}

#[derive(Debug)]
struct QuantizedBackward;

#[derive(Clone, Debug)]
struct QuantizedState<B: Backend> {
    places: ExpertOffsets<B>,
    words: IntTensor<B>,
    weight: Stacked,
}

impl<B: GroupedBackend> Backward<B, 1> for QuantizedBackward {
    type State = QuantizedState<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [input] = ops.parents;
        let gradient = gradients.consume::<B>(&ops.node);
        if let Some(input) = input {
            let QuantizedState {
                places,
                words,
                weight,
            } = ops.state;
            let (order, starts) = (places.order.clone(), places.starts.clone());
            let of_places = B::grouped_columns_words(gradient, words, order, starts, weight);
            gradients.register::<B>(input.id, places.of_inputs(of_places));
        }
    }
}

impl<B: GroupedBackend, C: CheckpointStrategy> GroupedBackend for Autodiff<B, C> {
    fn grouped_rows(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        order: IntTensor<Self>,
        starts: IntTensor<Self>,
        of_row: usize,
    ) -> FloatTensor<Self> {
        let (of_input, of_weight) = (input.is_tracked(), weight.is_tracked());
        match GroupedBackward
            .prepare::<C>([input.node(), weight.node()])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(mut preparation) => {
                let state = GroupedState {
                    places: ExpertOffsets {
                        order: order.clone(),
                        starts: starts.clone(),
                        of_row,
                    },
                    input: of_weight.then(|| preparation.checkpoint(&input)),
                    weight: of_input.then(|| preparation.checkpoint(&weight)),
                };
                let (input, weight) = (input.into_primitive(), weight.into_primitive());
                let output = B::grouped_rows(input, weight, order, starts, of_row);
                preparation.finish(state, output)
            }
            OpsKind::UnTracked(preparation) => {
                let (input, weight) = (input.into_primitive(), weight.into_primitive());
                preparation.finish(B::grouped_rows(input, weight, order, starts, of_row))
            }
        }
    }

    fn grouped_rows_words(
        input: FloatTensor<Self>,
        words: IntTensor<Self>,
        order: IntTensor<Self>,
        starts: IntTensor<Self>,
        weight: Stacked,
        of_row: usize,
    ) -> FloatTensor<Self> {
        let node = input.node();
        let output = B::grouped_rows_words(
            input.into_primitive(),
            words.clone(),
            order.clone(),
            starts.clone(),
            weight,
            of_row,
        );
        match QuantizedBackward
            .prepare::<C>([node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(preparation) => {
                let places = ExpertOffsets {
                    order,
                    starts,
                    of_row,
                };
                let state = QuantizedState {
                    places,
                    words,
                    weight,
                };
                preparation.finish(state, output)
            }
            OpsKind::UnTracked(preparation) => preparation.finish(output),
        }
    }

    fn grouped_columns(
        _gradient: FloatTensor<Self>,
        _weight: FloatTensor<Self>,
        _order: IntTensor<Self>,
        _starts: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        unreachable!(
            "second-order gradients are unsupported: the backward runs on the inner backend"
        )
    }

    fn grouped_columns_words(
        _gradient: FloatTensor<Self>,
        _words: IntTensor<Self>,
        _order: IntTensor<Self>,
        _starts: IntTensor<Self>,
        _weight: Stacked,
    ) -> FloatTensor<Self> {
        unreachable!(
            "second-order gradients are unsupported: the backward runs on the inner backend"
        )
    }

    fn grouped_weight(
        _gradient: FloatTensor<Self>,
        _input: FloatTensor<Self>,
        _order: IntTensor<Self>,
        _starts: IntTensor<Self>,
        _of_row: usize,
    ) -> FloatTensor<Self> {
        unreachable!(
            "second-order gradients are unsupported: the backward runs on the inner backend"
        )
    }
}
