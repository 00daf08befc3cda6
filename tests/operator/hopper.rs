//! The engine for Hopper, at every head size that has tiles of its own and between: several tiles of queries
//! and blocks of keys with tails, and everything that hides keys, shares tiles or splits them. Each case is
//! checked to be served by that engine, its gradients too; where no device has it there is nothing to test.

use crate::biases::check_lowest;
use crate::case::{Case, FULL};
use crate::compare::Named;
use crate::dense::{Dense, Layout, read};
use crate::devices::{TestDevice, cube_devices};
use crate::empty_rows::check_beside_nan;
use crate::inputs::Inputs;
use crate::run::Operator;
use attention_cube::device::Feature;
use attention_cube::engine::Engine;
use attention_cube::{
    AttentionOptions, AttentionProblem, CausalAlignment, attention_with_lse, explain,
    fused_attention,
};
use burn::tensor::{Bool, DType, Distribution, Int, Tensor};

/// Key and value widths: every row of the tile tables, and widths that fill no subtile.
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

/// More of them, for one test.
const OTHER_WIDTHS: [(usize, usize); 6] = [
    (8, 8),
    (80, 80),
    (96, 96),
    (256, 128),
    (512, 256),
    (576, 512),
];

/// The widest operands that its backward has tiles for.
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

/// Checks `case` in bf16, if some device has the engine.
fn check(case: Case) {
    let case = Case {
        dtype: DType::BF16,
        ..case
    };
    check_poisoned(&case, |_| {});
}

/// The same with what `poison` does to the inputs on the devices.
fn check_poisoned(case: &Case, poison: impl Fn(&mut Inputs)) {
    check_with(case, |_| {}, poison);
}

/// The same with what `change` does to the inputs everywhere.
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
            let too_wide = case.head_dim.max(case.value_dim) > WIDEST_GRADIENT;
            assert!(
                engine == Engine::Wgmma || (too_wide && selection == &explanation.backward),
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

#[test]
fn everything_is_seen() {
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
fn causal() {
    for alignment in [CausalAlignment::BottomRight, CausalAlignment::TopLeft] {
        each_width(|case| Case {
            causal: Some(alignment),
            ..case
        });
    }
}

#[test]
fn windows() {
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
fn masks_and_sinks() {
    each_width(|case| Case {
        mask: Some(FULL),
        sinks: true,
        ..case
    });
}

#[test]
fn biases_and_softcaps() {
    each_width(|case| Case {
        bias: Some(FULL),
        softcap: Some(3.0),
        ..case
    });
}

/// Biases of a length that lets the copy engine bring them: of every sequence or broadcast, in tiles with tails, of several
/// tiles a cube, and of −∞, which hides keys and values that are not numbers.
#[test]
fn biases_by_boxes() {
    for (head_dim, value_dim) in WIDTHS {
        let case = Case::new([2, 2, 1, 200, 328, head_dim, value_dim]);
        check(Case {
            bias: Some(FULL),
            causal: Some(CausalAlignment::BottomRight),
            ..case.clone()
        });
        check(Case {
            bias: Some([false, true, true, true]),
            softcap: Some(3.0),
            ..case.clone()
        });
        let nobody_sees = |key: usize| key % 16 == 5 || (200..290).contains(&key);
        let case = Case {
            dtype: DType::BF16,
            bias: Some([true, false, true, true]),
            ..case
        };
        check_with(
            &case,
            |inputs| {
                let bias = inputs.bias.as_mut().expect("the case has a bias");
                *bias = Dense::from_fn(bias.shape, |[batch, _, query, key]| {
                    let hidden = nobody_sees(key) || (query + key) % 7 == 0;
                    match hidden {
                        true => f64::NEG_INFINITY,
                        false => ((query + 3 * key + batch) % 16) as f64 / 8.0 - 1.0,
                    }
                });
            },
            |inputs| {
                let unseen = |[_, _, key]: [usize; 3]| nobody_sees(key);
                inputs.key.fill_rows(f64::NAN, unseen);
                inputs.value.fill_rows(f64::NAN, unseen);
            },
        );
    }
    for width in [64, 128, 256] {
        // Rows of an odd length, which start at multiples of 16 bytes all the same where their allocation is padded.
        check(Case {
            bias: Some(FULL),
            ..Case::new([1, 2, 1, 140, 391, width, width])
        });
        check(Case {
            bias: Some([false, true, true, true]),
            ..Case::new([3, 24, 8, 200, 200, width, width])
        });
    }
}

/// With a scale that is not positive the largest product is not the largest score.
#[test]
fn any_scale() {
    for scale in [-0.3, 0.0, 1.0, 1e-31] {
        for (head_dim, value_dim) in [(64, 64), (512, 512)] {
            check(Case {
                scale: Some(scale),
                ..sized([head_dim, value_dim])
            });
        }
    }
}

#[test]
fn segments() {
    each_width(|case| Case {
        causal: Some(CausalAlignment::BottomRight),
        segments: Some((ids(140, 80), ids(270, 80))),
        ..case
    });
}

/// Ids of documents of `size` tokens, one after the other.
fn ids(length: usize, size: i64) -> Vec<i64> {
    (0..length as i64).map(|i| i / size).collect()
}

/// Documents that begin and end within blocks, alone and with a mask, and far more of them than a tile sees.
#[test]
fn many_documents() {
    for causal in [None, Some(CausalAlignment::BottomRight)] {
        for mask in [None, Some([false, false, true, true])] {
            each_width(|case| Case {
                causal,
                mask,
                segments: Some((ids(500, 37), ids(630, 41))),
                ..Case::new([1, 2, 1, 500, 630, case.head_dim, case.value_dim])
            });
        }
    }
}

/// More tiles than multiprocessors, of documents from a token to all, so that cubes take them one by one.
#[test]
fn many_tiles_of_documents() {
    let uneven = |length: usize| {
        let ends = [1, 2, 90, 91, 300, 420];
        (0..2 * length).map(move |i| ends.iter().filter(|end| i % length >= **end).count() as i64)
    };
    let causal = Some(CausalAlignment::BottomRight);
    for (length, width, causal) in [
        (450, 64, causal),
        (450, 128, None),
        (450, 192, causal),
        (450, 256, causal),
        (330, 512, None),
    ] {
        let ids: Vec<i64> = uneven(length).collect();
        check(Case {
            causal,
            segments: Some((ids.clone(), ids)),
            ..Case::new([2, 24, 8, length, length, width, width])
        });
    }
}

/// Of whole tiles; and decoded, with keys split over cubes.
#[test]
fn documents_of_whole_tiles() {
    for width in [64, 128, 256, 512] {
        check(Case {
            causal: Some(CausalAlignment::BottomRight),
            segments: Some((ids(2048, 256), ids(2048, 256))),
            ..Case::new([1, 2, 1, 2048, 2048, width, width])
        });
        check(Case {
            segments: Some((vec![3; 2], ids(3000, 700))),
            ..Case::new([1, 8, 1, 2, 3000, width, width])
        });
    }
}

/// Rows that do not start at multiples of 16 bytes, and operands that lie otherwise.
#[test]
fn any_width_and_layout() {
    for (head_dim, value_dim) in [
        (9, 9),
        (13, 11),
        (33, 33),
        (90, 100),
        (100, 90),
        (127, 64),
        (192, 127),
    ] {
        check(sized([head_dim, value_dim]));
    }
    for (head_dim, value_dim) in [(250, 250), (300, 260), (383, 381), (511, 507), (512, 511)] {
        check(Case {
            causal: Some(CausalAlignment::BottomRight),
            ..sized([head_dim, value_dim])
        });
    }
    for layout in Layout::ALL {
        for width in [64, 100] {
            check(Case {
                layouts: [layout, layout, layout, Layout::Contiguous],
                ..Case::new([2, 4, 2, 140, 270, width, width])
            });
        }
    }
    for layout in [
        Layout::HeadsLast,
        Layout::Transposed,
        Layout::SharedBatch,
        Layout::SharedHeads,
    ] {
        let contiguous = Layout::Contiguous;
        check(Case {
            layouts: [contiguous, contiguous, contiguous, layout],
            ..Case::new([2, 4, 2, 140, 270, 100, 90])
        });
    }
    for (q_heads, kv_heads, q_len) in [(8, 1, 1), (10, 1, 30)] {
        check(Case {
            causal: Some(CausalAlignment::BottomRight),
            ..Case::new([2, q_heads, kv_heads, q_len, 700, 100, 36])
        });
    }
}

/// A mask that the caller expanded is packed once, and read by all.
#[test]
fn expanded_masks() {
    for bits in 0..16 {
        let extent = [0, 1, 2, 3].map(|dim| bits >> dim & 1 == 1);
        check(Case {
            mask: Some(extent),
            expanded: true,
            ..Case::new([2, 4, 2, 140, 270, 64, 64])
        });
    }
}

/// Narrow biases, whose gradients are summed in parts, or without a look at the scores.
#[test]
fn narrow_biases() {
    for bits in 0..16 {
        let extent = [0, 1, 2, 3].map(|dim| bits >> dim & 1 == 1);
        for sinks in [false, true] {
            check(Case {
                bias: Some(extent),
                sinks,
                ..Case::new([2, 4, 2, 140, 270, 64, 64])
            });
        }
    }
}

/// A bias of one number a head hides everything from heads that share their keys with another, and from all that keys have:
/// what these heads and keys hold is NaN.
#[test]
fn heads_hidden_by_a_bias() {
    let extents = [[false, true, false, false], [true, true, false, false]];
    for (head_dim, value_dim) in WIDTHS {
        for (extent, causal, f32_extras) in [
            (extents[0], None, false),
            (extents[1], Some(CausalAlignment::BottomRight), true),
        ] {
            let case = Case {
                bias: Some(extent),
                causal,
                f32_extras,
                dtype: DType::BF16,
                ..Case::new([2, 4, 2, 270, 270, head_dim, value_dim])
            };
            // Of a bias without a sequence of its own, every sequence's.
            let is_hidden = move |[batch, head, _]: [usize; 3]| match head {
                0 => false,
                1 => true,
                _ => batch == 1 || !extent[0],
            };
            check_with(
                &case,
                |inputs| {
                    let bias = inputs.bias.as_mut().expect("the case has a bias");
                    *bias = Dense::from_fn(bias.shape, |[batch, head, ..]| {
                        match is_hidden([batch, head, 0]) {
                            true => f64::NEG_INFINITY,
                            false => 0.75 - head as f64 - batch as f64,
                        }
                    });
                },
                |inputs| {
                    inputs.query.fill_rows(f64::NAN, is_hidden);
                    inputs.output_gradient.fill_rows(f64::NAN, is_hidden);
                    let unseen = |[batch, kv_head, _]: [usize; 3]| {
                        is_hidden([batch, 2 * kv_head, 0]) && is_hidden([batch, 2 * kv_head + 1, 0])
                    };
                    inputs.key.fill_rows(f64::NAN, unseen);
                    inputs.value.fill_rows(f64::INFINITY, unseen);
                },
            );
        }
    }
}

/// Keys and values that a mask hides from everybody are NaN, in the middle and at the end of blocks.
#[test]
fn nothing_hidden_is_read() {
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

/// A mask that hides whole blocks, leaves others alone, hides a key here and there from everybody, and others
/// from some: what nobody sees is NaN.
#[test]
fn masks_by_blocks() {
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
                        // Where it is all visible, so are those that nobody else sees: but not these.
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

/// More tiles than multiprocessors: cubes stay for several, in pairs under a causal mask, of an odd number too.
#[test]
fn cubes_stay() {
    for (length, width) in [(200, 64), (300, 128), (300, 192), (200, 256), (140, 512)] {
        let case = Case::new([3, 24, 8, length, length, width, width]);
        let causal = Some(CausalAlignment::BottomRight);
        check(case.clone());
        check(Case {
            causal,
            sinks: true,
            ..case.clone()
        });
        check(Case {
            causal,
            window: (Some(50), None),
            mask: Some([false, false, true, true]),
            ..case
        });
    }
}

/// Tiles that see no key between others, of cubes that stay: a mask hides the first keys, as left padding does, or all from the last
/// queries. Sequences alone, which are fewer tiles than cubes, have the same bits.
#[test]
fn tiles_without_keys() {
    let (batch, q_heads) = (4, 24);
    for (width, value_dim, length) in [
        (64, 64, 900),
        (128, 128, 600),
        (192, 128, 600),
        (192, 192, 600),
        (256, 256, 600),
        (384, 384, 300),
        (512, 512, 300),
    ] {
        for device in hopper_devices() {
            let device = &device.device;
            let random = |heads: usize, columns: usize| {
                let normal = Distribution::Normal(0.0, 1.0);
                Tensor::<4>::random([batch, heads, length, columns], normal, device)
                    .cast(DType::BF16)
            };
            let operands = [
                random(q_heads, width),
                random(8, width),
                random(8, value_dim),
            ];
            let numbers = Tensor::<1, Int>::arange(0..length as i64, device);
            // More than two tiles of keys or queries.
            let keys: Tensor<4, Bool> = numbers
                .clone()
                .greater_equal_elem(length as i64 * 7 / 10)
                .reshape([1, 1, 1, length]);
            let queries: Tensor<4, Bool> = numbers.lower_elem(130).reshape([1, 1, length, 1]);
            for options in [
                AttentionOptions::new().causal().mask(keys),
                AttentionOptions::new().mask(queries),
            ] {
                let run = |first: usize, count: usize| {
                    let [query, key, value] = operands
                        .clone()
                        .map(|operand| operand.narrow(0, first, count));
                    let (output, logsumexp) =
                        attention_with_lse(query, key, value, options.clone())
                            .unwrap_or_else(|error| panic!("D{width}: {error}"));
                    (output, logsumexp.unsqueeze_dim::<4>(3))
                };
                let together = run(0, batch);
                for sequence in 0..batch {
                    let alone = run(sequence, 1);
                    for (together, alone) in [(&together.0, alone.0), (&together.1, alone.1)] {
                        let differ = together
                            .clone()
                            .narrow(0, sequence, 1)
                            .not_equal(alone)
                            .int()
                            .sum();
                        let differ: i64 = differ.into_scalar();
                        assert_eq!(differ, 0, "D{width}/{value_dim}, sequence {sequence}");
                    }
                }
            }
        }
    }
}

/// A sink of −∞ beside queries that see nothing.
#[test]
fn sinks_of_minus_infinity() {
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

/// NaN that others of a tile see, and biases of the lowest numbers.
#[test]
fn extremes() {
    if hopper_devices().is_empty() {
        return;
    }
    let lowest = [
        (DType::BF16, true, f64::from(f32::MIN)),
        (DType::BF16, false, f64::from(f32::from_bits(0xFF7F_0000))),
        (DType::F16, false, -65504.0),
        (DType::F16, true, -1e30),
    ];
    for (index, (head_dim, value_dim)) in WIDTHS.into_iter().enumerate() {
        for [q_len, kv_len] in [[140, 270], [2, 3000]] {
            let sizes = [1, 4, 2, q_len, kv_len, head_dim, value_dim];
            check_beside_nan(sizes, DType::BF16, index % 2 == 0);
            let (dtype, f32_extras, lowest) = lowest[index % lowest.len()];
            let case = Case {
                dtype,
                f32_extras,
                bias: Some(FULL),
                ..Case::new(sizes)
            };
            check_lowest(&case, lowest);
        }
    }
}

/// Where heads share a tile, its other rows are nobody's: what other kernels left in shared memory there must not matter.
#[test]
fn shared_tiles_repeat_after_other_work() {
    let cases = [
        Case::new([1, 16, 4, 1, 5000, 256, 256]),
        Case {
            window: (Some(425), Some(88)),
            ..Case::new([1, 4, 2, 3, 799, 64, 64])
        },
        Case::new([1, 16, 2, 3, 799, 512, 512]),
        Case::new([2, 8, 1, 1, 3000, 128, 128]),
        Case::new([1, 128, 1, 1, 3000, 576, 512]),
        // The last tile of a group has fewer heads.
        Case::new([1, 10, 1, 30, 900, 320, 320]),
    ];
    for device in hopper_devices() {
        for case in &cases {
            let case = Case {
                dtype: DType::BF16,
                ..case.clone()
            };
            let inputs = case.inputs();
            let mut first: Option<Vec<Named>> = None;
            for round in 0..12 {
                // Queries of other sizes fill the whole tile with other numbers; the largest are infinite products.
                let width = [case.head_dim, case.value_dim].map(|width| width.min(512));
                let other = Case {
                    dtype: DType::BF16,
                    lse_gradient: false,
                    amplitude: [1.0, 30.0, 1e18][round % 3],
                    ..Case::new([1, 150, 1, 200 + round, 300, width[0], width[1]])
                };
                let tracked = &device.device;
                let drawn = other.inputs();
                let [query, key, value] = [&drawn.query, &drawn.key, &drawn.value]
                    .map(|dense| dense.tensor(tracked, DType::BF16));
                let options = other.options(drawn.extras(tracked, DType::BF16));
                attention_with_lse(query, key, value, options)
                    .unwrap_or_else(|error| panic!("{other:?}: {error}"));
                let again = case.run(&inputs, &device.device, case.dtype, Operator::Fused);
                match &first {
                    None => first = Some(again),
                    Some(first) => {
                        for (first, again) in first.iter().zip(&again) {
                            let differ = first.values.iter().zip(&again.values);
                            let differ = differ.filter(|(a, b)| a.to_bits() != b.to_bits());
                            let (count, name) = (differ.count(), first.name);
                            assert_eq!(count, 0, "{name} in round {round} of {case:?}");
                        }
                    }
                }
            }
        }
    }
}

fn cases_to_repeat() -> Vec<Case> {
    let causal = Some(CausalAlignment::BottomRight);
    let documents = |tokens: i64| (0..tokens).map(|token| token / 70).collect::<Vec<_>>();
    let cases = [
        Case {
            causal,
            ..Case::new([3, 24, 8, 200, 200, 64, 64])
        },
        Case::new([3, 24, 8, 300, 300, 128, 128]),
        // One stage of biases, which the copy engine fills again at once.
        Case {
            bias: Some(FULL),
            ..Case::new([1, 2, 1, 140, 272, 128, 128])
        },
        Case {
            mask: Some([false, false, true, true]),
            bias: Some([false, true, true, true]),
            ..Case::new([1, 4, 2, 300, 504, 256, 256])
        },
        Case {
            causal,
            kv_lengths: Some(vec![150, 97, 140]),
            ..Case::new([3, 24, 8, 140, 150, 512, 512])
        },
        // Cubes take whichever tile is next.
        Case {
            causal,
            segments: Some((documents(3 * 300), documents(3 * 300))),
            ..Case::new([3, 24, 8, 300, 300, 128, 128])
        },
        Case {
            causal,
            segments: Some((documents(3 * 300), documents(3 * 300))),
            ..Case::new([3, 24, 8, 300, 300, 512, 512])
        },
        Case {
            causal,
            ..Case::new([2, 8, 1, 1, 3000, 512, 512])
        },
        Case {
            causal,
            ..Case::new([2, 8, 1, 2, 3000, 512, 512])
        },
    ];
    let in_half = |case| Case {
        dtype: DType::BF16,
        deterministic: true,
        ..case
    };
    cases.map(in_half).into()
}

/// Checks that `repeats` runs of each case give the same bits as the first: output and logsumexp, or, for a loss of
/// these, the gradients.
fn check_repeats(repeats: usize, of_gradients: bool, cases: Vec<Case>) {
    for device in hopper_devices() {
        for case in &cases {
            let inputs = case.inputs();
            let tracked = device.device.clone().autodiff();
            let tensor = |dense: &Dense| dense.tensor(&tracked, case.dtype);
            let operands = [&inputs.query, &inputs.key, &inputs.value].map(tensor);
            let output_gradient = tensor(&inputs.output_gradient);
            let run = || {
                let operands = operands.clone().map(Tensor::require_grad);
                let [query, key, value] = operands.clone();
                let extras = inputs.extras(&tracked, case.extras_dtype());
                let options = case.options(extras);
                let (output, logsumexp) = attention_with_lse(query, key, value, options)
                    .unwrap_or_else(|error| panic!("{case:?}: {error}"));
                if !of_gradients {
                    let logsumexp = logsumexp.unsqueeze_dim::<4>(3);
                    return vec![output.inner(), logsumexp.inner()];
                }
                let loss = (output * output_gradient.clone()).sum();
                let gradients = loss.backward();
                let gradient = |operand: &Tensor<4>| {
                    operand
                        .grad(&gradients)
                        .unwrap_or_else(|| panic!("{case:?}: no gradient"))
                };
                operands.iter().map(gradient).collect()
            };
            let first = run();
            let mut different = Tensor::<1, Int>::zeros([1], &device.device);
            for _ in 0..repeats {
                for (again, first) in run().into_iter().zip(&first) {
                    different = different + again.not_equal(first.clone()).int().sum();
                }
            }
            let different: i64 = different.into_scalar();
            assert_eq!(different, 0, "{case:?}");
        }
    }
}

/// A thousand runs of each give the same bits.
#[test]
fn repeats_are_identical() {
    check_repeats(1000, false, cases_to_repeat());
    // Seven stages for eight chunks of values: the last takes the first's.
    let case = Case {
        dtype: DType::BF16,
        ..Case::new([1, 128, 1, 3, 2000, 576, 512])
    };
    check_repeats(300, false, vec![case]);
}

/// Two hundred runs of each give the same gradients.
#[test]
fn gradients_repeat() {
    check_repeats(200, true, cases_to_repeat());
}

/// Heads of a group share a tile, also where they do not fill it, and keys are split over cubes.
#[test]
fn few_queries() {
    for (q_heads, kv_heads, q_len) in [(8, 1, 1), (8, 2, 5), (10, 1, 30), (3, 3, 2), (64, 1, 3)] {
        for (head_dim, value_dim) in [(64, 64), (256, 256), (512, 512), (576, 512)] {
            let case = Case {
                causal: Some(CausalAlignment::BottomRight),
                kv_lengths: Some(vec![700, 311]),
                sinks: true,
                ..Case::new([2, q_heads, kv_heads, q_len, 700, head_dim, value_dim])
            };
            check(case);
        }
    }
}

/// Scores far beyond what half precision holds.
#[test]
fn large_scores() {
    for dtype in [DType::F16, DType::BF16] {
        for (head_dim, value_dim) in [(64, 64), (256, 256), (512, 512)] {
            let case = Case {
                dtype,
                scale: Some(1.0),
                amplitude: 8.0,
                ..sized([head_dim, value_dim])
            };
            check_poisoned(&case, |_| {});
        }
    }
}

/// A mask of more elements than 32 bits count is read where it lies, forward and backward: the last head sees what it
/// sees with its own mask alone.
#[test]
fn masks_of_more_elements_than_32_bits_count() {
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
                results.push(last(leaf.grad(&gradients).expect("a gradient")));
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
