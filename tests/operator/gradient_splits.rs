//! Tests of gradients with few keys and many queries, and with few queries and many keys. The kernel for the gradients
//! of the few keys, or of the few queries, has few tiles. To fill the device, such a kernel divides the sum for each
//! tile among several cubes (CTAs).

use crate::case::{Case, FULL};
use crate::cliffs::{chosen, hopper, problem};
use crate::devices::devices;
use crate::run::Operator;
use attention_cube::internals::device::{DeviceProfile, Feature};
use attention_cube::internals::engine::tiling::GradientSplits;
use attention_cube::internals::engine::{BackwardKernel, Kernel};
use attention_cube::internals::select::Pass;
use attention_cube::{AttentionProblem, CausalAlignment};
use burn::tensor::DType;

/// Returns the properties of a GPU with matrix units on which the engine `mma` runs.
fn ampere() -> DeviceProfile {
    DeviceProfile {
        features: vec![
            Feature::CopyAsync,
            Feature::Mma(DType::BF16),
            Feature::LoadMatrix(DType::BF16),
        ],
        ..hopper()
    }
}

fn planned_splits(problem: &AttentionProblem, device: &DeviceProfile) -> GradientSplits {
    let selection = chosen(problem, device, Pass::Backward);
    match selection.kernel {
        Kernel::Backward(BackwardKernel::Wgmma(plan)) => plan.splits,
        Kernel::Backward(BackwardKernel::Mma(plan)) => plan.splits,
        _ => panic!("{selection:?}"),
    }
}

/// Checks that a gradient kernel with few tiles is split until its cubes fill the device. If there are few keys, the
/// kernel for their gradients is split, and the kernel for the gradient of the many queries is not. If there are few
/// queries, the opposite holds.
#[test]
fn plan_few_tiles_fill_the_device() {
    for device in [hopper(), ampere()] {
        for width in [9, 64, 128, 192, 256, 512] {
            let few_keys = AttentionProblem {
                kv_heads: 1,
                kv_len: 64,
                ..problem([1, 8, 65_536, width])
            };
            let few_queries = AttentionProblem {
                q_len: 1,
                ..problem([1, 8, 131_072, width])
            };
            let of_keys = planned_splits(&few_keys, &device);
            let of_queries = planned_splits(&few_queries, &device);
            let context = format!("{width}: {of_keys:?}, {of_queries:?}");
            assert!(of_keys.key >= 100 && of_keys.query == 1, "{context}");
            assert!(of_keys.value == 1 || of_keys.value >= 100, "{context}");
            assert!(of_queries.query >= 12 && of_queries.key == 1, "{context}");
            for splits in [of_keys, of_queries] {
                assert!(splits.workspace > 0, "{context}");
                assert!(splits.workspace <= 72 << 20, "{context}");
            }
        }
    }
}

/// Checks that gradient kernels whose tiles fill the device are not split and need no workspace.
#[test]
fn plan_full_grids_stay_whole() {
    let whole = GradientSplits {
        query: 1,
        key: 1,
        value: 1,
        workspace: 0,
    };
    for device in [hopper(), ampere()] {
        for width in [64, 128, 256, 512] {
            for shape in [[4, 4096 / width, 4096, width], [1, 32, 8192, width]] {
                let splits = planned_splits(&problem(shape), &device);
                assert_eq!(splits, whole, "{shape:?}");
            }
        }
    }
}

/// Returns three cases with partly filled tiles: few keys that three query heads share, few keys of one query head, and few
/// queries.
fn shapes(width: usize) -> [Case; 3] {
    [
        Case::new([1, 6, 2, 1111, 37, width, width]),
        Case::new([1, 1, 1, 3001, 70, width, width]),
        Case::new([1, 2, 1, 5, 4109, width, width]),
    ]
}

/// Returns uneven cases: several sequences, `value_dim` unequal to `head_dim`, GQA groups that the splits divide unevenly, and
/// odd head sizes.
fn uneven_shapes() -> [Case; 4] {
    [
        Case::new([2, 4, 2, 3001, 37, 64, 48]),
        Case::new([20, 10, 2, 1111, 37, 64, 64]),
        Case::new([1, 2, 1, 5, 4109, 9, 11]),
        Case::new([2, 2, 1, 5, 4109, 72, 40]),
    ]
}

fn splits_of_case(case: &Case, device: &DeviceProfile) -> GradientSplits {
    let problem = AttentionProblem {
        batch: case.batch,
        q_heads: case.q_heads,
        kv_heads: case.kv_heads,
        q_len: case.q_len,
        kv_len: case.kv_len,
        head_dim: case.head_dim,
        value_dim: case.value_dim,
        ..problem([1, 1, 1, 64])
    };
    planned_splits(&problem, device)
}

/// Checks that the GPU engines plan splits for the cases of this file. Otherwise, the other tests of this file would not cover
/// splits.
#[test]
fn plan_compared_shapes_are_split() {
    for device in [hopper(), ampere()] {
        for width in WIDTHS {
            let [group, keys, queries] = shapes(width).map(|case| splits_of_case(&case, &device));
            let context = format!("{width}: {group:?}, {keys:?}, {queries:?}");
            assert!(group.key > 1 && keys.key > 1, "{context}");
            assert!(queries.query > 1, "{context}");
        }
        for case in uneven_shapes() {
            let splits = splits_of_case(&case, &device);
            assert!(splits.query > 1 || splits.key > 1, "{splits:?}: {case:?}");
        }
    }
}

/// The tested head sizes. Together, these sizes reach every kernel in the engines' tile tables.
const WIDTHS: [usize; 6] = [9, 64, 128, 200, 256, 320];

fn check_each(width: usize, change: impl Fn(Case) -> Case) {
    for case in shapes(width) {
        for dtype in [DType::BF16, DType::F16] {
            change(Case {
                dtype,
                ..case.clone()
            })
            .check();
        }
    }
}

/// Defines one test per head size. A single test would take too long, because each head size compiles about twenty kernels.
macro_rules! width_tests {
    ($($name:ident: $width:literal,)*) => {
        $(
            #[test]
            fn $name() {
                assert!(WIDTHS.contains(&$width));
                check_each($width, |case| case);
            }
        )*
    };
}

width_tests! {
    gradient_splits_of_width_9_match_reference: 9,
    gradient_splits_of_width_64_match_reference: 64,
    gradient_splits_of_width_128_match_reference: 128,
    gradient_splits_of_width_200_match_reference: 200,
    gradient_splits_of_width_256_match_reference: 256,
    gradient_splits_of_width_320_match_reference: 320,
}

#[test]
fn gradient_splits_uneven_match_reference() {
    for case in uneven_shapes() {
        for dtype in [DType::BF16, DType::F16] {
            Case {
                dtype,
                ..case.clone()
            }
            .check();
        }
    }
}

/// Checks splits that have no visible keys. In the first case, the keys of a sequence end in the first of many splits.
/// In the second case, the causal mask leaves only one block of keys visible.
#[test]
fn gradient_splits_without_keys_match_reference() {
    let [.., few_queries] = uneven_shapes();
    for dtype in [DType::BF16, DType::F16] {
        for (kv_lengths, causal) in [
            (Some(vec![0, 90]), None),
            (None, Some(CausalAlignment::TopLeft)),
        ] {
            Case {
                dtype,
                kv_lengths,
                causal,
                ..few_queries.clone()
            }
            .check();
        }
    }
}

#[test]
fn gradient_splits_causal_and_windows_match_reference() {
    for alignment in [CausalAlignment::BottomRight, CausalAlignment::TopLeft] {
        check_each(64, |case| Case {
            causal: Some(alignment),
            ..case
        });
    }
    check_each(64, |case| Case {
        window: (Some(900), Some(700)),
        ..case
    });
}

#[test]
fn gradient_splits_masks_and_biases_match_reference() {
    check_each(64, |case| Case {
        mask: Some(FULL),
        softcap: Some(3.0),
        ..case
    });
    check_each(64, |case| Case {
        bias: Some([false, true, false, true]),
        sinks: true,
        ..case
    });
    // The number of keys is a multiple of eight here, so TMA loads the rows of the biases.
    for extent in [FULL, [false, true, true, true]] {
        check_each(64, |case| Case {
            bias: Some(extent),
            kv_len: case.kv_len.next_multiple_of(8),
            ..case
        });
    }
}

#[test]
fn gradient_splits_lengths_and_segments_match_reference() {
    check_each(64, |case| Case {
        kv_lengths: Some(vec![case.kv_len as i64 - 20]),
        ..case
    });
    check_each(64, |case| Case {
        segments: Some((
            (0..case.q_len as i64).map(|token| token / 300).collect(),
            (0..case.kv_len as i64).map(|token| token / 11).collect(),
        )),
        ..case
    });
}

/// Checks that repeated calls give the same bits. Other calls run in between, so that the workspaces hold other data
/// before each repetition.
#[test]
fn gradient_splits_repeats_after_other_work_are_equal() {
    for case in shapes(64) {
        let case = Case {
            dtype: DType::BF16,
            ..case
        };
        let inputs = case.inputs();
        for device in devices()
            .iter()
            .filter(|device| device.supports(case.dtype))
        {
            let mut first = None;
            for round in 0..4 {
                let other = Case {
                    amplitude: [1.0, 30.0][round % 2],
                    ..Case::new([1, 2, 1, 900 + round, 150, 64, 64])
                };
                other.run(
                    &other.inputs(),
                    &device.device,
                    other.dtype,
                    Operator::Fused,
                );
                let again = case.run(&inputs, &device.device, case.dtype, Operator::Fused);
                let bits: Vec<Vec<u64>> = again
                    .iter()
                    .map(|named| named.values.iter().map(|value| value.to_bits()).collect())
                    .collect();
                let first = first.get_or_insert_with(|| bits.clone());
                assert!(*first == bits, "{}: round {round} of {case:?}", device.name);
            }
        }
    }
}
