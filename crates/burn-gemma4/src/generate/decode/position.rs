//! One position of every sequence, by the kernels: what a layer computes in about a dozen launches.
//!
//! Nothing here depends on the host but the shapes. Which tokens and which position, the kernels read from the device, so
//! that the launches can be captured and replayed.

use super::Part;
use crate::{
    Gemma4Model, LayerType,
    model::{
        SharedKeyValues,
        cache::Target,
        layer::{
            DecoderLayer, Linear,
            attention::{KeyValues, Visible},
        },
    },
    op::{
        argmax::argmax,
        flat_rows,
        linear::few_rows,
        residual::{Added, residual, residual_and_norm},
        rope::{
            RotationTables,
            heads::{self, HeadOptions},
        },
    },
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

        let embedded = model.embed_tokens.forward(tokens.clone());
        let project = |input: Tensor<3>, weight| {
            let projected = few_rows::project(flat_rows(input), weight, None);
            projected.unsqueeze_dim(1)
        };
        let per_layer_embeddings = model
            .per_layer_embeddings(tokens, &embedded, project)
            .map(columns_of_layers);
        let written = positions.clone() + 1;
        let in_ring = written.clone().clamp_max(config.sliding_window as i64);
        let targets = Targets {
            layers: &self.targets,
            sliding_lengths: in_ring,
            full_lengths: written,
        };
        let layers = Layers {
            model,
            positions,
            sliding: self.sliding.clone(),
            full: self.full.clone(),
            per_layer_embeddings,
        };
        let normed = model.layers[0].input_layernorm.forward(embedded.clone());
        after(Part::Embedding);

        let (stream, normed) = (flat_rows(embedded), flat_rows(normed));
        let mut shared = SharedKeyValues::default();
        let normed = layers.run(0, stream, normed, &mut shared, Some(&targets), after);

        let cap = config.final_logit_softcapping;
        let logits = few_rows::project(normed, model.head(), cap);
        after(Part::Head);
        let argmax = argmax(logits.clone());
        after(Part::Argmax);
        (logits, argmax)
    }
}

/// `[batch, 1, layers, columns]` to `[batch, layers · columns]`.
pub(crate) fn columns_of_layers(inputs: Tensor<4>) -> Tensor<2> {
    let [batch, _, layers, columns] = inputs.dims();
    inputs.reshape([batch, layers * columns])
}

/// What layers read to compute one position.
pub(crate) struct Layers<'a> {
    pub model: &'a Gemma4Model,
    /// `[batch]`.
    pub positions: Tensor<1, Int>,
    pub sliding: RotationTables,
    pub full: RotationTables,
    /// `[batch, layers · columns]`.
    pub per_layer_embeddings: Option<Tensor<2>>,
}

/// Where the position's keys and values go, and what its queries see afterwards: what is written, in a ring in any order.
pub(crate) struct Targets<'a> {
    layers: &'a [Target],
    sliding_lengths: Tensor<1, Int>,
    full_lengths: Tensor<1, Int>,
}

impl Layers<'_> {
    /// The last layer's stream, normalised for the logits, `[batch, hidden]`: of the layers from `first` on, which has
    /// `stream` and its norm. With `targets`, layers that have keys and values of their own write them there; without,
    /// there are no such layers, and `shared` has what all of them read.
    pub fn run(
        &self,
        first: usize,
        mut stream: Tensor<2>,
        mut normed: Tensor<2>,
        shared: &mut SharedKeyValues,
        targets: Option<&Targets<'_>>,
        after: &mut dyn FnMut(Part),
    ) -> Tensor<2> {
        let model = self.model;
        let config = model.config();
        let epsilon = config.rms_norm_eps;
        for (index, layer) in model.layers.iter().enumerate().skip(first) {
            let kind = config.layer_types[index];
            let queries = self.queries_and_keys(index, normed, shared, targets, after);
            let read = layer.self_attn.attend(queries, shared.get(kind));
            after(Part::Attention);
            let read =
                few_rows::project(flat_rows(read), layer.self_attn.o_proj.weight.val(), None);
            after(Part::Projections);

            let norm = &layer.post_attention_layernorm;
            (stream, normed) = residual_and_norm(
                Added {
                    stream,
                    added: read,
                    weight: norm.weight.val(),
                    epsilon,
                },
                None,
                layer.pre_feedforward_layernorm.weight.val(),
            );
            after(Part::Norms);
            let next = match model.layers.get(index + 1) {
                Some(layer) => &layer.input_layernorm,
                None => &model.norm,
            };
            let per_layer_embeddings = self.per_layer_embeddings.as_ref().map(|inputs| {
                let start = index * config.hidden_size_per_layer_input;
                (inputs.clone(), start)
            });
            let next_weight = next.weight.val();
            (stream, normed) = feed_forward(
                layer,
                stream,
                normed,
                per_layer_embeddings,
                next_weight,
                epsilon,
                after,
            );
        }
        normed
    }

    /// The layer's queries, `[batch, heads, 1, head_dim]`. Where it has keys and values of its own, they become the ones that
    /// layers of its type read.
    fn queries_and_keys(
        &self,
        index: usize,
        normed: Tensor<2>,
        shared: &mut SharedKeyValues,
        targets: Option<&Targets<'_>>,
        after: &mut dyn FnMut(Part),
    ) -> Tensor<4> {
        let config = self.model.config();
        let epsilon = config.rms_norm_eps;
        let attention = &self.model.layers[index].self_attn;
        let kind = config.layer_types[index];
        let tables = match kind {
            LayerType::Sliding => &self.sliding,
            LayerType::Full => &self.full,
        };
        let positions = || self.positions.clone();
        let project =
            |linear: &Linear| few_rows::project(normed.clone(), linear.weight.val(), None);
        let queries = project(&attention.q_proj);
        let own = attention.k_proj.as_ref().zip(attention.k_norm.as_ref());
        let own = own.map(|(k_proj, k_norm)| {
            let keys = project(k_proj);
            let values = match &attention.v_proj {
                Some(v_proj) => project(v_proj),
                None => keys.clone(),
            };
            (keys, values, k_norm.weight.val())
        });
        after(Part::Projections);

        if let (Some((keys, values, weight)), Some(targets)) = (own, targets) {
            let lengths = match kind {
                LayerType::Sliding => &targets.sliding_lengths,
                LayerType::Full => &targets.full_lengths,
            };
            let visible = Visible {
                lengths: Some(lengths.clone()),
                ..Visible::default()
            };
            let write_values = |values, buffer, compact| {
                let options = HeadOptions { compact, epsilon };
                heads::write_values(values, positions(), buffer, options)
            };
            let write_keys = |keys, buffer, compact| {
                let options = HeadOptions { compact, epsilon };
                heads::write_keys(keys, weight, tables, positions(), buffer, options)
            };
            let key_values = match targets.layers[index].clone() {
                Target::Apart(buffers) => KeyValues::new(
                    write_keys(keys, buffers.key, None),
                    write_values(values, buffers.value, None),
                    visible,
                ),
                Target::Compact(buffer) => {
                    let rotated = Some(buffer.keys.layout.rotated_pairs);
                    let slots = write_values(values, buffer.slots, rotated);
                    let slots = write_keys(keys, slots, rotated);
                    buffer.keys.key_values(&slots, visible)
                }
            };
            shared.set(kind, key_values);
        }
        let key_values = shared.get(kind);
        let weight = attention.query_weight(key_values);
        let options = HeadOptions {
            compact: key_values
                .compact
                .as_ref()
                .map(|how| how.layout.rotated_pairs),
            epsilon,
        };
        let queries = heads::query_heads(queries, weight, tables, positions(), options);
        after(Part::Heads);
        queries
    }
}

/// The layer's part after attention: the stream, and its norm by `next_weight`.
fn feed_forward(
    layer: &DecoderLayer,
    stream: Tensor<2>,
    normed: Tensor<2>,
    per_layer_embeddings: Option<(Tensor<2>, usize)>,
    next_weight: Tensor<1>,
    epsilon: f64,
    after: &mut dyn FnMut(Part),
) -> (Tensor<2>, Tensor<2>) {
    let mlp = &layer.mlp;
    let inner =
        few_rows::project_gated(normed, mlp.gate_proj.weight.val(), mlp.up_proj.weight.val());
    let of_mlp = few_rows::project(inner, mlp.down_proj.weight.val(), None);
    after(Part::Mlp);
    let mut added = Added {
        stream,
        added: of_mlp,
        weight: layer.post_feedforward_layernorm.weight.val(),
        epsilon,
    };
    if let (Some(gate), Some(projection), Some(norm), Some((inputs, start))) = (
        &layer.per_layer_input_gate,
        &layer.per_layer_projection,
        &layer.post_per_layer_input_norm,
        per_layer_embeddings,
    ) {
        let stream = residual(added);
        after(Part::Norms);
        let gated = few_rows::project_gate_of(stream.clone(), gate.weight.val(), inputs, start);
        added = Added {
            stream,
            added: few_rows::project(gated, projection.weight.val(), None),
            weight: norm.weight.val(),
            epsilon,
        };
        after(Part::PerLayerEmbeddings);
    }
    let result = residual_and_norm(added, Some(layer.layer_scalar.val()), next_weight);
    after(Part::Norms);
    result
}
