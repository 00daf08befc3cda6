//! Tests of the cmma engine, which multiplies matrices in fragments (tiles in the registers of a warp). On devices
//! without fragments, the tests emulate fragments in f16. The cases cover partly filled tiles, rows that see no key,
//! every option that hides keys, head sizes that are not multiples of a fragment's size, GQA groups, and decode.
//!
//! A process can support only one fragment shape, so each test runs itself in a new process for every shape.

use crate::case::{Case, FULL};
use crate::dense::Dense;
use crate::devices::{TestDevice, cube_devices};
use crate::inputs::Inputs;
use crate::quantized::check_in_fragments;
use attention_cube::internals::device::Fragments;
use attention_cube::internals::device::{DeviceProfile, Feature, FragmentSupport};
use attention_cube::internals::engine::{BackwardKernel, Engine, ForwardKernel, Kernel};
use attention_cube::internals::select::{Layouts, Pass, Refusal, Selection, Warning, select};
use attention_cube::internals::tile_ops::tiles::Products;
use attention_cube::quantized::CodeFormat;
use attention_cube::{AttentionProblem, CausalAlignment, explain};
use attention_workspace::testing::program::run_test_anew;
use burn::tensor::DType;
use std::env;

/// The environment variable that tells a test that it runs in its new process, in which fragments are emulated.
const EMULATED: &str = "ATTENTION_TEST_EMULATED";

/// A shared memory size in bytes that has space for the smallest tiles only. On a software driver, kernels with small
/// tiles compile fastest.
const LITTLE: usize = 16 << 10;

/// A shared memory size in bytes for narrow heads. A block of queries, a block of keys and a block of values then fit
/// at the same time.
const ENOUGH: usize = 32 << 10;

/// Runs `check` on every device that supports f16, in a new process for each pair in `shapes`. A pair is a fragment shape and a
/// shared memory size. `test` is the name of the calling test.
fn emulated(test: &str, shapes: &[(&str, usize)], check: impl Fn(&TestDevice)) {
    let devices = cube_devices();
    let devices = devices.iter().filter(|device| device.supports(DType::F16));
    for device in devices {
        if env::var_os(EMULATED).is_some() {
            check(device);
            continue;
        }
        for (shape, shared_memory) in shapes {
            let variables = [
                (EMULATED, "1"),
                ("ATTENTION_FRAGMENTS", shape),
                ("ATTENTION_ENGINES", "cmma"),
                ("ATTENTION_SHARED_MEMORY", &shared_memory.to_string()),
                ("ATTENTION_TEST_DEVICES", device.name),
            ];
            run_test_anew(&format!("fragments::{test}"), &variables, shape);
        }
    }
}

/// Checks `case` in f16, and asserts that the cmma engine serves the forward and the backward. The device computes with the
/// inputs `given`, and the reference computes with the inputs `equivalent`.
fn check(device: &TestDevice, case: &Case, given: &Inputs, equivalent: &Inputs) {
    let case = Case {
        dtype: DType::F16,
        ..case.clone()
    };
    let problem = case.problem(given, &device.device);
    let problem = problem.unwrap_or_else(|error| panic!("{case:?}: {error}"));
    let explanation = explain(&problem, &device.device);
    for selection in [&explanation.forward, &explanation.backward] {
        assert_eq!(selection.kernel.engine(), Engine::Cmma, "{explanation}");
    }
    case.check_on(std::slice::from_ref(device), given, equivalent);
}

fn causal(sizes: [usize; 7]) -> Case {
    Case {
        dtype: DType::F16,
        causal: Some(CausalAlignment::BottomRight),
        ..Case::new(sizes)
    }
}

/// Returns a copy of the inputs in which the key at each position is multiplied by `factor(position)`.
fn with_keys(inputs: &Inputs, factor: impl Fn(usize) -> f64) -> Inputs {
    let key = Dense::from_fn(inputs.key.shape, |[batch, head, j, column]| {
        inputs.key.at([batch, head, j, column]) * factor(j)
    });
    Inputs {
        key: key.rounded(DType::F16),
        ..inputs.clone()
    }
}

/// Checks GQA groups, few rows with split-KV, and lengths close to the tile sizes. One case also runs with scores that
/// grow along the keys, so that some blocks raise the row maximum and others do not.
#[test]
fn fragments_partial_tiles_groups_and_growing_scores_match_reference() {
    let shapes = [("16x16x16", LITTLE), ("16x16x16", ENOUGH)];
    emulated(
        "fragments_partial_tiles_groups_and_growing_scores_match_reference",
        &shapes,
        |device| {
            for sizes in [
                [2, 3, 1, 37, 45, 40, 40],
                [1, 2, 2, 33, 3, 40, 40],
                [2, 4, 2, 3, 150, 40, 40],
                [1, 2, 1, 33, 45, 16, 16],
            ] {
                let case = causal(sizes);
                let inputs = case.inputs();
                check(device, &case, &inputs, &inputs);
                if sizes[5] == 40 && sizes[4] == 45 {
                    let inputs =
                        with_keys(&inputs, |j| if j % 32 < 16 { 0.1 } else { 0.3 * j as f64 });
                    check(device, &case, &inputs, &inputs);
                }
            }
        },
    );
}

/// Checks a call with all options that hide keys at the same time, and also with a bias and sinks. Hidden keys are NaN, and
/// so are the queries of the sequence without keys.
#[test]
fn fragments_all_options_ignore_hidden_nan() {
    let shapes = [("8x8x8", LITTLE), ("8x8x8", ENOUGH)];
    emulated(
        "fragments_all_options_ignore_hidden_nan",
        &shapes,
        |device| {
            let ids = |length: i64| (0..2 * length).map(|i| i % length / 15).collect();
            let case = Case {
                mask: Some(FULL),
                bias: Some(FULL),
                kv_lengths: Some(vec![0, 41]),
                segments: Some((ids(38), ids(49))),
                sinks: true,
                window: (Some(30), Some(4)),
                ..Case::new([2, 4, 2, 38, 49, 36, 20])
            };
            let case = Case {
                dtype: DType::F16,
                ..case
            };
            let inputs = with_keys(&case.inputs(), |j| 1.0 + j as f64 / 4.0);
            let mut poisoned = inputs.clone();
            let unseen = |[batch, _, j]: [usize; 3]| batch == 0 || j >= 41;
            poisoned.key.fill_rows(f64::NAN, unseen);
            poisoned.value.fill_rows(f64::NAN, unseen);
            let blind = |[batch, _, _]: [usize; 3]| batch == 0;
            poisoned.query.fill_rows(f64::NAN, blind);
            poisoned.output_gradient.fill_rows(f64::NAN, blind);
            check(device, &case, &poisoned, &inputs);
        },
    );
}

/// Checks rows whose scores in the first blocks are the lowest finite number. The scores in later blocks are much
/// higher, so the scores of the first blocks must add nothing to the row sum.
#[test]
fn fragments_lowest_bias_before_larger_scores_matches_reference() {
    emulated(
        "fragments_lowest_bias_before_larger_scores_matches_reference",
        &[("8x8x8", LITTLE)],
        |device| {
            let case = Case {
                dtype: DType::F16,
                f32_extras: true,
                bias: Some(FULL),
                ..Case::new([1, 1, 1, 35, 70, 16, 16])
            };
            let mut inputs = case.inputs();
            let shape = inputs.bias.as_ref().expect("the case has a bias").shape;
            inputs.bias = Some(Dense::from_fn(shape, |[_, _, query, key]| {
                match query % 2 == 0 && key < 33 {
                    true => f64::from(f32::MIN),
                    false => (query + key) as f64 / 64.0,
                }
            }));
            check(device, &case, &inputs, &inputs);
        },
    );
}

/// Checks kernels that convert queries, keys and values to f32 in shared memory. These kernels are for devices that
/// cannot multiply half-precision fragments and accumulate the products in f32.
#[test]
fn fragments_operands_widened_to_f32_match_reference() {
    emulated(
        "fragments_operands_widened_to_f32_match_reference",
        &[("8x8x8:f32", LITTLE)],
        |device| {
            let case = causal([1, 2, 1, 20, 35, 13, 21]);
            let inputs = case.inputs();
            check(device, &case, &inputs, &inputs);
        },
    );
}

/// Checks kernels that multiply int8 codes in fragments. These kernels multiply the scores by the scales of the keys,
/// and the attention probabilities by the scales of the values.
#[test]
fn fragments_int8_keys_and_values_match_reference() {
    emulated(
        "fragments_int8_keys_and_values_match_reference",
        &[("8x8x8:f32", LITTLE)],
        |device| {
            check_in_fragments(device);
        },
    );
}

/// Checks which engine serves int8 keys and values on a GPU with fragments: cmma in bf16, but the unit engine in f16.
/// The cmma engine refuses f16, because an attention probability times the scale of a value row can exceed the range of
/// f16.
#[test]
fn select_int8_with_f16_fragments_is_refused() {
    for (dtype, engine) in [(DType::BF16, Engine::Cmma), (DType::F16, Engine::Unit)] {
        let problem = AttentionProblem {
            q_len: 1,
            quantized: Some(CodeFormat::Int8),
            ..problem(64, dtype)
        };
        let (layouts, card) = (Layouts::contiguous(&problem), card([16, 16, 16], dtype));
        let selection = select(&problem, Some(&card), layouts, Pass::Forward);
        assert_eq!(selection.kernel.engine(), engine, "{selection:?}");
        // The mma engine refuses because this GPU lacks a feature. The other engines refuse because the keys and values are
        // int8.
        let is_told = |(engine, refusal): &(Engine, Refusal)| match engine {
            Engine::Mma => matches!(refusal, Refusal::MissingFeature(_)),
            _ => matches!(refusal, Refusal::Quantized(_)),
        };
        assert!(selection.refusals.iter().all(is_told), "{selection:?}");
        let backward = select(&problem, Some(&card), layouts, Pass::Backward);
        assert_eq!(backward.kernel.engine(), Engine::Blocks, "{backward:?}");
    }
}

/// Checks wide values, whose output is staged in shared memory in several chunks of columns.
#[test]
fn fragments_wide_values_match_reference() {
    emulated(
        "fragments_wide_values_match_reference",
        &[("16x16x16", LITTLE)],
        |device| {
            let case = causal([1, 1, 1, 18, 70, 24, 200]);
            let inputs = case.inputs();
            check(device, &case, &inputs, &inputs);
        },
    );
}

/// Returns the properties of a Vulkan GPU that supports one shape and dtype of fragments.
fn card(shape: [usize; 3], dtype: DType) -> DeviceProfile {
    let [m, n, k] = shape;
    DeviceProfile {
        name: "fabricated".into(),
        dtypes: vec![DType::F32, DType::F16, DType::BF16],
        shared_memory: 48 << 10,
        units_per_cube: 1024,
        bindings: 16,
        largest_buffer: 1 << 30,
        cube_count: 65535,
        processors: None,
        multiprocessors: None,
        features: vec![],
        fragments: FragmentSupport {
            kinds: vec![Fragments {
                m,
                n,
                k,
                dtype,
                emulation: None,
            }],
            plane_sizes: (32, 32),
            fault: None,
            verdicts: None,
        },
        disabled_engines: vec![],
        not_built: vec![],
    }
}

fn problem(head_dim: usize, dtype: DType) -> AttentionProblem {
    let case = Case {
        dtype,
        ..Case::new([1, 2, 1, 50, 50, head_dim, head_dim])
    };
    let device = burn::tensor::Device::flex();
    case.problem(&case.inputs(), &device)
        .unwrap_or_else(|error| panic!("{case:?}: {error}"))
}

fn selection(problem: &AttentionProblem, device: &DeviceProfile, pass: Pass) -> Selection {
    select(problem, Some(device), Layouts::contiguous(problem), pass)
}

/// Checks that the cmma engine serves every fragment shape, warp size, shared memory size and head size, in forward and
/// backward.
#[test]
fn select_cmma_serves_all_fragment_shapes() {
    for shape in [[16, 16, 16], [16, 8, 16], [8, 8, 8]] {
        for (own, staged) in [
            (DType::F16, DType::F16),
            (DType::BF16, DType::BF16),
            (DType::BF16, DType::F32),
        ] {
            for (plane, kilobytes) in [(32, 32), (32, 48), (64, 64), (32, 99)] {
                for head_dim in [8, 40, 64, 128, 200, 256, 512, 1024] {
                    let mut device = card(shape, staged);
                    device.fragments.plane_sizes = (plane, plane);
                    device.shared_memory = kilobytes << 10;
                    let problem = problem(head_dim, own);
                    for pass in [Pass::Forward, Pass::Backward] {
                        let selection = selection(&problem, &device, pass);
                        let context = format!("{shape:?} {plane} {kilobytes} {selection:?}");
                        let tiles = match selection.kernel {
                            Kernel::Forward(ForwardKernel::Cmma(plan)) => vec![plan.tiles],
                            Kernel::Backward(BackwardKernel::Cmma(plan)) => {
                                vec![plan.query, plan.key_value]
                            }
                            _ => panic!("{context}"),
                        };
                        for tiles in tiles {
                            assert!(
                                matches!(tiles.products, Products::Fragments(fragments)
                                    if fragments.fragments.dtype == staged),
                                "{context}"
                            );
                            assert!(tiles.shared_memory() <= kilobytes << 10, "{context}");
                        }
                    }
                }
            }
        }
    }
}

/// Checks in which cases a plan warns that gradients of the scores may overflow in f16. The dtype of the fragments
/// decides, not the dtype of the inputs.
#[test]
fn select_f16_fragments_in_backward_warn() {
    for (own, staged, pass, warned) in [
        (DType::F16, DType::F16, Pass::Backward, true),
        (DType::F16, DType::F16, Pass::Forward, false),
        (DType::F16, DType::F32, Pass::Backward, false),
        (DType::BF16, DType::BF16, Pass::Backward, false),
        (DType::BF16, DType::F32, Pass::Backward, false),
    ] {
        let selection = selection(&problem(64, own), &card([16, 16, 16], staged), pass);
        assert_eq!(selection.kernel.engine(), Engine::Cmma, "{selection:?}");
        let expected: &[Warning] = match warned {
            true => &[Warning::ScoreGradientsInF16],
            false => &[],
        };
        assert_eq!(
            selection.warnings, expected,
            "{own:?}, {staged:?}, {pass:?}"
        );
    }
}

/// Checks that a refusal of the cmma engine names its reason, and that the unit engine then serves the problem.
#[test]
fn select_cmma_refusal_names_the_reason() {
    let good = || card([16, 16, 16], DType::F16);
    let mut varying = good();
    varying.fragments.plane_sizes = (32, 64);
    let mut faulty = good();
    faulty.fragments.fault = Some("a known fault");
    let mut little = good();
    little.shared_memory = 4 << 10;
    let f16 = |head_dim| problem(head_dim, DType::F16);
    for (problem, device, refusal) in [
        (
            problem(64, DType::F32),
            good(),
            Refusal::NotHalf(DType::F32),
        ),
        (
            problem(64, DType::BF16),
            good(),
            Refusal::MissingFeature(Feature::Fragments(DType::BF16)),
        ),
        (
            f16(64),
            card([32, 8, 16], DType::F16),
            Refusal::MissingFeature(Feature::Fragments(DType::F16)),
        ),
        (
            f16(7),
            good(),
            Refusal::Narrow {
                narrowest: 8,
                head_dim: 7,
                value_dim: 7,
            },
        ),
        (
            f16(64),
            varying,
            Refusal::PlaneSizes {
                least: 32,
                most: 64,
            },
        ),
        (f16(64), faulty, Refusal::Fault("a known fault".into())),
    ] {
        for pass in [Pass::Forward, Pass::Backward] {
            let selection = selection(&problem, &device, pass);
            assert_eq!(selection.kernel.engine(), Engine::Unit, "{selection:?}");
            let found = selection.refusals.iter();
            let found = found.filter(|(engine, _)| *engine == Engine::Cmma);
            assert_eq!(
                Vec::from_iter(found),
                [&(Engine::Cmma, refusal.clone())],
                "{selection:?}"
            );
        }
    }
    let selection = selection(&f16(64), &little, Pass::Forward);
    let is_of_tiles = |(engine, refusal): &(Engine, Refusal)| {
        *engine == Engine::Cmma && matches!(refusal, Refusal::Tiles { .. })
    };
    assert!(selection.refusals.iter().any(is_of_tiles), "{selection:?}");
}
