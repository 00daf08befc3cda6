//! Tests of packed documents (segments). Tokens with equal ids see each other and no other tokens, whatever the ids and
//! their order are. The reference gets a block-diagonal mask instead of segments.

use crate::case::{Case, FULL};
use crate::dense::Dense;
use crate::inputs::Inputs;
use attention_cube::CausalAlignment;

/// Checks segments on the devices against the reference. The reference runs once with the equivalent mask and once with
/// segments.
fn check(case: Case) {
    let (queries, keys) = case.segments.clone().expect("the case has segments");
    let masked = Case {
        segments: None,
        mask: Some(FULL),
        ..case.clone()
    };
    let given = Inputs {
        segments: case.segments.clone(),
        mask: None,
        ..masked.inputs()
    };
    let (q_len, kv_len) = (case.q_len, case.kv_len);
    let mask = Dense::from_fn(case.scores(), |[b, _, i, j]| {
        f64::from(queries[b * q_len + i] == keys[b * kv_len + j])
    });
    let equivalent = Inputs {
        segments: None,
        mask: Some(mask),
        ..given.clone()
    };
    case.check_inputs(&given, &equivalent);
    case.check_inputs(&given, &given);
}

fn case(length: usize, ids: Vec<i64>) -> Case {
    Case {
        segments: Some((ids.clone(), ids)),
        ..Case::new([2, 2, 1, length, length, 32, 32])
    }
}

/// Returns the segment ids of two sequences of `length` tokens. `ends` holds the ends of the documents in each of the
/// two sequences.
fn documents(length: usize, ends: [&[usize]; 2]) -> Vec<i64> {
    ends.into_iter()
        .flat_map(|ends| {
            (0..length).map(|token| ends.iter().filter(|end| token >= **end).count() as i64)
        })
        .collect()
}

#[test]
fn segments_with_sorted_ids_equal_a_mask() {
    for causal in [None, Some(CausalAlignment::BottomRight)] {
        let ids = documents(150, [&[10, 64, 65, 140], &[128]]);
        check(Case {
            causal,
            ..case(150, ids)
        });
    }
}

#[test]
fn segments_with_unsorted_and_negative_ids_equal_a_mask() {
    for causal in [None, Some(CausalAlignment::BottomRight)] {
        let ids = (0..2 * 100).map(|token| [3, -1, 7, i64::from(i32::MIN), 0][token * token % 5]);
        check(Case {
            causal,
            ..case(100, ids.collect())
        });
    }
}

#[test]
fn segments_of_queries_unlike_those_of_keys_equal_a_mask() {
    let queries = documents(100, [&[30, 70], &[64]]);
    let keys = documents(150, [&[100], &[20, 80, 90]]);
    let segments = Some((queries, keys));
    check(Case {
        segments,
        ..Case::new([2, 2, 1, 100, 150, 32, 32])
    });
}

#[test]
fn segments_with_lengths_and_window_equal_a_mask() {
    let ids = documents(150, [&[40, 100], &[75]]);
    check(Case {
        kv_lengths: Some(vec![150, 90]),
        causal: Some(CausalAlignment::TopLeft),
        window: (Some(20), Some(0)),
        ..case(150, ids)
    });
}

/// Checks documents of nine tokens, so that each tile of queries sees only a few of the many blocks of keys. The
/// documents of the queries are in the same order as the documents of the keys, or in reversed order. The last
/// documents of the keys have no queries.
#[test]
fn segments_of_many_documents_equal_a_mask() {
    let (q_len, kv_len) = (400, 460);
    let documents = |length: usize| (0..2 * length).map(move |token| (token % length / 9) as i64);
    let queries: Vec<i64> = documents(q_len).collect();
    let keys: Vec<i64> = documents(kv_len).collect();
    let plain = Case::new([2, 2, 1, q_len, kv_len, 32, 32]);
    let backwards = queries.iter().map(|id| 44 - id).collect();
    let padded = |ids: &[i64], length: usize| {
        let padding = |token: usize| token % length > length - 50;
        let ids = ids.iter().enumerate();
        ids.map(|(token, id)| if padding(token) { -1 } else { *id })
            .collect()
    };
    check(Case {
        segments: Some((queries.clone(), keys.clone())),
        ..plain.clone()
    });
    check(Case {
        segments: Some((backwards, keys.clone())),
        ..plain.clone()
    });
    check(Case {
        segments: Some((padded(&queries, q_len), padded(&keys, kv_len))),
        causal: Some(CausalAlignment::TopLeft),
        ..plain.clone()
    });
    for document in [0, 3, 50, 51] {
        check(Case {
            q_len: 2,
            segments: Some((vec![document; 4], keys.clone())),
            ..plain.clone()
        });
    }
}
