//! A decode pass, which runs the model over one or a few positions of every sequence, from the token ids to the next
//! logits.
//!
//! The host determines only the shapes. The kernels read token ids and positions from device memory, so the launches can be
//! captured in a CUDA graph and replayed for other tokens.

use super::inputs::{AdapterInputs, Inputs};
use crate::generate::sampling::device::DeviceSampler;
use crate::model::Gemma4Model;
use crate::model::cache::WriteTarget;
use crate::model::cache::key_values::{SharedKeyValues, Visible};
use crate::model::cache::ring::Ring;
use crate::model::decode_ops::{DecodeOps, Targets};
use crate::model::observe::Part;
use crate::op::argmax::argmax;
use crate::op::graph_capture::Computation;
use crate::op::rope::RotationTables;
use crate::op::stream::StreamCheck;
use crate::op::{gemv, make_edges_programmatic};
use burn::tensor::{Device, Int, Tensor};

/// The number of decode steps of a text before a CUDA graph is captured. A capture does not pay off for a short text.
pub(super) const CAPTURED_AFTER: usize = 3;

/// A forward pass of the decoder, with all tensors that its launches read and write.
pub(super) struct Position {
    /// A clone of the caller's model. The clone shares the weight tensors with the caller's model.
    pub model: Gemma4Model,
    /// The KV buffers to which the forward pass writes. Only layers that compute their own keys and values have such
    /// buffers.
    pub targets: Vec<WriteTarget>,
    pub batch: usize,
    /// True if the sequences may be at different positions.
    pub is_ragged: bool,
    pub ring: Ring,
    pub sliding: RotationTables,
    pub full: RotationTables,
    pub inputs: Inputs,
    /// The per-layer embeddings of the forward pass's tokens, `[rows · layers · columns]`, which the host has read from
    /// a table in host memory. `None` if the table is on the device.
    pub from_host: Option<Tensor<1>>,
    /// The sampler that draws the next tokens, or `None` if the forward pass takes the argmax of each row.
    pub sampler: Option<DeviceSampler>,
    /// The adapters that the rows select, or `None` if no row selects an adapter.
    pub adapters: Option<AdapterInputs>,
    /// The number of passes before the launches are captured in a CUDA graph.
    pub captured_after: usize,
}

/// The results of a forward pass.
#[derive(Clone)]
pub(super) struct Outputs {
    /// The logits, `[rows, vocabulary]`.
    pub logits: Tensor<2>,
    pub chosen: Choice,
    /// The normalized hidden states from which the logits are computed, `[rows, hidden]`.
    pub hidden: Tensor<2>,
}

/// The next tokens, `[rows]`. The enum's variant tells how the tokens were chosen.
#[derive(Clone, Debug)]
pub(crate) enum Choice {
    /// The argmax of each row.
    Largest(Tensor<1, Int>),
    /// The tokens that a [`DeviceSampler`] drew.
    Drawn(Tensor<1, Int>),
}

impl Choice {
    /// The chosen tokens, `[rows]`.
    pub fn tokens(&self) -> Tensor<1, Int> {
        match self {
            Self::Largest(tokens) | Self::Drawn(tokens) => tokens.clone(),
        }
    }
}

impl Computation for Position {
    type Outputs = Outputs;

    fn before_capture(&self) -> usize {
        self.captured_after
    }

    fn compute(&self) -> Outputs {
        self.compute_by_parts(&mut |_| ())
    }

    fn compute_captured(&self) -> Self::Outputs {
        let outputs = self.compute();
        make_edges_programmatic(&outputs.chosen.tokens());
        outputs
    }

    fn is_local(&self) -> bool {
        let mut check = StreamCheck::new();
        for target in &self.targets {
            target.check_streams(&mut check);
        }
        if let Some(adapters) = &self.adapters {
            adapters.check_streams(&mut check);
        }
        check.module(&self.model).are_local
    }

    fn device(&self) -> Device {
        self.inputs.device()
    }
}

impl Position {
    /// Runs the forward pass like [`compute`](Computation::compute), and calls `after` after each [`Part`] of the pass.
    pub fn compute_by_parts(&self, after: &mut dyn FnMut(Part)) -> Outputs {
        let model = &self.model;
        let config = model.config();
        let rows = self.inputs.rows();
        let read = self.inputs.tokens.clone();
        let positions = self.inputs.positions.clone();
        let read_at = positions.clone();

        let adapters = self.adapters.as_ref().map(AdapterInputs::pass);
        let adapters = adapters.as_ref();
        let from_host = self.from_host.clone().map(|values| {
            let [count] = values.dims();
            values.reshape([rows, count / rows])
        });
        let (stream, embeddings) = model.first_rows(&read, from_host, adapters);
        let (sliding, full) = (self.sliding(), self.full());
        after(Part::Embedding);

        let mut operators = DecodeOps {
            batch: self.batch,
            positions,
            sliding: self.sliding.clone(),
            full: self.full.clone(),
            targets: Some(Targets {
                layers: &self.targets,
                sliding,
                full,
            }),
            adapters,
            after,
        };
        let mut shared = SharedKeyValues::default();
        let layers = 0..config.num_layers();
        let embeddings = embeddings.as_ref();
        let mut stream = model.layers(layers, stream, embeddings, &mut shared, &mut operators);

        let hidden = stream.norm(&model.norm);
        let (head, cap) = (model.head_weight(), config.final_logit_softcapping);
        let logits = gemv::project(hidden.clone(), head.matrix(), cap, head.origin());
        after(Part::Head);
        let chosen = match &self.sampler {
            Some(sampler) => Choice::Drawn(sampler.choose(logits.clone(), Some(read), read_at)),
            None => Choice::Largest(argmax(logits.clone())),
        };
        after(Part::Choice);
        Outputs {
            logits,
            chosen,
            hidden,
        }
    }

    /// The number of positions of each sequence in this forward pass.
    fn count(&self) -> usize {
        self.inputs.rows() / self.batch
    }

    /// Returns which keys the queries see in full layers. A causal mask hides the keys of later positions of the same
    /// forward pass.
    fn full(&self) -> Visible {
        Visible {
            causal: self.count() > 1,
            ..self.written()
        }
    }

    /// Returns which keys the queries see in a sliding layer's ring buffer. A mask hides the keys of later positions of the
    /// same forward pass.
    fn sliding(&self) -> Visible {
        if self.ring.is_exact() && self.count() == 1 {
            // No mask is needed, because the single query sees every key in the ring buffer.
            return self.written();
        }
        // If all sequences are at the same positions, build one mask for all sequences. Otherwise build one mask per
        // sequence.
        let sequences = match self.is_ragged {
            true => self.batch,
            false => 1,
        };
        let queries = [sequences, self.count()];
        self.ring.visible(queries, self.inputs.positions.clone())
    }

    /// Returns rules by which each query sees all keys that have been written to the buffers.
    fn written(&self) -> Visible {
        Visible {
            lengths: Some(self.inputs.lengths.clone()),
            lengths_ahead: true,
            ..Visible::default()
        }
    }
}
