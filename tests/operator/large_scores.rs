//! Tests of scores of 10⁸ and more, where neighboring f32 numbers are 8 or more apart. Rounding to f32 then changes the
//! scaled dot product, and also the sum of the row maximum and the logarithm of the row sum.

use crate::dense::read;
use crate::devices::devices;
use attention_cube::{AttentionOptions, fused_attention};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};

/// The number of query heads, which share one key head.
const Q_HEADS: usize = 2;
/// The value of every element in the output's gradient.
const OUTPUT_GRADIENT: f64 = 1.0 / 64.0;

/// Returns a tensor in which all elements of row `i` equal `of(i)`. The index `i` counts the rows of all sequences and heads.
fn tensor_of_rows(
    shape: [usize; 4],
    of: impl Fn(usize) -> f64,
    on: &Device,
    dtype: DType,
) -> Tensor<4> {
    let elements = (0..shape.iter().product()).map(|i: usize| of(i / shape[3]) as f32);
    let data = TensorData::new(elements.collect::<Vec<f32>>(), shape);
    Tensor::from_data(data, (on, dtype)).require_grad()
}

/// The option that a case uses. Each option selects another kernel.
#[derive(Clone, Copy, Debug)]
enum Extra {
    Nothing,
    Causal,
    /// A mask tensor that hides no key, so that the kernels find all blocks fully visible.
    Mask,
    /// Two segments, with the boundary at two fifths of the rows.
    Segments,
    Lengths,
    /// A sink that equals the largest score of the queries with small elements.
    Sink,
}

/// The data of a test. Every second query has huge elements and the other queries have small elements. A tile therefore
/// contains both kinds of queries. Most keys are equal, some keys are half as large as these, and the last key is
/// negative.
#[derive(Clone, Copy, Debug)]
struct Case {
    head_dim: usize,
    length: usize,
    extra: Extra,
    magnitude: f64,
}

impl Case {
    fn query(&self, head: usize, row: usize) -> f64 {
        match (head + row).is_multiple_of(2) {
            true => self.magnitude,
            false => 2.0_f64.powi(-7),
        }
    }

    fn key(&self, row: usize) -> f64 {
        match row {
            _ if row + 1 == self.length => -self.magnitude,
            _ if row % 8 == 5 => self.magnitude / 2.0,
            _ => self.magnitude,
        }
    }

    fn value(row: usize) -> f64 {
        match row % 3 {
            0 => -1.0,
            _ => 1.0,
        }
    }

    fn scale(&self) -> f64 {
        1.0 / (self.head_dim as f64).sqrt()
    }

    fn score(&self, query: f64, key: f64) -> f64 {
        query * key * self.head_dim as f64 * self.scale()
    }

    fn sink(&self) -> f64 {
        self.score(self.query(0, 1), self.magnitude)
    }

    /// Returns the segment id of a row.
    fn document(&self, row: usize) -> i32 {
        i32::from(row >= self.length * 2 / 5)
    }

    /// Returns the number of visible keys under the option `Lengths`: four fifths of all keys.
    fn keys(&self) -> usize {
        self.length * 4 / 5
    }

    fn sees(&self, query: usize, key: usize) -> bool {
        match self.extra {
            Extra::Nothing | Extra::Mask | Extra::Sink => true,
            Extra::Causal => key <= query,
            Extra::Segments => self.document(query) == self.document(key),
            Extra::Lengths => key < self.keys(),
        }
    }

    /// Returns the probabilities of all keys for one query.
    fn probabilities(&self, head: usize, query: usize) -> Vec<f64> {
        let scores: Vec<f64> = (0..self.length)
            .map(|key| match self.sees(query, key) {
                true => self.score(self.query(head, query), self.key(key)),
                false => f64::NEG_INFINITY,
            })
            .collect();
        let sink = match self.extra {
            Extra::Sink => self.sink(),
            _ => f64::NEG_INFINITY,
        };
        let highest = scores.iter().copied().fold(sink, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - highest).exp()).sum();
        let sum = sum + (sink - highest).exp();
        scores
            .iter()
            .map(|score| (score - highest).exp() / sum)
            .collect()
    }

    /// Returns the gradients of query, key and value, with one pair of numbers for each row. All elements of a row have
    /// the same gradient, and the first number is this gradient. The second number is the sum of the absolute values of
    /// the terms that add up to the gradient. The tolerance is proportional to the second number.
    fn gradients(&self) -> [Vec<[f64; 2]>; 3] {
        let mut query_gradient = vec![[0.0; 2]; Q_HEADS * self.length];
        let mut key_gradient = vec![[0.0; 2]; self.length];
        let mut value_gradient = vec![[0.0; 2]; self.length];
        let add = |sum: &mut [f64; 2], part: f64| {
            sum[0] += part;
            sum[1] += part.abs();
        };
        let of_output = self.head_dim as f64 * OUTPUT_GRADIENT;
        for head in 0..Q_HEADS {
            for query in 0..self.length {
                let p = self.probabilities(head, query);
                let delta: f64 = (0..self.length)
                    .map(|key| p[key] * Self::value(key) * of_output)
                    .sum();
                for key in 0..self.length {
                    let score_gradient =
                        p[key] * (Self::value(key) * of_output - delta) * self.scale();
                    let query_row = &mut query_gradient[head * self.length + query];
                    add(query_row, score_gradient * self.key(key));
                    add(
                        &mut key_gradient[key],
                        score_gradient * self.query(head, query),
                    );
                    add(&mut value_gradient[key], p[key] * OUTPUT_GRADIENT);
                }
            }
        }
        [query_gradient, key_gradient, value_gradient]
    }

    /// Returns a tensor `[1, heads, length, head_dim]` with equal elements in each row.
    fn tensor(
        &self,
        heads: usize,
        of: impl Fn(usize, usize) -> f64,
        on: &Device,
        dtype: DType,
    ) -> Tensor<4> {
        let Self {
            head_dim, length, ..
        } = *self;
        let of_row = |row: usize| of(row / length, row % length);
        tensor_of_rows([1, heads, length, head_dim], of_row, on, dtype)
    }

    fn options(&self, on: &Device) -> AttentionOptions {
        let options = AttentionOptions::new();
        let length = self.length;
        match self.extra {
            Extra::Nothing => options,
            Extra::Causal => options.causal(),
            Extra::Mask => options.mask(Tensor::<4, Bool>::full([1, 1, length, length], true, on)),
            Extra::Segments => {
                let documents: Vec<i32> = (0..length).map(|row| self.document(row)).collect();
                let data = TensorData::new(documents, [1, length]);
                let documents = Tensor::<2, Int>::from_data(data, on);
                options.segments(documents.clone(), documents)
            }
            Extra::Lengths => {
                options.kv_lengths(Tensor::<1, Int>::full([1], self.keys() as i32, on))
            }
            Extra::Sink => options.sinks(Tensor::full([Q_HEADS], self.sink(), (on, DType::F32))),
        }
    }

    fn check(&self, on: &Device, dtype: DType, tolerance: f64, name: &str) {
        let width = self.head_dim;
        let query = self.tensor(Q_HEADS, |head, row| self.query(head, row), on, dtype);
        let key = self.tensor(1, |_, row| self.key(row), on, dtype);
        let value = self.tensor(1, |_, row| Self::value(row), on, dtype);
        let options = self.options(on);
        let output = fused_attention(query.clone(), key.clone(), value.clone(), options);
        let loss = output.cast(DType::F32).sum() * OUTPUT_GRADIENT;
        let gradients = loss.backward();
        for (which, (tensor, expected)) in
            [query, key, value].iter().zip(self.gradients()).enumerate()
        {
            let found = read(tensor.grad(&gradients).expect("the leaf has a gradient"));
            for (row, [expected, whole]) in expected.into_iter().enumerate() {
                for found in &found[row * width..][..width] {
                    assert!(
                        (found - expected).abs() <= tolerance * whole.max(1e-6),
                        "{name}, {dtype:?}, {self:?}: gradient {which} of row {row} is {found:e}, not {expected:e}",
                    );
                }
            }
        }
    }
}

/// Cases of one tile, as `(head_dim, length, extra)`. Each head size selects another plan. Each option in [`Extra`] selects
/// another kernel.
const SHORT: [(usize, usize, Extra); 4] = [
    (64, 40, Extra::Nothing),
    (80, 40, Extra::Causal),
    (256, 40, Extra::Nothing),
    (320, 40, Extra::Nothing),
];

/// Cases with several blocks, as `(head_dim, length, extra)`, where `extra` is an option of the call. The engines with
/// matrix units treat fully visible blocks differently from blocks with hidden scores.
const LONG: [(usize, usize, Extra); 7] = [
    (64, 256, Extra::Nothing),
    (64, 256, Extra::Mask),
    (256, 256, Extra::Mask),
    (80, 256, Extra::Causal),
    (64, 256, Extra::Segments),
    (64, 256, Extra::Lengths),
    (64, 256, Extra::Sink),
];

fn check_on_devices(dtype: DType, tolerance: f64) {
    for device in devices() {
        if !device.supports(dtype) {
            continue;
        }
        let on = &device.device.clone().autodiff();
        // Only half precision runs on matrix units. The condition on bf16 excludes software Vulkan, which would take seconds
        // to compile each kernel.
        let has_matrix_units = dtype != DType::F32 && device.supports(DType::BF16);
        let long = LONG.iter().filter(|_| has_matrix_units);
        for (head_dim, length, extra) in SHORT.iter().chain(long).copied() {
            for magnitude in [3584.0, 18048.0] {
                let case = Case {
                    head_dim,
                    length,
                    extra,
                    magnitude,
                };
                case.check(on, dtype, tolerance, device.name);
            }
        }
    }
}

/// Checks a single far query, that is, a query whose scores are too large for a precise f32 logsumexp. The far query comes
/// after many queries of zeros, so the kernels find a far query in one block only.
fn check_one_far_query(dtype: DType, tolerance: f64) {
    const LENGTH: usize = 1100;
    const FAR_QUERY: usize = 1090;
    const HEADS: usize = 2;
    const WIDTH: usize = 64;
    for device in devices() {
        if !device.supports(dtype) {
            continue;
        }
        let on = &device.device.clone().autodiff();
        for sign in [1.0, -1.0] {
            let tensor = |batch: usize, heads: usize, of: &dyn Fn(usize) -> f64| {
                tensor_of_rows([batch, heads, LENGTH, WIDTH], of, on, dtype)
            };
            let far_row = (2 * HEADS - 1) * LENGTH + FAR_QUERY;
            let query = tensor(2, HEADS, &|row| match row == far_row {
                true => sign * 18048.0,
                false => 0.0,
            });
            let key = tensor(2, HEADS / 2, &|_| 18048.0);
            let value = tensor(2, HEADS / 2, &Case::value);
            let output =
                fused_attention(query, key.clone(), value.clone(), AttentionOptions::new());
            let gradients = (output.cast(DType::F32).sum() * OUTPUT_GRADIENT).backward();
            // The scores of a query are all equal, so each key has the probability 1 / `LENGTH`. The gradient of a
            // value is a sum over `LENGTH` queries of each of the two heads that share a key head.
            let expected = 2.0 * OUTPUT_GRADIENT;
            let found = read(value.grad(&gradients).expect("the values have a gradient"));
            for (index, found) in found.iter().enumerate() {
                assert!(
                    (found - expected).abs() <= tolerance * expected,
                    "{}, {dtype:?}, sign {sign}: dV of row {} is {found:e}, not {expected:e}",
                    device.name,
                    index / WIDTH
                );
            }
            let found = read(key.grad(&gradients).expect("the keys have a gradient"));
            assert!(
                found.iter().all(|found| found.is_finite()),
                "{}, {dtype:?}, sign {sign}: dK",
                device.name
            );
        }
    }
}

#[test]
fn backward_one_far_query_exact() {
    check_one_far_query(DType::BF16, 2e-2);
    check_one_far_query(DType::F16, 1e-2);
}

#[test]
fn backward_f32_scores_beyond_1e8_exact() {
    check_on_devices(DType::F32, 1e-4);
}

#[test]
fn backward_bf16_scores_beyond_1e8_exact() {
    check_on_devices(DType::BF16, 2e-2);
}

#[test]
fn backward_f16_scores_beyond_1e8_exact() {
    check_on_devices(DType::F16, 1e-2);
}
