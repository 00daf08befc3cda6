//! Tests that the fused embedding kernels agree with Burn's operators. The tests try to fill the output buffers with
//! NaN before a launch, to detect elements that the kernel does not write.

use super::{NormWeight, OfTokens, PerLayerFactors, TokenRows, embed, per_layer};
use crate::op;
use crate::op::gemv::Origin;
use crate::op::norm::norm;
use burn::tensor::{DType, Device, Distribution, Int, Tensor, TensorData};

const EPSILON: f64 = 1e-6;
const TABLE_ROWS: usize = 11;
const TOKENS: [i32; 3] = [7, 0, 10];

fn drawn(shape: [usize; 2], device: &Device, dtype: DType) -> Tensor<2> {
    Tensor::<2>::random(shape, Distribution::Uniform(-1.0, 1.0), device).cast(dtype)
}

fn weight(columns: usize, device: &Device, dtype: DType) -> NormWeight {
    NormWeight {
        weight: drawn([1, columns], device, dtype).reshape([columns]),
        epsilon: EPSILON,
    }
}

fn numbers(tensor: Tensor<2>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

fn bits(tensor: Tensor<2>) -> Vec<u32> {
    numbers(tensor).into_iter().map(f32::to_bits).collect()
}

fn tokens(rows: usize, device: &Device) -> Tensor<1, Int> {
    let data = TensorData::new(TOKENS[..rows].to_vec(), [rows]);
    Tensor::from_data(data, (device, DType::I32))
}

/// Creates an embedding table. Only the rows of the tokens in `TOKENS` hold numbers, and all other rows hold NaN.
fn table(columns: usize, device: &Device, dtype: DType) -> Tensor<2> {
    let row = |row: usize| match TOKENS.contains(&(row as i32)) {
        true => drawn([1, columns], device, dtype),
        false => Tensor::<2>::full([1, columns], f32::NAN, device).cast(dtype),
    };
    Tensor::cat((0..TABLE_ROWS).map(row).collect(), 0)
}

/// Fills a buffer with NaN and frees the buffer. The next output of this `shape` may be allocated in the freed buffer.
/// The output then contains NaN before the launch.
fn dirty(shape: [usize; 2], device: &Device, dtype: DType) {
    let poison = Tensor::<2>::full(shape, f32::NAN, device).cast(dtype) * 2.0;
    drop(poison.into_data());
}

fn dtypes(device: &Device) -> impl Iterator<Item = DType> {
    let served = |dtype: &DType| op::serves(device, *dtype);
    [DType::F32, DType::F16, DType::BF16]
        .into_iter()
        .filter(served)
}

#[test]
fn embed_matches_separate_operators() {
    let device = Device::default();
    for dtype in dtypes(&device) {
        for (rows, columns) in [(1, 1536), (3, 40), (2, 63)] {
            let (table, scale) = (table(columns, &device, dtype), (columns as f64).sqrt());
            let NormWeight { weight, epsilon } = weight(columns, &device, dtype);
            let expected = table.clone().select(0, tokens(rows, &device)) * scale;
            let expected_norm = numbers(norm(expected.clone(), weight.clone(), epsilon));
            let expected = bits(expected);
            for origin in [Origin::Parameters, Origin::Computed] {
                dirty([rows, columns], &device, dtype);
                let rows_of = TokenRows {
                    table: table.clone(),
                    origin,
                    tokens: tokens(rows, &device),
                    scale,
                };
                let weight = weight.clone();
                let (found, normed) = embed(rows_of, NormWeight { weight, epsilon });
                assert_eq!(found.dims(), [rows, columns]);
                assert_eq!(bits(found), expected, "{columns} columns in {dtype:?}");
                // Allow an error of two roundings, because the compiler may fuse a multiplication and an addition in
                // only one of the two kernels.
                let rounding = dtype.finfo().expect("the dtype is a float").epsilon;
                for (found, expected) in numbers(normed).into_iter().zip(&expected_norm) {
                    let error = f64::from((found - expected).abs());
                    let most = 2.0 * rounding * f64::from(expected.abs());
                    assert!(
                        error <= most,
                        "got {found}, expected {expected}, in {dtype:?}"
                    );
                }
            }
        }
    }
}

/// Computes the expected per-layer embeddings in f64. A row has the columns of layer 0, then the columns of layer 1,
/// and so on.
fn exact(
    projected: &[f32],
    of_tokens: &[f32],
    weight: &[f32],
    factors: PerLayerFactors,
) -> Vec<f64> {
    let columns = weight.len();
    let layers = projected.chunks(columns).zip(of_tokens.chunks(columns));
    let of_layer = |(projected, of_tokens): (&[f32], &[f32])| {
        let scaled = projected.iter().map(|x| f64::from(*x) * factors.projected);
        let scaled: Vec<f64> = scaled.collect();
        let mean = scaled.iter().map(|x| x * x).sum::<f64>() / columns as f64;
        let factor = 1.0 / (mean + EPSILON).sqrt();
        let terms = scaled.into_iter().zip(weight).zip(of_tokens);
        let sums = terms.map(move |((x, weight), of_token)| {
            (x * factor * f64::from(*weight) + f64::from(*of_token)) * factors.sum
        });
        sums.collect::<Vec<_>>()
    };
    layers.flat_map(of_layer).collect()
}

#[test]
fn per_layer_matches_reference() {
    let device = Device::default();
    for dtype in dtypes(&device) {
        for (rows, layers, columns) in [(1, 35, 256), (3, 2, 20), (2, 3, 7)] {
            let all = layers * columns;
            let (table, scale) = (table(all, &device, dtype), (columns as f64).sqrt());
            let projected = drawn([rows, all], &device, dtype) * 9.0;
            let NormWeight { weight, epsilon } = weight(columns, &device, dtype);
            let factors = PerLayerFactors {
                projected: 0.0255,
                sum: std::f64::consts::FRAC_1_SQRT_2,
            };
            let of_tokens = table.clone().select(0, tokens(rows, &device)) * scale;
            let exact = exact(
                &numbers(projected.clone()),
                &numbers(of_tokens.clone()),
                &numbers(weight.clone().unsqueeze()),
                factors,
            );
            let found = |of_tokens| {
                dirty([rows, all], &device, dtype);
                let norm = NormWeight {
                    weight: weight.clone(),
                    epsilon,
                };
                let found = per_layer(projected.clone(), of_tokens, norm, factors);
                assert_eq!(found.dims(), [rows, all]);
                numbers(found)
            };
            let in_table = |origin| {
                OfTokens::from(TokenRows {
                    table: table.clone(),
                    origin,
                    tokens: tokens(rows, &device),
                    scale,
                })
            };
            let rounding = dtype.finfo().expect("the dtype is a float").epsilon;
            for of_tokens in [
                OfTokens::there(of_tokens),
                in_table(Origin::Parameters),
                in_table(Origin::Computed),
            ] {
                let found = found(of_tokens);
                assert_eq!(found.len(), exact.len());
                for (found, exact) in found.into_iter().zip(&exact) {
                    let error = (f64::from(found) - exact).abs();
                    // The bound is half a unit in the last place, plus the rounding errors of the operations in f32.
                    let most = (0.51 * rounding).max(1e-6) * exact.abs().max(1.0);
                    assert!(error <= most, "got {found}, expected {exact}, in {dtype:?}");
                }
            }
        }
    }
}
