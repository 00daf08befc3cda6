//! Tests of keys that are divided into shards. The merged results must equal attention over all keys, and the gradients
//! of the shards must add up to the gradients over all keys.

use crate::case::seed;
use crate::devices::{TestDevice, devices};
use attention_cube::shards::{Merged, backward, merge};
use attention_cube::{AttentionError, AttentionOptions, attention_with_lse, reference};
use burn::tensor::{DType, Device, Distribution, Int, Tensor, TensorData};

const BATCH: usize = 2;
const Q_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const Q_LEN: usize = 70;
const WIDTH: usize = 32;
/// The first key of each shard, and the end of the last shard. The shards have unequal sizes.
const SHARDS: [usize; 4] = [0, 40, 97, 150];
const KV_LEN: usize = SHARDS[SHARDS.len() - 1];

/// The inputs of a problem and the gradients of its output and logsumexp, in f64.
struct Problem {
    query: TensorData,
    key: TensorData,
    value: TensorData,
    output_gradient: TensorData,
    lse_gradient: TensorData,
    sinks: TensorData,
}

impl Problem {
    fn new(dtype: DType) -> Self {
        // The data are rounded to the dtype, so that the f64 reference computes with the same numbers as the device.
        let mut salt = seed();
        let mut random = |shape: [usize; 4]| {
            salt += 1;
            let count: usize = shape.iter().product();
            let values: Vec<f64> = (0..count as u64).map(|index| normal(salt, index)).collect();
            TensorData::new(values, shape)
                .convert_dtype(dtype)
                .convert_dtype(DType::F64)
        };
        let flat = |data: TensorData, shape: &[usize]| {
            TensorData::new(
                data.try_into_vec::<f64>().expect("the data is f64"),
                shape.to_vec(),
            )
        };
        Self {
            query: random([BATCH, Q_HEADS, Q_LEN, WIDTH]),
            key: random([BATCH, KV_HEADS, KV_LEN, WIDTH]),
            value: random([BATCH, KV_HEADS, KV_LEN, WIDTH]),
            output_gradient: random([BATCH, Q_HEADS, Q_LEN, WIDTH]),
            lse_gradient: flat(random([1, BATCH, Q_HEADS, Q_LEN]), &[BATCH, Q_HEADS, Q_LEN]),
            sinks: flat(random([1, 1, 1, Q_HEADS]), &[Q_HEADS]),
        }
    }
}

/// Returns a pseudo-random number that is approximately normally distributed: a sum of twelve uniform numbers, minus 6. The
/// number depends only on the arguments.
fn normal(salt: u64, index: u64) -> f64 {
    let uniform = |part: u64| {
        // The mixing function is the one of SplitMix64 (Steele et al.).
        let mut z = (salt << 48 ^ index << 4 ^ part).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    };
    (0..12).map(uniform).sum::<f64>() - 6.0
}

/// Returns the first key and the end (one past the last key) of the keys that query `i` sees. The first queries see no
/// key of the last shards. Query 5 sees no key at all.
fn keys_of(i: usize) -> (usize, usize) {
    match i {
        5 => (0, 0),
        _ => (i, 2 * i + 12),
    }
}

/// Returns the options of the shard with the keys `first..end`. Each query's interval is cut to the keys of the shard,
/// and its bounds count from the first key of the shard. A sink must count only once, so only the first shard has the
/// sinks.
fn options(first: usize, end: usize, sinks: &Tensor<1>, device: &Device) -> AttentionOptions {
    let side = |key: fn(usize) -> usize| {
        let keys = (0..BATCH * Q_LEN).map(|query| key(query % Q_LEN).clamp(first, end) - first);
        let keys: Vec<i64> = keys.map(|key| key as i64).collect();
        Tensor::<2, Int>::from_data(TensorData::new(keys, [BATCH, Q_LEN]), device)
    };
    let options = AttentionOptions::new()
        .visible_between(side(|i| keys_of(i).0), side(|i| keys_of(i).1.min(KV_LEN)));
    match first {
        0 => options.sinks(sinks.clone()),
        _ => options,
    }
}

fn tensor<const D: usize>(data: &TensorData, device: &Device, dtype: DType) -> Tensor<D> {
    Tensor::from_data(data.clone().convert_dtype(dtype), (device, dtype))
}

fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    let data = tensor.into_data().convert_dtype(DType::F64);
    data.try_into_vec().expect("the data is f64")
}

/// The results of a run: the output, the logsumexp, and the gradients of query, keys, values and sinks.
type Results = [Vec<f64>; 6];

/// The way in which a run computes the results.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Method {
    /// The reference computes one call over all keys.
    Reference,
    /// The operator computes one call over all keys.
    Whole,
    /// The operator computes one call per shard. The results are merged, and autodiff computes the gradients.
    Merged,
    /// The operator computes one call per shard without autodiff. The results are merged, and an explicit backward of each
    /// shard computes the gradients.
    Backward,
}

fn run(problem: &Problem, method: Method, device: &Device, dtype: DType) -> Results {
    let lse_dtype = if dtype == DType::F64 {
        dtype
    } else {
        DType::F32
    };
    let device = match method {
        Method::Backward => device.clone(),
        _ => device.clone().autodiff(),
    };
    let leaf = |data: &TensorData| {
        let leaf = tensor::<4>(data, &device, dtype);
        if method == Method::Backward {
            leaf
        } else {
            leaf.require_grad()
        }
    };
    let (query, key, value) = (
        leaf(&problem.query),
        leaf(&problem.key),
        leaf(&problem.value),
    );
    let sinks = tensor::<1>(&problem.sinks, &device, lse_dtype);
    let sinks = if method == Method::Backward {
        sinks
    } else {
        sinks.require_grad()
    };
    let output_gradient = tensor::<4>(&problem.output_gradient, &device, dtype);
    let lse_gradient = tensor::<3>(&problem.lse_gradient, &device, lse_dtype);
    let shards = || SHARDS.windows(2).map(|ends| (ends[0], ends[1]));
    let rows = |tensor: &Tensor<4>, first: usize, end: usize| {
        tensor.clone().slice([0..BATCH, 0..KV_HEADS, first..end])
    };
    let attend = |first: usize, end: usize| {
        let (key, value) = (rows(&key, first, end), rows(&value, first, end));
        let options = options(first, end, &sinks, &device);
        let call = match method {
            Method::Reference => reference::attention,
            _ => attention_with_lse,
        };
        call(query.clone(), key, value, options).expect("the arguments fit")
    };
    let (output, logsumexp) = match method {
        Method::Reference | Method::Whole => attend(0, KV_LEN),
        Method::Merged | Method::Backward => {
            let parts = shards().map(|(first, end)| attend(first, end)).collect();
            merge(parts).expect("the shards fit each other")
        }
    };
    let gradients: [Vec<f64>; 4] = if method == Method::Backward {
        let mut sums: [Option<Tensor<4>>; 1] = [None];
        let (mut keys, mut values, mut sink_gradient) = (vec![], vec![], None);
        for (first, end) in shards() {
            let gradients = backward(
                query.clone(),
                rows(&key, first, end),
                rows(&value, first, end),
                options(first, end, &sinks, &device),
                Merged {
                    output: output.clone(),
                    logsumexp: logsumexp.clone(),
                    output_gradient: output_gradient.clone(),
                    logsumexp_gradient: Some(lse_gradient.clone()),
                },
            )
            .expect("the arguments fit");
            let query = gradients.query.cast(lse_dtype);
            sums[0] = Some(match sums[0].take() {
                Some(sum) => sum + query,
                None => query,
            });
            keys.push(gradients.key);
            values.push(gradients.value);
            sink_gradient = sink_gradient.or(gradients.sinks);
        }
        let [query] = sums.map(|sum| read(sum.expect("a shard exists")));
        let sinks = read(sink_gradient.expect("the first shard has the sinks"));
        [
            query,
            read(Tensor::cat(keys, 2)),
            read(Tensor::cat(values, 2)),
            sinks,
        ]
    } else {
        let weighted = (output.clone().cast(lse_dtype) * output_gradient.cast(lse_dtype)).sum();
        // All logsumexps are finite: query 5 sees no key but has a sink.
        let loss = weighted + (logsumexp.clone() * lse_gradient).sum();
        let gradients = loss.backward();
        let of = |leaf: &Tensor<4>| read(leaf.grad(&gradients).expect("the leaf has a gradient"));
        let sinks = read(sinks.grad(&gradients).expect("the sinks have a gradient"));
        [of(&query), of(&key), of(&value), sinks]
    };
    let [dq, dk, dv, dsinks] = gradients;
    let plain = |tensor: Tensor<4>| read(tensor.without_autodiff());
    let lse = read(logsumexp.without_autodiff());
    [plain(output), lse, dq, dk, dv, dsinks]
}

/// Returns the root mean square of the differences between two results.
fn error(found: &[f64], exact: &[f64]) -> f64 {
    assert_eq!(found.len(), exact.len());
    let squares = found.iter().zip(exact).map(|(a, b)| (a - b) * (a - b));
    (squares.sum::<f64>() / exact.len() as f64).sqrt()
}

fn check(device: &TestDevice, dtype: DType) {
    let problem = Problem::new(dtype);
    let exact = run(&problem, Method::Reference, &Device::flex(), DType::F64);
    let whole = run(&problem, Method::Whole, &device.device, dtype);
    for method in [Method::Merged, Method::Backward] {
        let found = run(&problem, method, &device.device, dtype);
        let names = ["output", "logsumexp", "query", "key", "value", "sinks"];
        for (index, name) in names.into_iter().enumerate() {
            // The allowed error is twice the error of one operator call over all keys, plus a slack. The slack is
            // needed because the error of one call may be 0 by chance. The gradients of the few sinks get more slack,
            // because the addends of these gradients cancel.
            let scale = error(&exact[index], &vec![0.0; exact[index].len()]);
            let slack = match (name, dtype) {
                ("sinks", DType::F32) => 1e-6,
                ("sinks", DType::F16) => 4e-3,
                ("sinks", _) => 3e-2,
                _ => 1.2e-7,
            };
            let allowed = 2.0 * error(&whole[index], &exact[index]) + slack * scale;
            let found = error(&found[index], &exact[index]);
            assert!(
                found <= allowed,
                "{} {dtype:?} {method:?}: {name}: {found:e}, allowed {allowed:e}",
                device.name
            );
        }
    }
}

#[test]
fn shards_merged_equal_attention_over_all_keys() {
    for device in devices() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            if device.supports(dtype) {
                check(&device, dtype);
            }
        }
    }
}

/// Checks queries that see no key of any shard and have no sink. The output is 0, the logsumexp is −∞, and the gradients are 0.
#[test]
fn shards_without_visible_keys_give_zeros() {
    for device in devices() {
        let on = &device.device.clone().autodiff();
        let ones = |length| Tensor::<4>::ones([1, 1, length, 8], on).require_grad();
        let (query, key, value) = (ones(2), ones(3), ones(3));
        let attend = || {
            let nothing = Tensor::<2, Int>::zeros([1, 2], on);
            let options = AttentionOptions::new().visible_between(nothing.clone(), nothing);
            attention_with_lse(query.clone(), key.clone(), value.clone(), options)
                .expect("the arguments fit")
        };
        let (output, logsumexp) = merge(vec![attend(), attend()]).expect("the shards fit");
        assert!(
            read(logsumexp.without_autodiff())
                .iter()
                .all(|lse| *lse == f64::NEG_INFINITY)
        );
        assert!(
            read(output.clone().without_autodiff())
                .iter()
                .all(|x| *x == 0.0)
        );
        let gradients = output.sum().backward();
        for leaf in [query, key, value] {
            let gradient = read(leaf.grad(&gradients).expect("the leaf has a gradient"));
            assert!(gradient.iter().all(|x| *x == 0.0), "{}", device.name);
        }
    }
}

#[test]
fn shards_that_do_not_fit_are_refused() {
    let on = &Device::flex();
    let shard = |q_len: usize, dtype: DType| {
        (
            Tensor::<4>::zeros([1, 2, q_len, 8], (on, dtype)),
            Tensor::<3>::zeros([1, 2, q_len], (on, DType::F32)),
        )
    };
    assert!(matches!(
        merge(vec![]),
        Err(AttentionError::Value {
            argument: "shards",
            ..
        })
    ));
    let shapes = merge(vec![shard(3, DType::F32), shard(4, DType::F32)]);
    assert!(matches!(
        shapes,
        Err(AttentionError::Shape {
            argument: "output",
            ..
        })
    ));
    let dtypes = merge(vec![shard(3, DType::F32), shard(3, DType::F16)]);
    assert!(matches!(
        dtypes,
        Err(AttentionError::Dtype {
            argument: "output",
            ..
        })
    ));
    let wide = (
        shard(3, DType::F32).0,
        Tensor::<3>::zeros([1, 2, 4], (on, DType::F32)),
    );
    let lengths = merge(vec![wide]);
    assert!(matches!(
        lengths,
        Err(AttentionError::Shape {
            argument: "logsumexp",
            ..
        })
    ));
    let zeros = |length| Tensor::<4>::zeros([1, 2, length, 8], (on, DType::F32));
    let (output, logsumexp) = shard(3, DType::F32);
    let gradients = backward(
        zeros(3),
        zeros(5),
        zeros(5),
        AttentionOptions::new(),
        Merged {
            output: output.clone(),
            logsumexp,
            output_gradient: zeros(4),
            logsumexp_gradient: None,
        },
    );
    let refused = matches!(
        gradients,
        Err(AttentionError::Shape {
            argument: "output gradient",
            ..
        })
    );
    assert!(refused);
}

/// Checks the explicit backward of shards with a bias that is constant over the keys. The sum of the shards' bias
/// gradients must equal the bias gradient that autodiff computes.
#[test]
fn shards_backward_bias_of_queries_equals_autodiff() {
    for device in devices() {
        let problem = Problem::new(DType::F32);
        let on = &device.device.clone().autodiff();
        let floats = |data: &TensorData, on: &Device| tensor::<4>(data, on, DType::F32);
        let bias = Tensor::<4>::random(
            [1, Q_HEADS, Q_LEN, 1],
            Distribution::Normal(0.0, 1.0),
            &device.device,
        );
        let rows = |data: &TensorData, first: usize, end: usize, on: &Device| {
            floats(data, on).slice([0..BATCH, 0..KV_HEADS, first..end])
        };
        let shards = [(0, 60), (60, KV_LEN)];
        let tracked = Tensor::<4>::from_data(bias.to_data(), on).require_grad();
        let parts = shards.map(|(first, end)| {
            let options = AttentionOptions::new().bias(tracked.clone());
            let (key, value) = (
                rows(&problem.key, first, end, on),
                rows(&problem.value, first, end, on),
            );
            attention_with_lse(floats(&problem.query, on), key, value, options)
                .expect("the arguments fit")
        });
        let (output, logsumexp) = merge(parts.to_vec()).expect("the shards fit each other");
        let weights = floats(&problem.output_gradient, on);
        let gradients = (output.clone() * weights).sum().backward();
        let expected = read(tracked.grad(&gradients).expect("the bias has a gradient"));

        let on = &device.device;
        let found = shards.map(|(first, end)| {
            let gradients = backward(
                floats(&problem.query, on),
                rows(&problem.key, first, end, on),
                rows(&problem.value, first, end, on),
                AttentionOptions::new().bias(bias.clone()),
                Merged {
                    output: output.clone().without_autodiff(),
                    logsumexp: logsumexp.clone().without_autodiff(),
                    output_gradient: floats(&problem.output_gradient, on),
                    logsumexp_gradient: None,
                },
            );
            read(
                gradients
                    .expect("the arguments fit")
                    .bias
                    .expect("there is a bias"),
            )
        });
        // The gradient over all keys is 0 for a bias that is constant over the keys. The test would be useless if the
        // gradient from a shard were 0 too.
        assert!(found[0].iter().any(|x| x.abs() > 1e-3), "{}", device.name);
        for (index, expected) in expected.into_iter().enumerate() {
            let sum: f64 = found.iter().map(|shard| shard[index]).sum();
            assert!(
                (sum - expected).abs() < 1e-5,
                "{}: {sum} {expected}",
                device.name
            );
        }
    }
}

/// Checks that rows past the end of a sequence's queries may hold NaN in the explicit backward. The call has a sink, whose
/// gradient must not become NaN either.
#[test]
fn shards_backward_of_ragged_queries_ignores_nan() {
    for TestDevice { name, device } in devices() {
        let device = &device;
        let random = |salt: u64, rows: usize| {
            let values = (0..rows * 4).map(|index| normal(salt, index as u64));
            let data = TensorData::new(values.collect::<Vec<f64>>(), [1, 1, rows, 4]);
            tensor::<4>(&data, device, DType::F32)
        };
        let (query, key, value, gradient) =
            (random(1, 3), random(2, 5), random(3, 5), random(4, 3));
        let options = || {
            AttentionOptions::new()
                .query_lengths(Tensor::<1, Int>::from_ints([2], device))
                .sinks(Tensor::<1>::from_floats([0.5], device))
        };
        let (output, logsumexp) =
            attention_with_lse(query.clone(), key.clone(), value.clone(), options())
                .expect("the arguments fit");
        let last = |tensor: &Tensor<4>, number: f32| {
            let row = Tensor::<4>::full([1, 1, 1, 4], number, device);
            tensor.clone().slice_assign([0..1, 0..1, 2..3, 0..4], row)
        };
        let run = |number: f32| {
            let merged = Merged {
                output: output.clone(),
                logsumexp: logsumexp.clone(),
                output_gradient: last(&gradient, number),
                logsumexp_gradient: None,
            };
            let query = last(&query, number);
            let gradients = backward(query, key.clone(), value.clone(), options(), merged)
                .expect("the arguments fit");
            let sinks = gradients.sinks.expect("the call has sinks");
            (read(gradients.key), read(gradients.value), read(sinks))
        };
        assert_eq!(run(f32::NAN), run(0.0), "{name}");
    }
}
