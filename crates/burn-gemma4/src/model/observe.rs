//! A look at what a model computes on its way.

use burn::tensor::Tensor;

/// A place in the model's computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Site {
    /// `[batch, positions, hidden]`: the scaled embeddings.
    Embedding,
    /// `[batch, positions, layers, columns]`: the per-layer embeddings (PLE).
    PerLayerEmbeddings,
    /// In a layer.
    Layer(usize, LayerSite),
    /// `[batch, positions, hidden]`: what the logits are made of.
    FinalNorm,
}

/// A place in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LayerSite {
    /// `[batch, q_heads, positions, head_dim]`, normalised and rotated.
    Query,
    /// `[batch, kv_heads, positions, head_dim]`, normalised and rotated; of layers that have their own.
    Key,
    /// `[batch, kv_heads, positions, head_dim]`, normalised; of layers that have their own.
    Value,
    /// `[batch, positions, q_heads · head_dim]`: what the queries read.
    Attention,
    /// `[batch, positions, hidden]`: of the dense feed-forward network.
    Mlp,
    /// `[batch · positions, experts]`.
    RouterProbabilities,
    /// `[batch · positions, top_k]`: the numbers of the experts, as floats.
    RouterExperts,
    /// `[batch · positions, top_k]`.
    RouterWeights,
    /// `[batch, positions, hidden]`: of the experts.
    Experts,
    /// `[batch, positions, hidden]`: of the layer.
    Output,
}

/// Sees the tensors on the way. `()` looks at nothing and costs nothing.
pub trait Observer {
    /// Called at each place, in the order of the computation. `tensor` gives what is there, in the model's dtype.
    fn observe<const D: usize>(&mut self, site: Site, tensor: impl FnOnce() -> Tensor<D>);
}

impl Observer for () {
    fn observe<const D: usize>(&mut self, _site: Site, _tensor: impl FnOnce() -> Tensor<D>) {}
}

/// A part of a token's computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Part {
    /// Embeddings, of tokens and per layer.
    Embedding,
    /// The products before and after attention.
    Projections,
    /// Norms and rotation of heads, and writes into the cache.
    Heads,
    /// Attention.
    Attention,
    /// The feed-forward network.
    Mlp,
    /// The mixture of experts beside it.
    Experts,
    /// The per-layer embeddings on their way into the residual stream.
    PerLayerEmbeddings,
    /// Norms and sums of the residual stream.
    Norms,
    /// Logits.
    Head,
    /// The next token.
    Choice,
}
