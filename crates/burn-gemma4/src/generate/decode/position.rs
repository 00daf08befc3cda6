//! One position of every sequence, from its token to the next one's logits.
//!
//! Nothing here depends on the host but the shapes. Which tokens and which position, the kernels read from the device, so
//! that the launches can be captured and replayed.

use crate::{
    Gemma4Model,
    model::{
        cache::{Target, key_values::SharedKeyValues},
        few_rows::{FewRows, Targets},
        layer::operators::Stream,
        observe::Part,
    },
    op::{argmax::argmax, flat_rows, linear::few_rows, rope::RotationTables},
};
use burn::tensor::{Int, Tensor};

/// The computation of one position: everything it reads and writes.
pub(super) struct Position {
    /// Its tensors are the caller's model's.
    pub model: Gemma4Model,
    /// Where every layer that has keys and values of its own writes them.
    pub targets: Vec<Target>,
    pub sliding: RotationTables,
    pub full: RotationTables,
    /// `[2 · batch]`: the sequences' tokens, then their positions.
    pub inputs: Tensor<1, Int>,
}

/// Logits, `[batch, vocabulary]`, and the likeliest tokens, `[batch]`.
pub(super) type Outputs = (Tensor<2>, Tensor<1, Int>);

impl Position {
    pub fn compute(&self, after: &mut dyn FnMut(Part)) -> Outputs {
        let model = &self.model;
        let config = model.config();
        let batch = self.inputs.dims()[0] / 2;
        let tokens = self.inputs.clone().narrow(0, 0, batch).reshape([batch, 1]);
        let positions = self.inputs.clone().narrow(0, batch, batch);

        let embedded = flat_rows(model.embed_tokens.forward(tokens.clone()));
        let project = |input, weight| few_rows::project(input, weight, None);
        let embeddings = model.per_layer_embeddings(tokens, &embedded, project);
        let written = positions.clone() + 1;
        let in_ring = written.clone().clamp_max(config.sliding_window as i64);
        after(Part::Embedding);

        let mut operators = FewRows {
            positions,
            sliding: self.sliding.clone(),
            full: self.full.clone(),
            targets: Some(Targets {
                layers: &self.targets,
                sliding_lengths: in_ring,
                full_lengths: written,
            }),
            after,
        };
        let mut shared = SharedKeyValues::default();
        let (layers, stream) = (0..config.num_layers(), Stream::new(embedded));
        let embeddings = embeddings.as_ref();
        let mut stream = model.layers(layers, stream, embeddings, &mut shared, &mut operators);

        let cap = config.final_logit_softcapping;
        let logits = few_rows::project(stream.norm(&model.norm), model.head(), cap);
        after(Part::Head);
        let argmax = argmax(logits.clone());
        after(Part::Argmax);
        (logits, argmax)
    }
}
