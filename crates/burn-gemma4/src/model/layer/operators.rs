//! What a layer is computed by: one definition of a layer serves prompts, training and decoding by kernels.

use super::{Attention, Linear, Mlp, RmsNorm, experts::Mixture};
use crate::{
    model::{
        cache::key_values::KeyValues,
        observe::{LayerSite, Part},
    },
    op::residual::{Added, Next, residual, residual_before},
};
use burn::tensor::Tensor;

/// The operators of a layer. Rows are `[batch · positions, columns]`, a sequence's positions in their order.
pub(crate) trait Operators {
    /// `[rows, columns in]` to `[rows, columns out]`.
    fn project(&mut self, input: Tensor<2>, linear: &Linear) -> Tensor<2>;

    /// What several projections make of the same rows.
    fn project_together(&mut self, input: Tensor<2>, projections: &[&Linear]) -> Vec<Columns> {
        let project = |linear: &&Linear| Columns::all(self.project(input.clone(), linear));
        projections.iter().map(project).collect()
    }

    /// What queries read of a layer with keys and values of its own, whose projections these are. They go where later calls find
    /// them, if there are any.
    fn key_values(&mut self, attention: &Attention, key: Columns, value: Columns) -> KeyValues;

    /// The queries of a projection, for `key_values`: `[batch, q_heads, positions, head_dim]`.
    fn queries(
        &mut self,
        attention: &Attention,
        projected: Columns,
        key_values: &KeyValues,
    ) -> Tensor<4>;

    /// The queries of a layer, and its keys and values where it has its own, whose projections are `own`: else queries are for those
    /// of an earlier layer, `shared`.
    ///
    /// # Panics
    /// Without keys and values to read.
    fn heads(
        &mut self,
        attention: &Attention,
        query: Columns,
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

    /// What [`queries`](Self::queries) and [`key_values`](Self::key_values) are, where one launch makes both.
    fn heads_together(
        &mut self,
        _attention: &Attention,
        _query: &Columns,
        _own: &OwnColumns,
    ) -> Option<(Tensor<4>, KeyValues)> {
        None
    }

    /// The dense feed-forward network.
    fn mlp(&mut self, input: Tensor<2>, mlp: &Mlp) -> Tensor<2>;

    /// What the experts of a layer make of the residual stream.
    fn experts(&mut self, stream: Tensor<2>, mixture: Mixture, layer: usize) -> Tensor<2>;

    /// `gelu(gate(input))` times the layer's per-layer embedding.
    fn gate(&mut self, input: Tensor<2>, gate: &Linear, embedding: Columns) -> Tensor<2>;

    /// [`project_together`](Self::project_together) of the stream before a layer, normalised by `norm`.
    fn project_normed(
        &mut self,
        mut stream: Stream,
        norm: &RmsNorm,
        projections: &[&Linear],
    ) -> (Stream, Vec<Columns>) {
        let normed = stream.norm(norm);
        let projected = self.project_together(normed, projections);
        (stream, projected)
    }

    /// [`add`](Self::add), and [`gate`](Self::gate) of what the stream is then.
    fn add_and_gate(
        &mut self,
        stream: Stream,
        output: Tensor<2>,
        norm: &RmsNorm,
        gate: &Linear,
        embedding: Columns,
    ) -> (Stream, Tensor<2>) {
        let rows = self.add(stream, output, norm).into_rows();
        self.after(Part::Norms);
        let gated = self.gate(rows.clone(), gate, embedding);
        (Stream::new(rows), gated)
    }

    /// [`add_before`](Self::add_before) at the end of a layer.
    fn add_last(
        &mut self,
        stream: Stream,
        output: Tensor<2>,
        norm: &RmsNorm,
        scalar: Tensor<1>,
        next: &RmsNorm,
    ) -> Stream {
        self.add_before(stream, output, norm, Some(scalar), next)
    }

    /// The stream with a block's output, normalised by `norm`.
    fn add(&mut self, stream: Stream, output: Tensor<2>, norm: &RmsNorm) -> Stream {
        Stream::new(residual(added(stream, output, norm)))
    }

    /// The same times `scalar`, where there is one, before the norm `next`.
    fn add_before(
        &mut self,
        stream: Stream,
        output: Tensor<2>,
        norm: &RmsNorm,
        scalar: Option<Tensor<1>>,
        next: &RmsNorm,
    ) -> Stream {
        let next = Next {
            scalar,
            weight: next.weight.val(),
        };
        Stream::of(residual_before(added(stream, output, norm), next))
    }

    /// A look at a tensor on the way.
    fn observe<const D: usize>(
        &mut self,
        _layer: usize,
        _site: LayerSite,
        _tensor: impl FnOnce() -> Tensor<D>,
    ) {
    }

    /// Called when a part of the layer has been put on the device.
    fn after(&mut self, _part: Part) {}
}

/// What a block adds to the stream.
pub(crate) fn added(stream: Stream, output: Tensor<2>, norm: &RmsNorm) -> Added {
    Added {
        stream: stream.into_rows(),
        added: output,
        weight: norm.weight.val(),
        epsilon: norm.epsilon(),
    }
}

/// Why queries find what they read.
pub(crate) const KEYS_ARE_THERE: &str =
    "validated: a layer without keys comes after one of its type with keys";

/// The projections of a layer's own keys and values.
pub(crate) struct OwnColumns {
    pub key: Columns,
    pub value: Columns,
}

/// The residual stream.
#[derive(Clone)]
pub(crate) enum Stream {
    /// `[rows, hidden]`, and the norm that comes next, where it was computed along with the rows.
    There(Box<(Tensor<2>, Option<Tensor<2>>)>),
    /// What it becomes when something is added, which nothing has computed yet: the next product may.
    #[cfg(feature = "cube")]
    Due(Box<(Added, Next)>),
}

impl Stream {
    /// Nothing else is known of the rows.
    pub fn new(rows: Tensor<2>) -> Self {
        Self::of((rows, None))
    }

    /// With the norm that comes next.
    pub fn of(parts: (Tensor<2>, Option<Tensor<2>>)) -> Self {
        Self::There(Box::new(parts))
    }

    /// `[rows, hidden]`, and the next norm where it was computed along with them.
    fn parts(self) -> (Tensor<2>, Option<Tensor<2>>) {
        match self {
            Self::There(parts) => *parts,
            #[cfg(feature = "cube")]
            Self::Due(due) => {
                let (added, next) = *due;
                residual_before(added, next)
            }
        }
    }

    /// `[rows, hidden]`.
    pub fn into_rows(self) -> Tensor<2> {
        self.parts().0
    }

    /// The next norm, which is `norm`.
    pub fn norm(&mut self, norm: &RmsNorm) -> Tensor<2> {
        let (rows, normed) = self.clone().parts();
        let normed = normed.unwrap_or_else(|| norm.forward(rows.clone()));
        *self = Self::new(rows);
        normed
    }
}

/// Some columns of a matrix of rows.
#[derive(Clone, Debug)]
pub(crate) struct Columns {
    pub rows: Tensor<2>,
    /// The first column.
    pub start: usize,
    /// How many.
    pub count: usize,
}

impl Columns {
    /// So many for each of `counts`, one after the other.
    #[cfg(feature = "cube")]
    pub fn side_by_side(rows: &Tensor<2>, counts: &[usize]) -> Vec<Self> {
        let mut start = 0;
        let columns = counts.iter().map(|count| {
            start += count;
            Self {
                rows: rows.clone(),
                start: start - count,
                count: *count,
            }
        });
        columns.collect()
    }

    /// All of them.
    pub fn all(rows: Tensor<2>) -> Self {
        let [_, count] = rows.dims();
        Self {
            rows,
            start: 0,
            count,
        }
    }

    /// `[rows, count]`.
    pub fn columns(self) -> Tensor<2> {
        let [_, columns] = self.rows.dims();
        match columns == self.count {
            true => self.rows,
            false => self.rows.narrow(1, self.start, self.count),
        }
    }
}
