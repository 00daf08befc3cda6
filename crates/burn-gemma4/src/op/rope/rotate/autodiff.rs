//! The backward of the rotation.

use super::{Direction, RotateBackend};
use burn::backend::{
    Autodiff, Backend,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    tensor::FloatTensor,
};

#[derive(Debug)]
struct RotateBackward;

/// The rotation tables that the forward saves for the backward. The backward rotates the gradients by the inverse
/// rotation.
#[derive(Clone, Debug)]
struct Tables<B: Backend> {
    cos: FloatTensor<B>,
    sin: FloatTensor<B>,
}

impl<B: RotateBackend> Backward<B, 1> for RotateBackward {
    type State = Tables<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [heads] = ops.parents;
        let gradient = gradients.consume::<B>(&ops.node);
        if let Some(heads) = heads {
            let Tables { cos, sin } = ops.state;
            let turned = B::rotate(gradient, cos, sin, Direction::Back);
            gradients.register::<B>(heads.id, turned);
        }
    }
}

impl<B: RotateBackend, C: CheckpointStrategy> RotateBackend for Autodiff<B, C> {
    fn rotate(
        heads: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        direction: Direction,
    ) -> FloatTensor<Self> {
        let (cos, sin) = (cos.into_primitive(), sin.into_primitive());
        match RotateBackward
            .prepare::<C>([heads.node()])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(preparation) => {
                let tables = Tables {
                    cos: cos.clone(),
                    sin: sin.clone(),
                };
                let turned = B::rotate(heads.into_primitive(), cos, sin, direction);
                preparation.finish(tables, turned)
            }
            OpsKind::UnTracked(preparation) => {
                preparation.finish(B::rotate(heads.into_primitive(), cos, sin, direction))
            }
        }
    }
}
