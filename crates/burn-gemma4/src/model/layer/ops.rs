//! The operations of a layer as a trait, so that one definition of a layer serves prefill, training and decoding.

use super::{Attention, Linear, Mlp, RmsNorm, experts::Mixture};
use crate::op::column_slice::ColumnSlice;
use crate::{
    model::{
        cache::key_values::KeyValues,
        observe::{LayerSite, Part},
    },
    op::residual::{Next, ResidualAdd, residual, residual_before},
};
use burn::tensor::Tensor;

/// The operations of a layer. Rows, `[batch · positions, columns]`, are ordered by sequence, and within a sequence by
/// position.
pub(crate) trait LayerOps {
    /// Multiplies rows, `[rows, columns in]`, by the transpose of a weight. Returns `[rows, columns out]`.
    fn project(&mut self, input: Tensor<2>, linear: &Linear) -> Tensor<2>;

    /// Multiplies rows by the transposes of several weights. Returns one output per weight.
    fn project_together(&mut self, input: Tensor<2>, projections: &[&Linear]) -> Vec<ColumnSlice> {
        let project = |linear: &&Linear| ColumnSlice::all(self.project(input.clone(), linear));
        projections.iter().map(project).collect()
    }

    /// Normalizes and rotates a layer's projected keys and values, and appends them to the KV cache, if any. Returns the
    /// keys and values that the queries attend to.
    fn key_values(
        &mut self,
        attention: &Attention,
        key: ColumnSlice,
        value: ColumnSlice,
    ) -> KeyValues;

    /// Normalizes and rotates a layer's projected queries. Returns `[batch, q_heads, positions, head_dim]`, in the channel
    /// order of the keys in `key_values`.
    fn queries(
        &mut self,
        attention: &Attention,
        projected: ColumnSlice,
        key_values: &KeyValues,
    ) -> Tensor<4>;

    /// Returns a layer's queries. Also returns the layer's keys and values, if `own` holds their projections. If `own`
    /// is `None`, the queries attend to `shared`, the keys and values of an earlier layer.
    ///
    /// # Panics
    /// Panics if both `own` and `shared` are `None`.
    fn heads(
        &mut self,
        attention: &Attention,
        query: ColumnSlice,
        own: Option<OwnColumns>,
        shared: Option<&KeyValues>,
    ) -> (Tensor<4>, Option<KeyValues>) {
        let together = own
            .as_ref()
            .and_then(|own| self.heads_together(attention, &query, own));
        if let Some((query, own)) = together {
            return (query, Some(own));
        }
        let own = own.map(|own| self.key_values(attention, own.key, own.value));
        let read = own.as_ref().or(shared);
        let query = self.queries(attention, query, read.expect(KEYS_ARE_THERE));
        (query, own)
    }

    /// Computes [`queries`](Self::queries) and [`key_values`](Self::key_values) in one launch, or returns `None` if no
    /// kernel supports the layer.
    fn heads_together(
        &mut self,
        _attention: &Attention,
        _query: &ColumnSlice,
        _own: &OwnColumns,
    ) -> Option<(Tensor<4>, KeyValues)> {
        None
    }

    /// Runs the dense MLP.
    fn mlp(&mut self, input: Tensor<2>, mlp: &Mlp) -> Tensor<2>;

    /// Runs a layer's mixture of experts on rows of the residual stream.
    fn experts(&mut self, stream: Tensor<2>, mixture: Mixture, layer: usize) -> Tensor<2>;

    /// Computes `gelu(gate(input))` times the layer's per-layer embedding.
    fn gate(&mut self, input: Tensor<2>, gate: &Linear, embedding: ColumnSlice) -> Tensor<2>;

    /// Normalizes the residual stream with `norm`, then applies [`project_together`](Self::project_together).
    fn project_normed(
        &mut self,
        mut stream: ResidualStream,
        norm: &RmsNorm,
        projections: &[&Linear],
    ) -> (ResidualStream, Vec<ColumnSlice>) {
        let normed = stream.norm(norm);
        let projected = self.project_together(normed, projections);
        (stream, projected)
    }

    /// Computes [`add`](Self::add), then [`gate`](Self::gate) of the resulting residual stream.
    fn add_and_gate(
        &mut self,
        stream: ResidualStream,
        output: Tensor<2>,
        norm: &RmsNorm,
        gate: &Linear,
        embedding: ColumnSlice,
    ) -> (ResidualStream, Tensor<2>) {
        let rows = self.add(stream, output, norm).into_rows();
        self.after(Part::Norms);
        let gated = self.gate(rows.clone(), gate, embedding);
        (ResidualStream::new(rows), gated)
    }

    /// Adds a block's output to the residual stream, gates the layer's per-layer embedding by the sum, and adds the
    /// projection of the gated embedding. The last addition is [`add_last`](Self::add_last).
    fn per_layer_block(
        &mut self,
        stream: ResidualStream,
        output: Tensor<2>,
        norm: &RmsNorm,
        block: PerLayerBlock<'_>,
        scalar: Tensor<1>,
        next: &RmsNorm,
    ) -> ResidualStream {
        self.per_layer_parts(stream, output, norm, block, scalar, next)
    }

    /// Computes [`per_layer_block`](Self::per_layer_block) in separate operations.
    fn per_layer_parts(
        &mut self,
        stream: ResidualStream,
        output: Tensor<2>,
        norm: &RmsNorm,
        block: PerLayerBlock<'_>,
        scalar: Tensor<1>,
        next: &RmsNorm,
    ) -> ResidualStream {
        let (stream, gated) = self.add_and_gate(stream, output, norm, block.gate, block.embedding);
        let projected = self.project(gated, block.projection);
        self.after(Part::PerLayerEmbeddings);
        self.add_last(stream, projected, block.norm, scalar, next)
    }

    /// Computes [`add_before`](Self::add_before) for the last addition of a layer. The last addition always has a
    /// `scalar`. An implementation may defer this addition, so that the kernel of the next GEMV computes it.
    fn add_last(
        &mut self,
        stream: ResidualStream,
        output: Tensor<2>,
        norm: &RmsNorm,
        scalar: Tensor<1>,
        next: &RmsNorm,
    ) -> ResidualStream {
        self.add_before(stream, output, norm, Some(scalar), next)
    }

    /// Normalizes a block's output with `norm`, and adds the result to the residual stream.
    fn add(&mut self, stream: ResidualStream, output: Tensor<2>, norm: &RmsNorm) -> ResidualStream {
        ResidualStream::new(residual(added(stream, output, norm)))
    }

    /// Computes [`add`](Self::add), multiplies the residual stream by `scalar`, if given, and then applies the norm `next`.
    fn add_before(
        &mut self,
        stream: ResidualStream,
        output: Tensor<2>,
        norm: &RmsNorm,
        scalar: Option<Tensor<1>>,
        next: &RmsNorm,
    ) -> ResidualStream {
        let next = Next {
            scalar,
            weight: next.weight.val(),
        };
        ResidualStream::of(residual_before(added(stream, output, norm), next))
    }

    /// Passes a tensor to the observer.
    fn observe<const D: usize>(
        &mut self,
        _layer: usize,
        _site: LayerSite,
        _tensor: impl FnOnce() -> Tensor<D>,
    ) {
    }

    /// Runs the callback after the launches of one part of the step, `_part`, have been queued on the device.
    fn after(&mut self, _part: Part) {}
}

/// The modules of a layer's per-layer embedding block, and the layer's embedding of each row.
pub(crate) struct PerLayerBlock<'a> {
    pub gate: &'a Linear,
    pub projection: &'a Linear,
    /// The norm of the projection's output.
    pub norm: &'a RmsNorm,
    pub embedding: ColumnSlice,
}

/// Describes the addition of a block's normalized output to the residual stream.
pub(crate) fn added(stream: ResidualStream, output: Tensor<2>, norm: &RmsNorm) -> ResidualAdd {
    ResidualAdd {
        stream: stream.into_rows(),
        added: output,
        weight: norm.weight.val(),
        epsilon: norm.epsilon(),
    }
}

/// The message of the panic if a layer has queries but no keys and values.
pub(crate) const KEYS_ARE_THERE: &str = "a validated configuration has an earlier layer of the same type with keys for each shared KV layer";

/// The projected keys and values of a layer that computes its own keys and values.
pub(crate) struct OwnColumns {
    pub key: ColumnSlice,
    pub value: ColumnSlice,
}

/// The residual stream between the blocks of a layer.
#[derive(Clone)]
pub(crate) enum ResidualStream {
    /// The first tensor is the residual stream, `[rows, hidden]`. The second tensor is the stream after the next norm,
    /// if it is already computed.
    Ready(Box<(Tensor<2>, Option<Tensor<2>>)>),
    /// A pending addition to the residual stream, which the kernel of the next GEMV may compute together with the GEMV.
    #[cfg(feature = "cube")]
    Deferred(Box<(ResidualAdd, Next)>),
}

impl ResidualStream {
    /// Creates a residual stream that is not normalized yet.
    pub fn new(rows: Tensor<2>) -> Self {
        Self::of((rows, None))
    }

    /// Creates a residual stream from two tensors. The first is the stream, `[rows, hidden]`. The second is the stream
    /// after the next norm, if it is already computed.
    pub fn of(parts: (Tensor<2>, Option<Tensor<2>>)) -> Self {
        Self::Ready(Box::new(parts))
    }

    /// Returns the residual stream, `[rows, hidden]`. Also returns the stream after the next norm, if one launch has computed
    /// both tensors.
    fn parts(self) -> (Tensor<2>, Option<Tensor<2>>) {
        match self {
            Self::Ready(parts) => *parts,
            #[cfg(feature = "cube")]
            Self::Deferred(due) => {
                let (added, next) = *due;
                residual_before(added, next)
            }
        }
    }

    /// Returns the residual stream, `[rows, hidden]`.
    pub fn into_rows(self) -> Tensor<2> {
        self.parts().0
    }

    /// Returns the residual stream after `norm`, which must be the next norm that the model applies to the stream.
    pub fn norm(&mut self, norm: &RmsNorm) -> Tensor<2> {
        let (rows, normed) = self.clone().parts();
        let normed = normed.unwrap_or_else(|| norm.forward(rows.clone()));
        *self = Self::new(rows);
        normed
    }
}
