//! Tests of devices that are configured with other default dtypes for bools and integers. Masks, lengths and segment
//! ids then have these dtypes. The results of the reference must not depend on the configured dtypes.
//!
//! A process can configure a device only once, so each test runs itself in a new process for every dtype.

use crate::case::{Case, FULL};
use crate::dense::{Dense, read};
use crate::devices::{TestDevice, devices};
use crate::run::Operator;
use crate::varlen::visible::check_visible;
use attention_cube::CausalAlignment;
use attention_workspace::testing::program::run_test_anew;
use burn::tensor::{BoolStore, DType, DeviceConfig, IntDType};
use std::env;

/// The environment variable that is set in the new process of a test. Its value names the dtype for which that process
/// configures the device.
const CONFIGURED: &str = "ATTENTION_TEST_CONFIGURED";

fn config(dtype: DType) -> DeviceConfig {
    match dtype {
        DType::Bool(store) => DeviceConfig::from(store),
        _ => DeviceConfig::from(IntDType::from(dtype)),
    }
}

/// Runs `check` on every device, in one new process for each dtype in `dtypes` that the device supports. `test` is the name
/// of the calling test.
fn configured(test: &str, dtypes: &[DType], check: impl Fn(&TestDevice)) {
    let own = env::var(CONFIGURED).ok();
    for device in devices() {
        let has = |dtype: &&DType| device.device.supports_dtype(**dtype);
        for dtype in dtypes.iter().filter(has) {
            let name = format!("{dtype:?}");
            if let Some(own) = &own {
                if *own == name {
                    let configured = device.device.clone().configure(config(*dtype));
                    configured.expect("no tensor was created on the device yet");
                    check(&device);
                }
                continue;
            }
            let variables = [
                (CONFIGURED, name.as_str()),
                ("ATTENTION_ENGINES", "blocks"),
                ("ATTENTION_TEST_DEVICES", device.name),
            ];
            let what = format!("{}, {name}", device.name);
            run_test_anew(&format!("settings::{test}"), &variables, &what);
        }
    }
}

/// Checks the number of keys that each query sees under all options that hide keys. All scores are 0, so the logsumexp is
/// the logarithm of that number.
fn check_counts(device: &TestDevice) {
    let (q_len, kv_len) = (170, 150);
    let ids = |length: i64| (0..2 * length).map(|i| i % length / 60).collect();
    let case = Case {
        dtype: DType::F32,
        causal: Some(CausalAlignment::BottomRight),
        window: (Some(40), None),
        mask: Some(FULL),
        kv_lengths: Some(vec![127, 41]),
        segments: Some((ids(q_len), ids(kv_len))),
        ..Case::new([2, 2, 1, q_len as usize, kv_len as usize, 8, 8])
    };
    let mut inputs = case.inputs();
    inputs.query.values.fill(0.0);
    let tensor = |operand: &Dense| operand.tensor(&device.device, case.dtype);
    for operator in [Operator::Fused, Operator::Reference] {
        let options = case.options(inputs.extras(&device.device, case.dtype));
        let [query, key, value] = [&inputs.query, &inputs.key, &inputs.value].map(tensor);
        let (_, lse) = operator
            .call(query, key, value, options)
            .unwrap_or_else(|error| panic!("{case:?}: {error}"));
        for (row, lse) in read(lse).into_iter().enumerate() {
            let (plane, i) = (row / case.q_len, row % case.q_len);
            let (b, h) = (plane / case.q_heads, plane % case.q_heads);
            let seen = (0..case.kv_len).filter(|j| case.sees(&inputs, [b, h, i, *j]));
            let seen = seen.count() as f64;
            assert!(
                (lse.exp() - seen).abs() <= 1e-3 * seen,
                "{operator:?}: query {i} of head {h} in sequence {b} sees {} keys, not {seen}",
                lse.exp()
            );
        }
    }
}

/// Checks masks in every bool store. A bool store is the type in which a tensor stores bools. Comparisons inside the
/// reference may give masks with another bool store than the device's default.
#[test]
fn settings_masks_of_every_bool_store_hide_the_same_keys() {
    let stores = [BoolStore::Native, BoolStore::U8, BoolStore::U32].map(DType::Bool);
    configured(
        "settings_masks_of_every_bool_store_hide_the_same_keys",
        &stores,
        check_counts,
    );
}

/// Checks lengths and segment ids in unusual integer dtypes. Unsigned dtypes cannot represent the positions before the first
/// key, and the narrowest dtypes cannot represent all positions.
#[test]
fn settings_integers_of_every_dtype_hide_the_same_keys() {
    let dtypes = [DType::U32, DType::I64, DType::I8];
    configured(
        "settings_integers_of_every_dtype_hide_the_same_keys",
        &dtypes,
        check_counts,
    );
}

/// Checks packed sequences (varlen), for which tensors of integers hold the bounds of the keys that each query sees.
#[test]
fn settings_integers_of_every_dtype_show_keys_of_packed_sequences() {
    let dtypes = [DType::U32, DType::I64, DType::I8];
    configured(
        "settings_integers_of_every_dtype_show_keys_of_packed_sequences",
        &dtypes,
        check_visible,
    );
}
