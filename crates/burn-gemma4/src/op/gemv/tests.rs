//! Tests that GEMVs with concatenated and gated matrices agree with an f64 reference. The numbers of rows and columns
//! are not multiples of the tile sizes. The matrices are float or quantized.

mod fused_residual;
mod per_layer;
mod several_rows;

use super::*;
use crate::op::dequantize::tests::{even_words, layouts};
use crate::op::linear::QuantizedMatrix;
use crate::quant::blocks::BlockFormat;
use burn::tensor::{DType, Device, Distribution, TensorData};

fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    tensor.clone().into_data().iter::<f64>().collect()
}

fn check(found: &Tensor<2>, expected: &[f64], tolerance: f64, what: &str) {
    let found = values(found);
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(0f64, |most, x| most.max(x.abs()));
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs() / scale;
        assert!(
            error < tolerance,
            "{what}, index {index}: got {found}, expected {expected}"
        );
    }
}

/// Multiplies each input row by the transpose of each matrix. The outputs of all matrices are concatenated per row.
fn products(rows: &[f64], columns: usize, matrices: &[&Matrix]) -> Vec<f64> {
    let matrices: Vec<_> = matrices
        .iter()
        .map(|matrix| values(&matrix.whole(DType::F32)))
        .collect();
    rows.chunks_exact(columns)
        .flat_map(|row| {
            matrices.iter().flat_map(move |matrix| {
                let of_row = |weight: &[f64]| row.iter().zip(weight).map(|(x, w)| x * w).sum();
                matrix
                    .chunks_exact(columns)
                    .map(of_row)
                    .collect::<Vec<f64>>()
            })
        })
        .collect()
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((x + 0.044_715 * x * x * x) * 0.797_884_560_8).tanh())
}

struct Drawn<'a> {
    device: &'a Device,
    dtype: DType,
}

impl Drawn<'_> {
    fn tensor<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        let tensor = Tensor::<D>::random(shape, Distribution::Uniform(-1.0, 1.0), self.device);
        tensor.cast(self.dtype)
    }
}

/// Checks all kinds of [`Factors`]. `matrix` creates a matrix with the given number of rows and `columns` columns.
fn check_all(
    drawn: &Drawn<'_>,
    columns: usize,
    tolerance: f64,
    what: &str,
    matrix: impl Fn(usize) -> Matrix,
) {
    let outputs = [37, 5, 70].map(&matrix);
    let [first, second, third] = &outputs;
    let other = matrix(70);
    for rows in [1, 5] {
        let input = drawn.tensor([rows, columns]);
        let row = values(&input);
        let through = drawn.tensor([rows, 50]);
        let product = |matrices: &[&Matrix]| products(&row, columns, matrices);
        let sides = |sides: &[&Matrix]| {
            Factors::Concat(sides.iter().map(|matrix| (*matrix).clone()).collect())
        };
        let through_gates = product(&[&other]);
        let gated = product(&[third]).into_iter().zip(through_gates);
        let gated = gated.map(|(gate, x)| gelu(gate) * x);
        let factor = values(&through);
        let factor = factor.chunks_exact(50).flat_map(|row| row[7..44].to_vec());
        let gate_of = product(&[first]).into_iter().zip(factor);
        let cases = [
            (sides(&[first]), product(&[first])),
            (sides(&[first, second]), product(&[first, second])),
            (
                sides(&[first, second, third]),
                product(&[first, second, third]),
            ),
            (
                Factors::Gated {
                    gate: third.clone(),
                    through: other.clone(),
                },
                gated.collect(),
            ),
            (
                Factors::GateOf {
                    gate: first.clone(),
                    through: through.clone(),
                    start: 7,
                },
                gate_of.map(|(x, factor)| gelu(x) * factor).collect(),
            ),
        ];
        for (index, (factors, expected)) in cases.into_iter().enumerate() {
            let what = format!("{what}, {columns} columns, {rows} rows, factors {index}");
            check(
                &multiply(input.clone(), factors, origin_of(rows)),
                &expected,
                tolerance,
                &what,
            );
        }
    }
}

#[test]
fn multiply_float_matrices_matches_reference() {
    let device = Device::default();
    let halves = [(DType::F16, 2e-2), (DType::BF16, 1e-1)].into_iter();
    let halves = halves.filter(|(dtype, _)| crate::op::serves(&device, *dtype));
    for (dtype, tolerance) in [(DType::F32, 1e-5)].into_iter().chain(halves) {
        let drawn = Drawn {
            device: &device,
            dtype,
        };
        let columns = match dtype {
            DType::F32 => vec![6, 257, 1408, 4000],
            _ => vec![1536, 2816],
        };
        for columns in columns {
            check_all(&drawn, columns, tolerance, &format!("{dtype:?}"), |rows| {
                drawn.tensor([rows, columns]).into()
            });
        }
    }
}

#[test]
fn multiply_quantized_matrices_matches_reference() {
    let device = Device::default();
    let drawn = Drawn {
        device: &device,
        dtype: DType::F32,
    };
    // Test only four of the layouts: the GGUF blocks Q4_1, Q5_K and Q6_K, and 4-bit groups with zero points.
    let layouts = layouts();
    for layout in [1, 6, 7, 21].map(|index| layouts[index]) {
        check_all(
            &drawn,
            layout.columns,
            1e-5,
            &format!("{layout:?}"),
            |rows| {
                let words = TensorData::new(even_words(layout, rows), [rows, layout.words()]);
                let words = Tensor::<2, Int>::from_data(words, (&device, DType::U32));
                QuantizedMatrix { words, layout }.into()
            },
        );
    }
}

/// Checks rows that are so long that a unit loads several vectors at once, in more than one iteration.
#[test]
fn multiply_long_quantized_rows_matches_reference() {
    let device = Device::default();
    let drawn = Drawn {
        device: &device,
        dtype: DType::F32,
    };
    for columns in [2112, 2816, 3072, 24_576, 49_152] {
        let layout = BlockFormat::Q4_0
            .words(columns)
            .expect("the columns are whole blocks");
        let matrices = [37, 5, 70].map(|rows| {
            let words = TensorData::new(even_words(layout, rows), [rows, layout.words()]);
            let words = Tensor::<2, Int>::from_data(words, (&device, DType::U32));
            Matrix::from(QuantizedMatrix { words, layout })
        });
        let all: Vec<_> = matrices.iter().collect();
        for rows in [1, 5] {
            let input = drawn.tensor([rows, columns]);
            let expected = products(&values(&input), columns, &all);
            let found = multiply(input, Factors::Concat(matrices.to_vec()), origin_of(rows));
            check(
                &found,
                &expected,
                1e-5,
                &format!("{columns} columns, {rows} rows"),
            );
        }
    }
}

/// Returns [`Origin::Computed`] if 3 divides the number of rows, and [`Origin::Parameters`] otherwise, so that the
/// tests cover both variants.
fn origin_of(rows: usize) -> Origin {
    match rows.is_multiple_of(3) {
        true => Origin::Computed,
        false => Origin::Parameters,
    }
}

/// Checks the concatenated outputs of a quantized and a float matrix, which need separate launches.
#[test]
fn multiply_mixed_formats_matches_reference() {
    let device = Device::default();
    let drawn = Drawn {
        device: &device,
        dtype: DType::F32,
    };
    let layout = layouts()[0];
    let words = TensorData::new(even_words(layout, 9), [9, layout.words()]);
    let words = Tensor::<2, Int>::from_data(words, (&device, DType::U32));
    let quantized = Matrix::from(QuantizedMatrix { words, layout });
    let whole = Matrix::from(drawn.tensor([4, layout.columns]));
    let factors = Factors::Concat(vec![quantized.clone(), whole.clone()]);
    let input = drawn.tensor([2, layout.columns]);
    let expected = products(&values(&input), layout.columns, &[&quantized, &whole]);
    let found = multiply(input, factors, Origin::Computed);
    check(&found, &expected, 1e-5, "mixed");
}
