//! Tests of attention inside an autodiff graph, under both checkpointing strategies. In some tests, the loss depends only on
//! the output, or only on the logsumexp. In other tests, only some inputs require gradients, or two calls share their keys.

use crate::case::Case;
use crate::compare::{Named, Precision, assert_close};
use crate::definition::Definition;
use crate::dense::{Dense, read};
use crate::devices::{cube_devices, devices};
use crate::inputs::Inputs;
use crate::run::Operator;
use attention_cube::{AttentionOptions, fused_attention};
use burn::tensor::{DType, Device, Distribution, Tensor};
use rand::{SeedableRng, rngs::StdRng};

fn case(q_len: usize) -> Case {
    Case::new([2, 4, 2, q_len, 70, 32, 32])
}

#[test]
fn gradient_of_output_alone_matches_reference() {
    for q_len in [66, 2] {
        Case {
            lse_gradient: false,
            ..case(q_len)
        }
        .check();
    }
}

#[test]
fn gradient_of_logsumexp_alone_matches_reference() {
    let case = case(66);
    let mut inputs = case.inputs();
    inputs.output_gradient.values.fill(0.0);
    case.check_inputs(&inputs, &inputs);
}

/// Checks the results of a case with the error limits of [`Definition::random_faults`]. The operator stores the output
/// and the logsumexp in rounded form, so these limits are larger than usual.
fn check_stored(case: &Case, inputs: &Inputs) {
    let definition = Definition::new(case, inputs);
    for device in devices().iter().filter(|it| it.supports(case.dtype)) {
        let got = case.run(inputs, &device.device, case.dtype, Operator::Fused);
        let faults = definition.random_faults(&got);
        assert!(faults.is_empty(), "{}: {case:?}: {faults:?}", device.name);
    }
}

/// Checks gradients if the scores are in the hundreds. For such a score, even a difference in the last bits changes the
/// attention probability. The backward must therefore accumulate each dot product in the same order as the forward.
/// This must also hold if different engines run the forward and the backward.
#[test]
fn gradient_of_scores_in_the_hundreds_matches_stored_forward() {
    for (dtype, head_dim, value_dim) in [
        (DType::F32, 64, 64),
        (DType::F32, 192, 192),
        (DType::F32, 250, 256),
        (DType::F32, 512, 512),
        (DType::F16, 64, 64),
        (DType::F16, 320, 320),
        (DType::F16, 576, 512),
    ] {
        for (q_len, kv_len) in [(70, 40), (1, 90)] {
            let case = Case {
                dtype,
                scale: Some(0.25),
                amplitude: 8.0,
                ..Case::new([1, 2, 1, q_len, kv_len, head_dim, value_dim])
            };
            check_stored(&case, &case.inputs());
        }
    }
}

/// Checks gradients if the attention probabilities are tiny. A sink takes nearly all of each row's probability, so the
/// probabilities of the keys are subnormal in half precision.
#[test]
fn gradient_of_small_probabilities_matches_stored_forward() {
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        for (head_dim, q_len) in [(64, 70), (128, 3), (256, 130), (320, 7), (512, 70)] {
            let case = Case {
                dtype,
                sinks: true,
                ..Case::new([1, 6, 2, q_len, 40, head_dim, head_dim])
            };
            let mut inputs = case.inputs();
            inputs.sinks = Some(Dense::from_fn([1, 6, 1, 1], |[_, head, _, _]| {
                9.0 + head as f64
            }));
            check_stored(&case, &inputs);
        }
    }
}

fn random<const N: usize>(shapes: [[usize; 4]; N]) -> [Dense; N] {
    let mut rng = StdRng::seed_from_u64(crate::case::seed() ^ 0x6752_6164);
    shapes.map(|shape| Dense::normal(shape, DType::F32, &mut rng))
}

const QUERY: [usize; 4] = [2, 4, 66, 32];
const KEY: [usize; 4] = [2, 2, 70, 32];

/// Returns the gradients of all leaves on a device. `graph` computes the loss from the leaves.
fn gradients(
    leaves: &[Dense],
    device: &Device,
    dtype: DType,
    graph: impl Fn(&[Tensor<4>]) -> Tensor<1>,
) -> Vec<Named> {
    let tensors: Vec<_> = leaves
        .iter()
        .map(|leaf| leaf.tensor(device, dtype).require_grad())
        .collect();
    let gradients = graph(&tensors).backward();
    let values = |tensor: &Tensor<4>| tensor.grad(&gradients).map(read).unwrap_or_default();
    let named = |tensor| Named {
        name: "gradient",
        values: values(tensor),
        magnitude: 1.0,
        stored: 0.0,
    };
    tensors.iter().map(named).collect()
}

/// Checks the gradients of a graph on every device, with and without checkpointing, against the reference in f64.
fn check_graph(name: &str, leaves: &[Dense], graph: impl Fn(Operator, &[Tensor<4>]) -> Tensor<1>) {
    let flex = Device::flex().autodiff();
    let reference = |dtype| gradients(leaves, &flex, dtype, |x| graph(Operator::Reference, x));
    let (exact, baseline) = (reference(DType::F64), reference(DType::F32));
    let precision = Precision {
        dtype: DType::F32,
        terms: 140,
    };
    for device in devices() {
        let plain = device.device.clone().autodiff();
        let checkpointed = plain.clone().gradient_checkpointing();
        for (strategy, on) in [("plain", plain), ("checkpointed", checkpointed)] {
            let got = gradients(leaves, &on, DType::F32, |x| graph(Operator::Fused, x));
            for (leaf, ((got, exact), baseline)) in
                got.iter().zip(&exact).zip(&baseline).enumerate()
            {
                let context = format!("{}, {strategy}, {name}, leaf {leaf}", device.name);
                assert_close(&context, got, exact, baseline, precision);
            }
        }
    }
}

fn attend(operator: Operator, query: &Tensor<4>, key: &Tensor<4>, value: &Tensor<4>) -> Tensor<4> {
    let options = AttentionOptions::new().causal();
    match operator.call(query.clone(), key.clone(), value.clone(), options) {
        Ok((output, _)) => output,
        Err(error) => panic!("{operator:?}: {error}"),
    }
}

/// Checks attention in a graph with cheap operations before and after attention. Gradient checkpointing recomputes these
/// operations.
#[test]
fn gradient_between_other_operations_matches_reference() {
    let leaves = random([QUERY, KEY, KEY, QUERY]);
    check_graph("between other operations", &leaves, |operator, x| {
        let query = (x[0].clone() * 0.7 + 0.1).tanh() * 2.0;
        let key = x[1].clone().tanh() * x[1].clone();
        let value = (x[2].clone() * 0.5).exp();
        let output = attend(operator, &query, &key, &value);
        ((output.clone() * x[3].clone()).tanh() + output).sum()
    });
}

#[test]
fn gradient_of_two_calls_over_the_same_keys_matches_reference() {
    let leaves = random([QUERY, KEY, KEY, QUERY, QUERY]);
    check_graph("two calls over the same keys", &leaves, |operator, x| {
        let first = attend(operator, &x[0], &x[1], &x[2]);
        let second = attend(operator, &x[3], &x[1], &x[2]);
        (first * x[4].clone()).sum() + (second * x[0].clone()).sum()
    });
}

/// Checks two calls in a chain: the output of the first is the query of the second.
#[test]
fn gradient_of_chained_calls_matches_reference() {
    let leaves = random([QUERY, KEY, KEY, QUERY]);
    check_graph("one call after another", &leaves, |operator, x| {
        let first = attend(operator, &x[0], &x[1], &x[2]);
        let second = attend(operator, &first, &x[1], &x[2]);
        (second * x[3].clone()).sum()
    });
}

/// Checks a call in which one tensor is query, key and value, so its gradient is the sum of three gradients.
#[test]
fn gradient_of_self_attention_of_one_tensor_matches_reference() {
    let leaves = random([QUERY, QUERY]);
    check_graph("one tensor as qkv", &leaves, |operator, x| {
        (attend(operator, &x[0], &x[0], &x[0]) * x[1].clone()).sum()
    });
}

/// Checks two calls, each over one half of the keys. The outputs of the calls are merged by their logsumexps, and the
/// result equals attention over all keys.
#[test]
fn gradient_of_halves_merged_by_logsumexp_matches_reference() {
    let leaves = random([QUERY, KEY, KEY, QUERY]);
    check_graph("merged halves", &leaves, |operator, x| {
        let half = |keys: std::ops::Range<usize>| {
            let part = |tensor: &Tensor<4>| tensor.clone().slice([0..2, 0..2, keys.clone(), 0..32]);
            let options = AttentionOptions::new();
            let (output, lse) = operator
                .call(x[0].clone(), part(&x[1]), part(&x[2]), options)
                .unwrap_or_else(|error| panic!("{operator:?}: {error}"));
            (output, lse.exp().unsqueeze_dim::<4>(3))
        };
        let ((first, first_weight), (second, second_weight)) = (half(0..31), half(31..70));
        let merged = (first * first_weight.clone() + second * second_weight.clone())
            / (first_weight + second_weight);
        (merged * x[3].clone()).sum()
    });
}

/// Checks calls in which autodiff tracks only one input. All other inputs are constants without autodiff.
#[test]
fn gradient_of_one_tracked_input_matches_reference() {
    let case = Case {
        bias: Some([false, true, true, true]),
        sinks: true,
        ..case(66)
    };
    let inputs = case.inputs();
    let all = case.run(&inputs, &Device::flex(), DType::F64, Operator::Reference);
    let baseline = case.run(&inputs, &Device::flex(), DType::F32, Operator::Reference);
    for device in devices() {
        let tracked_device = device.device.clone().autodiff();
        for tracked in 0..5 {
            let place = |index| {
                if index == tracked {
                    &tracked_device
                } else {
                    &device.device
                }
            };
            let on = |index: usize, dense: &Dense| {
                let tensor = dense.tensor(place(index), DType::F32);
                if index == tracked {
                    tensor.require_grad()
                } else {
                    tensor
                }
            };
            let bias = on(3, inputs.bias.as_ref().expect("the case has a bias"));
            let sinks = inputs.sinks.as_ref().expect("the case has sinks");
            let sinks = on(4, sinks);
            let leaves = [
                on(0, &inputs.query),
                on(1, &inputs.key),
                on(2, &inputs.value),
                bias.clone(),
                sinks.clone(),
            ];
            let options = AttentionOptions::new().bias(bias).sinks(sinks.reshape([4]));
            let [query, key, value, ..] = leaves.clone();
            let (output, lse) = Operator::Fused
                .call(query, key, value, options)
                .unwrap_or_else(|error| panic!("{}, {tracked}: {error}", device.name));
            let lse_weights = inputs
                .lse_gradient
                .as_ref()
                .expect("the case has a gradient of the logsumexp");
            let weights = inputs.output_gradient.tensor(&device.device, DType::F32);
            let lse_weights = lse_weights
                .tensor(&device.device, DType::F32)
                .reshape(lse.dims());
            let gradients = ((output * weights).sum() + (lse * lse_weights).sum()).backward();
            let gradient = leaves[tracked].grad(&gradients);
            let (exact, baseline) = (&all[2 + tracked], &baseline[2 + tracked]);
            let context = format!("{}, {} alone", device.name, exact.name);
            let gradient = gradient.unwrap_or_else(|| panic!("{context}: no gradient"));
            let got = Named {
                values: read(gradient),
                ..exact.clone()
            };
            let precision = Precision {
                dtype: DType::F32,
                terms: 140,
            };
            assert_close(&context, &got, exact, baseline, precision);
        }
    }
}

/// Checks a call whose gradients each fit in the device's largest buffer, although all gradients together do not fit.
/// The last head must get the same gradients as in a call with this head alone.
#[test]
fn gradients_that_exceed_one_buffer_together_match_a_single_head() {
    const HEADS: usize = 64;
    for device in cube_devices() {
        let on = &device.device.clone().autodiff();
        let random = || {
            let shape = [1, HEADS, 2048, 128];
            Tensor::<4>::random(shape, Distribution::Default, (on, DType::F32))
        };
        let inputs = [random(), random(), random(), random()];
        let run = |first: usize, count: usize| {
            let [query, key, value, weights] = inputs
                .each_ref()
                .map(|tensor| tensor.clone().narrow(1, first, count).detach());
            let leaves = [query, key, value].map(Tensor::require_grad);
            let [query, key, value] = leaves.clone();
            let options = AttentionOptions::new().window(Some(16), Some(0));
            let output = fused_attention(query, key, value, options);
            let gradients = (output * weights).sum().backward();
            leaves.map(|leaf| {
                let gradient = leaf.grad(&gradients).expect("the leaf has a gradient");
                read(gradient.narrow(1, count - 1, 1))
            })
        };
        let all = run(0, HEADS);
        let last = run(HEADS - 1, 1);
        for ((got, expected), name) in all.iter().zip(&last).zip(["query", "key", "value"]) {
            let apart = got
                .iter()
                .zip(expected)
                .map(|(got, expected)| (got - expected).abs());
            let worst = apart.fold(0.0, f64::max);
            assert!(worst < 1e-5, "{}: {name} by {worst:e}", device.name);
        }
    }
}
