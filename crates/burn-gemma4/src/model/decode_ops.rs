//! The GPU kernels of a layer in a decode step, about a dozen launches. A decode step processes up to 8 rows, or up to 64
//! rows with tensor cores. A row is one token.
//!
//! The host determines only the shapes. The kernels read positions from device memory, so a CUDA graph can capture the
//! launches and replay them for later tokens.

use super::adapters::PassAdapters;
use super::cache::WriteTarget;
use super::cache::key_values::{KeyValues, Visible};
use super::cache::slots::Slots;
use super::layer::experts::Mixture;
use super::layer::ops::{LayerOps, OwnColumns, PerLayerBlock, ResidualStream, added};
use super::layer::{Attention, Linear, Mlp, RmsNorm};
use super::observe::Part;
use super::text_model::Gemma4Model;
use crate::config::LayerType;
use crate::op;
use crate::op::column_slice::ColumnSlice;
use crate::op::geglu::gelu;
use crate::op::gemv::{Factors, Origin, PerLayerWeights};
use crate::op::linear::Matrix;
use crate::op::residual::Next;
use crate::op::rope::heads::{HeadOptions, LayerColumns, LayerParts};
use crate::op::rope::{RotationTables, heads};
use crate::op::store::store_rows;
use crate::op::{gemv, moe_router};
use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{DType, Int, Tensor},
};

/// The operations of a decode step.
pub(crate) struct DecodeOps<'a> {
    pub batch: usize,
    /// The position of each row, `[rows]`, ordered by sequence. No launch of a captured graph may write this tensor,
    /// because kernels may read it before the previous launch has ended.
    pub positions: Tensor<1, Int>,
    pub sliding: RotationTables,
    pub full: RotationTables,
    /// The buffers for new keys and values. `None` if all layers that run are shared KV layers, which compute no keys and
    /// values.
    pub targets: Option<Targets<'a>>,
    /// The adapters that the rows select, or `None` if no row selects an adapter.
    pub adapters: Option<&'a PassAdapters>,
    /// A callback that runs after the launches of each part of the step.
    pub after: &'a mut dyn FnMut(Part),
}

/// The buffers for new keys and values, and the rules that decide which keys a query sees after the write.
pub(crate) struct Targets<'a> {
    /// The buffers of every layer that computes its own keys and values.
    pub layers: &'a [WriteTarget],
    /// The rules that decide which keys a query sees in sliding-window layers, whose ring buffers are not in text order.
    pub sliding: Visible,
    pub full: Visible,
}

impl Targets<'_> {
    fn visible(&self, kind: LayerType) -> Visible {
        match kind {
            LayerType::Sliding => self.sliding.clone(),
            LayerType::Full => self.full.clone(),
        }
    }
}

impl DecodeOps<'_> {
    /// True if the decode kernels support the model with this number of rows. They do not serve mobile checkpoints,
    /// because they do not round activations by static scales.
    pub fn serve(model: &Gemma4Model, rows: usize) -> bool {
        let dtype = model.dtype();
        let experts = model.config().experts.as_ref();
        let has_kernels = !model.is_mobile;
        has_kernels
            && experts.is_none_or(|experts| moe_router::chooses(experts.num_experts))
            && rows <= gemv::most_rows(&model.device(), dtype)
            && op::serves(&model.device(), dtype)
            && OneDtype::is_of(model, dtype)
    }

    /// Computes new keys or values with `write`, and stores them in `slots`. If the cache is in int8, `write` writes to a
    /// temporary buffer, which [`store_rows`] then quantizes into the cache.
    fn placed(&self, slots: Slots, write: impl FnOnce(Tensor<4>) -> Tensor<4>) -> Slots {
        let [sequences, heads, _, width] = slots.dims();
        match slots {
            Slots::Whole(buffer) => Slots::Whole(write(buffer)),
            Slots::Q8 { words, scales } => {
                let count = self.positions.dims()[0] / sequences;
                let device = (&words.device(), self.full.cos.dtype());
                let rows = write(Tensor::empty([sequences, heads, count, width], device));
                let (words, scales) = store_rows(rows, self.positions.clone(), words, scales);
                Slots::Q8 { words, scales }
            }
        }
    }

    /// Reshapes heads from `[rows, heads, 1, head_dim]` to `[batch, heads, rows / batch, head_dim]`.
    fn by_sequences(&self, heads: Tensor<4>) -> Tensor<4> {
        let [rows, count, _, head_dim] = heads.dims();
        match rows == self.batch {
            true => heads,
            false => heads
                .reshape([self.batch, rows / self.batch, count, head_dim])
                .swap_dims(1, 2),
        }
    }

    /// True if the projection has an adapter, or if a row may select an adapter of the projection.
    fn is_adapted(&self, linear: &Linear) -> bool {
        linear.weight.adapter().is_some()
            || self
                .adapters
                .is_some_and(|adapters| adapters.adapts(linear))
    }

    /// Returns the weights of the projections if no projection has an adapter and one launch can multiply by all of
    /// them.
    fn matrices_of_one_launch(&self, projections: &[&Linear]) -> Option<Vec<Matrix>> {
        let matrices = projections
            .iter()
            .map(|linear| (!self.is_adapted(linear)).then(|| linear.weight.matrix()));
        let factors = matrices.collect::<Option<Vec<_>>>().map(Factors::Concat);
        match factors.filter(Factors::are_of_one_launch) {
            Some(Factors::Concat(matrices)) => Some(matrices),
            _ => None,
        }
    }

    fn tables(&self, kind: LayerType) -> &RotationTables {
        match kind {
            LayerType::Sliding => &self.sliding,
            LayerType::Full => &self.full,
        }
    }
}

impl LayerOps for DecodeOps<'_> {
    fn project(&mut self, input: Tensor<2>, linear: &Linear) -> Tensor<2> {
        let added = self
            .adapters
            .and_then(|adapters| adapters.added(&input, linear, project_by_adapter));
        let origin = linear.weight.origin();
        let output = linear.rows_by(input, |input, weight| {
            gemv::project(input, weight, None, origin)
        });
        match added {
            Some(added) => output + added,
            None => output,
        }
    }

    fn project_together(&mut self, input: Tensor<2>, projections: &[&Linear]) -> Vec<ColumnSlice> {
        let Some(matrices) = self.matrices_of_one_launch(projections) else {
            let project = |linear: &&Linear| ColumnSlice::all(self.project(input.clone(), linear));
            return projections.iter().map(project).collect();
        };
        let counts: Vec<_> = matrices.iter().map(Matrix::rows).collect();
        let rows = gemv::multiply(input, Factors::Concat(matrices), Origin::Parameters);
        ColumnSlice::consecutive(&rows, &counts)
    }

    fn project_normed(
        &mut self,
        stream: ResidualStream,
        norm: &RmsNorm,
        projections: &[&Linear],
    ) -> (ResidualStream, Vec<ColumnSlice>) {
        match (stream, self.matrices_of_one_launch(projections)) {
            (ResidualStream::Deferred(due), Some(matrices)) => {
                let (added, next) = *due;
                let counts: Vec<_> = matrices.iter().map(Matrix::rows).collect();
                let (rows, projected) = gemv::multiply_after_residual(
                    added,
                    Some(next),
                    Factors::Concat(matrices),
                    Origin::Parameters,
                );
                let projected = ColumnSlice::consecutive(&projected, &counts);
                (ResidualStream::new(rows), projected)
            }
            (mut stream, _) => {
                let normed = stream.norm(norm);
                let projected = self.project_together(normed, projections);
                (stream, projected)
            }
        }
    }

    fn add_and_gate(
        &mut self,
        stream: ResidualStream,
        output: Tensor<2>,
        norm: &RmsNorm,
        gate: &Linear,
        embedding: ColumnSlice,
    ) -> (ResidualStream, Tensor<2>) {
        if self.is_adapted(gate) {
            let rows = self.add(stream, output, norm).into_rows();
            let gated = self.gate(rows.clone(), gate, embedding);
            return (ResidualStream::new(rows), gated);
        }
        let (rows, gated) = gemv::multiply_after_residual(
            added(stream, output, norm),
            None,
            gate_of(gate, embedding),
            Origin::Parameters,
        );
        (ResidualStream::new(rows), gated)
    }

    fn per_layer_block(
        &mut self,
        stream: ResidualStream,
        output: Tensor<2>,
        norm: &RmsNorm,
        block: PerLayerBlock<'_>,
        scalar: Tensor<1>,
        next: &RmsNorm,
    ) -> ResidualStream {
        let is_adapted = self.is_adapted(block.gate) || self.is_adapted(block.projection);
        let has_one_epsilon = [block.norm, next]
            .into_iter()
            .all(|other| other.epsilon() == norm.epsilon());
        if is_adapted || !has_one_epsilon {
            return self.per_layer_parts(stream, output, norm, block, scalar, next);
        }
        let weights = PerLayerWeights {
            gate: block.gate.weight.matrix(),
            projection: block.projection.weight.matrix(),
            norm: block.norm.weight.val(),
        };
        let before = ResidualStream::new(stream.into_rows());
        let of_block = added(before.clone(), output.clone(), norm);
        let of_next = Next {
            scalar: Some(scalar.clone()),
            weight: next.weight.val(),
        };
        match gemv::per_layer_block(&of_block, &weights, &block.embedding, &of_next) {
            Some((stream, normed)) => {
                self.after(Part::PerLayerEmbeddings);
                ResidualStream::of((stream, Some(normed)))
            }
            None => self.per_layer_parts(before, output, norm, block, scalar, next),
        }
    }

    fn add_last(
        &mut self,
        stream: ResidualStream,
        output: Tensor<2>,
        norm: &RmsNorm,
        scalar: Tensor<1>,
        next: &RmsNorm,
    ) -> ResidualStream {
        let next = Next {
            scalar: Some(scalar),
            weight: next.weight.val(),
        };
        ResidualStream::Deferred(Box::new((added(stream, output, norm), next)))
    }

    fn key_values(
        &mut self,
        attention: &Attention,
        key: ColumnSlice,
        value: ColumnSlice,
    ) -> KeyValues {
        let targets = self
            .targets
            .as_ref()
            .expect("write targets are set if a layer has its own keys and values");
        let visible = targets.visible(attention.kind);
        let norm = attention.key_norm();
        let (tables, epsilon) = (self.tables(attention.kind), norm.epsilon());
        let options = |columns: &ColumnSlice, compact| HeadOptions {
            start: columns.start,
            count: columns.count,
            compact,
            epsilon,
        };
        let write_values = |buffer, compact| {
            let options = options(&value, compact);
            heads::write_values(value.rows, self.positions.clone(), buffer, options)
        };
        let write_keys = |buffer, compact| {
            let (options, positions) = (options(&key, compact), self.positions.clone());
            let weight = norm.weight.val();
            heads::write_keys(key.rows, weight, tables, positions, buffer, options)
        };
        match targets.layers[attention.layer].clone() {
            WriteTarget::Apart(buffers) => {
                let key = self.placed(buffers.key, |buffer| write_keys(buffer, None));
                let value = self.placed(buffers.value, |buffer| write_values(buffer, None));
                KeyValues::new(key, value, visible)
            }
            WriteTarget::Compact(buffer) => {
                let rotated = Some(buffer.keys.layout.rotated_pairs);
                let slots = self.placed(buffer.slots, |slots| {
                    write_keys(write_values(slots, rotated), rotated)
                });
                KeyValues::of_slots(&slots, &buffer.keys, visible)
            }
        }
    }

    fn queries(
        &mut self,
        attention: &Attention,
        projected: ColumnSlice,
        key_values: &KeyValues,
    ) -> Tensor<4> {
        let compact = key_values.compact.as_ref();
        let options = HeadOptions {
            start: projected.start,
            count: projected.count,
            compact: compact.map(|keys| keys.layout.rotated_pairs),
            epsilon: attention.q_norm.epsilon(),
        };
        let weight = attention.query_weight(key_values);
        let tables = self.tables(attention.kind);
        let positions = self.positions.clone();
        let heads = heads::query_heads(projected.rows, weight, tables, positions, options);
        self.by_sequences(heads)
    }

    fn heads_together(
        &mut self,
        attention: &Attention,
        query: &ColumnSlice,
        own: &OwnColumns,
    ) -> Option<(Tensor<4>, KeyValues)> {
        let targets = self
            .targets
            .as_ref()
            .expect("write targets are set if a layer has its own keys and values");
        let WriteTarget::Apart(buffers) = &targets.layers[attention.layer] else {
            return None;
        };
        let (Slots::Whole(keys), Slots::Whole(values)) = (&buffers.key, &buffers.value) else {
            return None;
        };
        // Use separate launches if each projection has its own output tensor, as in a layer with an adapter. The fused
        // launch reads the outputs of all projections from one tensor.
        if own.key.start == 0 || own.value.start == 0 {
            return None;
        }
        let visible = targets.visible(attention.kind);
        let parts = LayerParts {
            projected: query.rows.clone(),
            query_weight: attention.q_norm.weight.val(),
            key_weight: attention.key_norm().weight.val(),
            tables: self.tables(attention.kind),
            positions: self.positions.clone(),
            keys: keys.clone(),
            values: values.clone(),
        };
        let columns = LayerColumns {
            queries: query.start,
            count: query.count,
            keys: own.key.start,
            values: own.value.start,
            epsilon: attention.q_norm.epsilon(),
        };
        let [queries, keys, values] = heads::layer_heads(parts, columns);
        let own = KeyValues::new(Slots::Whole(keys), Slots::Whole(values), visible);
        Some((self.by_sequences(queries), own))
    }

    fn mlp(&mut self, input: Tensor<2>, mlp: &Mlp) -> Tensor<2> {
        let (gate, up) = (&mlp.gate_proj, &mlp.up_proj);
        let inner = if self.is_adapted(gate) || self.is_adapted(up) {
            // Compute the gate and the up projection separately, because the fused kernel cannot add the adapter's
            // output before the GELU.
            gelu(self.project(input.clone(), gate)) * self.project(input, up)
        } else {
            let factors = Factors::Gated {
                gate: gate.weight.matrix(),
                through: up.weight.matrix(),
            };
            gemv::multiply(input, factors, Origin::Parameters)
        };
        self.project(inner, &mlp.down_proj)
    }

    fn experts(&mut self, stream: Tensor<2>, mixture: Mixture, _layer: usize) -> Tensor<2> {
        let choice = mixture.router.choice(stream.clone());
        let experts = mixture.experts;
        let normed = mixture.norm.forward(stream);
        let (gate_up, down) = (&experts.gate_up_proj, &experts.down_proj);
        let inner = gemv::gate_experts(normed, gate_up.matrices(), choice.experts.clone());
        gemv::mix_experts(inner, down.matrices(), choice.experts, choice.shares)
    }

    fn gate(&mut self, input: Tensor<2>, gate: &Linear, embedding: ColumnSlice) -> Tensor<2> {
        if self.is_adapted(gate) {
            return gelu(self.project(input, gate)) * embedding.columns();
        }
        gemv::multiply(input, gate_of(gate, embedding), Origin::Parameters)
    }

    fn after(&mut self, part: Part) {
        (self.after)(part);
    }
}

/// Multiplies rows by the transpose of an adapter's factor. No launch of a step writes the factors.
pub(super) fn project_by_adapter(input: Tensor<2>, factor: Matrix) -> Tensor<2> {
    gemv::project(input, factor, None, Origin::Parameters)
}

/// Returns the factors of a GEMV that computes GELU of the per-layer embedding's gate, multiplied by the embedding.
fn gate_of(gate: &Linear, embedding: ColumnSlice) -> Factors {
    Factors::GateOf {
        gate: gate.weight.matrix(),
        through: embedding.rows,
        start: embedding.start,
    }
}

/// A visitor that checks whether all parameters have a given dtype.
struct OneDtype {
    dtype: DType,
    holds: bool,
}

impl OneDtype {
    fn is_of(model: &Gemma4Model, dtype: DType) -> bool {
        let mut visitor = Self { dtype, holds: true };
        model.visit(&mut visitor);
        visitor.holds
    }
}

impl ModuleVisitor for OneDtype {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.holds &= param.val().dtype() == self.dtype;
    }
}
