//! Tests of `explain`, which names the engine that serves a problem, and the reason why each faster engine refused the
//! problem.

use crate::devices::{cube_devices, devices};
use attention_cube::internals::device::{DeviceProfile, Feature, FragmentSupport};
use attention_cube::internals::engine::{BackwardKernel, Engine, Kernel};
use attention_cube::internals::select::{
    Layouts, Operands, Pass, Refusal, Selection, Warning, select,
};
use attention_cube::{AttentionOptions, AttentionProblem, MAX_HEAD_DIM, explain};
use attention_workspace::testing::program::{example, run, succeed};
use burn::tensor::{DType, Device, Tensor};

fn problem(head_dim: usize) -> AttentionProblem {
    let zeros = Tensor::<4>::zeros([1, 2, 3, head_dim], (&Device::flex(), DType::F32));
    AttentionProblem::new(&zeros, &zeros, &zeros, &AttentionOptions::new())
        .unwrap_or_else(|error| panic!("{head_dim}: {error}"))
}

/// The input layouts that every engine can read.
const READABLE: Layouts = Layouts {
    vectors: true,
    tma: Operands::ALL,
    tma_bias: true,
};

/// Returns the properties of a device on which the unit engine serves every problem.
fn profile() -> DeviceProfile {
    DeviceProfile {
        name: "fabricated".into(),
        dtypes: vec![DType::F32, DType::F16],
        shared_memory: 48 << 10,
        units_per_cube: 1024,
        bindings: 16,
        largest_buffer: 1 << 30,
        cube_count: 65535,
        processors: None,
        multiprocessors: None,
        features: vec![],
        fragments: FragmentSupport::default(),
        disabled_engines: vec![],
        not_built: vec![],
    }
}

#[test]
fn explain_flex_selects_blocks() {
    let explanation = explain(&problem(64), &Device::flex());
    assert_eq!(explanation.device, None);
    for selection in [&explanation.forward, &explanation.backward] {
        assert_eq!(selection.kernel.engine(), Engine::Blocks);
        assert!(
            selection
                .refusals
                .contains(&(Engine::Unit, Refusal::NoCubeCL)),
            "{explanation}"
        );
    }
    assert!(
        explanation
            .to_string()
            .contains("does not run CubeCL kernels"),
        "{explanation}"
    );
}

#[test]
fn explain_cube_device_selects_kernels() {
    for device in cube_devices() {
        for head_dim in [1, 64, 512, MAX_HEAD_DIM] {
            let explanation = explain(&problem(head_dim), &device.device);
            let profile = explanation.device.as_ref();
            let name = &profile
                .unwrap_or_else(|| panic!("{}: no profile", device.name))
                .name;
            let text = explanation.to_string();
            assert!(
                text.contains(name.as_str()) && text.contains("forward"),
                "{text}"
            );
            for selection in [&explanation.forward, &explanation.backward] {
                assert_ne!(
                    selection.kernel.engine(),
                    Engine::Blocks,
                    "{}: {text}",
                    device.name
                );
            }
        }
    }
}

/// Checks that `explain` names the problem's dtype if the device does not support that dtype.
#[test]
fn explain_unsupported_dtype_is_named() {
    for device in devices() {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let explanation = explain(
                &AttentionProblem {
                    dtype,
                    ..problem(64)
                },
                &device.device,
            );
            let served = explanation.forward.kernel.engine() != Engine::Blocks;
            assert_eq!(
                served,
                device.is_cube() && device.supports(dtype),
                "{explanation}"
            );
            if device.is_cube() && !served {
                let text = explanation.to_string();
                assert!(text.contains(&format!("have no {dtype:?}")), "{text}");
            }
        }
    }
}

/// Returns the reason why `engine` refused, or `None` if it did not refuse or was not tried.
fn refusal_of(engine: Engine, selection: &Selection) -> Option<&Refusal> {
    let refusals = &selection.refusals;
    let refusal = refusals.iter().find(|(asked, _)| *asked == engine);
    refusal.map(|(_, refusal)| refusal)
}

/// Asserts that the engine `Blocks` serves the forward and the backward of `problem`. `Blocks` is the last choice,
/// because it serves every problem. Asserts also that the unit engine's refusal satisfies `matches` and contains each
/// string in `text`.
#[track_caller]
fn assert_refused(
    problem: &AttentionProblem,
    profile: &DeviceProfile,
    matches: impl Fn(&Refusal) -> bool,
    text: &[&str],
) {
    for pass in [Pass::Forward, Pass::Backward] {
        let selection = select(problem, Some(profile), READABLE, pass);
        assert_eq!(
            selection.kernel.engine(),
            Engine::Blocks,
            "{pass:?}: {selection:?}"
        );
        let refusal = refusal_of(Engine::Unit, &selection);
        let refusal = refusal.unwrap_or_else(|| panic!("{pass:?}: {selection:?}"));
        assert!(matches(refusal), "{pass:?}: {refusal:?}");
        for part in text {
            let refusal = refusal.to_string();
            assert!(
                refusal.contains(part),
                "{pass:?}: {part:?} is not in {refusal:?}"
            );
        }
    }
}

#[test]
fn select_too_little_shared_memory_is_refused() {
    assert_refused(
        &problem(64),
        &DeviceProfile {
            shared_memory: 8 << 10,
            ..profile()
        },
        |refusal| {
            matches!(
                refusal,
                Refusal::Tiles {
                    width: 64,
                    shared_memory: 8192,
                    ..
                }
            )
        },
        &["64 columns", "8192 bytes of shared memory"],
    );
}

#[test]
fn select_too_few_units_is_refused() {
    assert_refused(
        &problem(64),
        &DeviceProfile {
            units_per_cube: 32,
            ..profile()
        },
        |refusal| matches!(refusal, Refusal::Tiles { units: 32, .. }),
        &["64 columns", "32 units a cube"],
    );
}

#[test]
fn select_too_few_bindings_is_refused() {
    assert_refused(
        &problem(64),
        &DeviceProfile {
            bindings: 4,
            ..profile()
        },
        |refusal| matches!(refusal, Refusal::Bindings { available: 4, .. }),
        &["buffers", "may bind 4"],
    );
}

#[test]
fn select_unsupported_dtype_is_refused() {
    assert_refused(
        &AttentionProblem {
            dtype: DType::F16,
            ..problem(64)
        },
        &DeviceProfile {
            dtypes: vec![DType::F32],
            ..profile()
        },
        |refusal| *refusal == Refusal::Dtype(DType::F16),
        &["have no F16"],
    );
}

#[test]
fn select_length_beyond_32_bits_is_refused() {
    assert_refused(
        &AttentionProblem {
            kv_len: 1 << 31,
            ..problem(64)
        },
        &profile(),
        |refusal| matches!(refusal, Refusal::Length { length, .. } if *length == 1 << 31),
        &["2147483648", "longer than"],
    );
}

/// Checks that the unit engine refuses problems with long loops on a software driver. Such a driver ends a long loop
/// early, without an error.
#[test]
fn select_long_loops_on_software_driver_are_refused() {
    let software = DeviceProfile {
        processors: Some(2),
        ..profile()
    };
    let long = |head_dim, kv_len| AttentionProblem {
        q_len: 64,
        kv_len,
        ..problem(head_dim)
    };
    let refusal = |problem: &AttentionProblem, profile: &DeviceProfile| {
        let selection = select(problem, Some(profile), READABLE, Pass::Forward);
        refusal_of(Engine::Unit, &selection).map(ToString::to_string)
    };
    assert_eq!(refusal(&long(512, 16384), &software), None);
    assert_eq!(refusal(&long(512, 65536), &profile()), None);
    let text = refusal(&long(512, 65536), &software).unwrap_or_default();
    assert!(text.contains("software driver ends"), "{text:?}");
}

/// Checks the field `parts` of the plan for a software driver, on which one kernel can compute all gradients. `parts` is the
/// number of partial sums into which this kernel divides the query's gradient. All partial sums must fit in the device's
/// largest buffer. If not even one fits, `parts` is `None`, and a separate kernel computes the query's gradient.
#[test]
fn plan_joint_gradients_fit_the_largest_buffer() {
    let parts = |heads: usize, megabytes: usize| {
        let problem = AttentionProblem {
            q_heads: heads,
            kv_heads: heads,
            q_len: 2048,
            kv_len: 2048,
            ..problem(128)
        };
        let software = DeviceProfile {
            processors: Some(4),
            largest_buffer: megabytes << 20,
            ..profile()
        };
        let selection = select(&problem, Some(&software), READABLE, Pass::Backward);
        match selection.kernel {
            Kernel::Backward(BackwardKernel::Unit(plan)) => plan.parts,
            other => panic!("{other:?}"),
        }
    };
    // The operand buffer has 4.5 MB per head: query, keys, values and output gradient, in padded rows. In the gradient buffer,
    // each partial sum of the query's gradient takes 1 MB. The gradients of the keys and of the values take 1 MB each.
    assert_eq!(parts(1, 128), Some(4));
    assert_eq!(parts(1, 5), Some(3));
    assert_eq!(parts(1, 4), None);
    assert_eq!(parts(16, 128), Some(1));
    assert_eq!(parts(64, 128), None);
}

/// Checks that the limits that WebGPU guarantees are enough for every head size: 16 KB of shared memory, 256 units
/// (threads) per cube, and 8 buffers.
#[test]
fn select_sixteen_kilobytes_serve_every_head_dim() {
    let small = DeviceProfile {
        shared_memory: 16 << 10,
        units_per_cube: 256,
        bindings: 8,
        ..profile()
    };
    for head_dim in 1..=MAX_HEAD_DIM {
        for q_len in [1, 100] {
            let problem = AttentionProblem {
                q_len,
                ..problem(head_dim)
            };
            for vectors in [false, true] {
                let layouts = Layouts {
                    vectors,
                    ..READABLE
                };
                for pass in [Pass::Forward, Pass::Backward] {
                    let selection = select(&problem, Some(&small), layouts, pass);
                    let engine = selection.kernel.engine();
                    assert_ne!(
                        engine,
                        Engine::Blocks,
                        "{head_dim}, {pass:?}: {selection:?}"
                    );
                }
            }
        }
    }
}

/// Checks a device on which an engine is disabled. The next engine, here `Blocks`, must serve the problem. The refusal
/// of the disabled engine must say that the engine is disabled on this device.
#[test]
fn select_disabled_engine_is_refused() {
    let without_units = DeviceProfile {
        disabled_engines: vec![Engine::Unit],
        ..profile()
    };
    let selection = select(&problem(64), Some(&without_units), READABLE, Pass::Forward);
    assert_eq!(selection.kernel.engine(), Engine::Blocks);
    assert_eq!(
        refusal_of(Engine::Unit, &selection),
        Some(&Refusal::LeftOut)
    );
    for device in devices().iter().filter(|device| device.name != "flex") {
        let mut command = example("attention");
        command
            .args(["--device", device.name, "--dtype", "f32"])
            .args(["--q-len", "5", "--kv-len", "7", "--head-dim", "8"]);
        let restricted = succeed(command.env("ATTENTION_ENGINES", "blocks"));
        let refusal = "Unit refused: it is left out by ATTENTION_ENGINES";
        assert!(restricted.stdout.contains(refusal), "{restricted:?}");
        let ended = run(command.env("ATTENTION_ENGINES", "units"));
        assert_ne!(ended.code, Some(0), "{ended:?}");
    }
}

/// Checks that the refusal names the missing Cargo feature if the build lacks an engine's kernels. The refusal must not blame
/// the GPU.
#[test]
fn select_engine_not_built_names_the_feature() {
    let features = vec![
        Feature::CopyAsync,
        Feature::Mma(DType::BF16),
        Feature::LoadMatrix(DType::BF16),
        Feature::Tma,
        Feature::Wgmma,
    ];
    let built = DeviceProfile {
        name: "cuda".into(),
        dtypes: vec![DType::F32, DType::F16, DType::BF16],
        shared_memory: 232_448,
        multiprocessors: Some(132),
        features,
        ..profile()
    };
    let lacking = DeviceProfile {
        not_built: vec![(Engine::Wgmma, "cuda"), (Engine::Mma, "cuda")],
        ..built.clone()
    };
    let without_copies = DeviceProfile {
        features: vec![],
        ..lacking.clone()
    };
    let elsewhere = DeviceProfile {
        name: "wgpu<wgsl>".into(),
        ..without_copies.clone()
    };
    let problem = AttentionProblem {
        dtype: DType::BF16,
        ..problem(64)
    };
    for pass in [Pass::Forward, Pass::Backward] {
        let choose = |device| select(&problem, Some(device), READABLE, pass);
        assert_ne!(choose(&built).kernel.engine(), Engine::Unit);
        for device in [&lacking, &without_copies] {
            let selection = choose(device);
            assert_eq!(selection.kernel.engine(), Engine::Unit, "{selection:?}");
            for engine in [Engine::Wgmma, Engine::Mma] {
                let refusal = refusal_of(engine, &selection);
                assert_eq!(refusal, Some(&Refusal::NotBuilt("cuda")), "{selection:?}");
            }
        }
        // The runtime of this device is not CUDA, so a build with the Cargo feature `cuda` would not help. The refusal
        // therefore names the missing feature of the GPU.
        let selection = choose(&elsewhere);
        for engine in [Engine::Wgmma, Engine::Mma] {
            let refusal = refusal_of(engine, &selection);
            assert!(
                matches!(refusal, Some(Refusal::MissingFeature(_))),
                "{selection:?}"
            );
        }
    }
    let text = Refusal::NotBuilt("cuda").to_string();
    assert!(text.contains("attention-cube is built without its feature `cuda`"));
}

#[test]
fn select_ampere_refusal_names_the_missing_feature() {
    let needed = [
        (Feature::CopyAsync, "copy_async"),
        (Feature::Mma(DType::BF16), "mma"),
        (Feature::LoadMatrix(DType::BF16), "ldmatrix"),
    ];
    let half = |head_dim| AttentionProblem {
        dtype: DType::BF16,
        ..problem(head_dim)
    };
    let refusal = |problem: &AttentionProblem, device: &DeviceProfile, pass| {
        let selection = select(problem, Some(device), READABLE, pass);
        refusal_of(Engine::Mma, &selection).map(ToString::to_string)
    };
    // The shared memory per block, in bytes, of an RTX 4090, an A100 and an H100.
    for shared_memory in [101_376, 166_912, 232_448] {
        let ampere = DeviceProfile {
            dtypes: vec![DType::F32, DType::F16, DType::BF16],
            shared_memory,
            multiprocessors: Some(108),
            features: needed.iter().map(|(feature, _)| *feature).collect(),
            ..profile()
        };
        for head_dim in [8, 64, 80, 128, 192, 256, 320, 512] {
            let forward = refusal(&half(head_dim), &ampere, Pass::Forward);
            assert_eq!(forward, None, "{head_dim} in {shared_memory}");
        }
        for head_dim in [8, 64, 128, 192, 256, 320, 512] {
            let backward = refusal(&half(head_dim), &ampere, Pass::Backward);
            assert_eq!(backward, None, "{head_dim} in {shared_memory}");
        }
        let says = |text: Option<String>, part: &str| {
            let text = text.unwrap_or_default();
            assert!(text.contains(part), "{part:?} is not in {text:?}");
        };
        says(refusal(&problem(64), &ampere, Pass::Forward), "not F32");
        says(refusal(&half(600), &ampere, Pass::Forward), "600");
        says(refusal(&half(520), &ampere, Pass::Backward), "up to 512");
        for (feature, name) in needed {
            let mut lacking = ampere.clone();
            lacking.features.retain(|it| *it != feature);
            says(refusal(&half(64), &lacking, Pass::Forward), name);
            says(refusal(&half(64), &lacking, Pass::Backward), name);
        }
    }
}

#[test]
fn select_hopper_refusal_names_the_reason() {
    let hopper = DeviceProfile {
        dtypes: vec![DType::F32, DType::F16, DType::BF16],
        shared_memory: 232_448,
        multiprocessors: Some(132),
        features: vec![Feature::Wgmma, Feature::Tma],
        ..profile()
    };
    let half = |head_dim| AttentionProblem {
        dtype: DType::BF16,
        ..problem(head_dim)
    };
    let refusal = |problem: &AttentionProblem, profile: &DeviceProfile, pass| {
        let selection = select(problem, Some(profile), READABLE, pass);
        let refusal = refusal_of(Engine::Wgmma, &selection).map(ToString::to_string);
        let served = selection.kernel.engine() == Engine::Wgmma;
        assert_eq!(served, refusal.is_none(), "{problem:?}");
        refusal
    };
    let forward = |problem: &AttentionProblem, profile: &DeviceProfile| {
        refusal(problem, profile, Pass::Forward)
    };
    for head_dim in [8, 64, 80, 128, 256, 512] {
        assert_eq!(forward(&half(head_dim), &hopper), None);
    }
    let says = |text: Option<String>, part: &str| {
        let text = text.unwrap_or_default();
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    };
    says(forward(&half(64), &profile()), "Hopper GPU (sm_90)");
    for (feature, name) in [
        (Feature::Wgmma, "wgmma"),
        (Feature::Tma, "tensor memory accelerator"),
    ] {
        let mut lacking = hopper.clone();
        lacking.features.retain(|it| *it != feature);
        says(forward(&half(64), &lacking), name);
    }
    says(forward(&problem(64), &hopper), "not F32");
    says(forward(&half(600), &hopper), "not for 600 and 600");
    says(forward(&half(7), &hopper), "from 8 on, not for 7 and 7");
    assert_eq!(refusal(&half(512), &hopper, Pass::Backward), None);
    says(refusal(&half(520), &hopper, Pass::Backward), "up to 512");
    let masked = |keys| AttentionProblem {
        batch: 8,
        q_heads: 16,
        kv_heads: 16,
        q_len: 1024,
        kv_len: 1 << 20,
        mask: Some([8, 16, 1024, keys]),
        ..half(64)
    };
    assert_eq!(
        forward(
            &AttentionProblem {
                batch: 7,
                mask: Some([7, 16, 1024, 1 << 20]),
                ..masked(1)
            },
            &hopper
        ),
        None
    );
    for keys in [1, 1 << 20] {
        says(
            forward(&masked(keys), &hopper),
            "words, and it counts up to 4294967295",
        );
    }
    let little = DeviceProfile {
        shared_memory: 48 << 10,
        ..hopper.clone()
    };
    says(forward(&half(64), &little), "49152 bytes of shared memory");
}

/// Checks that a plan warns about the wgmma backward in f16. This backward rounds the gradients of the scores to the
/// inputs' dtype. In f16, gradients above 65504, the largest f16 number, then overflow.
#[test]
fn select_hopper_backward_in_f16_warns() {
    let hopper = DeviceProfile {
        dtypes: vec![DType::F32, DType::F16, DType::BF16],
        shared_memory: 232_448,
        multiprocessors: Some(132),
        features: vec![Feature::Wgmma, Feature::Tma],
        ..profile()
    };
    for (dtype, pass, warned) in [
        (DType::F16, Pass::Backward, true),
        (DType::F16, Pass::Forward, false),
        (DType::BF16, Pass::Backward, false),
        (DType::F32, Pass::Backward, false),
    ] {
        let problem = AttentionProblem {
            dtype,
            ..problem(64)
        };
        let selection = select(&problem, Some(&hopper), READABLE, pass);
        let expected: &[Warning] = match warned {
            true => &[Warning::ScoreGradientsInF16],
            false => &[],
        };
        assert_eq!(selection.warnings, expected, "{dtype:?}, {pass:?}");
    }
}
