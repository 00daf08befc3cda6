//! Tests that compare attention in blocks with the reference in f64. The blocks are much smaller than the problem.

use super::backward;
use super::cuts::Sizes;
use super::forward;
use crate::block_mask::BlockMask;
use crate::options::{AttentionOptions, CausalAlignment};
use crate::problem::AttentionProblem;
use crate::reference::{self, block::Block, logsumexp_of_parts};
use crate::score_mod::{Alibi, SameDocument, SoftWindow};
use crate::types::request::BackwardRequest;
use crate::types::tensors::{AttentionSaved, MaybeFloat, inputs};
use burn::backend::Dispatch;
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};

const BATCH: usize = 2;
const Q_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const Q_LEN: usize = 23;
const KV_LEN: usize = 29;
const HEAD_DIM: usize = 3;
const VALUE_DIM: usize = 2;

/// Three choices of block sizes. With the first, each dimension of the problem has several blocks. With the second, a
/// block covers all heads. With the third, one block covers all queries.
const SIZES: [Sizes; 3] = [
    Sizes {
        rows: 12,
        keys: 5,
        scores: 60,
    },
    Sizes {
        rows: 6,
        keys: 8,
        scores: 4096,
    },
    Sizes {
        rows: 46,
        keys: 7,
        scores: 300,
    },
];

/// Returns reproducible numbers of mean 0 in f64.
fn numbers<const D: usize>(shape: [usize; D], seed: u64, device: &Device) -> Tensor<D> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) as f64 / f64::from(1u32 << 30) - 1.0
    };
    let numbers: Vec<f64> = (0..shape.iter().product()).map(next).collect();
    Tensor::from_data(TensorData::new(numbers, shape), (device, DType::F64))
}

fn integers<const D: usize>(
    shape: [usize; D],
    device: &Device,
    of: impl Fn(usize) -> i64,
) -> Tensor<D, Int> {
    let integers: Vec<i64> = (0..shape.iter().product()).map(of).collect();
    Tensor::from_data(TensorData::new(integers, shape), device)
}

fn mask(shape: [usize; 4], device: &Device) -> Tensor<4, Bool> {
    numbers(shape, 11, device).greater_elem(-0.4)
}

/// The inputs of a call: an array of query, keys, values and the output's gradient, and then the gradient of the
/// logsumexp.
type Rows = ([Tensor<4>; 4], Tensor<3>);

fn rows(device: &Device) -> Rows {
    let rows = [
        numbers([BATCH, Q_HEADS, Q_LEN, HEAD_DIM], 1, device),
        numbers([BATCH, KV_HEADS, KV_LEN, HEAD_DIM], 2, device),
        numbers([BATCH, KV_HEADS, KV_LEN, VALUE_DIM], 3, device),
        numbers([BATCH, Q_HEADS, Q_LEN, VALUE_DIM], 4, device),
    ];
    (rows, numbers([BATCH, Q_HEADS, Q_LEN], 5, device))
}

fn elements<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

/// Returns output, logsumexp and all gradients of the reference.
fn expected(options: &dyn Fn(&Device) -> AttentionOptions) -> Vec<Vec<f64>> {
    let device = Device::flex().autodiff();
    let ([query, key, value, weights], lse_weights) = rows(&device);
    let [query, key, value] = [query, key, value].map(Tensor::require_grad);
    let mut options = options(&device);
    options.bias = options.bias.map(Tensor::require_grad);
    options.sinks = options.sinks.map(Tensor::require_grad);
    let (bias, sinks) = (options.bias.clone(), options.sinks.clone());
    let leaves = [query.clone(), key.clone(), value.clone()];
    let (output, lse) =
        reference::attention(query, key, value, options).expect("the arguments fit");
    let loss = (output.clone() * weights).sum() + (lse.clone() * lse_weights).sum();
    let gradients = loss.backward();
    let mut found = vec![elements(output.inner()), elements(lse.inner())];
    for leaf in leaves.iter().chain(&bias) {
        found.push(elements(leaf.grad(&gradients).expect("a gradient")));
    }
    if let Some(sinks) = sinks {
        found.push(elements(sinks.grad(&gradients).expect("a gradient")));
    }
    found
}

/// Returns output, logsumexp and all gradients of attention in blocks.
fn of_blocks(
    options: &dyn Fn(&Device) -> AttentionOptions,
    ([query, key, value, weights], lse_weights): Rows,
    sizes: Sizes,
) -> Vec<Vec<f64>> {
    let options = options(&query.device());
    let problem = AttentionProblem::new(&query, &key, &value, &options).expect("they fit");
    let request = BackwardRequest {
        query: true,
        key: true,
        value: true,
        bias: options.bias.is_some(),
        sinks: options.sinks.is_some(),
        table: false,
        lse_of_all_shards: false,
    };
    let whole = || {
        let [query, key, value] = [&query, &key, &value].map(Tensor::clone);
        let inputs = inputs(query, key, value, options.clone());
        Block::<Dispatch>::whole(inputs, problem.clone())
    };
    let result = forward::of_blocks(whole(), sizes);
    let lse = logsumexp_of_parts::<Dispatch>(result.logsumexp.clone(), &problem);
    let mut found = vec![
        elements(Tensor::<4>::from_dispatch(result.output.clone())),
        elements(Tensor::<3>::from_dispatch(lse)),
    ];
    let lse_gradient = Tensor::cat(vec![lse_weights.clone(), lse_weights], 0);
    let saved = AttentionSaved {
        output: result.output,
        logsumexp: result.logsumexp,
        output_gradient: weights.into_dispatch(),
        logsumexp_gradient: Some(lse_gradient.into_dispatch()).into(),
    };
    let gradients = backward::of_blocks(whole(), saved, request, sizes);
    let of_four = |gradient: MaybeFloat<Dispatch>| {
        let gradient = gradient.into_option()?;
        Some(elements(Tensor::<4>::from_dispatch(gradient)))
    };
    found.extend(of_four(gradients.query));
    found.extend(of_four(gradients.key));
    found.extend(of_four(gradients.value));
    found.extend(of_four(gradients.bias));
    let sinks = gradients.sinks.into_option();
    found.extend(sinks.map(|sinks| elements(Tensor::<1>::from_dispatch(sinks))));
    found
}

#[track_caller]
fn assert_close(name: &str, got: &[Vec<f64>], expected: &[Vec<f64>], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{name}");
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.len(), expected.len(), "{name}, result {index}");
        for (got, expected) in got.iter().zip(expected) {
            let is_close = got == expected || (got - expected).abs() <= tolerance;
            assert!(
                is_close,
                "{name}, result {index}: {got} instead of {expected}"
            );
        }
    }
}

#[track_caller]
fn check(name: &str, tolerance: f64, options: impl Fn(&Device) -> AttentionOptions) {
    let expected = expected(&options);
    for sizes in SIZES {
        let got = of_blocks(&options, rows(&Device::flex()), sizes);
        assert_close(&format!("{name}, {sizes:?}"), &got, &expected, tolerance);
    }
}

/// The largest error allowed if all sums are in f64.
const EXACT: f64 = 1e-12;

/// The largest error allowed if some code computes in f32.
const SINGLE: f64 = 1e-5;

fn new() -> AttentionOptions {
    AttentionOptions::new()
}

fn lengths(device: &Device) -> Tensor<1, Int> {
    integers([BATCH], device, |index| [17, 40][index])
}

fn query_lengths(device: &Device) -> Tensor<1, Int> {
    integers([BATCH], device, |index| [0, 13][index])
}

fn documents(len: usize, device: &Device) -> Tensor<2, Int> {
    integers([BATCH, len], device, |index| (index % len / 6) as i64)
}

/// Returns intervals whose ends lie on edges of blocks and next to edges of blocks.
fn intervals(options: AttentionOptions, device: &Device) -> AttentionOptions {
    let ends = |of: fn(i64) -> i64| {
        integers([BATCH, Q_LEN], device, move |index| {
            of((index % Q_LEN) as i64)
        })
    };
    options
        .visible_between(ends(|query| query / 4 * 5), ends(|query| query / 4 * 5 + 5))
        .visible_between(ends(|query| query % 7 + 9), ends(|query| query % 5 + 12))
}

#[test]
fn blocks_single_options_match_reference() {
    check("full", EXACT, |_| new());
    check("scale", EXACT, |_| new().scale(-3.5));
    check("causal", EXACT, |_| new().causal());
    check("top left", EXACT, |_| {
        new().causal_aligned(CausalAlignment::TopLeft)
    });
    for (left, right) in [(Some(3), None), (None, Some(2)), (Some(0), Some(6))] {
        check("window", EXACT, |_| new().window(left, right));
    }
    check("causal window", EXACT, |_| {
        new().window(Some(4), None).causal()
    });
    check("softcap", EXACT, |_| new().softcap(0.5));
    check("sinks", EXACT, |on| new().sinks(numbers([Q_HEADS], 6, on)));
    check("dropout", EXACT, |_| new().dropout(0.3, 1 << 40));
    check("score mod", SINGLE, |on| {
        let slopes = Alibi::slopes(Q_HEADS, on);
        new().score_mod::<Alibi>(Some(slopes.without_autodiff()))
    });
    check("mask mod", EXACT, |on| {
        // The table holds the document of each position, for as many positions as there are keys.
        let table = SameDocument::table(documents(KV_LEN, on));
        new().mask_mod::<SameDocument>(Some(table))
    });
    check("segments", EXACT, |on| {
        new().segments(documents(Q_LEN, on), documents(KV_LEN, on))
    });
    check("key lengths", EXACT, |on| new().kv_lengths(lengths(on)));
    check("query lengths", EXACT, |on| {
        new().query_lengths(query_lengths(on))
    });
    check("intervals", EXACT, |on| intervals(new(), on));
}

#[test]
fn blocks_masks_and_biases_match_reference() {
    for index in 0..16 {
        let scores = [BATCH, Q_HEADS, Q_LEN, KV_LEN];
        let shape = [0, 1, 2, 3].map(|dim| {
            if index >> dim & 1 == 1 {
                scores[dim]
            } else {
                1
            }
        });
        check("mask", EXACT, |on| new().mask(mask(shape, on)));
        let blocks = [
            shape[0],
            shape[1],
            shape[2].div_ceil(4),
            shape[3].div_ceil(6),
        ];
        check("block mask", EXACT, |on| {
            new().block_mask(BlockMask::new(mask(blocks, on), [4, 6]))
        });
        check("bias", EXACT, |on| new().bias(numbers(shape, 7, on)));
    }
    check("hiding bias", EXACT, |on| {
        let shape = [1, Q_HEADS, Q_LEN, KV_LEN];
        let bias = numbers(shape, 7, on);
        new().bias(bias.mask_fill(mask(shape, on), f64::NEG_INFINITY))
    });
}

#[test]
fn blocks_combined_options_match_reference() {
    check("lengths", EXACT, |on| {
        let lengths = new()
            .kv_lengths(lengths(on))
            .query_lengths(query_lengths(on));
        lengths.causal().window(Some(6), None).dropout(0.2, 3)
    });
    check("sinks without keys", EXACT, |on| {
        let sinks = numbers([Q_HEADS], 6, on).mask_fill(
            integers([Q_HEADS], on, |head| head as i64).equal_elem(1),
            f64::NEG_INFINITY,
        );
        let none = integers([BATCH], on, |sequence| 20 * sequence as i64);
        new().sinks(sinks).kv_lengths(none).causal()
    });
    check("packed documents", EXACT, |on| {
        let packed = new().segments(documents(Q_LEN, on), documents(KV_LEN, on));
        let shape = [BATCH, Q_HEADS, 1, KV_LEN];
        packed
            .causal_aligned(CausalAlignment::TopLeft)
            .bias(numbers(shape, 8, on))
            .softcap(2.0)
    });
    check("everything", SINGLE, |on| {
        let shape = [1, Q_HEADS, Q_LEN, KV_LEN];
        let options = intervals(new().causal(), on).kv_lengths(lengths(on));
        let table = SoftWindow::table(3, 0.5, on).without_autodiff();
        let options = options.score_mod::<SoftWindow>(Some(table)).softcap(1.5);
        let options = options
            .bias(numbers(shape, 9, on))
            .mask(mask([BATCH, 1, Q_LEN, KV_LEN], on));
        options.sinks(numbers([Q_HEADS], 6, on)).dropout(0.1, 5)
    });
}

/// Checks scores far beyond the range of the exponential. For some queries, the largest score is in the first block of
/// keys, for others in the last or a middle block.
#[test]
fn blocks_large_scores_match_reference() {
    for scale in [1e4, -1e4, 1e9] {
        check("large", 1e-5, |_| new().scale(scale));
        check("large causal", 1e-5, |_| new().scale(scale).causal());
    }
}

/// Checks that NaN in rows that no query sees, and in the gradients of queries that see no key, does not change any
/// result.
#[test]
fn blocks_poisoned_hidden_rows_match_reference() {
    let options = |on: &Device| {
        let lengths = new()
            .kv_lengths(lengths(on))
            .query_lengths(query_lengths(on));
        lengths.causal()
    };
    let expected = expected(&options);
    let device = Device::flex();
    let beyond = |tensor: Tensor<4>, lengths: [usize; BATCH]| {
        let [_, heads, len, columns] = tensor.dims();
        let is_beyond = integers([BATCH, heads, len, columns], &device, |index| {
            let sequence = index / (heads * len * columns);
            i64::from(index / columns % len >= lengths[sequence])
        });
        tensor.mask_fill(is_beyond.equal_elem(1), f64::NAN)
    };
    for sizes in SIZES {
        let ([query, key, value, weights], lse_weights) = rows(&device);
        // No query sees a key of the first sequence.
        let [query, weights] = [query, weights].map(|rows| beyond(rows, [0, 13]));
        let [key, value] = [key, value].map(|rows| beyond(rows, [0, KV_LEN]));
        let rows = ([query, key, value, weights], lse_weights);
        let got = of_blocks(&options, rows, sizes);
        assert_close(&format!("{sizes:?}"), &got, &expected, EXACT);
    }
}

/// Checks a row of V that contains NaN and that some queries see. The NaN must not reach a query that sees no key.
#[test]
fn blocks_partly_hidden_nan_spares_queries_without_keys() {
    let device = Device::flex();
    let ([query, key, value, weights], lse_weights) = rows(&device);
    let is_key = integers([1, 1, KV_LEN, 1], &device, |key| i64::from(key == 13));
    let is_key = is_key.equal_elem(1).expand(value.dims());
    let value = value.mask_fill(is_key, f64::NAN);
    // Every third query sees no key.
    let ends = |of: fn(i64) -> i64| {
        integers([BATCH, Q_LEN], &device, move |index| {
            of((index % Q_LEN) as i64)
        })
    };
    let options = |_: &Device| {
        let end = ends(|query| if query % 3 == 0 { 0 } else { KV_LEN as i64 });
        new().visible_between(ends(|_| 0), end)
    };
    for sizes in SIZES {
        let rows = [&query, &key, &value, &weights].map(Tensor::clone);
        let got = of_blocks(&options, (rows, lse_weights.clone()), sizes);
        for (result, columns) in [(0, VALUE_DIM), (2, HEAD_DIM)] {
            for (row, numbers) in got[result].chunks(columns).enumerate() {
                if (row % Q_LEN).is_multiple_of(3) {
                    assert!(numbers.iter().all(|number| *number == 0.0), "{numbers:?}");
                }
            }
        }
    }
}
