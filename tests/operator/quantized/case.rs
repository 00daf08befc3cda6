//! Codes and scales on the host and on a device, and the check of attention against the reference over the dequantized numbers.

use crate::case::{Case, seed};
use crate::compare::Named;
use crate::definition::Definition;
use crate::dense::{Dense, read};
use crate::devices::{TestDevice, devices};
use crate::inputs::{Extras, Inputs};
use attention_cube::quantized::{CodeFormat, QuantizedRows, try_quantized_attention};
use attention_cube::{AttentionProblem, Explanation, explain};
use burn::tensor::{DType, Device, Tensor, TensorData};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Quantized rows on the host: their codes and their scales.
#[derive(Clone)]
pub struct Rows {
    /// The numbers that the codes represent, `[batch, kv_heads, kv_len, columns]`.
    pub codes: Dense,
    /// The scales in f32, `[batch, kv_heads, kv_len, 1]`. In e4m3, any of these dimensions may be 1, and one scale then
    /// applies to all indices of the dimension.
    pub scales: Dense,
    pub format: CodeFormat,
}

/// Returns the number that an e4m3 code represents. For the two NaN codes, the function returns ±480.
pub fn e4m3_number(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match exponent {
        0 => mantissa / 8.0 * 2f64.powi(-6),
        exponent => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    };
    if code < 128 { magnitude } else { -magnitude }
}

/// Returns the e4m3 code that represents `number`.
fn e4m3_code(number: f64) -> u8 {
    let code = (0..=255).find(|code| e4m3_number(*code) == number);
    code.expect("the number has a code")
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
            format: CodeFormat::Int8,
        }
    }

    /// Returns random e4m3 codes, which include NaN codes. `scales` is the shape of the scales: batch, heads and
    /// length.
    pub fn random_e4m3(shape: [usize; 4], scales: [usize; 3], rng: &mut StdRng) -> Self {
        let [batch, heads, length] = scales;
        Self {
            codes: Dense::from_fn(shape, |_| e4m3_number(rng.random())),
            scales: Dense::from_fn([batch, heads, length, 1], |_| {
                f64::from(rng.random_range(0.002f32..0.02))
            }),
            format: CodeFormat::E4m3,
        }
    }

    /// Returns the dequantized elements: each code times its scale, without rounding.
    pub fn numbers(&self) -> Dense {
        let sizes = self.scales.shape;
        Dense::from_fn(self.codes.shape, |[b, h, j, c]| {
            let scale = self
                .scales
                .at([b % sizes[0], h % sizes[1], j % sizes[2], 0]);
            self.codes.at([b, h, j, c]) * scale
        })
    }

    fn words(&self) -> Vec<i32> {
        let byte = |number: f64| match self.format {
            CodeFormat::Int8 => (number as i8).cast_unsigned(),
            _ => e4m3_code(number),
        };
        let word = |codes: &[f64]| i32::from_le_bytes([0, 1, 2, 3].map(|lane| byte(codes[lane])));
        self.codes.values.chunks(4).map(word).collect()
    }

    pub fn on(&self, device: &Device) -> QuantizedRows {
        let [batch, heads, length, columns] = self.codes.shape;
        let words = TensorData::new(self.words(), [batch, heads, length, columns / 4]);
        let words = Tensor::from_data(words, (device, DType::I32));
        let scales = self.scales.tensor(device, DType::F32).squeeze_dim(3);
        let rows = match self.format {
            CodeFormat::Int8 => QuantizedRows::of_parts(words, scales),
            _ => QuantizedRows::of_e4m3_parts(words, scales),
        };
        rows.expect("the codes and scales fit each other")
    }
}

/// A case whose keys and values are quantized. `key` and `value` replace the keys and values in `inputs`.
pub struct Quantized {
    pub case: Case,
    pub inputs: Inputs,
    pub key: Rows,
    pub value: Rows,
    /// The value of the call's option `kv_lengths_ahead`. With this option, the caller promises that no kernel launch
    /// in the same CUDA graph writes the lengths.
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

    /// Returns a case with e4m3 keys and values. The flags in `per` stand for batch, heads and length. If a flag is
    /// true, each index of that dimension has a scale of its own. Otherwise, all indices share one scale.
    pub fn e4m3(case: Case, per: [bool; 3]) -> Self {
        let int8 = Self::new(case);
        let mut rng = StdRng::seed_from_u64(seed() ^ int8.case.head_dim as u64);
        let mut rows = |shape: [usize; 4]| {
            let scales = [0, 1, 2].map(|dim| if per[dim] { shape[dim] } else { 1 });
            Rows::random_e4m3(shape, scales, &mut rng)
        };
        Self {
            key: rows(int8.inputs.key.shape),
            value: rows(int8.inputs.value.shape),
            ..int8
        }
    }

    /// Checks the output and the logsumexp of each device against the reference over `key` and `value`. The devices get the
    /// rows `given_key` and `given_value`, which may differ from `key` and `value` only where keys are hidden.
    pub fn check(&self, given_key: &Rows, given_value: &Rows) {
        self.check_on(&devices(), given_key, given_value);
    }

    /// Returns the explanation of this call on a device, with contiguous quantized keys and values.
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
