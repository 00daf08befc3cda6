//! Compares MoE GEMMs, MoE GEMVs and their gradients with an f64 reference, for float and quantized weights. The sizes
//! are not multiples of the tile sizes. Some experts are chosen by all rows, some by no row, and some by more rows than
//! a tile has.

use super::*;
use crate::op::dequantize::tests;
use crate::op::gemv;
use crate::quant::blocks::BlockFormat;
use crate::quant::layout::Scales;
use burn::tensor::{Device, Distribution, TensorData};

/// The router's result: `top_k` chosen experts for each row.
struct Case {
    experts: usize,
    top_k: usize,
    chosen: Vec<i32>,
}

impl Case {
    fn rows(&self) -> usize {
        self.chosen.len() / self.top_k
    }

    fn chosen(&self, device: &Device) -> Tensor<2, Int> {
        let data = TensorData::new(self.chosen.clone(), [self.rows(), self.top_k]);
        Tensor::from_data(data, (device, DType::I32))
    }
}

fn cases() -> [Case; 3] {
    [
        // A single row chooses the experts 2 and 0.
        Case {
            experts: 3,
            top_k: 2,
            chosen: vec![2, 0],
        },
        // One expert gets all rows, and the other experts get none.
        Case {
            experts: 4,
            top_k: 1,
            chosen: vec![2; 131],
        },
        Case {
            experts: 5,
            top_k: 3,
            chosen: (0..70)
                .flat_map(|row| [row % 5, (row + 1 + row % 2) % 5, (row + 4) % 5])
                .collect(),
        },
    ]
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

fn check(found: &[f64], expected: &[f64], what: &str) {
    check_to(2e-5, found, expected, what);
}

/// Checks that the errors are at most `tolerance` times the largest expected magnitude.
fn check_to(tolerance: f64, found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(0f64, |most, x| most.max(x.abs()));
    for (found, expected) in found.iter().zip(expected) {
        let error = (found - expected).abs();
        assert!(
            error <= tolerance * scale,
            "{what}: got {found}, expected {expected}"
        );
    }
}

/// Computes the reference output, `[pairs, columns_out]`. A pair is a row with one of its chosen experts. `input` is
/// `[pairs / of_row, columns_in]`, where `of_row` is the number of pairs per input row. `weight` is
/// `[experts, columns_out, columns_in]`.
fn product(
    case: &Case,
    input: &[f64],
    weight: &[f64],
    columns_in: usize,
    of_row: usize,
) -> Vec<f64> {
    let columns_out = weight.len() / case.experts / columns_in;
    let mut output = Vec::new();
    for (place, expert) in case.chosen.iter().enumerate() {
        let row = &input[place / of_row * columns_in..][..columns_in];
        let matrix = &weight[*expert as usize * columns_out * columns_in..];
        for weight in matrix.chunks_exact(columns_in).take(columns_out) {
            output.push(row.iter().zip(weight).map(|(x, w)| x * w).sum());
        }
    }
    output
}

/// Computes the gradients of [`product`] with respect to its input and its weight. `gradient` is the gradient of the
/// output.
fn gradients(
    case: &Case,
    [gradient, input, weight]: [&[f64]; 3],
    columns_in: usize,
    of_row: usize,
) -> [Vec<f64>; 2] {
    let columns_out = gradient.len() / case.chosen.len();
    let (mut of_input, mut of_weight) = (vec![0.0; input.len()], vec![0.0; weight.len()]);
    for (place, expert) in case.chosen.iter().enumerate() {
        let row = place / of_row * columns_in;
        for output in 0..columns_out {
            let matrix = (*expert as usize * columns_out + output) * columns_in;
            let gradient = gradient[place * columns_out + output];
            for column in 0..columns_in {
                of_input[row + column] += gradient * weight[matrix + column];
                of_weight[matrix + column] += gradient * input[row + column];
            }
        }
    }
    [of_input, of_weight]
}

/// Returns uniform numbers between −½ and ½ in `dtype`.
fn random(shape: [usize; 2], dtype: DType, device: &Device) -> Tensor<2> {
    let numbers = Tensor::<2>::random(shape, Distribution::Default, (device, DType::F32));
    (numbers - 0.5).cast(dtype)
}

/// Checks the GEMM of random rows and its gradients. The errors are at most `tolerance` times the largest expected
/// magnitude.
fn check_rows_and_gradients(
    case: &Case,
    [columns_out, columns_in]: [usize; 2],
    of_row: usize,
    dtype: DType,
    tolerance: f64,
    device: &Device,
) {
    let tracked = device.clone().autodiff();
    let (places, experts) = (case.chosen.len(), case.experts);
    let what = format!("{dtype:?}, {places} places, {of_row} of a row");
    let input = random([places / of_row, columns_in], dtype, device);
    let weight = random([experts * columns_out, columns_in], dtype, device);
    let gradient = random([places, columns_out], dtype, device);
    let [of_input, of_weight, of_gradient] =
        [&input, &weight, &gradient].map(|tensor| values(tensor.clone()));
    let track = |tensor: Tensor<2>| Tensor::<2>::from_data(tensor.into_data(), (&tracked, dtype));
    let leaves = [input, weight].map(|tensor| track(tensor).require_grad());
    let [input, weight] = leaves.clone();
    let groups = groups(&case.chosen(&tracked), experts);
    let weight = weight.reshape([experts, columns_out, columns_in]);
    let output = rows(input, Matrices::Whole(weight), &groups, of_row);
    let expected = product(case, &of_input, &of_weight, columns_in, of_row);
    check_to(tolerance, &values(output.clone()), &expected, &what);

    let found = (output * track(gradient)).sum().backward();
    let tensors = [&of_gradient[..], &of_input, &of_weight];
    let expected = gradients(case, tensors, columns_in, of_row);
    for ((leaf, expected), of) in leaves.iter().zip(expected).zip(["input", "weight"]) {
        let found = leaf.grad(&found).expect("the leaf has a gradient");
        let what = format!("{what}: gradient of the {of}");
        check_to(tolerance, &values(found), &expected, &what);
    }
}

#[test]
fn rows_and_gradients_match_reference() {
    let device = Device::default();
    device.seed(3);
    for (case, sizes) in cases().iter().zip([[7, 17], [66, 40], [130, 65]]) {
        for of_row in [1, case.top_k] {
            check_rows_and_gradients(case, sizes, of_row, DType::F32, 2e-5, &device);
        }
    }
}

/// Checks half precision, which runs on tensor cores if the device has them. The sizes are legal for TMA, but they are
/// not multiples of the tile sizes. Some experts have several tiles of rows, and others have none.
#[test]
fn rows_and_gradients_in_half_precision_match_reference() {
    let device = Device::default();
    device.seed(8);
    let [_, one, mixed] = cases();
    let many = Case {
        experts: 9,
        top_k: 2,
        chosen: (0..700)
            .map(|pair| [0, 3, 8, 3][pair * pair % 11 % 4])
            .collect(),
    };
    // The relative rounding error of an output is half of `epsilon`. The sum of the gradients over a row's pairs is
    // rounded once more.
    for (dtype, epsilon) in [(DType::F16, 1.0 / 1024.0), (DType::BF16, 1.0 / 128.0)] {
        if !device.supports_dtype(dtype) {
            continue;
        }
        let sizes = [[72, 40], [136, 200], [328, 520]];
        for (case, sizes) in [&one, &mixed, &many].into_iter().zip(sizes) {
            check_rows_and_gradients(case, sizes, case.top_k, dtype, epsilon, &device);
        }
    }
}

/// Returns the quantized matrices of `experts` experts with `rows` rows each, and the same matrices in dequantized
/// form.
fn matrices(
    layout: Layout,
    experts: usize,
    rows: usize,
    dtype: DType,
    device: &Device,
) -> [Matrices; 2] {
    let words = tests::even_words(layout, experts * rows);
    let words = TensorData::new(words, [experts * rows, layout.words()]);
    let all = QuantizedMatrix {
        words: Tensor::<2, Int>::from_data(words, (device, DType::U32)),
        layout,
    };
    let whole = all.dequantized(dtype);
    [
        Matrices::Quantized { all, rows },
        Matrices::Whole(whole.reshape([experts, rows, layout.columns])),
    ]
}

/// Returns three layouts: blocks of 4 bits, blocks of 6 bits with quantized scales, and groups with zero points.
fn some_layouts() -> Vec<Layout> {
    let all = tests::layouts();
    let has_zeros = |layout: &&Layout| {
        layout.format.group == Some(96) && layout.format.scales == Scales::SingleAndZero
    };
    let with_zeros = all
        .iter()
        .find(has_zeros)
        .expect("one of the layouts has zero points");
    vec![all[0], all[7], *with_zeros]
}

#[test]
fn rows_with_quantized_weight_match_dequantized_weight() {
    let device = Device::default();
    device.seed(5);
    let tracked = device.clone().autodiff();
    let [_, _, case] = cases();
    let dtypes = [(DType::F32, 70, 2e-5), (DType::BF16, 72, 1.0 / 128.0)];
    for (dtype, columns_out, tolerance) in dtypes {
        if !device.supports_dtype(dtype) {
            continue;
        }
        for layout in some_layouts() {
            let what = format!("{dtype:?}, {layout:?}");
            let shape = [70, layout.columns];
            let input = Tensor::<2>::random(shape, Distribution::Default, (&device, DType::F32));
            let input = input.cast(dtype).into_data();
            let [found, expected] = matrices(layout, case.experts, columns_out, dtype, &tracked)
                .map(|weight| {
                    let input = Tensor::<2>::from_data(input.clone(), (&tracked, dtype));
                    let input = input.require_grad();
                    let groups = groups(&case.chosen(&tracked), case.experts);
                    let output = rows(input.clone(), weight, &groups, case.top_k);
                    let gradients = (output.clone() * output.clone().detach()).sum().backward();
                    let gradient = input.grad(&gradients).expect("the leaf has a gradient");
                    [values(output), values(gradient)]
                });
            for ((found, expected), of) in found.iter().zip(&expected).zip(["output", "gradient"]) {
                check_to(tolerance, found, expected, &format!("{what}: {of}"));
            }
        }
    }
}

/// Checks a whole mixture of experts on tensor cores, for sizes that are legal for TMA. On devices without such tensor
/// cores, `mixture` returns `None`.
#[cfg(feature = "cuda")]
#[test]
fn mixture_matches_reference() {
    let device = Device::default();
    device.seed(6);
    let [_, one, mixed] = cases();
    for (dtype, epsilon) in [(DType::F16, 1.0 / 1024.0), (DType::BF16, 1.0 / 128.0)] {
        for (case, (hidden, inner)) in [&one, &mixed].into_iter().zip([(72, 40), (200, 136)]) {
            let random = |shape| random(shape, dtype, &device);
            let input = random([case.rows(), hidden]);
            let gate_up = random([case.experts * 2 * inner, hidden]);
            let down = random([case.experts * hidden, inner]);
            let shares = random([case.rows(), case.top_k]).cast(DType::F32);
            let stack = |matrix: &Tensor<2>| {
                let [rows, columns] = matrix.dims();
                Matrices::Whole(matrix.clone().reshape([
                    case.experts,
                    rows / case.experts,
                    columns,
                ]))
            };
            let matrices = [stack(&gate_up), stack(&down)];
            let chosen = case.chosen(&device);
            let Some(found) = mixture(&input, matrices, &chosen, &shares) else {
                assert!(!infers_on_device(&device, dtype) || device.is_autodiff());
                continue;
            };
            let [input, gate_up, down] = [input, gate_up, down].map(values);
            let inner_rows = product(case, &input, &gate_up, hidden, case.top_k);
            let gated = gated(&inner_rows, inner);
            let outputs = product(case, &gated, &down, inner, 1);
            let expected = mixed_of(case, &outputs, &values(shares));
            // Allow for three roundings. The values between the two GEMMs are rounded twice, and each output is rounded
            // once.
            check_to(
                3.0 * epsilon,
                &values(found),
                &expected,
                &format!("{dtype:?}, {hidden}"),
            );
        }
    }
}

/// Computes `gelu(gate) · through`. Each row of `outputs` holds `columns` elements of `gate`, then `columns` elements
/// of `through`.
fn gated(outputs: &[f64], columns: usize) -> Vec<f64> {
    let gelu = |x: f64| {
        let inner = (x + 0.044715 * x.powi(3)) * (2.0 / std::f64::consts::PI).sqrt();
        0.5 * x * (1.0 + inner.tanh())
    };
    let of_place = |outputs: &[f64]| -> Vec<f64> {
        let (gates, through) = outputs.split_at(columns);
        gates
            .iter()
            .zip(through)
            .map(|(x, y)| gelu(*x) * y)
            .collect()
    };
    outputs
        .chunks_exact(2 * columns)
        .flat_map(of_place)
        .collect()
}

/// Sums the outputs of each row's chosen experts, weighted by `shares`, `[rows, top_k]`.
fn mixed_of(case: &Case, outputs: &[f64], shares: &[f64]) -> Vec<f64> {
    let columns = outputs.len() / case.chosen.len();
    let mut sums = vec![0.0; case.rows() * columns];
    for (place, outputs) in outputs.chunks_exact(columns).enumerate() {
        let sums = &mut sums[place / case.top_k * columns..];
        for (sum, output) in sums.iter_mut().zip(outputs) {
            *sum += shares[place] * output;
        }
    }
    sums
}

/// Checks the two GEMVs of decoding: the gated product, and the weighted sum over the chosen experts.
#[test]
fn expert_gemv_matches_reference() {
    let device = Device::default();
    device.seed(4);
    let case = Case {
        experts: 5,
        top_k: 3,
        chosen: vec![4, 0, 2, 2, 4, 3],
    };
    let random =
        |shape: [usize; 2]| Tensor::<2>::random(shape, Distribution::Default, &device) - 0.5;
    let whole = |columns_out, columns_in| {
        let weight = random([case.experts * columns_out, columns_in]);
        let weight = weight.reshape([case.experts, columns_out, columns_in]);
        [Matrices::Whole(weight.clone()), Matrices::Whole(weight)]
    };
    // Append columns of NaN to the matrix and take a view without them, to detect a read beyond the view.
    let padded = |columns_out, columns_in| {
        let [Matrices::Whole(weight), _] = whole(columns_out, columns_in) else {
            panic!("the matrices are floats")
        };
        let behind = Tensor::<3>::full([case.experts, columns_out, 8], f32::NAN, &device);
        let wide = Tensor::cat(vec![weight.clone(), behind], 2);
        let weight_in_place = wide.narrow(2, 0, columns_in);
        [Matrices::Whole(weight_in_place), Matrices::Whole(weight)]
    };
    let mut weights = vec![whole(14, 9), whole(6, 160), padded(6, 160), padded(14, 9)];
    // Rows of which some vectors in flight lie beyond the end.
    weights.extend([whole(6, 1408), padded(6, 1408)]);
    let long = BlockFormat::Q4_0
        .words(2816)
        .expect("the columns are whole blocks");
    for layout in some_layouts().into_iter().chain([long]) {
        weights.push(matrices(layout, case.experts, 22, DType::F32, &device));
    }
    for [weight, numbers] in weights {
        let what = match &weight {
            Matrices::Whole(weight) => format!("{:?}", weight.dims()),
            Matrices::Quantized { all, .. } => format!("{:?}", all.layout),
        };
        let Matrices::Whole(numbers) = numbers else {
            panic!("the second matrices are floats");
        };
        let [_, columns_out, columns_in] = numbers.dims();
        let numbers = values(numbers);
        let shares = random([case.rows(), case.top_k]);
        let input = random([case.rows(), columns_in]) * 0.1;
        let inner = random([case.chosen.len(), columns_in]);

        let outputs = product(
            &case,
            &values(input.clone()),
            &numbers,
            columns_in,
            case.top_k,
        );
        let found = gemv::gate_experts(input, weight.clone(), case.chosen(&device));
        let expected = gated(&outputs, columns_out / 2);
        check(&values(found), &expected, &format!("{what}: gated"));

        let outputs = product(&case, &values(inner.clone()), &numbers, columns_in, 1);
        let expected = mixed_of(&case, &outputs, &values(shares.clone()));
        let found = gemv::mix_experts(inner, weight, case.chosen(&device), shares);
        check(&values(found), &expected, &format!("{what}: mixed"));
    }
}

/// Checks the GEMVs of decoding in half precision, which run on tensor cores of NVIDIA GPUs. Some experts have more rows
/// than the kernel multiplies at once, and one expert has none. An expert has more outputs than a cube computes.
#[test]
fn expert_gemv_of_halves_matches_reference() {
    let device = Device::default();
    let halves = [(DType::F16, 2e-3), (DType::BF16, 1e-2)].into_iter();
    for (dtype, tolerance) in halves.filter(|(dtype, _)| crate::op::serves(&device, *dtype)) {
        for (format, columns, rows) in [
            (BlockFormat::Q4_0, 704, 2),
            (BlockFormat::Q4_0, 448, 9),
            (BlockFormat::Q4_0, 2112, 40),
            (BlockFormat::Q8_0, 704, 64),
            (BlockFormat::Q8_0, 256, 3),
            (BlockFormat::Q4_0, 256, 1),
        ] {
            let chosen = |row: i32| [row % 5, (row + 1 + row % 2) % 5, (row + 4) % 5];
            let case = Case {
                experts: 6,
                top_k: 3,
                chosen: (0..rows).flat_map(chosen).collect(),
            };
            let layout = format.words(columns).expect("the columns are whole blocks");
            let what = format!("{dtype:?}, {format:?}, {columns} columns, {rows} rows");
            let [weight, numbers] = matrices(layout, case.experts, 150, DType::F32, &device);
            let Matrices::Whole(numbers) = numbers else {
                panic!("the second matrices are floats");
            };
            let numbers = values(numbers);
            let input = random([case.rows(), columns], dtype, &device);
            let inner = random([case.chosen.len(), columns], dtype, &device);
            let shares = random([case.rows(), case.top_k], DType::F32, &device);

            let of_input = values(input.clone());
            let outputs = product(&case, &of_input, &numbers, columns, case.top_k);
            let found = gemv::gate_experts(input, weight.clone(), case.chosen(&device));
            let expected = gated(&outputs, 75);
            check_to(
                tolerance,
                &values(found),
                &expected,
                &format!("{what}: gated"),
            );

            let outputs = product(&case, &values(inner.clone()), &numbers, columns, 1);
            let expected = mixed_of(&case, &outputs, &values(shares.clone()));
            let found = gemv::mix_experts(inner, weight, case.chosen(&device), shares);
            check_to(
                tolerance,
                &values(found),
                &expected,
                &format!("{what}: mixed"),
            );
        }
    }
}

/// Checks that rows are grouped by expert in the same way if the router's indices are i64 or u32 instead of the
/// kernels' i32.
#[test]
fn groups_of_any_integer_dtype_are_equal() {
    let device = Device::default();
    for case in cases() {
        let chosen = case.chosen(&device);
        let of = |chosen: &Tensor<2, Int>| {
            let groups = groups(chosen, case.experts);
            [groups.order, groups.starts]
                .map(|numbers| numbers.into_data().iter::<i64>().collect::<Vec<_>>())
        };
        let expected = of(&chosen);
        for dtype in [DType::I64, DType::U32] {
            if device.supports_dtype(dtype) {
                assert_eq!(of(&chosen.clone().cast(dtype)), expected, "{dtype:?}");
            }
        }
    }
}
