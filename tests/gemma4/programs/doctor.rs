//! Tests the report of `gemma4 doctor`.

use super::{gemma4, run, succeed};

#[test]
fn program_doctor_reports_the_processor() {
    let ended = succeed(gemma4("doctor").args(["--device", "cpu"]));
    for part in [
        "# gemma4 doctor",
        "| program | gemma4 ",
        "## flex: this machine's processor",
        "| matrix product | ",
        "| decode step, full layer | 512 | blocks | blocks | ",
        "unit: the device does not run CubeCL kernels",
        "## Advice",
    ] {
        assert!(ended.stdout.contains(part), "{part:?}: {ended:?}");
    }
    assert!(!ended.stdout.contains("failed"), "{ended:?}");
    assert!(!ended.stdout.contains("not measured"), "{ended:?}");
}

#[test]
fn program_doctor_quick_measures_nothing() {
    let ended = succeed(gemma4("doctor").args(["--device", "cpu", "--quick"]));
    assert!(ended.stdout.contains("not measured"), "{ended:?}");
    assert!(!ended.stdout.contains("matrix product"), "{ended:?}");
}

/// A backend that this build lacks is reported, and the program ends with an error.
#[test]
fn program_doctor_without_working_device_fails() {
    let absent = ["metal", "rocm"];
    let absent = absent[usize::from(cfg!(feature = "metal"))];
    let ended = run(gemma4("doctor").args(["--device", absent]));
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stdout.contains(&format!("## {absent}")), "{ended:?}");
    assert!(ended.stderr.contains("error: no device works"), "{ended:?}");
}
