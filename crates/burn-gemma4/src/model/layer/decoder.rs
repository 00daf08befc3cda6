//! One layer: attention and feed-forward networks around the residual stream.

use super::{Attention, Experts, Linear, Mlp, RmsNorm, Router, attention::KeyValues, constant};
use crate::{
    Gemma4Config,
    model::observe::{LayerSite, Observer, Site},
    op::{gelu::gelu, rope::Rotation},
};
use burn::{
    module::{Module, Param},
    tensor::{Device, Tensor},
};

/// One layer, by the names of the checkpoint's tensors.
#[derive(Module, Debug)]
pub struct DecoderLayer {
    /// Attention.
    pub self_attn: Attention,
    /// The dense feed-forward network.
    pub mlp: Mlp,
    /// Before attention.
    pub input_layernorm: RmsNorm,
    /// Of what attention adds.
    pub post_attention_layernorm: RmsNorm,
    /// Before the dense network.
    pub pre_feedforward_layernorm: RmsNorm,
    /// Of what the feed-forward networks add.
    pub post_feedforward_layernorm: RmsNorm,
    /// Chooses experts.
    pub router: Option<Router>,
    /// The experts beside the dense network.
    pub experts: Option<Experts>,
    /// Of what the dense network adds to the experts.
    pub post_feedforward_layernorm_1: Option<RmsNorm>,
    /// Of what the experts add to the dense network.
    pub post_feedforward_layernorm_2: Option<RmsNorm>,
    /// Before the experts.
    pub pre_feedforward_layernorm_2: Option<RmsNorm>,
    /// Opens the gate of the per-layer embedding.
    pub per_layer_input_gate: Option<Linear>,
    /// Brings the per-layer embedding into the residual stream.
    pub per_layer_projection: Option<Linear>,
    /// Of what they add.
    pub post_per_layer_input_norm: Option<RmsNorm>,
    /// `[1]`: the factor of the whole stream, which is not trained.
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

    /// Attention's part: what the residual stream `[batch, positions, hidden]` becomes with the layer's queries
    /// reading `key_values`. `normed` is the stream after [`Self::input_layernorm`].
    pub(crate) fn attention<O: Observer>(
        &self,
        stream: Tensor<3>,
        normed: Tensor<3>,
        rotation: &Rotation,
        key_values: &KeyValues,
        observer: &mut Observed<'_, O>,
    ) -> Tensor<3> {
        let query = self.self_attn.query(normed, rotation, key_values);
        observer.see(LayerSite::Query, || query.clone());
        let read = self.self_attn.attend(query, key_values);
        observer.see(LayerSite::Attention, || read.clone());
        let read = self.self_attn.o_proj.forward(read);
        self.post_attention_layernorm.add_to(stream, read)
    }

    /// The rest of the layer, after attention. `inputs` are the layer's of the per-layer embeddings, `[batch, positions, columns]`.
    pub(crate) fn feed_forward<O: Observer>(
        &self,
        stream: Tensor<3>,
        inputs: Option<Tensor<3>>,
        observer: &mut Observed<'_, O>,
    ) -> Tensor<3> {
        let dense = self
            .mlp
            .forward(self.pre_feedforward_layernorm.forward(stream.clone()));
        observer.see(LayerSite::Mlp, || dense.clone());
        let added = self.with_experts(&stream, dense, observer);
        let mut stream = self.post_feedforward_layernorm.add_to(stream, added);

        if let (Some(gate), Some(projection), Some(norm), Some(inputs)) = (
            &self.per_layer_input_gate,
            &self.per_layer_projection,
            &self.post_per_layer_input_norm,
            inputs,
        ) {
            let gated = gelu(gate.forward(stream.clone())) * inputs;
            stream = norm.add_to(stream, projection.forward(gated));
        }
        let stream = stream * self.layer_scalar.val().unsqueeze::<3>();
        observer.see(LayerSite::Output, || stream.clone());
        stream
    }

    /// What the dense network and the experts add together; `dense` alone without experts.
    fn with_experts<O: Observer>(
        &self,
        stream: &Tensor<3>,
        dense: Tensor<3>,
        observer: &mut Observed<'_, O>,
    ) -> Tensor<3> {
        let (Some(router), Some(experts), Some(after_dense), Some(after_experts), Some(before)) = (
            &self.router,
            &self.experts,
            &self.post_feedforward_layernorm_1,
            &self.post_feedforward_layernorm_2,
            &self.pre_feedforward_layernorm_2,
        ) else {
            return dense;
        };
        let [batch, positions, hidden] = stream.dims();
        let rows = stream.clone().reshape([batch * positions, hidden]);
        let routing = router.forward(rows.clone());
        observer.see(LayerSite::RouterProbabilities, || {
            routing.probabilities.clone()
        });
        observer.see(LayerSite::RouterExperts, || routing.experts.clone().float());
        observer.see(LayerSite::RouterWeights, || routing.weights.clone());
        let mixed = experts
            .forward(before.forward(rows), &routing)
            .reshape([batch, positions, hidden]);
        observer.see(LayerSite::Experts, || mixed.clone());
        after_dense.forward(dense) + after_experts.forward(mixed)
    }
}

/// An observer of one layer.
pub(crate) struct Observed<'a, O> {
    pub layer: usize,
    pub observer: &'a mut O,
}

impl<O: Observer> Observed<'_, O> {
    pub fn see<const D: usize>(&mut self, site: LayerSite, tensor: impl FnOnce() -> Tensor<D>) {
        self.observer.observe(Site::Layer(self.layer, site), tensor);
    }
}
