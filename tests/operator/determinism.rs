//! Tests that two runs of the same call give the same bits, in the output and in every gradient.
//! `ATTENTION_TEST_REPEATS=1000` repeats each call a thousand times, and adds cases with wide heads or with more tiles than
//! a GPU has multiprocessors.

use crate::case::{Case, FULL};
use crate::devices::devices;
use crate::run::Operator;
use attention_cube::CausalAlignment;
use std::env;

/// The environment variable that sets the number of runs per call. Without it, each call runs twice.
const REPEATS: &str = "ATTENTION_TEST_REPEATS";

#[test]
fn repeated_call_gives_equal_bits() {
    let prefill = Case {
        causal: Some(CausalAlignment::BottomRight),
        bias: Some([false, true, false, true]),
        sinks: true,
        ..Case::new([2, 8, 2, 130, 200, 32, 32])
    };
    let decode = Case {
        q_len: 2,
        kv_len: 3000,
        bias: None,
        ..prefill.clone()
    };
    let masked = Case {
        mask: Some(FULL),
        bias: None,
        ..prefill.clone()
    };
    // Kernels compute the gradient of a broadcast bias as several partial sums. The bias of `by_scores` has one element
    // per key, and all sequences, heads and queries share this element. The bias of `by_queries` has a single element.
    let [by_scores, by_queries] = [[false, false, false, true], [false; 4]].map(|extent| Case {
        bias: Some(extent),
        q_len: 300,
        ..prefill.clone()
    });
    let repeats: Option<usize> =
        (env::var(REPEATS).ok()).map(|runs| runs.parse().expect("the number of runs"));
    let wide = |head_dim| Case {
        causal: Some(CausalAlignment::BottomRight),
        ..Case::new([1, 68, 2, 65, 200, head_dim, head_dim])
    };
    let more = match repeats {
        Some(_) => [64, 128, 256, 512].map(wide).to_vec(),
        None => Vec::new(),
    };
    let cases = [&prefill, &decode, &masked, &by_scores, &by_queries];
    for case in cases.into_iter().chain(&more) {
        let inputs = case.inputs();
        for device in devices() {
            let prepared = case.prepare(&inputs, &device.device, case.dtype);
            let first = prepared.run(Operator::Fused);
            for repeat in 1..repeats.unwrap_or(2) {
                let again = prepared.run(Operator::Fused);
                for ((name, first), (_, again)) in first.iter().zip(again) {
                    assert!(
                        first.as_bytes() == again.as_bytes(),
                        "{}: {name} differs between run 0 and {repeat} of {case:?}",
                        device.name,
                    );
                }
            }
        }
    }
}
