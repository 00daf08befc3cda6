//! Tests of ring attention with several ranks on one device. The output and the gradients must equal those of one call
//! over the whole sequence.

use crate::devices::devices;
use attention_cube::{AttentionError, AttentionOptions, fused_attention};
use attention_workspace::ring::{Ring, Shard};
use burn::tensor::{DType, Device, Distribution, Tensor};

const BATCH: usize = 2;
const Q_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;
/// The length of the sequence, a multiple of twice each number of ranks. The chunks have odd lengths.
const TOKENS: usize = 60;

/// The query, the keys, the values and the gradient of the output.
fn inputs(device: &Device) -> [Tensor<4>; 4] {
    [Q_HEADS, KV_HEADS, KV_HEADS, Q_HEADS].map(|heads| {
        let shape = [BATCH, heads, TOKENS, HEAD_DIM];
        Tensor::random(shape, Distribution::Normal(0.0, 1.0), (device, DType::F32))
    })
}

/// Computes the output and the gradients of query, keys and values by one call over the whole sequence.
fn whole([query, key, value, gradient]: [Tensor<4>; 4]) -> [Tensor<4>; 4] {
    let leaves = [query, key, value].map(|input| input.autodiff().require_grad());
    let [query, key, value] = leaves.clone();
    let output = fused_attention(query, key, value, AttentionOptions::new().causal());
    let gradients = (output.clone() * gradient.autodiff()).sum().backward();
    let [query, key, value] =
        leaves.map(|leaf| leaf.grad(&gradients).expect("the leaf has a gradient"));
    [output.without_autodiff(), query, key, value]
}

/// Computes the same results by a ring of `ranks` ranks.
fn ring(inputs: [Tensor<4>; 4], ranks: usize) -> [Tensor<4>; 4] {
    let devices = vec![inputs[0].device(); ranks];
    let ring = Ring::new(devices).expect("threads start");
    let [queries, keys, values, output_gradients] = inputs.map(|input| {
        ring.scatter(&input)
            .expect("the tokens divide among the ranks")
    });
    let shards = queries.into_iter().zip(keys).zip(values);
    let shards: Vec<Shard> = shards
        .map(|((query, key), value)| Shard { query, key, value })
        .collect();
    let forward = ring.forward(&shards).expect("the shards fit each other");
    let gradients = ring
        .backward(&shards, &forward, &output_gradients)
        .expect("the arguments fit");
    let outputs: Vec<_> = forward.into_iter().map(|forward| forward.output).collect();
    let (mut queries, mut keys, mut values) = (vec![], vec![], vec![]);
    for gradients in gradients {
        queries.push(gradients.query);
        keys.push(gradients.key);
        values.push(gradients.value);
    }
    [outputs, queries, keys, values]
        .map(|shards| ring.gather(&shards).expect("the shards fit the ring"))
}

/// Returns the Frobenius norm of the difference of two tensors, divided by the norm of `exact`.
fn relative_error(found: Tensor<4>, exact: Tensor<4>) -> f64 {
    let read = |tensor: Tensor<4>| -> Vec<f64> {
        let data = tensor.into_data().convert_dtype(DType::F64);
        data.try_into_vec().expect("the data is f64")
    };
    let (found, exact) = (read(found), read(exact));
    assert_eq!(found.len(), exact.len());
    let squares = found.iter().zip(&exact).map(|(a, b)| (a - b) * (a - b));
    let norm: f64 = exact.iter().map(|x| x * x).sum();
    (squares.sum::<f64>() / norm).sqrt()
}

#[test]
fn ring_of_ranks_equals_one_call() {
    for device in devices() {
        let inputs = inputs(&device.device);
        let exact = whole(inputs.clone());
        for ranks in [1, 2, 3, 5] {
            let found = ring(inputs.clone(), ranks);
            let names = ["output", "query", "key", "value"];
            for ((name, found), exact) in names.into_iter().zip(found).zip(exact.clone()) {
                let error = relative_error(found, exact);
                assert!(
                    error < 2e-6,
                    "{}, {ranks} ranks: {name}: {error:e}",
                    device.name
                );
            }
        }
    }
}

#[test]
fn ring_shards_that_do_not_fit_are_refused() {
    let device = Device::flex();
    let zeros = |heads, rows, dim| Tensor::<4>::zeros([1, heads, rows, dim], &device);
    let ring = Ring::new(vec![device.clone(); 3]).expect("threads start");
    assert!(Ring::new(Vec::new()).is_err());
    assert!(ring.scatter(&zeros(1, 10, 8)).is_err());
    let shard = |query_dim| Shard {
        query: zeros(2, 4, query_dim),
        key: zeros(1, 4, 8),
        value: zeros(1, 4, 8),
    };
    assert!(ring.forward(&[shard(8)]).is_err());
    // Rank 1 fails after it has sent its own keys. Rank 2 waits for further keys of rank 1 and must stop too. The caller
    // gets the error of rank 1.
    let error = ring.forward(&[shard(8), shard(7), shard(8)]).err();
    let error = error.expect("the head sizes differ");
    assert!(error.is::<AttentionError>(), "{error}");
    assert!(ring.forward(&[shard(8), shard(8), shard(8)]).is_ok());
}
