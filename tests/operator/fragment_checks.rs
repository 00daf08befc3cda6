//! Tests of the self-check, which decides whether the cmma engine may use a device's matrix units. The devices emulate
//! fragments, of honest drivers and of drivers that multiply wrongly, in f16.
//!
//! A process supports one kind of fragments and reads its cache folder once, so each step of a test runs in a new
//! process.

use crate::case::Case;
use crate::devices::{TestDevice, cube_devices};
use attention_cube::internals::device::{FragmentVerdict, FragmentVerdicts};
use attention_cube::internals::select::{Pass, Refusal, Selection};
use attention_cube::{CausalAlignment, Engine, Explanation, explain};
use attention_workspace::testing::program::run_test_anew;
use burn::tensor::DType;
use std::path::Path;
use std::sync::Barrier;
use std::{env, fs, thread};

/// The environment variable that names the step of a test to its new process.
const STEP: &str = "ATTENTION_TEST_EMULATED";

/// A shared memory size in bytes that has space for the smallest tiles only, whose kernels compile fastest.
const SHARED_MEMORY: &str = "16384";

/// Runs the steps of a test on every device that supports f16, each in a new process. A step has a name and a value of
/// `ATTENTION_FRAGMENTS`. All steps on a device share one cache folder, which is empty at first. Before each step but the
/// first, `between` may change the files of the folder.
fn run_steps(
    test: &str,
    steps: &[(&str, &str)],
    check: impl Fn(&TestDevice, &str),
    between: impl Fn(&str, &Path),
) {
    let devices = cube_devices();
    let devices = devices.iter().filter(|device| device.supports(DType::F16));
    for device in devices {
        if let Ok(step) = env::var(STEP) {
            check(device, &step);
            continue;
        }
        let cache = tempfile::tempdir().expect("a folder");
        let folder = cache.path().join("attention-cube");
        for (index, (step, fragments)) in steps.iter().enumerate() {
            if index > 0 {
                between(step, &folder);
            }
            let cache = cache.path().to_str().expect("the path is text");
            let variables = [
                (STEP, *step),
                ("ATTENTION_FRAGMENTS", fragments),
                ("ATTENTION_ENGINES", "cmma,unit"),
                ("ATTENTION_SHARED_MEMORY", SHARED_MEMORY),
                ("ATTENTION_TEST_DEVICES", device.name),
                ("XDG_CACHE_HOME", cache),
            ];
            run_test_anew(&format!("fragment_checks::{test}"), &variables, step);
        }
    }
}

/// Returns the path of the only file of verdicts in a folder.
fn verdict_file(folder: &Path) -> std::path::PathBuf {
    let files = fs::read_dir(folder).expect("the check makes the folder");
    let paths = files.map(|file| file.expect("the folder can be read").path());
    let is_file = |path: &std::path::PathBuf| path.extension().is_some_and(|end| end == "json");
    let files: Vec<_> = paths.filter(is_file).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files[0].clone()
}

fn case() -> Case {
    Case {
        dtype: DType::F16,
        causal: Some(CausalAlignment::BottomRight),
        ..Case::new([1, 2, 1, 21, 37, 24, 40])
    }
}

fn explained(device: &TestDevice) -> Explanation {
    let case = case();
    let problem = case.problem(&case.inputs(), &device.device);
    explain(&problem.expect("the problem is valid"), &device.device)
}

/// Checks the results of the case, forward and backward, against the reference.
fn check_results(device: &TestDevice) {
    let case = case();
    let inputs = case.inputs();
    case.check_on(std::slice::from_ref(device), &inputs, &inputs);
}

fn verdicts(explanation: &Explanation) -> &FragmentVerdicts {
    let device = explanation.device.as_ref().expect("a device with kernels");
    let verdicts = device.fragments.verdicts.as_ref();
    verdicts.expect("the fragments are checked before use")
}

/// Returns the reason for which the cmma engine refused.
fn reason(selection: &Selection) -> &str {
    let mut refusals = selection.refusals.iter();
    let refusal = refusals.find(|(engine, _)| *engine == Engine::Cmma);
    match refusal {
        Some((_, Refusal::Fault(reason))) => reason,
        _ => panic!("{selection:?}"),
    }
}

/// Asserts that the unit engine serves both passes, for a reason with the text `part`.
#[track_caller]
fn assert_refused(explanation: &Explanation, part: &str) {
    for selection in [&explanation.forward, &explanation.backward] {
        assert_eq!(selection.kernel.engine(), Engine::Unit, "{explanation}");
        assert!(reason(selection).contains(part), "{explanation}");
    }
}

#[track_caller]
fn assert_serves(explanation: &Explanation) {
    for selection in [&explanation.forward, &explanation.backward] {
        assert_eq!(selection.kernel.engine(), Engine::Cmma, "{explanation}");
    }
}

/// Checks that right fragments serve, that their verdicts stay on disk, and that later processes believe the file.
#[test]
fn check_of_right_fragments_passes_and_is_kept() {
    run_steps(
        "check_of_right_fragments_passes_and_is_kept",
        &[
            ("fresh", "16x16x16:checked"),
            ("believed", "16x16x16:checked"),
            ("killed", "16x16x16:checked"),
            ("damaged", "16x16x16:checked"),
        ],
        |device, step| {
            // The first call must run the check, not only `explain`.
            check_results(device);
            let explanation = explained(device);
            let text = explanation.to_string();
            match step {
                "fresh" | "damaged" => {
                    assert_serves(&explanation);
                    let verdicts = verdicts(&explanation);
                    let passed = FragmentVerdict::Passed {
                        speed_percent: None,
                    };
                    for (check, verdict) in &verdicts.known {
                        assert_eq!(verdict, &passed, "{check}");
                    }
                    let passes = verdicts.known.iter().map(|(check, _)| check.pass);
                    assert_eq!(
                        Vec::from_iter(passes),
                        [Pass::Forward, Pass::Backward],
                        "{text}"
                    );
                    let file = verdicts.file.as_ref().expect("the folder can be written");
                    assert!(file.is_file() && text.contains("passed"), "{text}");
                    assert!(text.contains(&file.display().to_string()), "{text}");
                }
                "believed" => assert_refused(&explanation, "this test says so"),
                _ => assert_refused(&explanation, "ended or was killed"),
            }
        },
        |step, folder| {
            let path = verdict_file(folder);
            let text = fs::read_to_string(&path).expect("the file can be read");
            let mut contents: serde_json::Value =
                serde_json::from_str(&text).expect("the file is JSON");
            let states = contents["verdicts"].as_array_mut().expect("a list");
            for entry in states {
                entry["state"] = match step {
                    "believed" => serde_json::json!({"refused": {"reason": "this test says so"}}),
                    _ => serde_json::json!("running"),
                };
            }
            let text = match step {
                "damaged" => text[..text.len() / 2].to_string(),
                _ => contents.to_string(),
            };
            fs::write(path, text).expect("the file can be written");
        },
    );
}

/// Checks that every kind of wrong fragments is found, and that results are right all the same.
#[test]
fn check_of_wrong_fragments_leaves_them_out() {
    run_steps(
        "check_of_wrong_fragments_leaves_them_out",
        &[
            ("swapped", "16x16x16:swapped"),
            ("short", "8x8x8:short"),
            ("first-tile", "16x16x16:first-tile"),
            ("short f32", "8x8x8:f32:short"),
        ],
        |device, _| {
            check_results(device);
            let explanation = explained(device);
            assert_refused(&explanation, "give a wrong output");
            let found = &verdicts(&explanation).known;
            assert!(
                matches!(&found[..], [(_, FragmentVerdict::Refused(_))]),
                "{found:?}"
            );
        },
        |_, _| (),
    );
}

/// Checks that the check of the backward finds wrong fragments, even if the forward's verdict says that they are right.
#[test]
fn check_of_backward_finds_wrong_gradients() {
    run_steps(
        "check_of_backward_finds_wrong_gradients",
        &[("forward", "8x8x8:short"), ("backward", "8x8x8:short")],
        |device, step| {
            let explanation = explained(device);
            match step {
                "forward" => assert_refused(&explanation, "give a wrong output"),
                _ => {
                    let forward = explanation.forward.kernel.engine();
                    assert_eq!(forward, Engine::Cmma, "{explanation}");
                    let backward = explanation.backward.kernel.engine();
                    assert_eq!(backward, Engine::Unit, "{explanation}");
                    let reason = reason(&explanation.backward);
                    assert!(reason.contains("give a wrong gradient"), "{explanation}");
                }
            }
        },
        |_, folder| {
            let path = verdict_file(folder);
            let text = fs::read_to_string(&path).expect("the file can be read");
            let mut contents: serde_json::Value =
                serde_json::from_str(&text).expect("the file is JSON");
            contents["verdicts"][0]["state"] =
                serde_json::json!({"passed": {"speed_percent": null}});
            fs::write(path, contents.to_string()).expect("the file can be written");
        },
    );
}

/// Checks that threads which use the device first at the same time share one check.
#[test]
fn check_from_several_threads_runs_once() {
    run_steps(
        "check_from_several_threads_runs_once",
        &[("threads", "16x16x16:checked")],
        |device, _| {
            let start = Barrier::new(3);
            thread::scope(|scope| {
                for index in 0..3 {
                    let start = &start;
                    scope.spawn(move || {
                        start.wait();
                        match index {
                            0 => assert_serves(&explained(device)),
                            _ => check_results(device),
                        }
                    });
                }
            });
            let explanation = explained(device);
            assert_serves(&explanation);
            assert_eq!(verdicts(&explanation).known.len(), 2, "{explanation}");
        },
        |_, _| (),
    );
}

/// Checks that the check of decode tiles finds faults in rows that the first call does not use, but a later call does.
#[test]
fn check_of_decode_tiles_covers_all_rows() {
    run_steps(
        "check_of_decode_tiles_covers_all_rows",
        &[("rows", "16x16x16:upper-rows")],
        |device, _| {
            let one_row = Case {
                dtype: DType::F16,
                ..Case::new([1, 1, 1, 1, 75, 40, 40])
            };
            let all_rows = Case {
                dtype: DType::F16,
                ..Case::new([1, 16, 1, 1, 75, 40, 40])
            };
            for decode in [one_row, all_rows] {
                let inputs = decode.inputs();
                decode.check_on(std::slice::from_ref(device), &inputs, &inputs);
                let problem = decode.problem(&inputs, &device.device);
                let problem = problem.expect("the problem is valid");
                assert_refused(&explain(&problem, &device.device), "give a wrong output");
            }
        },
        |_, _| (),
    );
}

/// Checks that the tiles of a decode step have their own verdict, and that `explain` says so before any check.
#[test]
fn check_of_decode_tiles_has_its_own_verdict() {
    run_steps(
        "check_of_decode_tiles_has_its_own_verdict",
        &[("decode", "16x16x16:checked")],
        |device, _| {
            let in_f32 = Case {
                dtype: DType::F32,
                ..case()
            };
            let problem = in_f32.problem(&in_f32.inputs(), &device.device);
            let problem = problem.expect("the problem is valid");
            let explanation = explain(&problem, &device.device);
            assert!(
                explanation.to_string().contains("cmma: not checked"),
                "{explanation}"
            );
            let decode = Case {
                dtype: DType::F16,
                ..Case::new([2, 4, 2, 1, 75, 40, 40])
            };
            let inputs = decode.inputs();
            decode.check_on(std::slice::from_ref(device), &inputs, &inputs);
            let problem = decode.problem(&inputs, &device.device);
            let problem = problem.expect("the problem is valid");
            let explanation = explain(&problem, &device.device);
            assert_eq!(
                explanation.forward.kernel.engine(),
                Engine::Cmma,
                "{explanation}"
            );
            let known = verdicts(&explanation).known.clone();
            assert_serves(&explained(device));
            let more = verdicts(&explained(device)).known.len();
            assert!(more > known.len(), "{known:?}");
        },
        |_, _| (),
    );
}
