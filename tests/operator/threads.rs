//! Several threads and devices at once: forward and backward give the bits that they give one after the other.

use crate::case::{Case, FULL};
use crate::devices::{TestDevice, devices};
use crate::inputs::Inputs;
use crate::run::Operator;
use attention_cube::CausalAlignment;
use burn::tensor::TensorData;
use std::sync::Barrier;
use std::thread;

/// Runs that each thread makes while the others do.
const RUNS: usize = 3;

/// Two problems of different kernels, so that launches of both are in flight.
fn cases() -> [(Case, Inputs); 2] {
    let causal = Case {
        causal: Some(CausalAlignment::BottomRight),
        sinks: true,
        deterministic: true,
        ..Case::new([2, 4, 2, 70, 90, 16, 16])
    };
    let masked = Case {
        causal: None,
        mask: Some(FULL),
        q_len: 40,
        ..causal.clone()
    };
    [causal, masked].map(|case| {
        let inputs = case.inputs();
        (case, inputs)
    })
}

fn run((case, inputs): &(Case, Inputs), device: &TestDevice) -> Vec<(&'static str, TensorData)> {
    let prepared = case.prepare(inputs, &device.device, case.dtype);
    prepared.run(Operator::Fused)
}

/// Runs each pair in a thread of its own, all at once, and compares with what it gave alone.
fn check(pairs: &[(&(Case, Inputs), &TestDevice)]) {
    let alone: Vec<_> = pairs.iter().map(|(case, on)| run(case, on)).collect();
    let start = Barrier::new(pairs.len());
    thread::scope(|scope| {
        for ((case, device), alone) in pairs.iter().zip(&alone) {
            let start = &start;
            scope.spawn(move || {
                start.wait();
                for repeat in 0..RUNS {
                    for ((name, alone), (_, found)) in alone.iter().zip(run(case, device)) {
                        assert!(
                            alone.as_bytes() == found.as_bytes(),
                            "{}: {name} of run {repeat} beside other threads differs: {:?}",
                            device.name,
                            case.0,
                        );
                    }
                }
            });
        }
    });
}

#[test]
fn threads_on_one_device_give_the_bits_of_serial_runs() {
    let [first, second] = cases();
    for device in devices() {
        check(&[(&first, &device), (&second, &device), (&first, &device)]);
    }
}

#[test]
fn threads_on_all_devices_give_the_bits_of_serial_runs() {
    let [first, second] = cases();
    let devices = devices();
    let pairs = |case| devices.iter().map(move |device| (case, device));
    let pairs: Vec<_> = pairs(&first).chain(pairs(&second)).collect();
    check(&pairs);
}
