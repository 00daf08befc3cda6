//! Tests of the engine for Hopper (wgmma), at every head size that has its own tile table and at sizes in between. The
//! cases cover partly filled tiles, every option that hides keys, tiles that several heads share, and split-KV.
//!
//! Each check asserts that this engine serves the forward and, for head sizes up to 512, the backward. Without a Hopper
//! device the tests do nothing.
//!
//! For few rows the operator prefers the mma engine's forward, so `ATTENTION_ENGINES=wgmma,unit` is needed to test the
//! forward of this engine.

mod biases;
mod layouts;
mod repeats;
mod scores;
mod segments;
mod tiles;
mod visibility;

use crate::case::Case;
use crate::devices::{TestDevice, cube_devices};
use crate::inputs::Inputs;
use attention_cube::internals::device::Feature;
use attention_cube::internals::engine::Engine;
use attention_cube::{AttentionProblem, explain};
use burn::tensor::{DType, Tensor};

/// The tested pairs of `(head_dim, value_dim)`. The pairs cover every row of the tile tables, and widths that are not
/// multiples of 64, the number of columns of a subtile.
const WIDTHS: [(usize, usize); 8] = [
    (40, 24),
    (64, 64),
    (128, 128),
    (192, 128),
    (192, 192),
    (256, 256),
    (320, 320),
    (512, 512),
];

/// The largest number of rows for which the operator prefers the mma engine's forward. The number of rows is the number
/// of queries times the number of query heads in a GQA group.
const FEW_ROWS: usize = 32;

/// The largest head size for which the wgmma backward has tiles.
const WIDEST_GRADIENT: usize = 512;

fn hopper_devices() -> Vec<TestDevice> {
    let is_hopper = |device: &TestDevice| {
        let probe = Tensor::<4>::zeros([1; 4], (&device.device, DType::F32));
        AttentionProblem::new(&probe, &probe, &probe, &Default::default()).is_ok_and(|problem| {
            explain(&problem, &device.device)
                .device
                .is_some_and(|it| it.features.contains(&Feature::Wgmma))
        })
    };
    cube_devices().into_iter().filter(is_hopper).collect()
}

/// Checks `case` in bf16. The check does nothing if no device has the wgmma engine.
fn check(case: Case) {
    let case = Case {
        dtype: DType::BF16,
        ..case
    };
    check_poisoned(&case, |_| {});
}

/// Checks `case` with inputs that differ between the devices and the reference. `poison` changes the devices' inputs, for
/// example to NaN in hidden keys.
fn check_poisoned(case: &Case, poison: impl Fn(&mut Inputs)) {
    check_with(case, |_| {}, poison);
}

/// Checks `case`. `change` changes the inputs of the devices and of the reference. `poison` then changes the inputs of the
/// devices only.
fn check_with(case: &Case, change: impl Fn(&mut Inputs), poison: impl Fn(&mut Inputs)) {
    let devices = hopper_devices();
    if devices.is_empty() {
        return;
    }
    let mut clean = case.inputs();
    change(&mut clean);
    for device in &devices {
        let problem = case
            .problem(&clean, &device.device)
            .unwrap_or_else(|error| panic!("{case:?}: {error}"));
        let explanation = explain(&problem, &device.device);
        for selection in [&explanation.forward, &explanation.backward] {
            let engine = selection.kernel.engine();
            let is_forward = selection == &explanation.forward;
            let too_wide = case.head_dim.max(case.value_dim) > WIDEST_GRADIENT;
            let few = case.q_len * case.q_heads / case.kv_heads <= FEW_ROWS;
            assert!(
                engine == Engine::Wgmma
                    || (too_wide && !is_forward)
                    || (few && is_forward && engine == Engine::Mma),
                "{case:?}: {explanation}"
            );
        }
    }
    let mut given = clean.clone();
    poison(&mut given);
    case.check_on(&devices, &given, &clean);
}

fn sized([head_dim, value_dim]: [usize; 2]) -> Case {
    Case::new([1, 2, 1, 140, 270, head_dim, value_dim])
}

fn each_width(options: impl Fn(Case) -> Case) {
    for (head_dim, value_dim) in WIDTHS {
        check(options(sized([head_dim, value_dim])));
    }
}
