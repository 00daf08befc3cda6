//! The operators of a layer for few rows, one position of a few sequences or a few of one, by kernels alone: about a dozen
//! launches a layer.
//!
//! Nothing here depends on the host but the shapes. Which position, the kernels read from the device, so that the launches
//! can be captured and replayed.

use super::{
    Gemma4Model,
    cache::{
        Target,
        key_values::{KeyValues, Visible},
        slots::Slots,
    },
    layer::{
        Attention, Linear, Mlp, RmsNorm,
        experts::Mixture,
        operators::{Columns, Operators, OwnColumns, Stream, added},
    },
    observe::Part,
};
use crate::{
    LayerType,
    op::{
        self,
        gate::gelu,
        linear::{
            Matrix,
            few_rows::{self, Factors, MOST_ROWS, Origin},
        },
        residual::Next,
        rope::{
            RotationTables,
            heads::{self, HeadOptions, LayerColumns, LayerParts},
        },
        route,
        store::store_rows,
    },
};
use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{DType, Int, Tensor},
};

/// The operators of few rows.
pub(crate) struct FewRows<'a> {
    pub batch: usize,
    /// `[rows]`: as many of each sequence, one after the other. No launch of a graph writes them.
    pub positions: Tensor<1, Int>,
    pub sliding: RotationTables,
    pub full: RotationTables,
    /// Where layers with keys and values of their own write them; nothing where no such layers are computed.
    pub targets: Option<Targets<'a>>,
    /// Called after each part.
    pub after: &'a mut dyn FnMut(Part),
}

/// Where keys and values go, and what queries see afterwards.
pub(crate) struct Targets<'a> {
    /// Of every layer that has its own.
    pub layers: &'a [Target],
    /// In a ring, whose columns are in any order.
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

impl FewRows<'_> {
    /// Whether they compute so many rows.
    pub fn serve(model: &Gemma4Model, rows: usize) -> bool {
        let dtype = model.dtype();
        let experts = model.config().experts.as_ref();
        experts.is_none_or(|experts| route::chooses(experts.num_experts))
            && rows <= MOST_ROWS
            && op::serves(&model.device(), dtype)
            && OneDtype::is_of(model, dtype)
    }

    /// The slots with what `write` puts into those of a buffer: these themselves, or of as many slots as there are rows, which go on from there
    /// quantized.
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

    /// Heads of rows, `[rows, heads, 1, head_dim]`, as those of sequences.
    fn by_sequences(&self, heads: Tensor<4>) -> Tensor<4> {
        let [rows, count, _, head_dim] = heads.dims();
        match rows == self.batch {
            true => heads,
            false => heads
                .reshape([self.batch, rows / self.batch, count, head_dim])
                .swap_dims(1, 2),
        }
    }

    fn tables(&self, kind: LayerType) -> &RotationTables {
        match kind {
            LayerType::Sliding => &self.sliding,
            LayerType::Full => &self.full,
        }
    }
}

impl Operators for FewRows<'_> {
    fn project(&mut self, input: Tensor<2>, linear: &Linear) -> Tensor<2> {
        let origin = Origin::of(&linear.weight);
        linear.rows_by(input, |input, weight| {
            few_rows::project(input, weight, None, origin)
        })
    }

    fn project_together(&mut self, input: Tensor<2>, projections: &[&Linear]) -> Vec<Columns> {
        let Some(matrices) = matrices_of_one_launch(projections) else {
            let project = |linear: &&Linear| Columns::all(self.project(input.clone(), linear));
            return projections.iter().map(project).collect();
        };
        let counts: Vec<_> = matrices.iter().map(Matrix::rows).collect();
        let rows = few_rows::multiply(input, Factors::Sides(matrices), Origin::Parameters);
        Columns::side_by_side(&rows, &counts)
    }

    fn project_normed(
        &mut self,
        stream: Stream,
        norm: &RmsNorm,
        projections: &[&Linear],
    ) -> (Stream, Vec<Columns>) {
        match (stream, matrices_of_one_launch(projections)) {
            (Stream::Due(due), Some(matrices)) => {
                let (added, next) = *due;
                let counts: Vec<_> = matrices.iter().map(Matrix::rows).collect();
                let (rows, projected) = few_rows::multiply_after_residual(
                    added,
                    Some(next),
                    Factors::Sides(matrices),
                    Origin::Parameters,
                );
                let projected = Columns::side_by_side(&projected, &counts);
                (Stream::new(rows), projected)
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
        stream: Stream,
        output: Tensor<2>,
        norm: &RmsNorm,
        gate: &Linear,
        embedding: Columns,
    ) -> (Stream, Tensor<2>) {
        if is_adapted(gate) {
            let rows = self.add(stream, output, norm).into_rows();
            let gated = self.gate(rows.clone(), gate, embedding);
            return (Stream::new(rows), gated);
        }
        let (rows, gated) = few_rows::multiply_after_residual(
            added(stream, output, norm),
            None,
            gate_of(gate, embedding),
            Origin::Parameters,
        );
        (Stream::new(rows), gated)
    }

    fn add_last(
        &mut self,
        stream: Stream,
        output: Tensor<2>,
        norm: &RmsNorm,
        scalar: Tensor<1>,
        next: &RmsNorm,
    ) -> Stream {
        let next = Next {
            scalar: Some(scalar),
            weight: next.weight.val(),
        };
        Stream::Due(Box::new((added(stream, output, norm), next)))
    }

    fn key_values(&mut self, attention: &Attention, key: Columns, value: Columns) -> KeyValues {
        let targets = self.targets.as_ref().expect("the layer has a target");
        let visible = targets.visible(attention.kind);
        let norm = attention.key_norm();
        let (tables, epsilon) = (self.tables(attention.kind), norm.epsilon());
        let options = |columns: &Columns, compact| HeadOptions {
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
            Target::Apart(buffers) => {
                let key = self.placed(buffers.key, |buffer| write_keys(buffer, None));
                let value = self.placed(buffers.value, |buffer| write_values(buffer, None));
                KeyValues::new(key, value, visible)
            }
            Target::Compact(buffer) => {
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
        projected: Columns,
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
        query: &Columns,
        own: &OwnColumns,
    ) -> Option<(Tensor<4>, KeyValues)> {
        let targets = self.targets.as_ref().expect("the layer has a target");
        let Target::Apart(buffers) = &targets.layers[attention.layer] else {
            return None;
        };
        let (Slots::Whole(keys), Slots::Whole(values)) = (&buffers.key, &buffers.value) else {
            return None;
        };
        // Those of one product follow each other; where one has an adapter, each is of its own.
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
        let inner = if is_adapted(gate) || is_adapted(up) {
            // A gate opens by what its adapter has added, too.
            gelu(self.project(input.clone(), gate)) * self.project(input, up)
        } else {
            let factors = Factors::Gated {
                gate: gate.weight.matrix(),
                through: up.weight.matrix(),
            };
            few_rows::multiply(input, factors, Origin::Parameters)
        };
        self.project(inner, &mlp.down_proj)
    }

    fn experts(&mut self, stream: Tensor<2>, mixture: Mixture, _layer: usize) -> Tensor<2> {
        let choice = mixture.router.choice(stream.clone());
        let experts = mixture.experts;
        let normed = mixture.norm.forward(stream);
        let (gate_up, down) = (&experts.gate_up_proj, &experts.down_proj);
        let inner = few_rows::gate_experts(normed, gate_up.matrices(), choice.experts.clone());
        few_rows::mix_experts(inner, down.matrices(), choice.experts, choice.shares)
    }

    fn gate(&mut self, input: Tensor<2>, gate: &Linear, embedding: Columns) -> Tensor<2> {
        if is_adapted(gate) {
            return gelu(self.project(input, gate)) * embedding.columns();
        }
        few_rows::multiply(input, gate_of(gate, embedding), Origin::Parameters)
    }

    fn after(&mut self, part: Part) {
        (self.after)(part);
    }
}

fn is_adapted(linear: &Linear) -> bool {
    linear.weight.adapter().is_some()
}

/// The weights of projections without adapters, where one launch reads them.
fn matrices_of_one_launch(projections: &[&Linear]) -> Option<Vec<Matrix>> {
    let matrices = projections
        .iter()
        .map(|linear| (!is_adapted(linear)).then(|| linear.weight.matrix()));
    let factors = matrices.collect::<Option<Vec<_>>>().map(Factors::Sides);
    match factors.filter(Factors::are_of_one_launch) {
        Some(Factors::Sides(matrices)) => Some(matrices),
        _ => None,
    }
}

/// A gate's weight, without an adapter, and the embedding that goes through.
fn gate_of(gate: &Linear, embedding: Columns) -> Factors {
    Factors::GateOf {
        gate: gate.weight.matrix(),
        through: embedding.rows,
        start: embedding.start,
    }
}

/// Looks for parameters of another dtype.
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
