//! Tests of inputs and gradients that are not contiguous: permuted, sliced, broadcast with stride 0, or with a last
//! dimension that is not contiguous. The result must equal the result for contiguous copies of the inputs.

use crate::case::{Case, FULL};
use crate::dense::{Layout, read};
use crate::devices::devices;
use attention_cube::{AttentionOptions, fused_attention};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use std::iter;

fn case(q_len: usize) -> Case {
    Case::new([2, 4, 2, q_len, 70, 32, 32])
}

/// Checks each layout for query, keys and values at the same time.
#[test]
fn strides_of_every_layout_match_contiguous() {
    for layout in Layout::ALL {
        for q_len in [66, 3] {
            Case {
                layouts: [layout, layout, layout, Layout::Contiguous],
                ..case(q_len)
            }
            .check();
        }
    }
}

/// Checks calls in which one input has another layout than all other inputs. Such a call detects a kernel that reads
/// one input with the strides of another input.
#[test]
fn strides_of_one_input_apart_match_contiguous() {
    for index in 0..3 {
        for layout in [Layout::HeadsLast, Layout::Transposed, Layout::SharedHeads] {
            let mut layouts = [Layout::Contiguous; 4];
            layouts[index] = layout;
            Case {
                layouts,
                ..case(66)
            }
            .check();
        }
    }
}

#[test]
fn strides_of_the_output_gradient_match_contiguous() {
    for layout in [
        Layout::HeadsLast,
        Layout::Transposed,
        Layout::SharedBatch,
        Layout::SharedHeads,
    ] {
        for q_len in [66, 3] {
            let layouts = [
                Layout::Contiguous,
                Layout::Contiguous,
                Layout::Contiguous,
                layout,
            ];
            Case {
                layouts,
                ..case(q_len)
            }
            .check();
        }
    }
}

#[test]
fn strides_of_all_inputs_apart_match_contiguous() {
    Case {
        layouts: [
            Layout::HeadsLast,
            Layout::Projection {
                before: 8,
                after: 4,
            },
            Layout::SharedHeads,
            Layout::Transposed,
        ],
        mask: Some([true, false, true, true]),
        bias: Some([false, true, true, true]),
        expanded: true,
        ..case(66)
    }
    .check();
}

/// Checks biases that the caller expanded. The gradient of the bias before the expansion is a sum over the expanded dimensions.
#[test]
fn strides_of_expanded_bias_sum_its_gradient() {
    for bias in [
        FULL,
        [false, true, true, true],
        [true, false, false, true],
        [false; 4],
    ] {
        Case {
            bias: Some(bias),
            expanded: true,
            ..case(66)
        }
        .check();
    }
}

/// Checks head sizes that are not multiples of four, so that consecutive rows start at different alignments.
#[test]
fn strides_of_odd_columns_match_contiguous() {
    for layout in [
        Layout::Contiguous,
        Layout::HeadsLast,
        Layout::Projection {
            before: 3,
            after: 1,
        },
    ] {
        Case {
            layouts: [layout, layout, layout, Layout::Contiguous],
            ..Case::new([2, 2, 1, 66, 70, 33, 33])
        }
        .check();
    }
}

/// Checks dimensions of size 1, which may have any stride. A kernel must not compute an address from such a stride.
#[test]
fn strides_of_a_single_row_are_not_read() {
    for (q_len, kv_len) in [(1, 70), (3, 1), (70, 1)] {
        // The widths differ in the alignment of their rows. In bf16, rows of 100 columns start at multiples of 8 bytes,
        // and rows of 64 columns start at multiples of 16 bytes.
        for width in [33, 261, 100, 64] {
            for layout in [Layout::Contiguous, Layout::Transposed] {
                for dtype in [DType::F32, DType::BF16] {
                    Case {
                        dtype,
                        layouts: [layout; 4],
                        ..Case::new([1, 1, 1, q_len, kv_len, width, width])
                    }
                    .check();
                }
            }
        }
    }
}

/// Checks expanded inputs. All sequences share the lengths and segment ids of one sequence, and all heads share the
/// sink of one head.
#[test]
fn strides_of_expanded_lengths_segments_and_sinks_match_contiguous() {
    let ids = |length: i64| -> Vec<i64> { (0..length).map(|token| token / 40).collect() };
    for q_len in [66, 3] {
        let plain = Case {
            expanded: true,
            sinks: true,
            ..case(q_len)
        };
        Case {
            kv_lengths: Some(vec![50]),
            ..plain.clone()
        }
        .check();
        Case {
            segments: Some((ids(q_len as i64), ids(70))),
            ..plain
        }
        .check();
    }
}

/// Checks lengths, segment ids and sinks that are columns of wider tensors, and a mask that is a transposed view.
#[test]
fn strides_of_sliced_lengths_segments_sinks_and_masks_match_contiguous() {
    for device in devices() {
        let on = &device.device;
        let normal = |heads: usize, length: usize| {
            let values = (0..2 * heads * length * 32).map(|x| ((x * 37 % 101) as f32).sin());
            let data = TensorData::new(values.collect::<Vec<_>>(), [2, heads, length, 32]);
            Tensor::<4>::from_data(data, on)
        };
        let (query, key) = (normal(4, 66), normal(2, 70));
        // Each element of `values` becomes the first column of a row with `wide` columns. The other columns hold −9, which must
        // not be read.
        let spread = |values: Vec<i64>, wide: usize| -> Vec<i64> {
            let row = |value| iter::once(value).chain(iter::repeat(-9)).take(wide);
            values.into_iter().flat_map(row).collect()
        };
        let ids = |length: usize, wide: usize| {
            let ids = (0..2 * length)
                .map(|token| (token % length / 33) as i64)
                .collect();
            let data = TensorData::new(spread(ids, wide), [2, length, wide]);
            let ids = Tensor::<3, Int>::from_data(data, on);
            ids.slice([0..2, 0..length, 0..1]).squeeze_dim::<2>(2)
        };
        let lengths = |wide: usize| {
            let data = TensorData::new(spread(vec![40, 41], wide), [2, wide]);
            let lengths = Tensor::<2, Int>::from_data(data, on);
            lengths.slice([0..2, 0..1]).squeeze_dim::<1>(1)
        };
        let sinks = |wide: usize| {
            let data = TensorData::new(spread(vec![0, 1, 2, 3], wide), [4, wide]);
            let sinks = Tensor::<2>::from_data(data.convert::<f32>(), on);
            sinks.slice([0..4, 0..1]).squeeze_dim::<1>(1)
        };
        let mask = |swapped: bool| {
            let visible = |query: usize, key: usize| !(3 * query + key).is_multiple_of(4);
            let values: Vec<bool> = if swapped {
                (0..70 * 66).map(|x| visible(x % 66, x / 66)).collect()
            } else {
                (0..66 * 70).map(|x| visible(x / 70, x % 70)).collect()
            };
            let shape = if swapped {
                [1, 1, 70, 66]
            } else {
                [1, 1, 66, 70]
            };
            let mask = Tensor::<4, Bool>::from_data(TensorData::new(values, shape), on);
            if swapped { mask.swap_dims(2, 3) } else { mask }
        };
        let attend = |wide: usize| {
            let options = AttentionOptions::new()
                .segments(ids(66, wide), ids(70, wide))
                .kv_lengths(lengths(wide))
                .sinks(sinks(wide))
                .mask(mask(wide > 1));
            read(fused_attention(
                query.clone(),
                key.clone(),
                key.clone(),
                options,
            ))
        };
        assert!(attend(1) == attend(3), "{}", device.name);
    }
}
