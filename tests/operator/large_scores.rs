//! Scores of 10⁸ and more, of which f32 holds neither the product with the scale nor the sum with a logarithm exactly.

use crate::dense::read;
use crate::devices::devices;
use attention_cube::{AttentionOptions, fused_attention};
use burn::tensor::{DType, Device, Tensor, TensorData};

/// Queries, and keys.
const LENGTH: usize = 40;
/// Every element of the output's gradient.
const OUTPUT_GRADIENT: f64 = 1.0 / 64.0;

/// What the elements of a position's row are.
fn rows(of: impl Fn(usize) -> f64, width: usize, on: &Device, dtype: DType) -> Tensor<4> {
    let numbers: Vec<f32> = (0..LENGTH * width).map(|i| of(i / width) as f32).collect();
    Tensor::from_data(TensorData::new(numbers, [1, 1, LENGTH, width]), (on, dtype)).require_grad()
}

/// Equal keys but for the last, which nobody's softmax sees; every second query is small, so that a tile has scores of both kinds.
struct Case {
    head_dim: usize,
    magnitude: f64,
    causal: bool,
}

impl Case {
    fn query(&self, row: usize) -> f64 {
        match row % 2 {
            0 => self.magnitude,
            _ => 2.0_f64.powi(-7),
        }
    }

    fn key(&self, row: usize) -> f64 {
        match row + 1 == LENGTH {
            true => -self.magnitude,
            false => self.magnitude,
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

    /// P of a query and a key.
    fn probability(&self, query: usize, key: usize) -> f64 {
        let seen = match self.causal {
            true => query + 1,
            false => LENGTH,
        };
        let equal = seen.min(LENGTH - 1);
        match key < equal {
            true => 1.0 / equal as f64,
            false => 0.0,
        }
    }

    /// `d loss / d score`.
    fn score_gradient(&self, query: usize, key: usize) -> f64 {
        let of_output = self.head_dim as f64 * OUTPUT_GRADIENT;
        let delta: f64 = (0..LENGTH)
            .map(|key| self.probability(query, key) * Self::value(key) * of_output)
            .sum();
        self.probability(query, key) * (Self::value(key) * of_output - delta)
    }

    /// The gradients of a row of query, key and value, each with the sum of what it is made of without signs.
    fn gradients(&self, row: usize) -> [[f64; 2]; 3] {
        let sum = |of: &dyn Fn(usize) -> f64| {
            let parts: Vec<f64> = (0..LENGTH).map(of).collect();
            [
                parts.iter().sum(),
                parts.iter().map(|part| part.abs()).sum(),
            ]
        };
        [
            sum(&|key| self.score_gradient(row, key) * self.key(key) * self.scale()),
            sum(&|query| self.score_gradient(query, row) * self.query(query) * self.scale()),
            sum(&|query| self.probability(query, row) * OUTPUT_GRADIENT),
        ]
    }

    fn check(&self, on: &Device, dtype: DType, tolerance: f64, name: &str) {
        let width = self.head_dim;
        let query = rows(|row| self.query(row), width, on, dtype);
        let key = rows(|row| self.key(row), width, on, dtype);
        let value = rows(Self::value, width, on, dtype);
        let options = match self.causal {
            true => AttentionOptions::new().causal(),
            false => AttentionOptions::new(),
        };
        let output = fused_attention(query.clone(), key.clone(), value.clone(), options);
        let loss = output.cast(DType::F32).sum() * OUTPUT_GRADIENT;
        let gradients = loss.backward();
        for (which, tensor) in [query, key, value].iter().enumerate() {
            let found = read(tensor.grad(&gradients).expect("a gradient"));
            for row in 0..LENGTH {
                let [expected, whole] = self.gradients(row)[which];
                for found in &found[row * width..][..width] {
                    assert!(
                        (found - expected).abs() <= tolerance * whole.max(1e-6),
                        "{name}, {dtype:?}, {width} columns of {}, causal {}: gradient {which} of row {row} is {found:e}, not {expected:e}",
                        self.magnitude,
                        self.causal
                    );
                }
            }
        }
    }
}

/// Every head size is of another plan, and one of two masks: each case compiles kernels of its own.
fn check_on_devices(dtype: DType, tolerance: f64) {
    for device in devices() {
        if !device.supports(dtype) {
            continue;
        }
        let on = &device.device.clone().autodiff();
        for (head_dim, causal) in [(64, false), (80, true), (256, true), (320, false)] {
            for magnitude in [3584.0, 18048.0] {
                let case = Case {
                    head_dim,
                    magnitude,
                    causal,
                };
                case.check(on, dtype, tolerance, device.name);
            }
        }
    }
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
