//! Tests of the modules with fused attention against burn-nn's modules with the same parameters. The modules of burn-nn
//! run in f64 for exact results, and in f32 for a baseline. The error of a fused module must be at most twice the error
//! of the baseline, apart from a few roundings.

mod attention;
mod cache;
mod encoder;

use crate::case::seed;
use crate::dense::{Dense, read, rms};
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::attention::{MultiHeadAttention, MultiHeadAttentionConfig};
use burn::tensor::{Bool, DType, Device, Tensor, TensorData};
use rand::{SeedableRng, rngs::StdRng};

// All tests use the following sizes, so that few kernels must be compiled. The head size is `D_MODEL / HEADS`, which is
// 8.
const BATCH: usize = 2;
const LENGTH: usize = 12;
const D_MODEL: usize = 32;
const HEADS: usize = 4;

/// Replaces parameters by random numbers in `dtype` on `device`.
struct Randomize {
    rng: StdRng,
    device: Device,
    dtype: DType,
}

impl ModuleMapper for Randomize {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let shape: [usize; D] = param.lazy_shape().dims();
        // One-dimensional parameters are the biases of layers and the factors of layer normalization. Their random numbers
        // have the mean 1, which is the usual initial value of the factors.
        let mean = if D == 1 { 1.0 } else { 0.0 };
        let data = random(shape, mean, 0.25, &mut self.rng);
        Param::from_tensor(tensor(&data, &self.device, self.dtype))
    }
}

/// Returns `module` with random parameters in `dtype` on `device`.
fn randomized<M: Module>(module: M, device: &Device, dtype: DType) -> M {
    module.map(&mut Randomize {
        rng: StdRng::seed_from_u64(seed()),
        device: device.clone(),
        dtype,
    })
}

/// Returns a module of burn-nn with random parameters.
fn unfused(config: &MultiHeadAttentionConfig, device: &Device, dtype: DType) -> MultiHeadAttention {
    randomized(config.init(device), device, dtype)
}

/// Returns the configuration of the tested attention modules, without dropout.
fn config(quiet_softmax: bool) -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(D_MODEL, HEADS)
        .with_dropout(0.0)
        .with_quiet_softmax(quiet_softmax)
}

/// Returns normally distributed numbers that bf16 represents exactly.
fn random<const D: usize>(
    shape: [usize; D],
    mean: f64,
    deviation: f64,
    rng: &mut StdRng,
) -> TensorData {
    let count: usize = shape.iter().product();
    let normal = Dense::normal([1, 1, 1, count], DType::F64, rng);
    let values: Vec<f64> = (normal.values.iter())
        .map(|value| mean + deviation * value)
        .collect();
    TensorData::new(values, shape)
        .convert_dtype(DType::BF16)
        .convert_dtype(DType::F64)
}

fn tensor<const D: usize>(data: &TensorData, device: &Device, dtype: DType) -> Tensor<D> {
    Tensor::from_data(data.clone().convert_dtype(dtype), (device, dtype))
}

/// Returns `count` random sequences, each `[BATCH, LENGTH, D_MODEL]`.
fn sequences<const COUNT: usize>(device: &Device, dtype: DType) -> [Tensor<3>; COUNT] {
    let mut rng = StdRng::seed_from_u64(seed() + 1);
    std::array::from_fn(|_| {
        let data = random([BATCH, LENGTH, D_MODEL], 0.0, 1.0, &mut rng);
        tensor(&data, device, dtype)
    })
}

/// Returns a padding mask, which hides the last keys of the second sequence.
fn pad_mask(device: &Device) -> Tensor<2, Bool> {
    let hidden = (0..BATCH * LENGTH).map(|index| index / LENGTH == 1 && index % LENGTH >= 9);
    let hidden: Vec<bool> = hidden.collect();
    Tensor::from_data(TensorData::new(hidden, [BATCH, LENGTH]), device)
}

/// Returns an attention mask with an irregular pattern. Each query sees the first key.
fn attention_mask(device: &Device) -> Tensor<3, Bool> {
    let hidden = (0..BATCH * LENGTH * LENGTH).map(|index| {
        let (query, key) = (index / LENGTH, index % LENGTH);
        key > 0 && (7 * query + 5 * key).is_multiple_of(3)
    });
    let hidden: Vec<bool> = hidden.collect();
    Tensor::from_data(TensorData::new(hidden, [BATCH, LENGTH, LENGTH]), device)
}

fn plain<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    read(tensor.without_autodiff())
}

/// Returns the root mean square of the differences between `found` and `expected`.
fn distance(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let differences: Vec<f64> = found.iter().zip(expected).map(|(a, b)| a - b).collect();
    rms(&differences)
}

/// The results of a run: the name of each output or gradient, and its elements.
type Results = Vec<(String, Vec<f64>)>;

/// Checks the error of each result in `found`. It may be at most twice the error of the same result in `baseline`, plus
/// a few f32 roundings.
fn assert_as_exact(case: &str, found: &Results, baseline: &Results, exact: &Results) {
    assert_eq!(found.len(), exact.len(), "{case}");
    for ((name, found), ((_, baseline), (_, exact))) in found.iter().zip(baseline.iter().zip(exact))
    {
        // The exact gradient of the key bias is 0. The slack therefore has a lower limit, because a slack relative to 0
        // would allow no rounding error.
        let slack = 2e-6 * rms(exact).max(1.0);
        let allowed = 2.0 * distance(baseline, exact) + slack;
        let error = distance(found, exact);
        assert!(error <= allowed, "{case}: {name}: {error:e} > {allowed:e}");
    }
}

/// Checks that two results agree. The tolerance is larger than the difference of two f32 computations with TF32 matrix
/// products.
fn assert_near(case: &str, found: &[f64], expected: &[f64]) {
    let (error, size) = (distance(found, expected), rms(expected));
    assert!(error <= 5e-3 * size, "{case}: {error:e} of {size:e}");
}
