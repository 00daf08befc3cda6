//! Tests of options that hide keys: causal masks, windows, and masks of any size. Kernels pack a mask into one bit per
//! score. For each block of scores, they also store a summary, which says whether all, some or none of the block is
//! visible.

use super::{WIDTHS, check, check_poisoned, check_with, each_width, hopper_devices, sized};
use crate::case::{Case, FULL};
use crate::dense::{Dense, read};
use attention_cube::{AttentionOptions, CausalAlignment, fused_attention};
use burn::tensor::{Bool, DType, Distribution, Int, Tensor};

/// More pairs of `(head_dim, value_dim)`. Only the test without options that hide keys uses these pairs.
const OTHER_WIDTHS: [(usize, usize); 6] = [
    (8, 8),
    (80, 80),
    (96, 96),
    (256, 128),
    (512, 256),
    (576, 512),
];

#[test]
fn wgmma_without_mask_matches_reference() {
    each_width(|case| case);
    for (head_dim, value_dim) in OTHER_WIDTHS {
        check(sized([head_dim, value_dim]));
    }
    for (head_dim, value_dim) in WIDTHS {
        let case = Case {
            dtype: DType::F16,
            ..sized([head_dim, value_dim])
        };
        check_poisoned(&case, |_| {});
    }
}

#[test]
fn wgmma_causal_matches_reference() {
    for alignment in [CausalAlignment::BottomRight, CausalAlignment::TopLeft] {
        each_width(|case| Case {
            causal: Some(alignment),
            ..case
        });
    }
}

#[test]
fn wgmma_windows_match_reference() {
    each_width(|case| Case {
        window: (Some(70), Some(9)),
        ..case
    });
    for (head_dim, value_dim) in [(64, 64), (256, 256), (512, 512)] {
        check(Case {
            causal: Some(CausalAlignment::BottomRight),
            window: (Some(20), None),
            ..Case::new([2, 2, 1, 300, 300, head_dim, value_dim])
        });
    }
}

#[test]
fn wgmma_masks_and_sinks_match_reference() {
    each_width(|case| Case {
        mask: Some(FULL),
        sinks: true,
        ..case
    });
}

/// Checks masks that the caller expanded along any dimensions. The kernels pack such a mask only once, and all heads
/// and sequences read the packed copy.
#[test]
fn wgmma_expanded_masks_match_reference() {
    for bits in 0..16 {
        let extent = [0, 1, 2, 3].map(|dim| bits >> dim & 1 == 1);
        check(Case {
            mask: Some(extent),
            expanded: true,
            ..Case::new([2, 4, 2, 140, 270, 64, 64])
        });
    }
}

/// Checks that hidden keys and values are not read. The keys and values past a sequence's length, or of segments without
/// queries, are NaN or infinite.
#[test]
fn wgmma_hidden_nan_keys_are_not_read() {
    for (head_dim, value_dim) in WIDTHS {
        let lengths = vec![330, 7, 0, 129];
        let case = Case {
            dtype: DType::BF16,
            causal: Some(CausalAlignment::BottomRight),
            kv_lengths: Some(lengths.clone()),
            ..Case::new([4, 2, 1, 70, 330, head_dim, value_dim])
        };
        check_poisoned(&case, |inputs| {
            let beyond = |[batch, _, row]: [usize; 3]| row as i64 >= lengths[batch];
            inputs.key.fill_rows(f64::NAN, beyond);
            inputs.value.fill_rows(f64::INFINITY, beyond);
        });
        let case = Case {
            dtype: DType::BF16,
            segments: Some((
                (0..140).map(|i| i / 70).collect(),
                (0..400).map(|i| i % 200 / 60).collect(),
            )),
            ..Case::new([2, 2, 1, 70, 200, head_dim, value_dim])
        };
        check_poisoned(&case, |inputs| {
            let unseen = |[batch, _, row]: [usize; 3]| row / 60 != batch;
            inputs.key.fill_rows(f64::NAN, unseen);
            inputs.value.fill_rows(f64::NAN, unseen);
        });
    }
}

/// Checks masks for which kernels may skip blocks. The first mask has hidden, fully visible and partly visible blocks.
/// The second mask hides some keys from all queries. Keys that no query sees are NaN.
#[test]
fn wgmma_masks_by_blocks_ignore_hidden_nan() {
    let nobody_sees = |key: usize| key % 16 == 5 || (200..290).contains(&key);
    for (head_dim, value_dim) in WIDTHS {
        for causal in [None, Some(CausalAlignment::BottomRight)] {
            let case = Case {
                dtype: DType::BF16,
                mask: Some(FULL),
                causal,
                ..Case::new([1, 2, 1, 330, 500, head_dim, value_dim])
            };
            check_with(
                &case,
                |inputs| {
                    let shape = inputs.mask.as_ref().expect("the case has a mask").shape;
                    inputs.mask = Some(Dense::from_fn(shape, |[_, _, query, key]| {
                        let block = (query / 64 + key / 128) % 4;
                        let visible = match block {
                            0 => false,
                            1 => true,
                            _ => !nobody_sees(key) && (query + key) % 7 != 0,
                        };
                        // Only the keys 200 to 289 are hidden from all queries here, so only these keys are NaN. The
                        // function `nobody_sees` is also true for keys with key % 16 = 5, but the fully visible blocks
                        // show those keys.
                        f64::from(visible && !(200..290).contains(&key))
                    }));
                },
                |inputs| {
                    let unseen = |[_, _, key]: [usize; 3]| (200..290).contains(&key);
                    inputs.key.fill_rows(f64::NAN, unseen);
                    inputs.value.fill_rows(f64::NAN, unseen);
                },
            );
            check_with(
                &case,
                |inputs| {
                    let mask = inputs.mask.as_mut().expect("the case has a mask");
                    *mask = Dense::from_fn(mask.shape, |[_, _, query, key]| {
                        f64::from(!nobody_sees(key) && (query * key) % 11 != 3)
                    });
                },
                |inputs| {
                    let unseen = |[_, _, key]: [usize; 3]| nobody_sees(key);
                    inputs.key.fill_rows(f64::NAN, unseen);
                    inputs.value.fill_rows(f64::NAN, unseen);
                },
            );
        }
    }
}

/// Checks a sink of −∞ in one head. Some queries of this head see no key.
#[test]
fn wgmma_sink_of_minus_infinity_matches_reference() {
    each_width(|case| Case {
        mask: Some([false, false, true, false]),
        sinks: true,
        ..case
    });
    for (head_dim, value_dim) in WIDTHS {
        let case = Case {
            dtype: DType::BF16,
            mask: Some([false, false, true, false]),
            sinks: true,
            ..sized([head_dim, value_dim])
        };
        check_with(
            &case,
            |inputs| {
                let sinks = inputs.sinks.as_mut().expect("the case has sinks");
                sinks.values[0] = f64::NEG_INFINITY;
            },
            |_| {},
        );
    }
}

/// Checks forward and backward with a mask that has more elements than 32 bits can count. The kernels pack the mask
/// directly from this tensor, so they must compute its offsets with more than 32 bits. The last head must get the same
/// results as in a call with only that head and its mask.
#[test]
fn wgmma_mask_beyond_32_bit_elements_equals_a_single_head() {
    const LENGTHS: [usize; 2] = [65_536, 32_768];
    const HEADS: usize = 3;
    for device in hopper_devices() {
        let on = &device.device.clone().autodiff();
        let random = |length| {
            let shape = [1, HEADS, length, 64];
            Tensor::<4>::random(shape, Distribution::Default, (on, DType::BF16))
        };
        let [query, key, value] = [LENGTHS[0], LENGTHS[1], LENGTHS[1]].map(random);
        let of_head = |head: usize| {
            let keys = Tensor::<1, Int>::arange(0..LENGTHS[1] as i64, &device.device);
            let visible = keys.remainder_scalar(16).equal_elem(head as i64);
            let visible: Tensor<4, Bool> = visible.reshape([1, 1, 1, LENGTHS[1]]);
            visible.expand([1, 1, LENGTHS[0], LENGTHS[1]])
        };
        let run = |first: usize, count: usize, mask| {
            let leaves = [&query, &key, &value].map(|tensor| {
                let heads = tensor.clone().narrow(1, first, count);
                heads.detach().require_grad()
            });
            let [query, key, value] = leaves.clone();
            let options = AttentionOptions::new().mask(mask);
            let output = fused_attention(query, key, value, options);
            let gradients = output.clone().sum().backward();
            let last = |tensor: Tensor<4>| read(tensor.narrow(1, count - 1, 1).narrow(2, 0, 512));
            let mut results = vec![last(output.inner())];
            for leaf in leaves {
                results.push(last(
                    leaf.grad(&gradients).expect("the leaf has a gradient"),
                ));
            }
            results
        };
        let all = run(0, HEADS, Tensor::cat((0..HEADS).map(of_head).collect(), 1));
        let alone = run(HEADS - 1, 1, of_head(HEADS - 1));
        let names = ["output", "query gradient", "key gradient", "value gradient"];
        for ((got, expected), name) in all.iter().zip(&alone).zip(names) {
            assert!(got == expected, "{}: {name}", device.name);
        }
    }
}
