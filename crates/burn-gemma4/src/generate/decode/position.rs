//! One or a few positions of every sequence, from their tokens to the next ones' logits.
//!
//! Nothing here depends on the host but the shapes. Which tokens and which positions, the kernels read from the device, so
//! that the launches can be captured and replayed.

use super::{CAPTURED_AFTER, inputs::Inputs};
use crate::{
    Gemma4Model,
    generate::sampling::device::DeviceSampler,
    model::{
        cache::{
            Target,
            key_values::{SharedKeyValues, Visible},
            ring::Ring,
        },
        few_rows::{FewRows, Targets},
        observe::Part,
    },
    op::{
        argmax::argmax,
        linear::few_rows::{self, Origin},
        overlap_launches,
        recorded::Computation,
        rope::RotationTables,
    },
};
use burn::tensor::{Device, Int, Tensor};

/// The computation of a few positions: everything it reads and writes.
pub(super) struct Position {
    /// Its tensors are the caller's model's.
    pub model: Gemma4Model,
    /// Where every layer that has keys and values of its own writes them.
    pub targets: Vec<Target>,
    pub batch: usize,
    /// Whether sequences are at different positions.
    pub is_ragged: bool,
    pub ring: Ring,
    pub sliding: RotationTables,
    pub full: RotationTables,
    pub inputs: Inputs,
    /// `[rows · layers · columns]`: of a table of per-layer embeddings on the host, the tokens' rows.
    pub from_host: Option<Tensor<1>>,
    /// Who draws the next tokens, where it is not their argmax.
    pub sampler: Option<DeviceSampler>,
}

/// What comes of a few positions.
#[derive(Clone)]
pub(super) struct Outputs {
    /// `[rows, vocabulary]`.
    pub logits: Tensor<2>,
    pub chosen: Choice,
    /// `[rows, hidden]`, normalised: what the logits are made of.
    pub hidden: Tensor<2>,
}

/// The next tokens, `[rows]`.
#[derive(Clone, Debug)]
pub(crate) enum Choice {
    /// The likeliest.
    Largest(Tensor<1, Int>),
    /// Those that a [`DeviceSampler`] has drawn.
    Drawn(Tensor<1, Int>),
}

impl Choice {
    /// They.
    pub fn tokens(&self) -> Tensor<1, Int> {
        match self {
            Self::Largest(tokens) | Self::Drawn(tokens) => tokens.clone(),
        }
    }
}

impl Computation for Position {
    const BEFORE_CAPTURE: usize = CAPTURED_AFTER;
    type Outputs = Outputs;

    fn compute(&self) -> Outputs {
        self.compute_by_parts(&mut |_| ())
    }

    fn compute_captured(&self) -> Self::Outputs {
        let outputs = self.compute();
        overlap_launches(&outputs.chosen.tokens());
        outputs
    }

    fn device(&self) -> Device {
        self.inputs.device()
    }
}

impl Position {
    /// [`compute`](Computation::compute) with a call after each part.
    pub fn compute_by_parts(&self, after: &mut dyn FnMut(Part)) -> Outputs {
        let model = &self.model;
        let config = model.config();
        let rows = self.inputs.rows();
        let read = self.inputs.tokens.clone();
        let positions = self.inputs.positions.clone();
        let read_at = positions.clone();

        let from_host = self.from_host.clone().map(|values| {
            let [count] = values.dims();
            values.reshape([rows, count / rows])
        });
        let (stream, embeddings) = model.first_rows(&read, from_host);
        let (sliding, full) = (self.sliding(), self.full());
        after(Part::Embedding);

        let mut operators = FewRows {
            batch: self.batch,
            positions,
            sliding: self.sliding.clone(),
            full: self.full.clone(),
            targets: Some(Targets {
                layers: &self.targets,
                sliding,
                full,
            }),
            after,
        };
        let mut shared = SharedKeyValues::default();
        let layers = 0..config.num_layers();
        let embeddings = embeddings.as_ref();
        let mut stream = model.layers(layers, stream, embeddings, &mut shared, &mut operators);

        let hidden = stream.norm(&model.norm);
        let (head, cap) = (model.head_weight(), config.final_logit_softcapping);
        let logits = few_rows::project(hidden.clone(), head.matrix(), cap, Origin::of(head));
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

    /// Positions of each sequence.
    fn count(&self) -> usize {
        self.inputs.rows() / self.batch
    }

    /// What queries of full layers see once all positions are written.
    fn full(&self) -> Visible {
        Visible {
            causal: self.count() > 1,
            ..self.written()
        }
    }

    /// What queries of sliding layers see in the ring then.
    fn sliding(&self) -> Visible {
        if self.ring.is_exact() && self.count() == 1 {
            // Of a ring that is full the last query sees all there is.
            return self.written();
        }
        // One sequence stands for all that are at the same positions.
        let sequences = match self.is_ragged {
            true => self.batch,
            false => 1,
        };
        let queries = [sequences, self.count()];
        self.ring.visible(queries, self.inputs.positions.clone())
    }

    /// All that is there.
    fn written(&self) -> Visible {
        Visible {
            lengths: Some(self.inputs.lengths.clone()),
            lengths_ahead: true,
            ..Visible::default()
        }
    }
}
