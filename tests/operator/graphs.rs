//! Tests of calls whose launches are captured in a CUDA graph and replayed. A replay must give the same bits as a direct
//! call, in the forward and in every gradient. The tests run on CUDA only, because other devices have no CUDA graphs.

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

/// A test captures its graph in a new process, in which this environment variable is set. No other test may run in that
/// process, because during a capture no other thread may allocate device memory or wait for the device.
const CAPTURES: &str = "ATTENTION_TEST_CAPTURES";

/// The environment variable that is set if the tests run on an emulated CUDA GPU.
const EMULATED: &str = "EMULATED_CARD";

/// The number of runs before the capture. In these runs, CubeCL and Burn's fusion compile and tune kernels and allocate memory.
const WARM_UPS: usize = 3;

const REPLAYS: usize = 3;

/// Runs `check` on every CUDA GPU, in a new process that runs no other test. `test` is the name of the calling test.
fn on_cards(test: &str, check: impl Fn(&TestDevice)) {
    let cards: Vec<TestDevice> = devices()
        .into_iter()
        .filter(|device| device.name == "cuda" && env::var_os(EMULATED).is_none())
        .collect();
    if cards.is_empty() {
        println!("no device with CUDA graphs");
        return;
    }
    if env::var_os(CAPTURES).is_some() {
        cards.iter().for_each(check);
        return;
    }
    let test_binary = env::current_exe().expect("the test binary has a path");
    let status = Command::new(test_binary)
        .args(["--exact", &format!("graphs::{test}"), "--nocapture"])
        .env(CAPTURES, "1")
        .status()
        .expect("the test binary starts");
    assert!(status.success(), "{test}: {status}");
}

/// The tensors of a case on a device.
struct Operands {
    case: Case,
    /// Query, keys, values, and the gradient of the output, each with four dimensions.
    tensors: [Tensor<4>; 4],
    /// The gradient of the logsumexp in f32, or `None` if the loss does not depend on the logsumexp.
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

    /// Returns the output, the logsumexp, and the gradients of all differentiable inputs, each as a flat tensor.
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
            results.push(gradient.expect("every differentiable input has a gradient"));
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

/// Flattens a result and detaches it from autodiff.
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

/// Captures a call with the operands `own`, and checks that each replay gives the same bits as the direct call. Calls
/// with the operands `other` run before the capture and between the replays.
fn check<O>(
    device: &TestDevice,
    context: &str,
    [own, other]: [O; 2],
    call: impl Fn(&O) -> Vec<Tensor<1>>,
) {
    // The tensors in `direct` and `direct_of_other` stay alive to the end. Otherwise, the graph's results could lie in
    // the memory of these tensors, which already contains the expected results.
    let [direct, direct_of_other] = [call(&own), call(&other)];
    let [expected, of_other] = [data(&direct), data(&direct_of_other)];
    assert!(
        !are_equal(&expected, &of_other),
        "{context}: the two operand sets must give different results"
    );

    let dispatch = device.device.as_dispatch();
    Dispatch::graph_prepare(dispatch).expect("the device supports CUDA graphs");
    for _ in 0..WARM_UPS {
        // The warm-up runs use the operands `other`, so that the graph's memory does not contain the expected results yet.
        let results = call(&other);
        Dispatch::sync(dispatch).expect("the device synchronizes");
        drop(results);
    }
    Dispatch::graph_start_capture(dispatch).expect("the device supports CUDA graphs");
    let results = call(&own);
    let graph = Dispatch::graph_stop_capture(dispatch).expect("the launches can be captured");
    for replay in 0..REPLAYS {
        // SAFETY: operands and results live as long as the graph, and this thread makes all launches.
        let replayed = unsafe { Dispatch::graph_replay(dispatch, &graph) };
        replayed.expect("the captured graph replays");
        let found = data(&results);
        assert!(are_equal(&found, &expected), "{context}: replay {replay}");
        let between = data(&call(&other));
        assert!(are_equal(&between, &of_other), "{context}: after {replay}");
    }
}

/// Returns cases that together run every engine, forward and backward. The cases cover long and short sequences,
/// split-KV, and each option that hides keys.
fn cases() -> Vec<Case> {
    let ids = |length: i64| (0..2 * length).map(|i| i % length / 40).collect();
    let causal = Case {
        dtype: DType::BF16,
        causal: Some(CausalAlignment::BottomRight),
        sinks: true,
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
        // Rows of 100 and 33 columns do not start at multiples of 16 bytes. The operator therefore copies the inputs
        // first, and the graph contains these copies too.
        Case {
            head_dim: 100,
            value_dim: 33,
            ..plain
        },
        causal,
    ]
}

#[test]
fn graph_replay_gives_the_bits_of_direct_calls() {
    on_cards("graph_replay_gives_the_bits_of_direct_calls", |device| {
        for case in cases() {
            let operands = [1, 2].map(|seed| Operands::new(&case, seed, &device.device));
            check(device, &format!("{case:?}"), operands, Operands::attend);
        }
    });
}

/// Checks captured calls over int8 keys and values. The kernels for few rows read the packed int8 directly. The kernels
/// for many rows read a dequantized copy of the keys and values, and each replay of the graph makes this copy again.
#[test]
fn graph_replay_over_int8_gives_the_bits_of_direct_calls() {
    on_cards(
        "graph_replay_over_int8_gives_the_bits_of_direct_calls",
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
                        mask_block: None,
                        bias: None,
                        kv_lengths: Some(Clone::clone(lengths)),
                        query_lengths: None,
                        segments: None,
                        intervals: Vec::new(),
                        sinks: None,
                        device: device.device.clone(),
                    };
                    let options = case.options(extras);
                    let results = try_quantized_attention(query.clone(), key, value, options);
                    let (output, logsumexp) = results.expect("the arguments fit");
                    vec![output.flatten(0, 3), logsumexp.flatten(0, 2)]
                };
                check(device, &format!("{case:?}"), operands, call);
            }
        },
    );
}
