//! Tests of bias gradients over several tiles of queries and keys, in the dtypes that matrix units (tensor cores)
//! multiply.

use crate::case::{Case, FULL};
use crate::dense::Layout;
use attention_cube::CausalAlignment;
use burn::tensor::DType;

/// Returns a case of three sequences with two query heads that share a KV head. The 130 queries and the 66 keys do not fit in
/// one tile of 64 rows.
fn case(head_dim: usize) -> Case {
    Case {
        dtype: DType::BF16,
        bias: Some(FULL),
        ..Case::new([3, 2, 1, 130, 66, head_dim, head_dim])
    }
}

#[test]
fn bias_gradient_broadcast_bias_sums_over_broadcast_dims() {
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
fn bias_gradient_f16_matches_reference() {
    Case {
        dtype: DType::F16,
        bias: Some([false, true, true, true]),
        ..case(16)
    }
    .check();
}

#[test]
fn bias_gradient_odd_head_dims_match_reference() {
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
fn bias_gradient_with_softcap_matches_reference() {
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
        // Skipped tiles have two causes here: the second sequence has no keys, and the last queries of the first sequence
        // see no key.
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

/// Checks even and odd numbers of keys. If the number of keys is even, kernels load the biases of two neighboring keys
/// at once. The queries and the keys fill their last tiles only partly.
#[test]
fn bias_gradient_partial_tiles_match_reference() {
    for (q_len, kv_len, extent, dtype) in [
        (1, 2, FULL, DType::F16),
        (77, 1, FULL, DType::BF16),
        (83, 129, FULL, DType::BF16),
        (83, 130, FULL, DType::BF16),
        (83, 130, [false, true, false, true], DType::BF16),
        (241, 200, FULL, DType::BF16),
        (241, 200, FULL, DType::F16),
        (241, 200, [true, false, true, false], DType::BF16),
    ] {
        Case {
            q_len,
            kv_len,
            dtype,
            bias: Some(extent),
            ..Case::new([2, 4, 2, 0, 0, 64, 64])
        }
        .check();
    }
}

/// Checks a bias of −∞ for neighboring keys. Kernels load the biases of a pair of neighboring keys at once. The bias
/// hides both keys of a pair, one key, or no key.
#[test]
fn bias_gradient_bias_of_minus_infinity_hides_keys() {
    for head_dim in [64, 128] {
        let case = Case {
            q_len: 200,
            kv_len: 270,
            bias: Some(FULL),
            ..case(head_dim)
        };
        let mut inputs = case.inputs();
        if let Some(bias) = &mut inputs.bias {
            for (index, value) in bias.values.iter_mut().enumerate() {
                if (index % 270).is_multiple_of(5) || index / 270 % 200 == 1 {
                    *value = f64::NEG_INFINITY;
                }
            }
        }
        case.check_inputs(&inputs, &inputs);
        let mut poisoned = inputs.clone();
        poisoned
            .key
            .fill_rows(f64::NAN, |[_, _, key]| key.is_multiple_of(5));
        poisoned
            .value
            .fill_rows(f64::INFINITY, |[_, _, key]| key.is_multiple_of(5));
        case.check_inputs(&poisoned, &inputs);
    }
}

#[test]
fn bias_gradient_hidden_nan_keys_are_not_read() {
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
fn bias_gradient_strided_operands_match_reference() {
    for (expanded, kv_len) in [(true, 66), (false, 67)] {
        Case {
            kv_len,
            expanded,
            bias: Some([false, true, true, true]),
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
