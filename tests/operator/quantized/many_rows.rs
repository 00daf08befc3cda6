//! Tests of calls with too many rows for the kernels that read int8 directly. Such a call makes a dequantized copy of
//! the keys and values that at least one query sees. In these tests, all other keys and values have NaN scales, which
//! must not affect a result.

use super::case::Quantized;
use super::causal;
use crate::case::Case;
use attention_cube::CausalAlignment::TopLeft;
use burn::tensor::DType;

/// Returns true if the causal mask, the window or the length hides the key from all queries of its sequence.
fn is_unseen(case: &Case, [batch, _, key]: [usize; 3]) -> bool {
    let end = match &case.kv_lengths {
        Some(lengths) => lengths[batch],
        None => case.kv_len as i64,
    };
    let q_len = case.q_len as i64;
    let offset = if case.causal == Some(TopLeft) {
        0
    } else {
        end - q_len
    };
    let right = match case.causal {
        Some(_) => Some(0),
        None => case.window.1,
    };
    let first = (case.window.0).map_or(0, |left| offset - left as i64);
    let last = right.map_or(i64::MAX, |right| offset + q_len - 1 + right as i64);
    let key = key as i64;
    key >= end || key < first || key > last
}

fn check(case: Case) {
    let quantized = Quantized::new(case);
    let case = &quantized.case;
    let (mut key, mut value) = (quantized.key.clone(), quantized.value.clone());
    for rows in [&mut key, &mut value] {
        rows.codes.fill_rows(-128.0, |at| is_unseen(case, at));
    }
    key.scales.fill_rows(f64::NAN, |at| is_unseen(case, at));
    value
        .scales
        .fill_rows(f64::INFINITY, |at| is_unseen(case, at));
    quantized.check(&key, &value);
}

#[test]
fn int8_many_rows_do_not_read_hidden_rows() {
    let lengths = [0i64, 1, 45, 300];
    for dtype in [DType::F32, DType::BF16] {
        for q_len in [40, 130] {
            let base = Case {
                dtype,
                ..causal([lengths.len(), 2, 1, q_len, 300, 32, 32])
            };
            for kv_lengths in [None, Some(lengths.to_vec())] {
                for (causal, window) in [
                    (base.causal, (None, None)),
                    (base.causal, (Some(20), None)),
                    (Some(TopLeft), (Some(70), None)),
                ] {
                    check(Case {
                        causal,
                        window,
                        kv_lengths: kv_lengths.clone(),
                        ..base.clone()
                    });
                }
            }
        }
    }
}
