//! A layer's operations for any number of rows, with gradients. Decoding uses these operations only if the decode
//! kernels do not support the model.

use super::adapters::PassAdapters;
#[cfg(feature = "cube")]
use super::cache::history::Continuation;
use super::cache::key_values::KeyValues;
use super::cache::packed::destination::PackedDestination;
use super::cache::slots::Slots;
use super::cache::{Cache, Call};
use super::embedding_gemma::PackedTexts;
use super::layer::experts::Mixture;
use super::layer::ops::LayerOps;
#[cfg(feature = "cube")]
use super::layer::ops::OwnColumns;
use super::layer::{Attention, Linear, Mlp};
use super::observe::{LayerSite, Observer, Site};
use super::row_rules::RowRules;
use crate::config::LayerType;
#[cfg(feature = "cube")]
use crate::op;
use crate::op::column_slice::ColumnSlice;
use crate::op::flat_rows;
use crate::op::geglu::gated;
#[cfg(feature = "cube")]
use crate::op::geglu::{GateColumns, gated_columns};
use crate::op::linear;
#[cfg(feature = "cuda")]
use crate::op::linear::side_by_side;
#[cfg(feature = "cube")]
use crate::op::mlp::adapted_mlp;
#[cfg(feature = "cuda")]
use crate::op::moe_router::Choice;
#[cfg(feature = "cube")]
use crate::op::rope::heads::{LayerColumns, OwnShape};
use crate::op::rope::tables::Rope;
use crate::op::rope::{Positions, Rotation};
use burn::tensor::{DType, Device, Int, Tensor};

/// The operations of a layer in one call of the model.
pub(crate) struct PrefillOps<'a, O> {
    pub batch: usize,
    pub rotations: Rotations,
    /// The window of sliding layers, in tokens.
    pub window: usize,
    /// The rules that decide which keys tokens see if the call has no KV cache.
    pub rules: RowRules,
    /// The place for the keys and values that later calls read.
    pub destination: KvDestination<'a>,
    /// The adapters that the rows select, or `None` if no row selects an adapter.
    pub adapters: Option<&'a PassAdapters>,
    /// True if the backward pass recomputes the activations inside the dense MLPs that have LoRA adapters.
    pub mlp_recompute: bool,
    pub observer: &'a mut O,
}

/// The place to which a call writes the keys and values that later calls read.
pub(crate) enum KvDestination<'a> {
    /// The call drops the keys and values, as in training.
    Dropped,
    /// The call drops the keys and values, as in an encoder. A token sees its text in both directions.
    Encoder(&'a PackedTexts),
    /// The KV cache.
    Cache(&'a mut Cache, Box<Call>),
    /// The keys and values of packed prompts.
    Packed(PackedDestination<'a>),
    /// A list with the keys and values of each layer that computes its own keys and values. The list is in the order of
    /// the layers. Each tensor is `[batch, kv_heads, positions, head_dim]`.
    #[cfg(feature = "cube")]
    List(&'a mut Vec<[Tensor<4>; 2]>),
    /// A copy of the keys and values of earlier tokens, after which the new tokens follow.
    #[cfg(feature = "cube")]
    History(Continuation<'a>),
}

/// The cosines and sines of the rotary embedding (RoPE) at a call's positions, for both layer types.
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

    /// Returns four tables: the cosines and sines of sliding-window layers, then the cosines and sines of full-attention
    /// layers. Each table is `[batch or 1, 1, positions, head_dim / 2]`.
    #[cfg(feature = "cube")]
    pub fn tables(&self) -> [Tensor<4>; 4] {
        let [sliding, full] = [&self.sliding, &self.full].map(Rotation::parts);
        let [sliding_cos, sliding_sin] = sliding;
        let [full_cos, full_sin] = full;
        [sliding_cos, sliding_sin, full_cos, full_sin]
    }

    /// Builds the rotary embeddings of both layer types from the cosines and sines that [`tables`](Self::tables) returns.
    #[cfg(feature = "cube")]
    pub fn of_tables([sliding_cos, sliding_sin, full_cos, full_sin]: [Tensor<4>; 4]) -> Self {
        Self {
            sliding: Rotation::of_parts([sliding_cos, sliding_sin]),
            full: Rotation::of_parts([full_cos, full_sin]),
        }
    }

    /// Returns the rotations of the last `count` positions.
    pub fn last(&self, count: usize) -> Self {
        Self {
            sliding: self.sliding.last(count),
            full: self.full.last(count),
        }
    }

    /// Returns the rotations of the positions with these indices.
    pub fn select(&self, indices: &Tensor<1, Int>) -> Self {
        Self {
            sliding: self.sliding.select(indices),
            full: self.full.select(indices),
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

impl<O> PrefillOps<'_, O> {
    /// Reshapes rows to `[batch, positions, columns]`. Without the reshape, Burn's fusion would autotune each matmul together
    /// with its following elementwise operations.
    fn of_text(&self, rows: Tensor<2>) -> Tensor<3> {
        let [_, columns] = rows.dims();
        rows.reshape([self.batch, self.rotations.positions(), columns])
    }

    /// True if a row may select an adapter of one of the projections.
    fn selects_adapter(&self, projections: &[&Linear]) -> bool {
        let mut projections = projections.iter();
        self.adapters
            .is_some_and(|adapters| projections.any(|linear| adapters.adapts(linear)))
    }
}

impl<O: Observer> PrefillOps<'_, O> {
    /// Stores the new keys and values, `[batch, kv_heads, positions, head_dim]`, in the destination. Returns the keys and
    /// values that the layer's queries attend to.
    fn keep(&mut self, attention: &Attention, key: Tensor<4>, value: Tensor<4>) -> KeyValues {
        let (layer, kind, norm) = (attention.layer, attention.kind, attention.key_norm());
        self.observe(layer, LayerSite::Key, || key.clone());
        self.observe(layer, LayerSite::Value, || value.clone());
        match &mut self.destination {
            KvDestination::Cache(cache, call) => {
                return cache.extend(layer, &norm.weight, key, value, call);
            }
            KvDestination::Packed(packed) => return packed.extend(kind, key, value),
            #[cfg(feature = "cube")]
            KvDestination::List(list) => list.push([key.clone(), value.clone()]),
            #[cfg(feature = "cube")]
            KvDestination::History(continuation) => {
                return continuation.extend(layer, kind, self.window, key, value);
            }
            KvDestination::Encoder(texts) => {
                let visible = texts.visible(kind, self.window);
                return KeyValues::new(Slots::Whole(key), Slots::Whole(value), visible);
            }
            KvDestination::Dropped => (),
        }
        let visible = self.rules.visible(kind, self.window);
        KeyValues::new(Slots::Whole(key), Slots::Whole(value), visible)
    }
}

impl<O: Observer> LayerOps for PrefillOps<'_, O> {
    fn project(&mut self, input: Tensor<2>, linear: &Linear) -> Tensor<2> {
        let added = self
            .adapters
            .and_then(|adapters| adapters.added(&input, linear, linear::rows));
        let output = linear.rows(input);
        match added {
            Some(added) => flat_rows(self.of_text(output) + self.of_text(added)),
            None => output,
        }
    }

    #[cfg(feature = "cuda")]
    fn project_together(&mut self, input: Tensor<2>, projections: &[&Linear]) -> Vec<ColumnSlice> {
        let together = match self.selects_adapter(projections) {
            true => None,
            false => in_one_product(&input, projections),
        };
        together.unwrap_or_else(|| {
            let project = |linear: &&Linear| ColumnSlice::all(self.project(input.clone(), linear));
            projections.iter().map(project).collect()
        })
    }

    fn key_values(
        &mut self,
        attention: &Attention,
        key: ColumnSlice,
        value: ColumnSlice,
    ) -> KeyValues {
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
        query: &ColumnSlice,
        own: &OwnColumns,
    ) -> Option<(Tensor<4>, KeyValues)> {
        // Do not use the fused launch if the projections have separate output tensors, because the fused launch reads
        // all projections' outputs from one tensor. Also do not use the fused launch if the values come from the key
        // projection. Such a layer may store compact keys, which the fused launch does not support.
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
        projected: ColumnSlice,
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
        if self.selects_adapter(&[&mlp.gate_proj, &mlp.up_proj, &mlp.down_proj]) {
            let gate = self.project(input.clone(), &mlp.gate_proj);
            let through = self.project(input, &mlp.up_proj);
            let inner = gated(self.of_text(gate), self.of_text(through));
            return self.project(flat_rows(inner), &mlp.down_proj);
        }
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
            return adapted_mlp(input, matrices, self.mlp_recompute);
        }
        flat_rows(mlp.forward(self.of_text(input)))
    }

    fn experts(&mut self, stream: Tensor<2>, mixture: Mixture, layer: usize) -> Tensor<2> {
        #[cfg(feature = "cuda")]
        if !O::OBSERVES
            && let Some(Choice { experts, shares }) = mixture.router.choice_of_rows(&stream)
        {
            let normed = mixture.norm.forward(stream);
            return mixture.experts.mix(normed, &experts, &shares);
        }
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

    fn gate(&mut self, input: Tensor<2>, gate: &Linear, embedding: ColumnSlice) -> Tensor<2> {
        #[cfg(feature = "cube")]
        if op::serve(&input) {
            return gated_by(&ColumnSlice::all(self.project(input, gate)), &embedding);
        }
        let gate = self.project(input, gate);
        let gate = self.of_text(gate);
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

/// Projects the rows by several weights in one GEMM. Returns `None` if one GEMM cannot compute all projections, such as
/// projections that round their inputs by scales of their own.
#[cfg(feature = "cuda")]
fn in_one_product(input: &Tensor<2>, projections: &[&Linear]) -> Option<Vec<ColumnSlice>> {
    let weights: Option<Vec<_>> = projections
        .iter()
        .map(
            |linear| match (linear.weight.adapter(), linear.activation_scales) {
                (None, None) => linear.weight.matrix().into_whole(),
                _ => None,
            },
        )
        .collect();
    let weights = weights?;
    let counts: Vec<_> = weights.iter().map(|weight| weight.dims()[0]).collect();
    let rows = side_by_side(input, weights)?;
    Some(ColumnSlice::consecutive(&rows, &counts))
}

/// Computes GeGLU with a kernel.
#[cfg(feature = "cube")]
fn gated_by(gate: &ColumnSlice, through: &ColumnSlice) -> Tensor<2> {
    let columns = GateColumns {
        gate: gate.start,
        through: through.start,
        count: gate.count,
    };
    gated_columns(gate.rows.clone(), through.rows.clone(), columns)
}
