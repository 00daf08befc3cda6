//! A drafter's round: all tokens that it guesses after one, by kernels alone.
//!
//! Nothing here depends on the host but the shapes. After which token and at which position, the kernels read from the device, so that
//! the launches can be captured and replayed.

use super::{CAPTURED_AFTER, inputs::Inputs};
use crate::{
    Cache, Drafter, Gemma4Model, Guesses, LayerType,
    model::{
        cache::{
            Target,
            key_values::{KeyValues, SharedKeyValues, Visible},
            ring::Ring,
        },
        few_rows::FewRows,
    },
    op::{overlap_launches, recorded::Computation, rope::RotationTables},
};
use burn::tensor::{Device, Tensor};

/// The computation of a round: everything it reads and writes.
pub(super) struct Round {
    drafter: Drafter,
    /// Its tensors are the caller's model's.
    target: Gemma4Model,
    /// Where the last layers of each kind that have keys and values of their own keep them.
    last_sliding: Option<Target>,
    last_full: Option<Target>,
    ring: Ring,
    sliding: RotationTables,
    full: RotationTables,
    /// A token of each sequence, and their positions, which the cache does not hold yet.
    pub inputs: Inputs,
    /// `[batch, hidden]`: what the tokens' logits were made of.
    pub hidden: Tensor<2>,
    count: usize,
}

impl Round {
    /// Of `count` tokens of each sequence after what the cache holds, and as far as it has room. What it begins with is still to be written.
    pub fn new(drafter: &Drafter, target: &Gemma4Model, cache: &Cache, count: usize) -> Self {
        let (device, batch) = (target.device(), cache.batch());
        let hidden = [batch, target.config().hidden_size];
        let (rope, dtype) = (&drafter.model.rope, drafter.model.dtype());
        let tables = |kind| rope.tables(kind, cache.room(), dtype, &device);
        Self {
            last_sliding: cache.last_target(LayerType::Sliding),
            last_full: cache.last_target(LayerType::Full),
            ring: cache.ring(),
            sliding: tables(LayerType::Sliding),
            full: tables(LayerType::Full),
            drafter: drafter.clone(),
            target: target.clone(),
            inputs: Inputs::empty(batch, batch, &device),
            hidden: Tensor::empty(hidden, (&device, dtype)),
            count,
        }
    }
}

impl Computation for Round {
    const BEFORE_CAPTURE: usize = CAPTURED_AFTER;
    type Outputs = Guesses;

    fn compute(&self) -> Guesses {
        let position = self.inputs.positions.clone();
        // The position's own key is not there yet.
        let in_ring = [self.inputs.rows(), 1];
        let in_ring = self.ring.visible_before(in_ring, position.clone());
        let in_full = Visible {
            lengths: Some(position.clone()),
            lengths_ahead: true,
            ..Visible::default()
        };
        let mut shared = SharedKeyValues::default();
        for (kind, last, visible) in [
            (LayerType::Sliding, &self.last_sliding, in_ring),
            (LayerType::Full, &self.last_full, in_full),
        ] {
            if let Some(last) = last {
                shared.set(kind, read(last, visible));
            }
        }
        let mut operators = FewRows {
            batch: self.inputs.rows(),
            positions: position,
            sliding: self.sliding.clone(),
            full: self.full.clone(),
            targets: None,
            after: &mut |_| (),
        };
        self.drafter.steps(
            &self.target,
            self.inputs.tokens.clone(),
            self.hidden.clone(),
            &mut shared,
            &mut operators,
            self.count,
        )
    }

    fn compute_captured(&self) -> Self::Outputs {
        let outputs = self.compute();
        overlap_launches(&outputs.tokens);
        outputs
    }

    fn device(&self) -> Device {
        self.inputs.device()
    }
}

/// What a layer's buffers hold, of which queries see what is `visible`.
fn read(buffers: &Target, visible: Visible) -> KeyValues {
    match buffers {
        Target::Apart(buffers) => buffers.read(visible),
        Target::Compact(buffer) => KeyValues::of_slots(&buffer.slots, &buffer.keys, visible),
    }
}
