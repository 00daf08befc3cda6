//! One position of every sequence, by the kernels: what a layer computes in about a dozen launches.
//!
//! Nothing here depends on the host but the shapes. Which tokens and which position, the kernels read from the device, so
//! that the launches can be recorded and replayed.

use super::Part;
use crate::{
    Gemma4Config, Gemma4Model, LayerType,
    kernel::{self, Added, RotationTables},
    layer::{
        DecoderLayer,
        attention::{KeyValues, Visible},
    },
    model::Sources,
};
use burn::tensor::{Int, Tensor};

/// The computation of one position: everything it reads and writes.
pub(super) struct Position {
    /// Its tensors are the caller's model's.
    pub model: Gemma4Model,
    /// Keys and values of every layer that has its own.
    pub buffers: Vec<(Tensor<4>, Tensor<4>)>,
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
        let epsilon = config.rms_norm_eps;
        let batch = self.inputs.dims()[0] / 2;
        let tokens = self.inputs.clone().narrow(0, 0, batch);
        let positions = self.inputs.clone().narrow(0, batch, batch);
        let rows = |tensor: Tensor<3>| {
            let [batch, _, columns] = tensor.dims();
            tensor.reshape([batch, columns])
        };

        let tokens = tokens.reshape([batch, 1]);
        let embedded = model.embed_tokens.forward(tokens.clone());
        let project = |input: Tensor<3>, weight| {
            let projected = kernel::project(rows(input), weight, None);
            projected.unsqueeze_dim(1)
        };
        let own_inputs = model
            .per_layer_inputs(tokens, &embedded, project)
            .map(|inputs| {
                let [batch, _, layers, columns] = inputs.dims();
                inputs.reshape([batch, layers * columns])
            });
        let mut normed = rows(model.layers[0].input_layernorm.forward(embedded.clone()));
        let mut stream = rows(embedded);
        let visible = self.visible(config, &positions);
        after(Part::Embedding);

        let mut sources = Sources::default();
        for (index, layer) in model.layers.iter().enumerate() {
            let kind = config.layer_types[index];
            let queries = self.queries_and_keys(
                index,
                normed,
                &positions,
                |(key, value)| {
                    let visible = match kind {
                        LayerType::Sliding => visible[0].clone(),
                        LayerType::Full => visible[1].clone(),
                    };
                    let key_values = KeyValues {
                        key,
                        value,
                        visible,
                    };
                    sources.set(kind, key_values);
                },
                after,
            );
            let read = layer.self_attn.attend(queries, sources.get(kind));
            after(Part::Attention);
            let read = kernel::project(rows(read), layer.self_attn.o_proj.weight.val(), None);
            after(Part::Projections);

            let norm = &layer.post_attention_layernorm;
            (stream, normed) = kernel::residual_and_norm(
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
            (stream, normed) = feed_forward(
                layer,
                stream,
                normed,
                own_inputs.as_ref().map(|inputs| {
                    let columns = config.hidden_size_per_layer_input;
                    (inputs.clone(), index * columns)
                }),
                next.weight.val(),
                epsilon,
                after,
            );
        }

        let cap = config.final_logit_softcapping;
        let logits = kernel::project(normed, model.head(), cap);
        after(Part::Head);
        let likeliest = kernel::likeliest(logits.clone());
        after(Part::Likeliest);
        (logits, likeliest)
    }

    /// The layer's queries, `[batch, heads, 1, head_dim]`. Where it has keys and values of its own, they are written into
    /// their buffers, which go to `keep`.
    fn queries_and_keys(
        &self,
        index: usize,
        normed: Tensor<2>,
        positions: &Tensor<1, Int>,
        keep: impl FnOnce((Tensor<4>, Tensor<4>)),
        after: &mut dyn FnMut(Part),
    ) -> Tensor<4> {
        let config = self.model.config();
        let epsilon = config.rms_norm_eps;
        let attention = &self.model.layers[index].self_attn;
        let tables = match config.layer_types[index] {
            LayerType::Sliding => &self.sliding,
            LayerType::Full => &self.full,
        };
        let project = |weight: &crate::layer::Linear| {
            kernel::project(normed.clone(), weight.weight.val(), None)
        };
        let queries = project(&attention.q_proj);
        let keys = attention.k_proj.as_ref().zip(attention.k_norm.as_ref());
        let own = keys.map(|(k_proj, k_norm)| {
            let keys = project(k_proj);
            let values = match &attention.v_proj {
                Some(v_proj) => project(v_proj),
                None => keys.clone(),
            };
            (keys, values, k_norm.weight.val())
        });
        after(Part::Projections);

        if let Some((keys, values, weight)) = own {
            let (key, value) = self.buffers[index].clone();
            let positions = || positions.clone();
            keep((
                kernel::write_keys(keys, weight, tables, positions(), key, epsilon),
                kernel::write_values(values, positions(), value, epsilon),
            ));
        }
        let weight = attention.q_norm.weight.val();
        let queries = kernel::query_heads(queries, weight, tables, positions.clone(), epsilon);
        after(Part::Heads);
        queries
    }

    /// What queries see of sliding and of full layers' buffers: what is written, in a ring in any order.
    fn visible(&self, config: &Gemma4Config, positions: &Tensor<1, Int>) -> [Visible; 2] {
        let written = positions.clone() + 1;
        let in_ring = written.clone().clamp_max(config.sliding_window as i64);
        [in_ring, written].map(|lengths| Visible {
            lengths: Some(lengths),
            ..Visible::default()
        })
    }
}

/// The layer's part after attention: the stream, and its norm by `next_weight`.
fn feed_forward(
    layer: &DecoderLayer,
    stream: Tensor<2>,
    normed: Tensor<2>,
    own_inputs: Option<(Tensor<2>, usize)>,
    next_weight: Tensor<1>,
    epsilon: f64,
    after: &mut dyn FnMut(Part),
) -> (Tensor<2>, Tensor<2>) {
    let mlp = &layer.mlp;
    let inner = kernel::project_gated(normed, mlp.gate_proj.weight.val(), mlp.up_proj.weight.val());
    let of_mlp = kernel::project(inner, mlp.down_proj.weight.val(), None);
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
        own_inputs,
    ) {
        let stream = kernel::residual(added);
        after(Part::Norms);
        let gated = kernel::project_gate_of(stream.clone(), gate.weight.val(), inputs, start);
        added = Added {
            stream,
            added: kernel::project(gated, projection.weight.val(), None),
            weight: norm.weight.val(),
            epsilon,
        };
        after(Part::PerLayerInputs);
    }
    let result = kernel::residual_and_norm(added, Some(layer.layer_scalar.val()), next_weight);
    after(Part::Norms);
    result
}
