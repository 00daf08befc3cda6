//! A drafting round: decode kernels run the drafter, which proposes several draft tokens after one token of each
//! sequence.
//!
//! The host determines only the shapes. The kernels read the tokens and their positions from device memory, so the
//! launches can be captured in a CUDA graph and replayed for other tokens.

use super::inputs::Inputs;
use super::position::CAPTURED_AFTER;
use crate::config::LayerType;
use crate::model::Gemma4Model;
use crate::model::cache::Cache;
use crate::model::cache::WriteTarget;
use crate::model::cache::key_values::{KeyValues, SharedKeyValues, Visible};
use crate::model::cache::ring::Ring;
use crate::model::decode_ops::DecodeOps;
use crate::op::graph_capture::Computation;
use crate::op::make_edges_programmatic;
use crate::op::rope::RotationTables;
use crate::op::stream::StreamCheck;
use crate::speculative::drafter::{Draft, Drafter};
use burn::tensor::{Device, Tensor};

/// One run of the drafter (a drafting round), with all tensors that its launches read and write.
pub(super) struct Round {
    drafter: Drafter,
    /// A clone of the caller's model. The clone shares the weight tensors with the caller's model.
    target: Gemma4Model,
    /// The target model's KV buffers that the drafter reads: those of the last sliding layer and those of the last full
    /// layer. Only layers that compute their own keys and values count.
    last_sliding: Option<WriteTarget>,
    last_full: Option<WriteTarget>,
    ring: Ring,
    sliding: RotationTables,
    full: RotationTables,
    /// One token of each sequence with its position. The cache does not hold these tokens yet.
    pub inputs: Inputs,
    /// The hidden states from which the tokens in `inputs` were chosen, `[batch, hidden]`.
    pub hidden: Tensor<2>,
    count: usize,
}

impl Round {
    /// Builds a run of the drafter that proposes `count` draft tokens per sequence, with rotary tables for the full size of
    /// the cache's buffers. The caller must write the inputs of the run.
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
    type Outputs = Draft;

    fn before_capture(&self) -> usize {
        CAPTURED_AFTER
    }

    fn compute(&self) -> Draft {
        let position = self.inputs.positions.clone();
        // Each query sees only the keys before its own position, because the cache does not hold the key of this position.
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
        let mut operators = DecodeOps {
            batch: self.inputs.rows(),
            positions: position,
            sliding: self.sliding.clone(),
            full: self.full.clone(),
            targets: None,
            adapters: None,
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
        make_edges_programmatic(&outputs.tokens);
        outputs
    }

    fn is_local(&self) -> bool {
        let mut check = StreamCheck::new();
        for target in self.last_sliding.iter().chain(&self.last_full) {
            target.check_streams(&mut check);
        }
        check.module(&self.target).module(&self.drafter).are_local
    }

    fn device(&self) -> Device {
        self.inputs.device()
    }
}

/// Returns the keys and values in a layer's buffers. `visible` selects the keys and values that the queries see.
fn read(buffers: &WriteTarget, visible: Visible) -> KeyValues {
    match buffers {
        WriteTarget::Apart(buffers) => buffers.read(visible),
        WriteTarget::Compact(buffer) => KeyValues::of_slots(&buffer.slots, &buffer.keys, visible),
    }
}
