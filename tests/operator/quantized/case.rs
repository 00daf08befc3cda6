//! Int8 codes and scales on the host and on a device, and the check of attention against the reference over the dequantized
//! numbers.

use crate::case::{Case, seed};
use crate::compare::Named;
use crate::definition::Definition;
use crate::dense::{Dense, read};
use crate::devices::{TestDevice, devices};
use crate::inputs::{Extras, Inputs};
use attention_cube::quantized::{QuantizedRows, try_quantized_attention};
use attention_cube::{AttentionProblem, Explanation, explain};
use burn::tensor::{DType, Device, Tensor, TensorData};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Rows of int8 codes on the host, with a scale for each row.
#[derive(Clone)]
pub struct Rows {
    /// The codes, `[batch, kv_heads, kv_len, columns]`.
    pub codes: Dense,
    /// The scales in f32, `[batch, kv_heads, kv_len, 1]`.
    pub scales: Dense,
}

impl Rows {
    /// Returns random codes and scales, chosen so that the dequantized numbers are about 1 in size.
    pub fn random(shape: [usize; 4], rng: &mut StdRng) -> Self {
        let [batch, heads, length, _] = shape;
        Self {
            codes: Dense::from_fn(shape, |_| f64::from(rng.random_range(-127..=127))),
            scales: Dense::from_fn([batch, heads, length, 1], |_| {
                f64::from(rng.random_range(0.002f32..0.02))
            }),
        }
    }

    /// Returns the dequantized elements: each code times the scale of its row, without rounding.
    pub fn numbers(&self) -> Dense {
        Dense::from_fn(self.codes.shape, |[b, h, j, c]| {
            self.codes.at([b, h, j, c]) * self.scales.at([b, h, j, 0])
        })
    }

    fn words(&self) -> Vec<i32> {
        let word = |codes: &[f64]| {
            let bytes = [0, 1, 2, 3].map(|lane| (codes[lane] as i8).cast_unsigned());
            i32::from_le_bytes(bytes)
        };
        self.codes.values.chunks(4).map(word).collect()
    }

    pub fn on(&self, device: &Device) -> QuantizedRows {
        let [batch, heads, length, columns] = self.codes.shape;
        let words = TensorData::new(self.words(), [batch, heads, length, columns / 4]);
        let scales = self.scales.tensor(device, DType::F32);
        QuantizedRows::of_parts(
            Tensor::from_data(words, (device, DType::I32)),
            scales.reshape([batch, heads, length]),
        )
        .expect("the codes and scales fit each other")
    }
}

/// A case with int8 keys and values, which replace the keys and values in `inputs`.
pub struct Quantized {
    pub case: Case,
    pub inputs: Inputs,
    pub key: Rows,
    pub value: Rows,
    /// True if the call sets the option `kv_lengths_ahead`, which promises that no kernel launch in the same CUDA graph
    /// writes the lengths.
    pub lengths_ahead: bool,
}

impl Quantized {
    pub fn new(case: Case) -> Self {
        let inputs = case.inputs();
        let mut rng = StdRng::seed_from_u64(seed() ^ case.kv_len as u64);
        let key = Rows::random(inputs.key.shape, &mut rng);
        let value = Rows::random(inputs.value.shape, &mut rng);
        Self {
            case,
            inputs,
            key,
            value,
            lengths_ahead: false,
        }
    }

    /// Checks the output and the logsumexp of each device against the reference over `key` and `value`. The devices get the
    /// rows `given_key` and `given_value`, which may differ from `key` and `value` only where keys are hidden.
    pub fn check(&self, given_key: &Rows, given_value: &Rows) {
        self.check_on(&devices(), given_key, given_value);
    }

    /// Returns the explanation of this call on a device, with contiguous int8 keys and values.
    pub fn explain_on(&self, TestDevice { device, .. }: &TestDevice) -> Explanation {
        let extras = untracked(&self.inputs, device, self.case.extras_dtype());
        let problem = AttentionProblem::quantized(
            &self.inputs.query.tensor(device, self.case.dtype),
            &self.key.on(device),
            &self.value.on(device),
            &self.case.options(extras),
        );
        explain(&problem.expect("the arguments fit"), device)
    }

    pub fn check_on(&self, devices: &[TestDevice], given_key: &Rows, given_value: &Rows) {
        let inputs = Inputs {
            key: self.key.numbers(),
            value: self.value.numbers(),
            ..self.inputs.clone()
        };
        let definition = Definition::new(&self.case, &inputs);
        let dtype = self.case.dtype;
        for device in devices.iter().filter(|device| device.supports(dtype)) {
            let TestDevice { name, device } = device;
            let extras = untracked(&self.inputs, device, self.case.extras_dtype());
            let (output, logsumexp) = try_quantized_attention(
                self.inputs.query.tensor(device, dtype),
                given_key.on(device),
                given_value.on(device),
                self.case
                    .options(extras)
                    .kv_lengths_ahead(self.lengths_ahead),
            )
            .unwrap_or_else(|error| panic!("{:?}: {error}", self.case));
            assert_eq!((output.dtype(), logsumexp.dtype()), (dtype, DType::F32));
            let named = |index: usize, values| Named {
                values,
                ..definition.exact()[index].clone()
            };
            let got = [named(0, read(output)), named(1, read(logsumexp))];
            let faults = definition.far_among(&got);
            assert!(
                faults.is_empty(),
                "{name}, seed {}: {:?}: {}",
                seed(),
                self.case,
                faults.join("; ")
            );
        }
    }
}

/// Returns the optional inputs of a call as tensors without autodiff.
fn untracked(inputs: &Inputs, device: &Device, dtype: DType) -> Extras {
    inputs
        .extras(&device.clone().autodiff(), dtype)
        .without_autodiff()
}

pub fn check(case: Case) {
    let quantized = Quantized::new(case);
    quantized.check(&quantized.key, &quantized.value);
}
