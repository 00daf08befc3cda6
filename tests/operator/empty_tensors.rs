//! Tests of tensors without elements: no sequence, no head, no query or no key. Output and gradients are 0. The
//! logsumexp of a query without keys is the sink of its head, or −∞ without sinks. Only the gradient of a sink may
//! differ from 0: it is the sum of the head's logsumexp gradients.

use crate::dense::read;
use crate::devices::{TestDevice, devices};
use crate::run::Operator;
use attention_cube::quantized::{QuantizedRows, try_quantized_attention};
use attention_cube::{AttentionOptions, attention_with_lse};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};

/// The tested sizes `[batch, q_heads, kv_heads, q_len, kv_len]`. At least one size in each entry is zero.
const SIZES: [[usize; 5]; 9] = [
    [2, 4, 2, 3, 0],
    [2, 2, 1, 3, 0],
    [1, 2, 1, 70, 0],
    [0, 2, 1, 3, 4],
    [2, 0, 0, 3, 4],
    [2, 0, 1, 3, 0],
    [2, 0, 1, 3, 4],
    [2, 2, 1, 0, 4],
    [2, 2, 1, 0, 0],
];

const WIDTH: usize = 16;

/// The option that a call has besides its sinks.
#[derive(Clone, Copy, Debug)]
enum Extra {
    None,
    Mask,
    Bias,
    Lengths,
    Segments,
    Intervals,
    Window,
}

const EXTRAS: [Extra; 7] = [
    Extra::None,
    Extra::Mask,
    Extra::Bias,
    Extra::Lengths,
    Extra::Segments,
    Extra::Intervals,
    Extra::Window,
];

/// The results on which the loss depends: the output, the logsumexp or both.
#[derive(Clone, Copy, Debug)]
enum Loss {
    Output,
    Logsumexp,
    Both,
}

/// The sizes and options of one operator call. Every call in these tests has sinks.
#[derive(Clone, Copy, Debug)]
struct Call {
    sizes: [usize; 5],
    dtype: DType,
    sinks_dtype: DType,
    extra: Extra,
    loss: Loss,
    operator: Operator,
}

/// Returns a sink for each head. Half precision can represent these sinks exactly, so each logsumexp must equal its
/// sink without a rounding error.
fn sinks_of(heads: usize) -> Vec<f64> {
    (0..heads).map(|head| head as f64 * 0.75 - 1.0).collect()
}

/// Returns the weight of one logsumexp in the loss. The weights are small integers, so that sums of weights are exact.
fn weight_of(row: usize) -> f64 {
    (row % 5) as f64 - 1.0
}

fn vector(values: &[f64], on: &Device, dtype: DType) -> Tensor<1> {
    let data = TensorData::new(values.to_vec(), [values.len()]);
    Tensor::from_data(data.convert_dtype(dtype), (on, dtype))
}

impl Call {
    fn options(&self, bias: &Tensor<4>, sinks: Tensor<1>, on: &Device) -> AttentionOptions {
        let [batch, _, _, q_len, kv_len] = self.sizes;
        let options = AttentionOptions::new().sinks(sinks);
        match self.extra {
            Extra::None => options,
            Extra::Mask => options.mask(Tensor::<4, Bool>::full([1, 1, q_len, kv_len], true, on)),
            Extra::Bias => options.bias(bias.clone()),
            Extra::Lengths => options.kv_lengths(Tensor::<1, Int>::zeros([batch], on)),
            Extra::Segments => options.segments(
                Tensor::<2, Int>::zeros([batch, q_len], on),
                Tensor::<2, Int>::zeros([batch, kv_len], on),
            ),
            Extra::Intervals => options.visible_between(
                Tensor::<2, Int>::zeros([batch, q_len], on),
                Tensor::<2, Int>::ones([batch, q_len], on),
            ),
            Extra::Window => options.window(Some(2), Some(0)).softcap(3.0),
        }
    }

    fn check(&self, device: &TestDevice) {
        let context = format!("{}: {self:?}", device.name);
        let [batch, q_heads, kv_heads, q_len, kv_len] = self.sizes;
        let on = &device.device.clone().autodiff();
        let ones = |heads, length| {
            let shape = [batch, heads, length, WIDTH];
            Tensor::<4>::ones(shape, (on, self.dtype)).require_grad()
        };
        let [query, key, value] = [(q_heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)]
            .map(|(heads, length)| ones(heads, length));
        let bias = Tensor::<4>::ones([1, q_heads, q_len, kv_len], (on, self.dtype)).require_grad();
        let sinks = vector(&sinks_of(q_heads), on, self.sinks_dtype).require_grad();
        let options = self.options(&bias, sinks.clone(), on);
        let (output, logsumexp) = self
            .operator
            .call(query.clone(), key.clone(), value.clone(), options)
            .unwrap_or_else(|error| panic!("{context}: {error}"));

        assert_eq!(output.dims(), [batch, q_heads, q_len, WIDTH], "{context}");
        let values = read(output.clone().inner());
        assert!(values.iter().all(|x| *x == 0.0), "{context}: output");
        assert_eq!(logsumexp.dims(), [batch, q_heads, q_len], "{context}");
        let rows = batch * q_heads * q_len;
        let head_of = |row: usize| row / q_len % q_heads;
        let expected: Vec<f64> = (0..rows)
            .map(|row| sinks_of(q_heads)[head_of(row)])
            .collect();
        let found = read(logsumexp.clone().inner());
        assert_eq!(found, expected, "{context}: logsumexp");

        let weights: Vec<f64> = (0..rows).map(weight_of).collect();
        let weighted = |logsumexp: Tensor<3>| {
            let weights = TensorData::new(weights.clone(), [batch, q_heads, q_len]);
            let weights = Tensor::<3>::from_data(weights.convert::<f32>(), (on, DType::F32));
            (logsumexp * weights).sum()
        };
        let of_output = output.cast(DType::F32).sum();
        let (loss, sees_logsumexp) = match self.loss {
            Loss::Output => (of_output, false),
            Loss::Logsumexp => (weighted(logsumexp), true),
            Loss::Both => (of_output + weighted(logsumexp), true),
        };
        let gradients = loss.backward();

        let mut sums = vec![0.0; q_heads];
        for row in (0..rows).filter(|_| sees_logsumexp) {
            sums[head_of(row)] += weights[row];
        }
        // Burn's autodiff gives a tensor no gradient if no operation reads the tensor. If the loss depends only on the
        // output, the reference may have no operation that reads the sinks.
        let is_fused = self.operator == Operator::Fused;
        match sinks.grad(&gradients) {
            Some(gradient) => {
                assert_eq!(gradient.dtype(), self.sinks_dtype, "{context}");
                assert_eq!(read(gradient), sums, "{context}: sinks gradient");
            }
            None => assert!(!is_fused && !sees_logsumexp, "{context}: no sinks gradient"),
        }
        let has_bias = matches!(self.extra, Extra::Bias);
        let leaves = [&query, &key, &value, &bias];
        for leaf in leaves.into_iter().take(if has_bias { 4 } else { 3 }) {
            match leaf.grad(&gradients) {
                Some(gradient) => {
                    assert_eq!(gradient.dims(), leaf.dims(), "{context}");
                    let values = read(gradient);
                    assert!(values.iter().all(|x| *x == 0.0), "{context}: {values:?}");
                }
                None => assert!(!is_fused, "{context}: no gradient"),
            }
        }
    }
}

/// Checks causal calls of all empty sizes, with and without sinks. Values have fewer columns than keys, so that the
/// test detects a result that has the shape of the keys.
#[test]
fn empty_tensor_gives_zero_output_and_gradients() {
    for device in devices() {
        for [batch, q_heads, kv_heads, q_len, kv_len] in SIZES {
            for with_sinks in [false, true] {
                let context = format!(
                    "{}: {:?}",
                    device.name,
                    [batch, q_heads, kv_heads, q_len, kv_len]
                );
                let autodiff = device.device.clone().autodiff();
                let ones = |heads, length, columns| {
                    Tensor::<4>::ones([batch, heads, length, columns], &autodiff).require_grad()
                };
                let query = ones(q_heads, q_len, 16);
                let key = ones(kv_heads, kv_len, 16);
                let value = ones(kv_heads, kv_len, 8);
                let values: Vec<f32> = (0..q_heads).map(|head| head as f32).collect();
                let sinks = Tensor::<1>::from_data(TensorData::new(values, [q_heads]), &autodiff)
                    .require_grad();
                let mut options = AttentionOptions::new().causal();
                if with_sinks {
                    options = options.sinks(sinks.clone());
                }
                let (output, lse) =
                    attention_with_lse(query.clone(), key.clone(), value.clone(), options)
                        .unwrap_or_else(|error| panic!("{context}: {error}"));
                assert_eq!(output.dims(), [batch, q_heads, q_len, 8], "{context}");
                assert_eq!(lse.dims(), [batch, q_heads, q_len], "{context}");
                let gradients = (output.clone().sum() + lse.clone().sum()).backward();
                assert!(
                    read(output.inner()).iter().all(|x| *x == 0.0),
                    "{context}: output"
                );
                for (index, lse) in read(lse.inner()).into_iter().enumerate() {
                    let head = (index / q_len % q_heads) as f64;
                    let expected = if with_sinks { head } else { f64::NEG_INFINITY };
                    assert_eq!(lse, expected, "{context}: logsumexp");
                }
                for leaf in [&query, &key, &value] {
                    let gradient = leaf.grad(&gradients);
                    let gradient = gradient.unwrap_or_else(|| panic!("{context}: no gradient"));
                    assert_eq!(gradient.dims(), leaf.dims(), "{context}");
                    assert!(
                        read(gradient).iter().all(|x| *x == 0.0),
                        "{context}: gradient"
                    );
                }
                if with_sinks {
                    let gradient = sinks.grad(&gradients);
                    let gradient = gradient.unwrap_or_else(|| panic!("{context}: no gradient"));
                    let expected = vec![(batch * q_len) as f64; q_heads];
                    assert_eq!(read(gradient), expected, "{context}: sinks gradient");
                }
            }
        }
    }
}

/// Checks the gradients of sinks for all empty sizes, with every option and every [`Loss`].
#[test]
fn empty_tensor_with_sinks_sums_sink_gradients() {
    for device in devices() {
        for sizes in SIZES {
            for extra in EXTRAS {
                for loss in [Loss::Output, Loss::Logsumexp, Loss::Both] {
                    for operator in [Operator::Fused, Operator::Reference] {
                        Call {
                            sizes,
                            dtype: DType::F32,
                            sinks_dtype: DType::F32,
                            extra,
                            loss,
                            operator,
                        }
                        .check(&device);
                    }
                }
            }
        }
    }
}

/// Checks calls in half precision, with sinks in half precision or in f32. The logsumexp stays in f32.
#[test]
fn empty_tensor_with_half_precision_sinks_sums_sink_gradients() {
    for device in devices() {
        for dtype in [DType::F16, DType::BF16] {
            if !device.supports(dtype) {
                continue;
            }
            for sinks_dtype in [dtype, DType::F32] {
                for sizes in SIZES {
                    Call {
                        sizes,
                        dtype,
                        sinks_dtype,
                        extra: Extra::Bias,
                        loss: Loss::Both,
                        operator: Operator::Fused,
                    }
                    .check(&device);
                }
            }
        }
    }
}

/// Checks that one sink that is expanded to all heads gets the sum of the sink gradients of all heads.
#[test]
fn empty_tensor_with_expanded_sink_sums_sink_gradients() {
    for device in devices() {
        let on = &device.device.clone().autodiff();
        let operand = |heads, length| Tensor::<4>::ones([2, heads, length, WIDTH], on);
        for operator in [Operator::Fused, Operator::Reference] {
            let sink = vector(&[0.5], on, DType::F32).require_grad();
            let options = AttentionOptions::new().sinks(sink.clone().expand([4]));
            let (_, logsumexp) = operator
                .call(operand(4, 3), operand(2, 0), operand(2, 0), options)
                .unwrap_or_else(|error| panic!("{}: {error}", device.name));
            let found = read(logsumexp.clone().inner());
            assert_eq!(found, vec![0.5; 24], "{}", device.name);
            let gradient = sink.grad(&logsumexp.sum().backward());
            let gradient = gradient.expect("the sink has a gradient");
            assert_eq!(read(gradient), [24.0], "{}, {operator:?}", device.name);
        }
    }
}

/// Checks that a forward over int8 keys and values without elements returns the sinks as logsumexps.
#[test]
fn empty_tensor_int8_with_sinks_gives_sinks_as_lse() {
    for TestDevice { name, device } in devices() {
        for [batch, q_heads, kv_heads, q_len, kv_len] in SIZES {
            let context = format!("{name}: {:?}", [batch, q_heads, kv_heads, q_len, kv_len]);
            let operand = |heads, length| Tensor::<4>::ones([batch, heads, length, WIDTH], &device);
            let rows = || QuantizedRows::new(operand(kv_heads, kv_len));
            let sinks = vector(&sinks_of(q_heads), &device, DType::F32);
            let options = AttentionOptions::new().sinks(sinks);
            let result = try_quantized_attention(operand(q_heads, q_len), rows(), rows(), options);
            let (output, logsumexp) = result.unwrap_or_else(|error| panic!("{context}: {error}"));
            assert!(read(output).iter().all(|x| *x == 0.0), "{context}: output");
            let expected: Vec<f64> = (0..batch * q_heads * q_len)
                .map(|row| sinks_of(q_heads)[row / q_len % q_heads])
                .collect();
            assert_eq!(read(logsumexp), expected, "{context}: logsumexp");
        }
    }
}
