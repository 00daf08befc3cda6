//! A decoder layer: attention and MLP blocks around the residual stream.

use super::experts::Mixture;
use super::ops::{KEYS_ARE_THERE, LayerOps, OwnColumns, PerLayerBlock, ResidualStream};
use super::{Attention, Experts, Linear, Mlp, RmsNorm, Router, constant};
use crate::config::Gemma4Config;
use crate::model::cache::key_values::KeyValues;
use crate::model::observe::{LayerSite, Part};
use crate::op::column_slice::ColumnSlice;
use burn::{
    module::{Module, Param},
    tensor::{Device, Tensor},
};

/// A decoder layer. The field names equal the names of the checkpoint's tensors.
#[derive(Module, Debug)]
pub struct DecoderLayer {
    /// The attention block.
    pub self_attn: Attention,
    /// The dense MLP.
    pub mlp: Mlp,
    /// The norm before attention.
    pub input_layernorm: RmsNorm,
    /// The norm of the attention block's output.
    pub post_attention_layernorm: RmsNorm,
    /// The norm before the dense MLP.
    pub pre_feedforward_layernorm: RmsNorm,
    /// The norm of the feed-forward output: the dense MLP's output, or the sum of the dense MLP's and the experts'
    /// normalized outputs.
    pub post_feedforward_layernorm: RmsNorm,
    /// The MoE router, or `None` in a layer without experts.
    pub router: Option<Router>,
    /// The experts, whose output is added to the dense MLP's output. `None` means that the layer has no experts.
    pub experts: Option<Experts>,
    /// The norm of the dense MLP's output, which applies before the experts' output is added.
    pub post_feedforward_layernorm_1: Option<RmsNorm>,
    /// The norm of the experts' output, which applies before the dense MLP's output is added.
    pub post_feedforward_layernorm_2: Option<RmsNorm>,
    /// The norm before the experts.
    pub pre_feedforward_layernorm_2: Option<RmsNorm>,
    /// The gate projection of the per-layer embedding.
    pub per_layer_input_gate: Option<Linear>,
    /// The projection of the gated per-layer embedding to the residual stream.
    pub per_layer_projection: Option<Linear>,
    /// The norm of the projected per-layer embedding.
    pub post_per_layer_input_norm: Option<RmsNorm>,
    /// A scalar that multiplies the layer's output, `[1]`. Training does not change it.
    pub layer_scalar: Param<Tensor<1>>,
}

impl DecoderLayer {
    pub(crate) fn new(config: &Gemma4Config, layer: usize, device: &Device) -> Self {
        let (hidden, inputs) = (config.hidden_size, config.hidden_size_per_layer_input);
        let norm = || RmsNorm::new(hidden, config.rms_norm_eps, device);
        let linear = |input, output| Linear::new(input, output, config.initializer_range, device);
        let experts = config.experts.as_ref();
        let per_layer_embeddings = config.has_per_layer_embeddings();
        Self {
            self_attn: Attention::new(config, layer, device),
            mlp: Mlp::new(
                hidden,
                config.intermediate_size(layer),
                config.initializer_range,
                device,
            ),
            input_layernorm: norm(),
            post_attention_layernorm: norm(),
            pre_feedforward_layernorm: norm(),
            post_feedforward_layernorm: norm(),
            router: experts.map(|experts| Router::new(config, experts, device)),
            experts: experts.map(|experts| Experts::new(config, experts, device)),
            post_feedforward_layernorm_1: experts.map(|_| norm()),
            post_feedforward_layernorm_2: experts.map(|_| norm()),
            pre_feedforward_layernorm_2: experts.map(|_| norm()),
            per_layer_input_gate: per_layer_embeddings.then(|| linear(hidden, inputs)),
            per_layer_projection: per_layer_embeddings.then(|| linear(inputs, hidden)),
            post_per_layer_input_norm: per_layer_embeddings.then(norm),
            layer_scalar: constant(1.0, [1], device).set_require_grad(false),
        }
    }

    /// Runs the layer. Returns the residual stream, and the keys and values that the layer computed. A shared KV layer
    /// attends to `shared`, and returns no keys and values. `next` is the norm that follows the layer.
    ///
    /// # Panics
    /// Panics if the layer computes no keys and values, and `shared` holds none for the layer's type.
    pub(crate) fn forward<O: LayerOps>(
        &self,
        stream: ResidualStream,
        embedding: Option<ColumnSlice>,
        shared: Option<&KeyValues>,
        next: &RmsNorm,
        operators: &mut O,
    ) -> (ResidualStream, Option<KeyValues>) {
        let attention = &self.self_attn;
        let projections: Vec<&Linear> = [
            Some(&attention.q_proj),
            attention.k_proj.as_ref(),
            attention.v_proj.as_ref(),
        ]
        .into_iter()
        .flatten()
        .collect();
        let (stream, projected) =
            operators.project_normed(stream, &self.input_layernorm, &projections);
        let mut projected = projected.into_iter();
        let query = projected
            .next()
            .expect("project_normed gives the queries first");
        let own = projected.next().map(|key| {
            // Use the key projection's output as the value if the layer has no value projection.
            let value = projected.next().unwrap_or_else(|| key.clone());
            OwnColumns { key, value }
        });
        operators.after(Part::Projections);

        let (query, own) = operators.heads(attention, query, own, shared);
        let read = own.as_ref().or(shared).expect(KEYS_ARE_THERE);
        operators.after(Part::Heads);
        let shape = [query.dims()[0], query.dims()[2]];
        operators.observe(attention.layer, LayerSite::Query, || query.clone());

        let found = attention.attend(query, read);
        operators.after(Part::Attention);
        operators.observe(attention.layer, LayerSite::Attention, || {
            of_text(&found, shape)
        });
        let output = operators.project(found, &attention.o_proj);
        operators.after(Part::Projections);
        let before_mlp = &self.pre_feedforward_layernorm;
        let norm = &self.post_attention_layernorm;
        let mut stream = operators.add_before(stream, output, norm, None, before_mlp);
        operators.after(Part::Norms);

        let dense = operators.mlp(stream.norm(before_mlp), &self.mlp);
        operators.after(Part::Mlp);
        operators.observe(attention.layer, LayerSite::Mlp, || of_text(&dense, shape));
        let output = self.with_experts(&stream, dense, shape, operators);
        let norm = &self.post_feedforward_layernorm;
        let scalar = self.layer_scalar.val();
        let stream = match (
            &self.per_layer_input_gate,
            &self.per_layer_projection,
            &self.post_per_layer_input_norm,
            embedding,
        ) {
            (Some(gate), Some(projection), Some(after_embedding), Some(embedding)) => {
                let block = PerLayerBlock {
                    gate,
                    projection,
                    norm: after_embedding,
                    embedding,
                };
                operators.per_layer_block(stream, output, norm, block, scalar, next)
            }
            _ => operators.add_last(stream, output, norm, scalar, next),
        };
        operators.after(Part::Norms);
        operators.observe(attention.layer, LayerSite::Output, || {
            of_text(&stream.clone().into_rows(), shape)
        });
        (stream, own)
    }

    /// Returns the sum of the dense MLP's and the experts' normalized outputs, or `dense` if the layer has no experts.
    fn with_experts<O: LayerOps>(
        &self,
        stream: &ResidualStream,
        dense: Tensor<2>,
        shape: [usize; 2],
        operators: &mut O,
    ) -> Tensor<2> {
        let (Some(router), Some(experts), Some(after_dense), Some(after_experts), Some(before)) = (
            &self.router,
            &self.experts,
            &self.post_feedforward_layernorm_1,
            &self.post_feedforward_layernorm_2,
            &self.pre_feedforward_layernorm_2,
        ) else {
            return dense;
        };
        let layer = self.self_attn.layer;
        let mixture = Mixture {
            router,
            experts,
            norm: before,
        };
        let mixed = operators.experts(stream.clone().into_rows(), mixture, layer);
        operators.after(Part::Experts);
        operators.observe(layer, LayerSite::Experts, || of_text(&mixed, shape));
        let dense = ResidualStream::new(after_dense.forward(dense));
        let both = operators.add(dense, mixed, after_experts).into_rows();
        operators.after(Part::Norms);
        both
    }
}

/// Reshapes rows to `[batch, positions, columns]`.
fn of_text(rows: &Tensor<2>, [batch, positions]: [usize; 2]) -> Tensor<3> {
    let [_, columns] = rows.dims();
    rows.clone().reshape([batch, positions, columns])
}
