//! Tests of multi-head attention without a cache, and of `sdpa`.

use super::*;
use crate::devices::devices;
use attention_cube::nn::{self, MhaInput, sdpa};
use attention_cube::{AttentionError, AttentionOptions, fused_attention};
use burn::nn::Linear;
use burn::nn::attention as burn_nn;
use burn::store::ModuleRecord;
use burn::tensor::Distribution;

/// The masks that a case applies.
#[derive(Clone, Copy, Debug)]
enum Masking {
    Unmasked,
    Pad,
    Attention,
    Both,
    Causal,
}

fn fused_input([query, key, value]: [Tensor<3>; 3], masking: Masking) -> MhaInput {
    let device = query.device();
    let input = MhaInput::new(query, key, value);
    match masking {
        Masking::Unmasked => input,
        Masking::Pad => input.mask_pad(pad_mask(&device)),
        Masking::Attention => input.mask_attn(attention_mask(&device)),
        Masking::Both => input
            .mask_pad(pad_mask(&device))
            .mask_attn(attention_mask(&device)),
        Masking::Causal => input.causal(),
    }
}

fn unfused_input([query, key, value]: [Tensor<3>; 3], masking: Masking) -> burn_nn::MhaInput {
    let device = query.device();
    let input = burn_nn::MhaInput::new(query, key, value);
    match masking {
        Masking::Unmasked => input,
        Masking::Pad => input.mask_pad(pad_mask(&device)),
        Masking::Attention => input.mask_attn(attention_mask(&device)),
        Masking::Both => input
            .mask_pad(pad_mask(&device))
            .mask_attn(attention_mask(&device)),
        Masking::Causal => {
            let mask = burn_nn::generate_autoregressive_mask(BATCH, LENGTH, &device);
            input.mask_attn(mask)
        }
    }
}

/// Returns the context and the gradients of the inputs and of all parameters. The loss is a weighted sum of the context.
fn results(linears: [&Linear; 4], inputs: &[Tensor<3>; 3], context: Tensor<3>) -> Results {
    let mut rng = StdRng::seed_from_u64(seed() + 2);
    let weights = random([BATCH, LENGTH, D_MODEL], 0.0, 1.0, &mut rng);
    let weights = tensor::<3>(&weights, &context.device(), context.dtype());
    let gradients = (context.clone() * weights).sum().backward();
    let mut results = vec![("context".to_string(), plain(context))];
    for (input, name) in inputs.iter().zip(["query", "key", "value"]) {
        let gradient = input.grad(&gradients).expect("the input has a gradient");
        results.push((format!("{name} input"), read(gradient)));
    }
    for (linear, name) in linears.into_iter().zip(["query", "key", "value", "output"]) {
        let weight = linear.weight.val().grad(&gradients);
        let bias = linear.bias.as_ref().expect("the layer has a bias").val();
        let bias = bias.grad(&gradients);
        let weight = weight.expect("the weight has a gradient");
        results.push((format!("{name} weight"), read(weight)));
        let bias = bias.expect("the bias has a gradient");
        results.push((format!("{name} bias"), read(bias)));
    }
    results
}

fn unfused_results(device: &Device, dtype: DType, quiet: bool, masking: Masking) -> Results {
    let mha = unfused(&config(quiet), device, dtype);
    let inputs = sequences::<3>(device, dtype).map(Tensor::require_grad);
    let output = mha.forward(unfused_input(inputs.clone(), masking));
    let linears = [&mha.query, &mha.key, &mha.value, &mha.output];
    results(linears, &inputs, output.context)
}

fn fused_results(device: &Device, dtype: DType, quiet: bool, masking: Masking) -> Results {
    let mha = nn::MultiHeadAttention::from(unfused(&config(quiet), device, dtype));
    let inputs = sequences::<3>(device, dtype).map(Tensor::require_grad);
    let context = mha.forward(fused_input(inputs.clone(), masking));
    let linears = [&mha.query, &mha.key, &mha.value, &mha.output];
    results(linears, &inputs, context)
}

#[test]
fn mha_with_masks_equals_burn_nn() {
    let cases = [
        (Masking::Unmasked, false),
        (Masking::Pad, false),
        (Masking::Attention, false),
        (Masking::Both, false),
        (Masking::Causal, false),
        (Masking::Both, true),
    ];
    for device in devices() {
        let on = device.device.clone().autodiff();
        for (masking, quiet) in cases {
            let exact = unfused_results(&Device::flex().autodiff(), DType::F64, quiet, masking);
            let baseline = unfused_results(&on, DType::F32, quiet, masking);
            let found = fused_results(&on, DType::F32, quiet, masking);
            let case = format!("{}, {masking:?}, quiet {quiet}", device.name);
            assert_as_exact(&case, &found, &baseline, &exact);
        }
    }
}

#[test]
fn mha_in_half_precision_is_near_the_exact_context() {
    let masking = Masking::Both;
    let mha = unfused(&config(true), &Device::flex(), DType::F64);
    let inputs = sequences::<3>(&Device::flex(), DType::F64);
    let exact = plain(mha.forward(unfused_input(inputs, masking)).context);
    for device in devices() {
        for (dtype, tolerance) in [(DType::F16, 5e-3), (DType::BF16, 4e-2)] {
            if !device.computes_in(dtype) {
                continue;
            }
            let on = &device.device;
            let mha = nn::MultiHeadAttention::from(unfused(&config(true), on, dtype));
            let context = mha.forward(fused_input(sequences::<3>(on, dtype), masking));
            assert_eq!(context.dtype(), dtype);
            let error = distance(&plain(context), &exact);
            let allowed = tolerance * rms(&exact);
            assert!(error <= allowed, "{}, {dtype:?}: {error:e}", device.name);
        }
    }
}

#[test]
fn mha_weights_on_request_equal_burn_nn() {
    let weights_and_context = |output: burn_nn::MhaOutput| -> Results {
        vec![
            ("weights".to_string(), plain(output.weights)),
            ("context".to_string(), plain(output.context)),
        ]
    };
    for device in devices() {
        for (masking, quiet) in [(Masking::Both, false), (Masking::Causal, true)] {
            let of_burn_nn = |on: &Device, dtype: DType| {
                let mha = unfused(&config(quiet), on, dtype);
                let input = unfused_input(sequences::<3>(on, dtype), masking);
                weights_and_context(mha.forward(input))
            };
            let exact = of_burn_nn(&Device::flex(), DType::F64);
            let baseline = of_burn_nn(&device.device, DType::F32);
            let mha = unfused(&config(quiet), &device.device, DType::F32);
            let mha = nn::MultiHeadAttention::from(mha);
            let input = fused_input(sequences::<3>(&device.device, DType::F32), masking);
            let found = weights_and_context(mha.forward_with_weights(input));
            let case = format!("{}, {masking:?}", device.name);
            assert_as_exact(&case, &found, &baseline, &exact);
        }
    }
}

/// Checks a sequence whose keys are all hidden as padding. With fused attention, the context of this sequence is the
/// bias of the output projection.
#[test]
fn mha_without_visible_keys_gives_zeros() {
    for device in devices() {
        let on = &device.device;
        let hidden: Vec<bool> = (0..BATCH * LENGTH).map(|index| index >= LENGTH).collect();
        let mask = || {
            let data = TensorData::new(hidden.clone(), [BATCH, LENGTH]);
            Tensor::<2, Bool>::from_data(data, on)
        };
        let unfused = unfused(&config(false), on, DType::F32);
        let mha = nn::MultiHeadAttention::from(unfused.clone());
        let [x] = sequences::<1>(on, DType::F32);
        let last = |context: Tensor<3>| plain(context.narrow(0, 1, 1));

        let bias = plain(mha.output.bias.as_ref().expect("a bias exists").val());
        let input = MhaInput::self_attn(x.clone()).mask_pad(mask());
        let output = mha.forward_with_weights(input.clone());
        for context in [last(mha.forward(input)), last(output.context)] {
            for row in context.chunks(D_MODEL) {
                assert_near(device.name, row, &bias);
            }
        }
        let weights = plain(output.weights.narrow(0, 1, 1));
        assert!(weights.iter().all(|weight| *weight == 0.0));

        let input = burn_nn::MhaInput::self_attn(x).mask_pad(mask());
        let averages = last(unfused.forward(input).context);
        assert!(distance(&averages[..D_MODEL], &bias) > 0.1 * rms(&bias));
    }
}

#[test]
fn mha_record_of_burn_nn_loads() {
    for device in devices() {
        let on = &device.device;
        let unfused = unfused(&config(false), on, DType::F32);
        let [x] = sequences::<1>(on, DType::F32);
        let input = burn_nn::MhaInput::self_attn(x.clone());
        let expected = plain(unfused.forward(input).context);

        let bytes = unfused.into_record().into_bytes();
        let bytes = bytes.expect("the record has bytes");
        let record = ModuleRecord::from_bytes(bytes).expect("the bytes are a record");
        let fused = nn::MultiHeadAttention::new(&config(false), on)
            .try_load_record(record)
            .expect("the record fits");
        let context = fused.forward(MhaInput::self_attn(x.clone()));
        assert_near(device.name, &plain(context), &expected);

        let bytes = fused.into_record().into_bytes();
        let bytes = bytes.expect("the record has bytes");
        let record = ModuleRecord::from_bytes(bytes).expect("the bytes are a record");
        let unfused = config(false)
            .init(on)
            .try_load_record(record)
            .expect("the record fits");
        let context = unfused.forward(burn_nn::MhaInput::self_attn(x)).context;
        assert_near(device.name, &plain(context), &expected);
    }
}

/// Checks dropout over many copies of one sequence. About half of the attention weights are 0. The contexts of the
/// copies differ, and their mean is near the context without dropout.
#[test]
fn mha_with_active_dropout_drops_half_of_the_weights() {
    const COPIES: usize = 64;
    for device in devices() {
        let on = &device.device.clone().autodiff();
        let dropping = config(false).with_dropout(0.5);
        let mha = nn::MultiHeadAttention::from(unfused(&dropping, on, DType::F32));
        let whole = nn::MultiHeadAttention::from(unfused(&config(false), on, DType::F32));
        let [x] = sequences::<1>(on, DType::F32);
        let x = x.narrow(0, 0, 1);
        let expected = plain(whole.forward(MhaInput::self_attn(x.clone())));
        let copies = MhaInput::self_attn(x.clone().repeat_dim(0, COPIES));

        let weights = plain(mha.forward_with_weights(copies.clone()).weights);
        let zeros = weights.iter().filter(|weight| **weight == 0.0).count();
        let share = zeros as f64 / weights.len() as f64;
        assert!((share - 0.5).abs() < 0.05, "{}: {share}", device.name);

        let contexts = mha.forward(copies);
        let sample = distance(&plain(contexts.clone().narrow(0, 0, 1)), &expected);
        let mean = distance(&plain(contexts.mean_dim(0)), &expected);
        assert!(sample > 0.05 * rms(&expected), "{}: {sample}", device.name);
        // The mean of 64 samples has about an eighth of the standard deviation of one sample.
        assert!(mean < 0.4 * sample, "{}: {mean} {sample}", device.name);

        let frozen = mha.clone().freeze();
        let context = frozen.forward(MhaInput::self_attn(x.clone()));
        assert_near(device.name, &plain(context), &expected);
        let valid = mha.valid();
        let context = valid.forward(MhaInput::self_attn(x.without_autodiff()));
        assert_near(device.name, &plain(context), &expected);
    }
}

#[test]
fn sdpa_with_mask_equals_fused_attention() {
    for device in devices() {
        let on = &device.device;
        let random = |heads| {
            let shape = [BATCH, heads, LENGTH, D_MODEL / HEADS];
            Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), on)
        };
        let (query, key, value) = (random(HEADS), random(2), random(2));
        let visible = attention_mask(on).bool_not().unsqueeze_dim::<4>(1);
        let options = AttentionOptions::new().causal().mask(visible.clone());
        let expected = fused_attention(query.clone(), key.clone(), value.clone(), options);
        let call = |mask| sdpa(query.clone(), key.clone(), value.clone(), mask, true);
        let found = call(Some(visible)).expect("the arguments fit");
        assert_eq!(plain(found), plain(expected), "{}", device.name);

        let narrow = Tensor::<4, Bool>::from_data(TensorData::new(vec![true; 2], [1, 1, 1, 2]), on);
        let refused = matches!(
            call(Some(narrow)),
            Err(AttentionError::Shape {
                argument: "mask",
                ..
            })
        );
        assert!(refused, "{}", device.name);
    }
}
