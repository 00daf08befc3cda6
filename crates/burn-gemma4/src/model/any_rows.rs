//! The operators of a layer for any number of rows, with gradients: for prompts, training, and wherever the kernels for a few
//! rows do not serve.

#[cfg(feature = "cube")]
use super::layer::operators::OwnColumns;
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
#[cfg(feature = "cuda")]
use crate::op::linear::side_by_side;
#[cfg(feature = "cube")]
use crate::op::{
    self,
    gate::{GateColumns, gated_columns},
    mlp::adapted_mlp,
    rope::heads::{LayerColumns, OwnShape},
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
    /// Whether the backward of an adapter multiplies what is inside the dense networks anew.
    pub mlp_anew: bool,
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

    /// Cosines and sines of sliding layers, then of full ones, `[batch or 1, 1, positions, head_dim / 2]` each.
    #[cfg(feature = "cube")]
    pub fn tables(&self) -> [Tensor<4>; 4] {
        let [sliding, full] = [&self.sliding, &self.full].map(Rotation::parts);
        let [sliding_cos, sliding_sin] = sliding;
        let [full_cos, full_sin] = full;
        [sliding_cos, sliding_sin, full_cos, full_sin]
    }

    /// Those of [`tables`](Self::tables).
    #[cfg(feature = "cube")]
    pub fn of_tables([sliding_cos, sliding_sin, full_cos, full_sin]: [Tensor<4>; 4]) -> Self {
        Self {
            sliding: Rotation::of_parts([sliding_cos, sliding_sin]),
            full: Rotation::of_parts([full_cos, full_sin]),
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

impl<O: Observer> AnyRows<'_, O> {
    /// New keys and values, `[batch, kv_heads, positions, head_dim]`, behind those of earlier calls: what queries read.
    fn keep(&mut self, attention: &Attention, key: Tensor<4>, value: Tensor<4>) -> KeyValues {
        let (layer, kind, norm) = (attention.layer, attention.kind, attention.key_norm());
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
}

impl<O: Observer> Operators for AnyRows<'_, O> {
    fn project(&mut self, input: Tensor<2>, linear: &Linear) -> Tensor<2> {
        linear.rows(input)
    }

    #[cfg(feature = "cuda")]
    fn project_together(&mut self, input: Tensor<2>, projections: &[&Linear]) -> Vec<Columns> {
        in_one_product(&input, projections).unwrap_or_else(|| {
            let project = |linear: &&Linear| Columns::all(self.project(input.clone(), linear));
            projections.iter().map(project).collect()
        })
    }

    fn key_values(&mut self, attention: &Attention, key: Columns, value: Columns) -> KeyValues {
        let norm = attention.key_norm();
        let (weight, epsilon) = (norm.weight.val(), norm.epsilon());
        let rotation = self.rotations.of(attention.kind);
        let key = rotation.heads(key.columns(), self.batch, weight, epsilon);
        let value = rotation.value_heads(value.columns(), self.batch, epsilon);
        self.keep(attention, key, value)
    }

    #[cfg(feature = "cube")]
    fn heads_together(
        &mut self,
        attention: &Attention,
        query: &Columns,
        own: &OwnColumns,
    ) -> Option<(Tensor<4>, KeyValues)> {
        // Those of one product follow each other. What values are made of keys may share slots, which queries have to suit.
        if own.key.start == 0 || own.value.start == own.key.start {
            return None;
        }
        let weights = [
            attention.q_norm.weight.val(),
            attention.key_norm().weight.val(),
        ];
        let columns = LayerColumns {
            queries: query.start,
            count: query.count,
            keys: own.key.start,
            values: own.value.start,
            epsilon: attention.q_norm.epsilon(),
        };
        let own = OwnShape {
            sequences: self.batch,
            columns: own.key.count,
        };
        let rotation = self.rotations.of(attention.kind);
        let [query, key, value] =
            rotation.layer_heads(query.rows.clone(), weights, columns, own)?;
        Some((query, self.keep(attention, key, value)))
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
        #[cfg(feature = "cuda")]
        if let Some(both) = in_one_product(&input, &[&mlp.gate_proj, &mlp.up_proj])
            && let [gate, through] = both.as_slice()
        {
            return self.project(gated_by(gate, through), &mlp.down_proj);
        }
        #[cfg(feature = "cube")]
        if input.device().is_autodiff()
            && op::runs(&input.device(), input.dtype())
            && let Some(matrices) = mlp.adapted()
        {
            return adapted_mlp(input, matrices, self.mlp_anew);
        }
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
        #[cfg(feature = "cube")]
        if op::serve(&input) {
            return gated_by(&Columns::all(gate.rows(input)), &embedding);
        }
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

/// What several projections make of the same rows, in one product; where one multiplies them.
#[cfg(feature = "cuda")]
fn in_one_product(input: &Tensor<2>, projections: &[&Linear]) -> Option<Vec<Columns>> {
    let weights: Option<Vec<_>> = projections
        .iter()
        .map(|linear| match linear.weight.adapter() {
            Some(_) => None,
            None => linear.weight.matrix().into_whole(),
        })
        .collect();
    let weights = weights?;
    let counts: Vec<_> = weights.iter().map(|weight| weight.dims()[0]).collect();
    let rows = side_by_side(input, weights)?;
    Some(Columns::side_by_side(&rows, &counts))
}

/// A gate by kernels.
#[cfg(feature = "cube")]
fn gated_by(gate: &Columns, through: &Columns) -> Tensor<2> {
    let columns = GateColumns {
        gate: gate.start,
        through: through.start,
        count: gate.count,
    };
    gated_columns(gate.rows.clone(), through.rows.clone(), columns)
}
