//! Tests of calls from several threads and on several devices at the same time. The forward and the backward must give the same
//! bits as serial runs.

use crate::case::{Case, FULL};
use crate::devices::{TestDevice, devices};
use crate::inputs::Inputs;
use crate::run::Operator;
use attention_cube::CausalAlignment;
use burn::tensor::{Device, DeviceType, TensorData};
use std::sync::Barrier;
use std::thread;

/// The number of runs that each thread makes while the other threads run.
const RUNS: usize = 3;

/// Returns two problems that use different kernels, so that concurrent threads launch different kernels.
fn cases() -> [(Case, Inputs); 2] {
    let causal = Case {
        causal: Some(CausalAlignment::BottomRight),
        sinks: true,
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

/// Runs each pair of a problem and a device in a thread of its own, all at the same time. Each thread's results must
/// equal the results of the same pair in a run without other threads.
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

/// Returns the device type of `device` if a machine may have several devices of that type, and `None` for other types.
fn kind_of(device: &TestDevice) -> Option<DeviceType> {
    match device.name {
        #[cfg(feature = "cuda")]
        "cuda" => Some(DeviceType::Cuda),
        #[cfg(feature = "rocm")]
        "rocm" => Some(DeviceType::Rocm),
        _ => None,
    }
}

/// Returns the devices of this machine, grouped by device type. Types with a single device are left out.
fn devices_by_kind() -> Vec<Vec<TestDevice>> {
    let kinds = devices().into_iter().filter_map(|device| {
        let of_kind = Device::enumerate(kind_of(&device)?).into_vec().into_iter();
        let named = |found| TestDevice {
            name: device.name,
            device: found,
        };
        Some(of_kind.map(named).collect::<Vec<_>>())
    });
    kinds.filter(|kind| kind.len() > 1).collect()
}

/// Runs the two problems of `cases` on all devices of one type at the same time. The results must equal the results of
/// serial runs bit for bit.
#[test]
fn threads_on_devices_of_a_kind_give_the_bits_of_serial_runs() {
    let [first, second] = cases();
    for devices in devices_by_kind() {
        let pairs = |case| devices.iter().map(move |device| (case, device));
        let pairs: Vec<_> = pairs(&first).chain(pairs(&second)).collect();
        check(&pairs);
        println!("{} devices {}", devices.len(), devices[0].name);
    }
}
