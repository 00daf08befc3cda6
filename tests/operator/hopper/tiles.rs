//! Tests of the assignment of tiles to CTAs: several tiles to one CTA, several heads to one tile, and tiles without keys.

use super::{check, hopper_devices};
use crate::case::Case;
use attention_cube::{AttentionOptions, CausalAlignment, attention_with_lse};
use burn::tensor::{Bool, DType, Distribution, Int, Tensor};

/// Checks cases with more tiles than multiprocessors, in which persistent CTAs process several tiles each. Under a causal
/// mask a CTA takes tiles in pairs, and some cases have an odd number of tiles per head.
#[test]
fn wgmma_persistent_ctas_match_reference() {
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

/// Checks tiles without visible keys. In a call with all sequences, a persistent CTA may process such a tile between
/// two tiles that have visible keys. A call with a single sequence has fewer tiles than CTAs. Both calls must give the
/// same bits for this sequence.
#[test]
fn wgmma_tiles_without_keys_equal_single_sequences() {
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
            // The mask `keys` hides the first 70 % of the keys, which fill more than two tiles. The mask `queries`
            // hides all keys from query 130 and from all later queries. These queries fill more than two tiles too.
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

/// Checks few queries per head, where the heads of a GQA group share a tile even if their rows do not fill the tile. The
/// keys are split over CTAs.
#[test]
fn wgmma_few_queries_match_reference() {
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
