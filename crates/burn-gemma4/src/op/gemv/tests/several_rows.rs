//! Tests GEMVs of several rows in half precision. Results agree with an f64 reference up to rounding, do not depend on
//! memory around the tensors, and have the same bits in every run.

use super::*;

/// The number of padding elements after each row. The row stride stays aligned, so that no copy is needed.
const BEHIND: usize = 512;
/// The number of padding rows below the last row.
const BELOW: usize = 16;

/// Copies rows of `columns` elements to a larger matrix whose other elements are `none`. Returns the larger matrix's
/// elements and shape.
fn around<T: Copy>(rows: &[T], columns: usize, none: T) -> (Vec<T>, [usize; 2]) {
    let width = columns + BEHIND;
    let count = rows.len() / columns + BELOW;
    let mut all = vec![none; count * width];
    for (all, row) in all.chunks_exact_mut(width).zip(rows.chunks_exact(columns)) {
        all[..columns].copy_from_slice(row);
    }
    (all, [count, width])
}

/// Copies `tensor` into a larger tensor of NaN. Returns the view of the copied rows. The elements are converted on the
/// host, because a device may refuse a buffer that holds the largest tensor in f32.
pub(super) fn surrounded(tensor: &Tensor<2>) -> Tensor<2> {
    let [rows, columns] = tensor.dims();
    let numbers: Vec<f32> = tensor.clone().into_data().iter::<f32>().collect();
    let (all, shape) = around(&numbers, columns, f32::NAN);
    let all = TensorData::new(all, shape).convert_dtype(tensor.dtype());
    let all = Tensor::<2>::from_data(all, (&tensor.device(), tensor.dtype()));
    all.slice([0..rows, 0..columns])
}

pub(super) fn surrounded_words(layout: Layout, rows: usize, device: &Device) -> Matrix {
    let (all, shape) = around(&even_words(layout, rows), layout.words(), u32::MAX);
    let all = Tensor::<2, Int>::from_data(TensorData::new(all, shape), (device, DType::U32));
    let words = all.slice([0..rows, 0..layout.words()]);
    QuantizedMatrix { words, layout }.into()
}

/// Checks the error of each output. The tolerance has two terms. The first is twice the largest error that rounding the
/// exact output to the dtype can cause. The second is 1e-5 of the largest exact output, to allow for rounding in the
/// f32 sums.
fn check_rounded(found: &Tensor<2>, expected: &[f64], what: &str) {
    let rounding = found.dtype().finfo().expect("the dtype is a float").epsilon;
    let found = values(found);
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(0f64, |most, x| most.max(x.abs()));
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs();
        assert!(
            error <= rounding * expected.abs() + 1e-5 * scale,
            "{what}, index {index}: got {found}, expected {expected}"
        );
    }
}

/// The numbers of outputs of three matrices. No number is a multiple of a tile size. No number is a multiple of 4
/// either, so Hopper's batch kernel does not support these matrices.
const OUTPUTS: [usize; 3] = [37, 5, 70];

/// Numbers of outputs for Hopper's batch kernel, which computes four neighboring outputs at once. Most numbers are not
/// multiples of a tile size. The last number is so large that each cube handles two row tiles of weights.
const BATCH_OUTPUTS: [[usize; 3]; 3] = [[36, 4, 72], [204, 132, 68], [12, 64, 33_800]];

/// Checks all variants of `Factors` and the soft cap for each number of input rows in `numbers`. `outputs` are the
/// numbers of outputs of the matrices.
fn check_rows(
    drawn: &Drawn<'_>,
    numbers: &[usize],
    outputs: [usize; 3],
    what: &str,
    matrix: impl Fn(usize) -> Matrix,
) {
    let [first, second, third] = outputs.map(&matrix);
    let other = matrix(outputs[2]);
    let factors = outputs[0] + 13;
    let columns = first.whole(DType::F32).dims()[1];
    for &rows in numbers {
        // Use small inputs. A gated GEMV multiplies two outputs, and the product must not exceed f16's range.
        let input = drawn.tensor([rows, columns]) * 0.0625;
        let row = values(&input);
        let input = surrounded(&input);
        let through = drawn.tensor([rows, factors]);
        let product = |matrices: &[&Matrix]| products(&row, columns, matrices);
        let gated = product(&[&third]).into_iter().zip(product(&[&other]));
        let factor = values(&through);
        let factor = factor.chunks_exact(factors);
        let factor = factor.flat_map(|row| row[7..7 + outputs[0]].to_vec());
        let gate_of = product(&[&first]).into_iter().zip(factor);
        let sides = vec![first.clone(), second.clone(), third.clone()];
        let cases = [
            (Factors::Concat(sides), product(&[&first, &second, &third])),
            (
                Factors::Gated {
                    gate: third.clone(),
                    through: other.clone(),
                },
                gated.map(|(gate, x)| gelu(gate) * x).collect(),
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
        let what = format!("{what}, {columns} columns, {rows} rows");
        for (index, (factors, expected)) in cases.into_iter().enumerate() {
            let found = multiply(input.clone(), factors, origin_of(rows));
            check_rounded(&found, &expected, &format!("{what}, factors {index}"));
        }
        let cap = 1.0;
        let capped = product(&[&third]).into_iter();
        let capped: Vec<_> = capped.map(|x| cap * (x / cap).tanh()).collect();
        let project = || project(input.clone(), third.clone(), Some(cap), origin_of(rows));
        let found = project();
        check_rounded(&found, &capped, &format!("{what}, with soft cap"));
        let again = project();
        assert!(found.into_data() == again.into_data(), "{what}, second run");
    }
}

pub(super) fn halves(device: &Device) -> impl Iterator<Item = DType> {
    let halves = [DType::F16, DType::BF16].into_iter();
    halves.filter(|dtype| crate::op::serves(device, *dtype))
}

#[test]
fn multiply_several_rows_by_float_matrices_matches_reference() {
    let device = Device::default();
    for dtype in halves(&device) {
        let drawn = Drawn {
            device: &device,
            dtype,
        };
        // Each case has one number of input columns and a list of numbers of rows. In each case a warp keeps a
        // different number of columns in flight.
        let cases: [(usize, &[usize]); 4] = [
            (1536, &[2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 64, 65]),
            (512, &[3, 20]),
            (160, &[8, 50]),
            (72, &[2, 11]),
        ];
        for (columns, rows) in cases {
            check_rows(&drawn, rows, OUTPUTS, &format!("{dtype:?}"), |rows| {
                surrounded(&drawn.tensor([rows, columns])).into()
            });
        }
    }
}

/// True if Hopper's batch kernel multiplies `rows` rows by a matrix of `outputs` rows. On a device that is not a Hopper
/// card, the function also returns true.
#[cfg(feature = "cuda")]
fn runs_on_hopper_kernel(drawn: &Drawn<'_>, [rows, columns, outputs]: [usize; 3]) -> bool {
    use super::launch_options::LaunchOptions;
    use burn::backend::Cube;
    use burn_cubecl::CubeBackend;
    let of_cube = |rows| {
        let tensor = surrounded(&drawn.tensor([rows, columns]));
        let tensor = tensor
            .try_into_primitive::<Cube>()
            .expect("a CubeCL device");
        let client = tensor.client.clone();
        client.resolve_tensor_float::<CubeBackend>(tensor)
    };
    let plan = || hopper::plan_of(&of_cube(rows), &of_cube(outputs), &LaunchOptions::default());
    !crate::op::is_hopper(drawn.device) || plan().is_some()
}

/// Checks 1 to 65 rows with Hopper's batch kernel. The kernel divides the inner dimension into parts, one for each cube
/// of a cluster. A cube loads its part in chunks into a ring buffer. The numbers of columns cover:
///
/// - one part and several parts,
/// - parts with equal and with different numbers of chunks,
/// - a full and a partial last chunk,
/// - more chunks than the ring buffer has stages.
#[test]
fn multiply_batches_by_float_matrices_matches_reference() {
    let device = Device::default();
    for dtype in halves(&device) {
        let drawn = Drawn {
            device: &device,
            dtype,
        };
        let cases: [(usize, &[usize], [usize; 3]); 6] = [
            (
                1536,
                &[1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65],
                BATCH_OUTPUTS[0],
            ),
            (2600, &[12, 20, 48], BATCH_OUTPUTS[1]),
            (6144, &[1, 64], BATCH_OUTPUTS[0]),
            (72, &[11, 64], BATCH_OUTPUTS[1]),
            (8, &[3], BATCH_OUTPUTS[0]),
            (520, &[1, 40], BATCH_OUTPUTS[2]),
        ];
        for (columns, rows, outputs) in cases {
            #[cfg(feature = "cuda")]
            for rows in rows.iter().filter(|rows| **rows <= BATCH_MAX_ROWS) {
                let shape = [*rows, columns, outputs[0]];
                assert!(runs_on_hopper_kernel(&drawn, shape), "{shape:?}");
            }
            check_rows(&drawn, rows, outputs, &format!("{dtype:?}"), |rows| {
                surrounded(&drawn.tensor([rows, columns])).into()
            });
        }
    }
}

#[test]
fn multiply_several_rows_by_quantized_matrices_matches_reference() {
    let device = Device::default();
    for dtype in halves(&device) {
        let drawn = Drawn {
            device: &device,
            dtype,
        };
        for format in [BlockFormat::Q4_0, BlockFormat::Q8_0] {
            let cases: [(usize, &[usize]); 4] = [
                (1536, &[2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 64, 65]),
                (10_240, &[6, 24]),
                (320, &[8, 12]),
                (2112, &[7, 16, 64]),
            ];
            let cases = cases.map(|(columns, rows)| (columns, rows, OUTPUTS));
            // With few outputs, a team of warps has only 16 weight rows.
            let few: [(usize, &[usize], [usize; 3]); 2] =
                [(1536, &[5, 16], [9, 3, 14]), (704, &[8, 40], [9, 3, 14])];
            for (columns, rows, outputs) in cases.into_iter().chain(few) {
                let layout = format.words(columns).expect("the columns are whole blocks");
                let what = format!("{dtype:?}, {format:?}");
                check_rows(&drawn, rows, outputs, &what, |rows| {
                    surrounded_words(layout, rows, &device)
                });
            }
        }
    }
}
