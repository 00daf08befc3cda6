//! Gradients of biases over several tiles of queries and keys, in the precisions that matrix units multiply.

use crate::case::{Case, FULL};
use crate::dense::Layout;
use attention_cube::CausalAlignment;
use burn::tensor::DType;

/// Three batches of two heads that share their keys, in more than one tile of 64 queries and of 64 keys.
fn case(head_dim: usize) -> Case {
    Case {
        dtype: DType::BF16,
        bias: Some(FULL),
        ..Case::new([3, 2, 1, 130, 66, head_dim, head_dim])
    }
}

#[test]
fn bias_gradient_broadcast_sums_what_it_repeats_along() {
    for bits in 0..8 {
        let [batch, heads, queries] = [0, 1, 2].map(|dim| bits >> dim & 1 == 1);
        Case {
            bias: Some([batch, heads, queries, true]),
            f32_extras: bits % 3 == 0,
            ..case(16)
        }
        .check();
    }
}

#[test]
fn bias_gradient_in_f16_matches_the_definition() {
    Case {
        dtype: DType::F16,
        bias: Some([false, true, true, true]),
        ..case(16)
    }
    .check();
}

#[test]
fn bias_gradient_many_head_dims_match_the_definition() {
    for (index, (head_dim, value_dim)) in [(8, 24), (65, 130), (320, 40)].into_iter().enumerate() {
        Case {
            batch: 2,
            bias: Some([index % 2 == 0, true, index % 3 != 0, true]),
            value_dim,
            ..case(head_dim)
        }
        .check();
    }
}

#[test]
fn bias_gradient_under_a_softcap_has_no_slope() {
    for extent in [FULL, [false, true, true, true], [false, true, false, true]] {
        Case {
            bias: Some(extent),
            softcap: Some(2.0),
            sinks: true,
            scale: Some(0.3),
            ..case(48)
        }
        .check();
    }
}

#[test]
fn bias_gradient_skipped_tiles_are_zero() {
    for extent in [FULL, [false, false, true, true], [false, true, false, true]] {
        // The second sequence has no keys, and the last queries of the first see none.
        Case {
            bias: Some(extent),
            causal: Some(CausalAlignment::TopLeft),
            window: (Some(9), Some(0)),
            kv_lengths: Some(vec![65, 0, 66]),
            ..case(32)
        }
        .check();
        let ids =
            |length: usize, each: usize| (0..3 * length).map(move |i| (i % length / each) as i64);
        Case {
            bias: Some(extent),
            segments: Some((ids(130, 64).collect(), ids(66, 32).collect())),
            mask: Some([false, true, true, true]),
            ..case(32)
        }
        .check();
    }
}

#[test]
fn bias_gradient_hidden_keys_are_not_read() {
    let case = Case {
        bias: Some([false, true, true, true]),
        causal: Some(CausalAlignment::TopLeft),
        kv_len: 90,
        q_len: 70,
        ..case(64)
    };
    let clean = case.inputs();
    let mut given = clean.clone();
    given.key.fill_rows(f64::INFINITY, |[_, _, key]| key >= 70);
    given.value.fill_rows(f64::NAN, |[_, _, key]| key >= 70);
    case.check_inputs(&given, &clean);
}

#[test]
fn bias_gradient_strided_operands_match_the_definition() {
    for (expanded, kv_len) in [(true, 66), (false, 67)] {
        Case {
            kv_len,
            expanded,
            bias: Some([false, true, true, true]),
            deterministic: true,
            layouts: [
                Layout::HeadsLast,
                Layout::HeadsLast,
                Layout::Transposed,
                Layout::HeadsLast,
            ],
            ..case(64)
        }
        .check();
    }
}
