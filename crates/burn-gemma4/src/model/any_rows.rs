//! The operators of a layer for any number of rows, with gradients: for prompts, training, and wherever the kernels for a few
//! rows do not serve.

use super::{
    cache::{
        Cache, Call,
        key_values::{KeyValues, Visible},
        slots::Slots,
    },
    layer::{
        Attention, Linear, Mlp,
        experts::Mixture,
        operators::{Columns, Operators},
    },
    observe::{LayerSite, Observer, Site},
};
use crate::{
    LayerType,
    op::{
        flat_rows,
        gate::gated,
        rope::{Positions, Rotation, tables::Rope},
    },
};
use burn::tensor::{DType, Device, Int, Tensor};

/// The operators in one call.
pub(crate) struct AnyRows<'a, O> {
    pub batch: usize,
    pub rotations: Rotations,
    /// Of sliding layers.
    pub window: usize,
    /// `[batch, positions]`: the document of each token, where a row has several.
    pub segments: Option<Tensor<2, Int>>,
    /// Where a layer's own keys and values go, behind those of earlier calls; without, to its queries alone.
    pub cache: Option<(&'a mut Cache, Call)>,
    pub observer: &'a mut O,
}

/// The rotations of a call's positions.
#[derive(Clone)]
pub(crate) struct Rotations {
    sliding: Rotation,
    full: Rotation,
}

impl Rotations {
    pub fn new(rope: &Rope, positions: &Positions, dtype: DType, device: &Device) -> Self {
        let rotation = |kind| rope.rotation(kind, positions, dtype, device);
        Self {
            sliding: rotation(LayerType::Sliding),
            full: rotation(LayerType::Full),
        }
    }

    /// Those of the last `count` positions.
    pub fn last(&self, count: usize) -> Self {
        Self {
            sliding: self.sliding.last(count),
            full: self.full.last(count),
        }
    }

    fn positions(&self) -> usize {
        self.full.positions()
    }

    fn of(&self, kind: LayerType) -> &Rotation {
        match kind {
            LayerType::Sliding => &self.sliding,
            LayerType::Full => &self.full,
        }
    }
}

impl<O> AnyRows<'_, O> {
    /// Rows as `[batch, positions, columns]`. Burn's fusion would tune products of rows anew with everything elementwise that
    /// comes after them.
    fn of_text(&self, rows: Tensor<2>) -> Tensor<3> {
        let [_, columns] = rows.dims();
        rows.reshape([self.batch, self.rotations.positions(), columns])
    }
}

impl<O: Observer> Operators for AnyRows<'_, O> {
    fn project(&mut self, input: Tensor<2>, linear: &Linear) -> Tensor<2> {
        linear.rows(input)
    }

    fn key_values(&mut self, attention: &Attention, key: Columns, value: Columns) -> KeyValues {
        let (layer, kind, norm) = (attention.layer, attention.kind, attention.key_norm());
        let (weight, epsilon) = (norm.weight.val(), norm.epsilon());
        let rotation = self.rotations.of(kind);
        let key = rotation.heads(key.columns(), self.batch, weight, epsilon);
        let value = rotation.value_heads(value.columns(), self.batch, epsilon);
        self.observe(layer, LayerSite::Key, || key.clone());
        self.observe(layer, LayerSite::Value, || value.clone());
        match &mut self.cache {
            Some((cache, call)) => cache.extend(layer, &norm.weight, key, value, call),
            None => {
                let visible = Visible {
                    segments: self.segments.clone(),
                    ..Visible::in_order(kind, self.window)
                };
                KeyValues::new(Slots::Whole(key), Slots::Whole(value), visible)
            }
        }
    }

    fn queries(
        &mut self,
        attention: &Attention,
        projected: Columns,
        key_values: &KeyValues,
    ) -> Tensor<4> {
        let weight = attention.query_weight(key_values);
        let rotation = self.rotations.of(attention.kind);
        let epsilon = attention.q_norm.epsilon();
        let queries = rotation.heads(projected.columns(), self.batch, weight, epsilon);
        match &key_values.compact {
            Some(compact) => compact.queries(queries),
            None => queries,
        }
    }

    fn mlp(&mut self, input: Tensor<2>, mlp: &Mlp) -> Tensor<2> {
        flat_rows(mlp.forward(self.of_text(input)))
    }

    fn experts(&mut self, stream: Tensor<2>, mixture: Mixture, layer: usize) -> Tensor<2> {
        let routing = mixture.router.forward(stream.clone());
        self.observe(layer, LayerSite::RouterProbabilities, || {
            routing.probabilities.clone()
        });
        self.observe(layer, LayerSite::RouterExperts, || {
            routing.experts.clone().float()
        });
        self.observe(layer, LayerSite::RouterWeights, || routing.weights.clone());
        mixture
            .experts
            .forward(mixture.norm.forward(stream), &routing)
    }

    fn gate(&mut self, input: Tensor<2>, gate: &Linear, embedding: Columns) -> Tensor<2> {
        let gate = gate.forward(self.of_text(input));
        flat_rows(gated(gate, self.of_text(embedding.columns())))
    }

    fn observe<const D: usize>(
        &mut self,
        layer: usize,
        site: LayerSite,
        tensor: impl FnOnce() -> Tensor<D>,
    ) {
        self.observer.observe(Site::Layer(layer, site), tensor);
    }
}
