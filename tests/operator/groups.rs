//! Tests of GQA with every ratio of query heads to key heads, in prefill and decode. The gradients of keys and values
//! are sums over all query heads of a GQA group.

use crate::case::Case;
use crate::compare::{Named, Precision, assert_close};
use crate::dense::Dense;
use crate::run::Operator;
use attention_cube::CausalAlignment;
use burn::tensor::{DType, Device};

const HEADS: [(usize, usize); 7] = [(1, 1), (2, 1), (3, 1), (6, 2), (4, 4), (8, 2), (8, 1)];

#[test]
fn gqa_prefill_matches_reference() {
    for (q_heads, kv_heads) in HEADS {
        Case {
            causal: Some(CausalAlignment::BottomRight),
            ..Case::new([2, q_heads, kv_heads, 66, 70, 32, 32])
        }
        .check();
    }
}

#[test]
fn gqa_decode_matches_reference() {
    for (q_heads, kv_heads) in HEADS {
        Case {
            causal: Some(CausalAlignment::BottomRight),
            ..Case::new([2, q_heads, kv_heads, 1, 70, 32, 32])
        }
        .check();
    }
}

/// Checks the f64 reference with GQA. It must equal the reference for a case in which each key head is repeated for all
/// query heads of its group. The gradients of the repeated heads add up to the gradient of the original key head.
#[test]
fn gqa_reference_equals_repeated_keys() {
    let grouped = Case::new([2, 6, 2, 5, 7, 8, 4]);
    let inputs = grouped.inputs();
    let repeated = Case {
        kv_heads: 6,
        ..grouped.clone()
    };
    let repeat = |dense: &Dense| {
        let [batch, _, length, columns] = dense.shape;
        Dense::from_fn([batch, 6, length, columns], |[b, h, j, c]| {
            dense.at([b, h / 3, j, c])
        })
    };
    let mut repeated_inputs = inputs.clone();
    repeated_inputs.key = repeat(&inputs.key);
    repeated_inputs.value = repeat(&inputs.value);

    let flex = Device::flex();
    let got = grouped.run(&inputs, &flex, DType::F64, Operator::Reference);
    let expected = repeated.run(&repeated_inputs, &flex, DType::F64, Operator::Reference);
    let precision = Precision {
        dtype: DType::F64,
        terms: 16,
    };
    for (got, expected) in got.iter().zip(&expected) {
        let columns = match got.name {
            "key gradient" => 8,
            "value gradient" => 4,
            _ => {
                assert_close("repeated keys", got, expected, expected, precision);
                continue;
            }
        };
        let all = Dense {
            shape: [2, 6, 7, columns],
            values: expected.values.clone(),
        };
        let summed = Dense::from_fn([2, 2, 7, columns], |[b, h, j, c]| {
            (0..3).map(|member| all.at([b, 3 * h + member, j, c])).sum()
        });
        let expected = Named {
            values: summed.values,
            ..expected.clone()
        };
        assert_close("repeated keys", got, &expected, &expected, precision);
    }
}
