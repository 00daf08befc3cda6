//! Tests of biases that threads load, biases that TMA loads, broadcast biases, and biases of −∞.

use super::{WIDTHS, check, check_with, each_width};
use crate::case::{Case, FULL};
use crate::dense::Dense;
use attention_cube::CausalAlignment;
use burn::tensor::DType;

#[test]
fn wgmma_bias_with_softcap_matches_reference() {
    each_width(|case| Case {
        bias: Some(FULL),
        softcap: Some(3.0),
        ..case
    });
}

/// Checks biases whose row length allows TMA loads. Some biases are broadcast over sequences or over heads. A bias of −∞
/// hides NaN keys and values.
#[test]
fn wgmma_bias_loaded_by_tma_matches_reference() {
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
        // TMA can load a bias with 391 keys only if its rows are padded, so that each row starts at a multiple of 16
        // bytes.
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

/// Checks the gradient of a bias that is broadcast along each combination of dimensions.
#[test]
fn wgmma_broadcast_bias_gradient_matches_reference() {
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

/// Checks a bias with one value per head. A bias of −∞ hides all keys from one of the two heads in a GQA group, or from both
/// heads. Queries without keys, and keys and values that no head sees, are NaN or infinite.
#[test]
fn wgmma_bias_that_hides_heads_ignores_nan() {
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
            // The bias hides all keys from heads 2 and 3 in the second sequence. If the bias is broadcast over the batch, it
            // also hides all keys of the first sequence from these heads.
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
