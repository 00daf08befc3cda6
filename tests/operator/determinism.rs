//! Two runs of the same call are equal bit by bit, forward and every gradient.

use crate::case::{Case, FULL};
use crate::devices::devices;
use crate::run::Operator;
use attention_cube::CausalAlignment;

#[test]
fn two_runs_are_equal() {
    let prefill = Case {
        causal: Some(CausalAlignment::BottomRight),
        bias: Some([false, true, false, true]),
        sinks: true,
        deterministic: true,
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
    // Biases whose gradients are summed in parts: by scores, and by queries.
    let [by_scores, by_queries] = [[false, false, false, true], [false; 4]].map(|extent| Case {
        bias: Some(extent),
        q_len: 300,
        ..prefill.clone()
    });
    for case in [prefill, decode, masked, by_scores, by_queries] {
        let inputs = case.inputs();
        for device in devices() {
            let run = || case.run(&inputs, &device.device, case.dtype, Operator::Fused);
            for (first, second) in run().iter().zip(run()) {
                let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert!(
                    bits(&first.values) == bits(&second.values),
                    "{}: {} differs between two runs of {case:?}",
                    device.name,
                    first.name,
                );
            }
        }
    }
}
