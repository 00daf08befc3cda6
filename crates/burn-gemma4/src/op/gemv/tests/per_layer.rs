//! Tests that a layer's per-layer embedding block agrees with an f64 reference. GPUs with clusters compute the block in
//! one launch, and other devices in separate launches.

use super::super::per_layer::computed;
use super::several_rows::{halves, surrounded, surrounded_words};
use super::*;
use crate::op::column_slice::ColumnSlice;
use crate::op::residual::{Next, ResidualAdd, residual, residual_before};

/// The tensors of a block, and its weights.
struct Case {
    added: ResidualAdd,
    weights: PerLayerWeights,
    embedding: ColumnSlice,
    next: Next,
}

impl Case {
    /// Creates random activations with NaN in the memory around them.
    fn new(drawn: &Drawn<'_>, rows: usize, columns: usize, formats: [BlockFormat; 2]) -> Self {
        let count = 256;
        let words = |format: BlockFormat, rows: usize, columns: usize| {
            let layout = format.words(columns).expect("the columns are whole blocks");
            surrounded_words(layout, rows, drawn.device)
        };
        Self {
            added: ResidualAdd {
                stream: surrounded(&drawn.tensor([rows, columns])),
                added: surrounded(&drawn.tensor([rows, columns])),
                weight: drawn.tensor([columns]),
                epsilon: 1e-6,
            },
            weights: PerLayerWeights {
                gate: words(formats[0], count, columns),
                projection: words(formats[1], columns, count),
                norm: drawn.tensor([columns]),
            },
            embedding: ColumnSlice {
                rows: surrounded(&drawn.tensor([rows, 3 * count])),
                start: count,
                count,
            },
            next: Next {
                scalar: Some(drawn.tensor([1])),
                weight: drawn.tensor([columns]),
            },
        }
    }

    /// Returns a case with only row `row` of the activations.
    fn row(&self, row: usize) -> Self {
        let row = |tensor: &Tensor<2>| surrounded(&tensor.clone().narrow(0, row, 1));
        Self {
            added: ResidualAdd {
                stream: row(&self.added.stream),
                added: row(&self.added.added),
                ..self.added.clone()
            },
            weights: PerLayerWeights {
                gate: self.weights.gate.clone(),
                projection: self.weights.projection.clone(),
                norm: self.weights.norm.clone(),
            },
            embedding: ColumnSlice {
                rows: row(&self.embedding.rows),
                ..self.embedding.clone()
            },
            next: self.next.clone(),
        }
    }

    /// Computes the block in one launch, or returns `None` if no kernel does so.
    fn in_one_launch(&self) -> Option<(Tensor<2>, Tensor<2>)> {
        per_layer_block(&self.added, &self.weights, &self.embedding, &self.next)
    }

    /// Computes the block by the operator of the backend, in one launch or in several.
    fn found(&self) -> (Tensor<2>, Tensor<2>) {
        computed(&self.added, &self.weights, &self.embedding, &self.next)
            .expect("the case has quantized matrices and a scalar")
    }

    /// Computes the block in separate launches.
    fn in_launches(&self) -> (Tensor<2>, Tensor<2>) {
        let stream = residual(self.added.clone());
        let gate = Factors::GateOf {
            gate: self.weights.gate.clone(),
            through: self.embedding.rows.clone(),
            start: self.embedding.start,
        };
        let gated = multiply(stream.clone(), gate, Origin::Parameters);
        let projection = self.weights.projection.clone();
        let last = ResidualAdd {
            stream,
            added: project(gated, projection, None, Origin::Parameters),
            weight: self.weights.norm.clone(),
            epsilon: self.added.epsilon,
        };
        let (stream, normed) = residual_before(last, self.next.clone());
        (stream, normed.expect("the kernels serve this dtype"))
    }

    /// Computes the block in f64.
    fn reference(&self) -> [Vec<f64>; 2] {
        let [rows, columns] = self.added.stream.dims();
        let norm = |row: &[f64], weight: &[f64]| -> Vec<f64> {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
            let factor = 1.0 / (mean + self.added.epsilon).sqrt();
            row.iter()
                .zip(weight)
                .map(|(x, w)| x * factor * w)
                .collect()
        };
        let plus = |row: &[f64], other: Vec<f64>| -> Vec<f64> {
            row.iter().zip(other).map(|(x, y)| x + y).collect()
        };
        let (stream, added) = (values(&self.added.stream), values(&self.added.added));
        let embeddings = values(&self.embedding.rows);
        let scalar = values(self.next.scalar.as_ref().expect("the case has a scalar"))[0];
        let parameters = [&self.added.weight, &self.weights.norm, &self.next.weight];
        let [first, last, next] = parameters.map(values);
        let mut found = [Vec::new(), Vec::new()];
        for row in 0..rows {
            let of_row = row * columns..(row + 1) * columns;
            let x = plus(&stream[of_row.clone()], norm(&added[of_row], &first));
            let start = row * (embeddings.len() / rows) + self.embedding.start;
            let gates = products(&x, columns, &[&self.weights.gate]);
            let gated = gates.iter().zip(&embeddings[start..]);
            let gated: Vec<_> = gated.map(|(gate, factor)| gelu(*gate) * factor).collect();
            let projected = products(&gated, gated.len(), &[&self.weights.projection]);
            let sum = plus(&x, norm(&projected, &last));
            let sum: Vec<_> = sum.into_iter().map(|x| x * scalar).collect();
            found[1].extend(norm(&sum, &next));
            found[0].extend(sum);
        }
        found
    }
}

/// Returns the root of the mean square of the errors.
fn error(found: &Tensor<2>, expected: &[f64]) -> f64 {
    let found = values(found);
    assert_eq!(found.len(), expected.len());
    let squares = found.iter().zip(expected).map(|(x, y)| (x - y) * (x - y));
    (squares.sum::<f64>() / expected.len() as f64).sqrt()
}

#[test]
fn per_layer_block_has_at_most_twice_the_error_of_separate_launches() {
    let device = Device::default();
    for dtype in halves(&device) {
        let drawn = Drawn {
            device: &device,
            dtype,
        };
        let (q4, q8) = (BlockFormat::Q4_0, BlockFormat::Q8_0);
        for (columns, rows, formats) in [
            (1536, 1, [q4, q4]),
            (1536, 8, [q4, q4]),
            (1536, 13, [q8, q8]),
            (1536, 5, [q4, q8]),
            (1536, 2, [q8, q4]),
            (1536, 39, [q4, q4]),
            (2560, 3, [q4, q4]),
            (2560, 64, [q4, q4]),
        ] {
            let case = Case::new(&drawn, rows, columns, formats);
            assert_eq!(
                case.in_one_launch().is_some(),
                crate::op::is_hopper(&device)
            );
            let found = case.found();
            let what = format!("{dtype:?}, {formats:?}, {columns} columns, {rows} rows");
            let [stream, normed] = case.reference();
            let launched = case.in_launches();
            for (found, launched, expected) in [
                (&found.0, &launched.0, stream),
                (&found.1, &launched.1, normed),
            ] {
                let [error, limit] = [found, launched].map(|tensor| error(tensor, &expected));
                assert!(error <= 2.0 * limit, "{what}: {error} > 2 · {limit}");
            }
        }
    }
}

#[test]
fn per_layer_block_gives_each_row_the_bits_that_it_has_alone() {
    let device = Device::default();
    for dtype in halves(&device) {
        let drawn = Drawn {
            device: &device,
            dtype,
        };
        let case = Case::new(&drawn, 11, 1536, [BlockFormat::Q4_0; 2]);
        let Some((stream, normed)) = case.in_one_launch() else {
            continue;
        };
        for row in 0..11 {
            let alone = case
                .row(row)
                .in_one_launch()
                .expect("one row is served, too");
            for (all, alone) in [(&stream, alone.0), (&normed, alone.1)] {
                let of_row = all.clone().narrow(0, row, 1);
                assert!(of_row.into_data() == alone.into_data(), "row {row}");
            }
        }
    }
}
