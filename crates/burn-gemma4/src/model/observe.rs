//! Observation of intermediate tensors and of the parts of a decode step.

use burn::tensor::Tensor;

/// A point in the model's computation where a tensor can be observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Site {
    /// The scaled token embeddings, `[batch, positions, hidden]`.
    Embedding,
    /// The per-layer embeddings (PLE), `[batch, positions, layers, columns]`.
    PerLayerEmbeddings,
    /// A point in the layer with this index.
    Layer(usize, LayerSite),
    /// The normalized hidden states from which the logits are computed, `[batch, positions, hidden]`.
    FinalNorm,
}

/// A point in a layer's computation where a tensor can be observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LayerSite {
    /// The normalized and rotated queries, `[batch, q_heads, positions, head_dim]`.
    Query,
    /// The normalized and rotated keys, `[batch, kv_heads, positions, head_dim]`, of layers that compute their own keys.
    Key,
    /// The normalized values, `[batch, kv_heads, positions, head_dim]`. Only layers that compute their own values report them.
    Value,
    /// The attention output before the output projection, `[batch, positions, q_heads · head_dim]`.
    Attention,
    /// The output of the dense MLP, `[batch, positions, hidden]`.
    Mlp,
    /// The MoE router's probabilities, `[batch · positions, experts]`.
    RouterProbabilities,
    /// The indices of the chosen experts as floats, `[batch · positions, top_k]`.
    RouterExperts,
    /// The weights of the chosen experts in the weighted sum of their outputs, `[batch · positions, top_k]`.
    RouterWeights,
    /// The output of the experts, `[batch, positions, hidden]`.
    Experts,
    /// The output of the layer, `[batch, positions, hidden]`.
    Output,
}

/// Receives intermediate tensors of a forward pass. The observer `()` ignores all tensors at no cost.
pub trait Observer {
    /// True if the observer uses the tensors. Otherwise a layer may run kernels that do not store all of them.
    const OBSERVES: bool = true;

    /// Receives the tensor at `site`, in the form of a function `tensor` that returns the tensor. The calls of
    /// `observe` follow the order of the computation.
    fn observe<const D: usize>(&mut self, site: Site, tensor: impl FnOnce() -> Tensor<D>);
}

impl Observer for () {
    const OBSERVES: bool = false;

    fn observe<const D: usize>(&mut self, _site: Site, _tensor: impl FnOnce() -> Tensor<D>) {}
}

/// A part of a decode step, for measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Part {
    /// Token embeddings and per-layer embeddings.
    Embedding,
    /// The projections before and after attention.
    Projections,
    /// The norms and rotation of queries, keys and values, and the writes to the KV cache.
    Heads,
    /// Attention.
    Attention,
    /// The dense MLP.
    Mlp,
    /// The mixture of experts (MoE).
    Experts,
    /// The addition of the per-layer embedding to the residual stream.
    PerLayerEmbeddings,
    /// The norms and additions that update the residual stream.
    Norms,
    /// The head, which computes the logits.
    Head,
    /// The choice of the next token.
    Choice,
}
