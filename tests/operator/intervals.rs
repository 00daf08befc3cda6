//! Tests of intervals of keys per query (`visible_between`). A query sees a key if at least one of the query's intervals
//! contains the key and all other options show the key. The reference gets the equivalent mask instead of intervals.

use crate::case::{Case, FULL};
use crate::dense::Dense;
use crate::inputs::Inputs;
use attention_cube::CausalAlignment;
use burn::tensor::DType;

/// One interval of keys per query, as two lists in the order `[batch, q_len]`. The first list holds the first key of
/// each interval, and the second list holds its end (one past the last key).
type Interval = (Vec<i64>, Vec<i64>);

/// Checks intervals on the devices against the reference with the equivalent mask. Keys that no query sees are NaN on the
/// devices.
fn check(case: Case) {
    let masked = Case {
        intervals: Vec::new(),
        mask: Some(FULL),
        ..case.clone()
    };
    let given = Inputs {
        intervals: case.intervals.clone(),
        mask: None,
        ..masked.inputs()
    };
    let mask = Dense::from_fn(case.scores(), |index| f64::from(case.sees(&given, index)));
    let equivalent = Inputs {
        intervals: Vec::new(),
        mask: Some(mask),
        ..given.clone()
    };
    let mut poisoned = given;
    case.poison_unused_keys(&mut poisoned);
    case.check_inputs(&poisoned, &equivalent);
}

/// Returns one interval for each query of each sequence. `keys(b, i)` gives the first key and the end (one past the last key)
/// of the interval of query `i` in sequence `b`.
fn interval(batch: usize, q_len: usize, keys: impl Fn(usize, usize) -> (usize, usize)) -> Interval {
    let queries = (0..batch).flat_map(|b| (0..q_len).map(move |i| (b, i)));
    queries
        .map(|(b, i)| keys(b, i))
        .map(|(first, end)| (first as i64, end as i64))
        .unzip()
}

/// The first token and the end (one past the last token) of each image in the tests. The tokens of an image see each other,
/// and every token sees all earlier tokens.
const IMAGES: [(usize, usize); 3] = [(20, 84), (100, 101), (120, 200)];

/// Returns the interval of keys that query `i` sees in causal attention with images: the first key and the end (one
/// past the last key).
fn causal_with_images(i: usize) -> (usize, usize) {
    let image = IMAGES
        .iter()
        .find(|(first, end)| (*first..*end).contains(&i));
    (0, image.map_or(i + 1, |(_, end)| *end))
}

fn plain(length: usize) -> Case {
    Case::new([2, 4, 2, length, length, 32, 32])
}

#[test]
fn intervals_of_image_blocks_equal_a_mask() {
    let images = interval(2, 230, |b, i| causal_with_images((i + 7 * b).min(229)));
    check(Case {
        intervals: vec![images],
        ..plain(230)
    });
}

#[test]
fn intervals_of_a_window_with_image_blocks_equal_a_mask() {
    let window = 48;
    let images = interval(2, 230, |_, i| {
        let (_, end) = causal_with_images(i);
        let first = IMAGES
            .iter()
            .find(|(first, end)| (*first..*end).contains(&i));
        let first = first.map_or(i, |(first, _)| *first);
        ((first + 1).saturating_sub(window), end)
    });
    check(Case {
        intervals: vec![images],
        ..plain(230)
    });
}

#[test]
fn intervals_of_two_ranges_equal_a_mask() {
    // The first interval of a query holds the sequence's first tokens (attention sinks). The second interval holds a window
    // that ends at the query.
    let first = interval(2, 230, |b, _| (0, 5 + b));
    let window = interval(2, 230, |_, i| (i.saturating_sub(30), i + 1));
    check(Case {
        intervals: vec![first, window],
        ..plain(230)
    });
}

#[test]
fn intervals_without_order_equal_a_mask() {
    let scattered = |salt: usize| {
        interval(2, 150, move |b, i| {
            let first = (i * i * 7 + salt * 31 + b) % 170;
            (first, first + (i * 13 + salt) % 60)
        })
    };
    for intervals in [vec![scattered(1)], vec![scattered(2), scattered(3)]] {
        check(Case {
            intervals,
            ..plain(150)
        });
    }
}

/// Checks empty intervals, intervals past the last key, and interval bounds that only just fit in 32 bits. The kernels clamp
/// all bounds to the number of keys.
#[test]
fn intervals_out_of_range_are_clamped() {
    let values = [
        (i64::from(i32::MIN), i64::from(i32::MAX)),
        (40, 40),
        (60, 20),
        (-5, 3),
        (95, 1000),
        (500, 600),
        (i64::from(i32::MAX), i64::from(i32::MIN)),
    ];
    let clamped = (0..2 * 100).map(|query| values[query / 5 % values.len()]);
    check(Case {
        intervals: vec![clamped.unzip()],
        ..plain(100)
    });
}

#[test]
fn intervals_with_all_other_options_equal_a_mask() {
    let q_len = 130;
    let kv_len = 190;
    let documents = |length: usize| {
        (0..2 * length)
            .map(move |token| (token % length / 70) as i64)
            .collect()
    };
    let case = Case {
        causal: Some(CausalAlignment::BottomRight),
        window: (Some(90), Some(0)),
        kv_lengths: Some(vec![190, 150]),
        segments: Some((documents(q_len), documents(kv_len))),
        bias: Some([false, true, true, true]),
        softcap: Some(3.0),
        sinks: true,
        ..Case::new([2, 4, 2, q_len, kv_len, 32, 48])
    };
    let first = interval(2, q_len, |_, i| (i / 16 * 16, i + 40));
    let second = interval(2, q_len, |b, i| (i + 50 + b, i + 120));
    check(Case {
        intervals: vec![first, second],
        ..case
    });
}

/// Checks one query, a few queries whose heads share a tile, and more queries than a tile holds.
#[test]
fn intervals_of_few_queries_equal_a_mask() {
    for (q_len, kv_len) in [(1, 700), (3, 300), (12, 300)] {
        let own = interval(2, q_len, |b, i| (200 * b + 3 * i, kv_len - 20 * i));
        let other = interval(2, q_len, |_, i| (0, 7 * i));
        for intervals in [vec![own.clone()], vec![own.clone(), other.clone()]] {
            check(Case {
                intervals,
                ..Case::new([2, 8, 2, q_len, kv_len, 32, 32])
            });
        }
    }
}

/// Checks the head sizes for which there are kernels on matrix units. The dtype is bf16 to exclude software Vulkan,
/// which does not support bf16 and would take seconds to compile each kernel.
#[test]
fn intervals_of_wide_heads_in_bf16_equal_a_mask() {
    let length = 300;
    for head_dim in [64, 128, 256, 512] {
        let images = interval(1, length, |_, i| causal_with_images(i));
        let tail = interval(1, length, |_, i| (250, 250 + i / 8));
        for intervals in [vec![images.clone()], vec![images.clone(), tail.clone()]] {
            check(Case {
                intervals,
                dtype: DType::BF16,
                ..Case::new([1, 2, 1, length, length, head_dim, head_dim])
            });
        }
    }
}
