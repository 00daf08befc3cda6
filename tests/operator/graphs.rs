//! Calls whose launches are captured in a CUDA graph and replayed give the bits of direct calls, forward and every gradient, whatever ran in
//! between. On CUDA alone: other devices have no graphs of the driver's, and the emulator none at all.

use crate::case::{Case, FULL};
use crate::dense::Dense;
use crate::devices::{TestDevice, devices};
use crate::inputs::{Extras, Inputs};
use attention_cube::quantized::{QuantizedRows, try_quantized_attention};
use attention_cube::{CausalAlignment, attention_with_lse};
use burn::backend::{Backend, Dispatch};
use burn::tensor::{DType, Device, Tensor, TensorData};
use std::env;
use std::process::Command;

/// Set in the environment of the process that captures: meanwhile no other thread may wait for the device or allocate there.
const CAPTURES: &str = "ATTENTION_TEST_CAPTURES";

/// Set by the emulator's runner.
const EMULATED: &str = "EMULATED_CARD";

/// Runs before launches are captured, in which CubeCL and fusion compile, tune and find memory.
const WARM_UPS: usize = 3;

const REPLAYS: usize = 3;

/// A test of this module, in a process of its own if there is a card.
fn on_cards(test: &str, check: impl Fn(&TestDevice)) {
    let cards: Vec<TestDevice> = devices()
        .into_iter()
        .filter(|device| device.name == "cuda" && env::var_os(EMULATED).is_none())
        .collect();
    if cards.is_empty() {
        println!("no device with graphs");
        return;
    }
    if env::var_os(CAPTURES).is_some() {
        cards.iter().for_each(check);
        return;
    }
    let test_binary = env::current_exe().expect("the path of this test");
    let status = Command::new(test_binary)
        .args(["--exact", &format!("graphs::{test}"), "--nocapture"])
        .env(CAPTURES, "1")
        .status()
        .expect("a process");
    assert!(status.success(), "{test}: {status}");
}

/// A case's tensors on a device.
struct Operands {
    case: Case,
    /// Query, keys, values, and what the loss multiplies the output with.
    tensors: [Tensor<4>; 4],
    /// What the loss multiplies the logsumexp with.
    weights: Option<Tensor<4>>,
    extras: Extras,
}

impl Operands {
    fn new(case: &Case, seed: u64, device: &Device) -> Self {
        let inputs: Inputs = case.seeded(seed);
        let on = device.clone().autodiff();
        let operand = |dense: &Dense| dense.tensor(&on, case.dtype);
        Self {
            case: case.clone(),
            tensors: [
                operand(&inputs.query).require_grad(),
                operand(&inputs.key).require_grad(),
                operand(&inputs.value).require_grad(),
                operand(&inputs.output_gradient),
            ],
            weights: (inputs.lse_gradient.as_ref()).map(|dense| dense.tensor(&on, DType::F32)),
            extras: inputs.extras(&on, case.extras_dtype()),
        }
    }

    /// Output and logsumexp, and the gradients of everything differentiable.
    fn attend(&self) -> Vec<Tensor<1>> {
        let [query, key, value, output_gradient] = self.tensors.clone();
        let options = self.case.options(self.extras.clone());
        let (output, logsumexp) =
            attention_with_lse(query.clone(), key.clone(), value.clone(), options)
                .unwrap_or_else(|error| panic!("{:?}: {error}", self.case));
        let mut results = vec![flat(output.clone()), flat(logsumexp.clone())];
        let mut loss = (output * output_gradient).cast(DType::F32).sum();
        if let Some(weights) = &self.weights {
            loss = loss + (logsumexp.unsqueeze_dim::<4>(3) * weights.clone()).sum();
        }
        let gradients = loss.backward();
        let mut add = |gradient: Option<Tensor<1>>| {
            results.push(gradient.expect("everything differentiable has a gradient"));
        };
        for leaf in [&query, &key, &value].into_iter().chain(&self.extras.bias) {
            add(leaf.grad(&gradients).map(|gradient| gradient.flatten(0, 3)));
        }
        if let Some(sinks) = &self.extras.sinks {
            add(sinks.grad(&gradients));
        }
        results
    }
}

/// A result's numbers, without autodiff.
fn flat<const D: usize>(result: Tensor<D>) -> Tensor<1> {
    result.inner().flatten(0, D - 1)
}

fn data(results: &[Tensor<1>]) -> Vec<TensorData> {
    let data = results.iter().map(|result| result.clone().into_data());
    data.collect()
}

fn are_equal(left: &[TensorData], right: &[TensorData]) -> bool {
    let mut pairs = left.iter().zip(right);
    left.len() == right.len() && pairs.all(|(left, right)| left.as_bytes() == right.as_bytes())
}

/// Captures a call with operands of its own, and compares its replays with the direct call.
fn check<O>(
    device: &TestDevice,
    context: &str,
    [own, other]: [O; 2],
    call: impl Fn(&O) -> Vec<Tensor<1>>,
) {
    // These results stay where they are: no graph has their memory for its own.
    let [direct, direct_of_other] = [call(&own), call(&other)];
    let [expected, of_other] = [data(&direct), data(&direct_of_other)];
    assert!(!are_equal(&expected, &of_other), "{context}: other numbers");

    let dispatch = device.device.as_dispatch();
    Dispatch::graph_prepare(dispatch).expect("a device with graphs");
    for _ in 0..WARM_UPS {
        // By other numbers: where the graph will write, the right ones are not there already.
        let results = call(&other);
        Dispatch::sync(dispatch).expect("a device that answers");
        drop(results);
    }
    Dispatch::graph_start_capture(dispatch).expect("a device with graphs");
    let results = call(&own);
    let graph = Dispatch::graph_stop_capture(dispatch).expect("launches that can be captured");
    for replay in 0..REPLAYS {
        // SAFETY: operands and results are here as long as the graph, and all launches are this thread's.
        let replayed = unsafe { Dispatch::graph_replay(dispatch, &graph) };
        replayed.expect("a graph that was captured");
        let found = data(&results);
        assert!(are_equal(&found, &expected), "{context}: replay {replay}");
        let between = data(&call(&other));
        assert!(are_equal(&between, &of_other), "{context}: after {replay}");
    }
}

/// Problems of every engine and pass: long and short, with keys that are split, and with each thing that hides keys.
fn cases() -> Vec<Case> {
    let ids = |length: i64| (0..2 * length).map(|i| i % length / 40).collect();
    let causal = Case {
        dtype: DType::BF16,
        causal: Some(CausalAlignment::BottomRight),
        sinks: true,
        deterministic: true,
        ..Case::new([2, 4, 2, 140, 270, 64, 64])
    };
    let plain = Case {
        causal: None,
        sinks: false,
        ..causal.clone()
    };
    vec![
        Case {
            dtype: DType::F32,
            ..causal.clone()
        },
        Case {
            window: (Some(50), None),
            ..causal.clone()
        },
        Case {
            q_len: 1,
            kv_len: 1300,
            kv_lengths: Some(vec![1300, 700]),
            head_dim: 128,
            value_dim: 128,
            ..causal.clone()
        },
        Case {
            head_dim: 512,
            value_dim: 512,
            ..causal.clone()
        },
        Case {
            mask: Some(FULL),
            bias: Some([false, true, true, true]),
            ..plain.clone()
        },
        Case {
            segments: Some((ids(140), ids(270))),
            ..plain.clone()
        },
        // Operands that are copied first.
        Case {
            head_dim: 100,
            value_dim: 33,
            ..plain
        },
        causal,
    ]
}

#[test]
fn replays_give_the_bits_of_direct_calls() {
    on_cards("replays_give_the_bits_of_direct_calls", |device| {
        for case in cases() {
            let operands = [1, 2].map(|seed| Operands::new(&case, seed, &device.device));
            check(device, &format!("{case:?}"), operands, Operands::attend);
        }
    });
}

/// Keys and values in int8: few rows, which read words, and many, which read a copy.
#[test]
fn replays_over_int8_give_the_bits_of_direct_calls() {
    on_cards(
        "replays_over_int8_give_the_bits_of_direct_calls",
        |device| {
            for (q_len, width) in [(1, 128), (4, 512), (9, 64)] {
                let case = Case {
                    dtype: DType::BF16,
                    causal: Some(CausalAlignment::BottomRight),
                    kv_lengths: Some(vec![600, 80]),
                    ..Case::new([2, 8, 1, q_len, 700, width, width])
                };
                let operands = [1, 2].map(|seed| {
                    let operands = Operands::new(&case, seed, &device.device);
                    let [query, key, value, _] = operands.tensors.clone().map(Tensor::inner);
                    let rows = [QuantizedRows::new(key), QuantizedRows::new(value)];
                    let lengths = operands.extras.kv_lengths;
                    (query, rows, lengths.expect("the case has lengths"))
                });
                let call = |(query, rows, lengths): &(Tensor<4>, [QuantizedRows; 2], _)| {
                    let [key, value] = rows.clone();
                    let extras = Extras {
                        mask: None,
                        bias: None,
                        kv_lengths: Some(Clone::clone(lengths)),
                        segments: None,
                        sinks: None,
                    };
                    let options = case.options(extras);
                    let results = try_quantized_attention(query.clone(), key, value, options);
                    let (output, logsumexp) = results.expect("arguments that fit");
                    vec![output.flatten(0, 3), logsumexp.flatten(0, 2)]
                };
                check(device, &format!("{case:?}"), operands, call);
            }
        },
    );
}
