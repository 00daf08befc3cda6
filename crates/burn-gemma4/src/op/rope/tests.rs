//! Tests that one launch for the queries, keys and values of a layer gives the same bits as three separate launches.

use super::{
    RotationTables,
    heads::{
        HeadOptions, LayerColumns, LayerParts, OwnShape, PartsInOrder, layer_heads,
        layer_heads_in_order, query_heads, write_keys, write_values,
    },
};
use crate::op;
use burn::tensor::{DType, Device, Distribution, Int, Tensor, TensorData};

const SLOTS: usize = 5;
const POSITIONS: usize = 9;

struct Sizes {
    sequences: usize,
    /// The number of rows of the QKV projection per sequence.
    rows: usize,
    heads: usize,
    own_heads: usize,
    pairs: usize,
    /// True if the values are computed from the key columns of the projection, and the projection has no columns for
    /// values.
    values_are_keys: bool,
}

fn bits(tensor: Tensor<4>) -> Vec<u32> {
    let numbers = tensor.into_data();
    numbers.iter::<f32>().map(f32::to_bits).collect()
}

fn check(sizes: Sizes, device: &Device, dtype: DType) {
    let Sizes {
        sequences,
        rows,
        heads,
        own_heads,
        pairs,
        values_are_keys,
    } = sizes;
    let head_dim = 2 * pairs;
    let drawn = |shape: [usize; 2]| {
        Tensor::<2>::random(shape, Distribution::Uniform(-1.0, 1.0), device).cast(dtype)
    };
    let weight = || drawn([1, head_dim]).reshape([head_dim]);
    let of_keys = own_heads * head_dim;
    let (key_start, mut end) = (heads * head_dim, heads * head_dim + of_keys);
    let value_start = match values_are_keys {
        true => key_start,
        false => end,
    };
    end += of_keys;
    let projected = drawn([sequences * rows, end]);
    let (query_weight, key_weight) = (weight(), weight());
    let tables = RotationTables {
        cos: drawn([POSITIONS, pairs]),
        sin: drawn([POSITIONS, pairs]),
    };
    // Use positions that exceed the number of slots, so that the ring buffer wraps around.
    let positions: Vec<i32> = (0..sequences)
        .flat_map(|sequence| (0..rows).map(move |row| (3 + 2 * sequence + row) as i32))
        .collect();
    let positions = TensorData::new(positions, [sequences * rows]);
    let positions = Tensor::<1, Int>::from_data(positions, (device, DType::I32));
    let buffer = || {
        let shape = [sequences, own_heads, SLOTS, head_dim];
        Tensor::<4>::full(shape, f32::NAN, device).cast(dtype)
    };
    let epsilon = 1e-6;
    let options = |start, count| HeadOptions {
        start,
        count,
        compact: None,
        epsilon,
    };

    let expected = [
        query_heads(
            projected.clone(),
            query_weight.clone(),
            &tables,
            positions.clone(),
            options(0, heads * head_dim),
        ),
        write_keys(
            projected.clone(),
            key_weight.clone(),
            &tables,
            positions.clone(),
            buffer(),
            options(key_start, of_keys),
        ),
        write_values(
            projected.clone(),
            positions.clone(),
            buffer(),
            options(value_start, of_keys),
        ),
    ];
    let parts = LayerParts {
        projected,
        query_weight,
        key_weight,
        tables: &tables,
        positions,
        keys: buffer(),
        values: buffer(),
    };
    let columns = LayerColumns {
        queries: 0,
        count: heads * head_dim,
        keys: key_start,
        values: value_start,
        epsilon,
    };
    let found = layer_heads(parts, columns);
    for (found, expected) in found.into_iter().zip(expected) {
        assert_eq!(bits(found), bits(expected), "{pairs} pairs, {dtype:?}");
    }
}

#[test]
fn layer_heads_match_separate_launches() {
    let device = Device::default();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        if !op::serves(&device, dtype) {
            continue;
        }
        for pairs in [20, 128, 256] {
            check(
                Sizes {
                    sequences: 1,
                    rows: 1,
                    heads: 8,
                    own_heads: 1,
                    pairs,
                    values_are_keys: false,
                },
                &device,
                dtype,
            );
            check(
                Sizes {
                    sequences: 2,
                    rows: 2,
                    heads: 4,
                    own_heads: 2,
                    pairs,
                    values_are_keys: true,
                },
                &device,
                dtype,
            );
        }
    }
}

/// Checks keys and values in new tensors instead of a KV cache, for two sequences of four rows. `table_rows` is 4 if
/// the sequences share the rows of the rotation tables, and 8 otherwise.
fn check_in_order(table_rows: usize, device: &Device, dtype: DType) {
    const SEQUENCES: usize = 2;
    const ROWS: usize = 4;
    let (heads, own_heads, pairs) = (4, 2, 20);
    let (head_dim, epsilon) = (2 * pairs, 1e-6);
    let drawn = |shape: [usize; 2]| {
        Tensor::<2>::random(shape, Distribution::Uniform(-1.0, 1.0), device).cast(dtype)
    };
    let weight = || drawn([1, head_dim]).reshape([head_dim]);
    let (count, own_count) = (heads * head_dim, own_heads * head_dim);
    let projected = drawn([SEQUENCES * ROWS, count + 2 * own_count]);
    let (query_weight, key_weight) = (weight(), weight());
    let tables = RotationTables {
        cos: drawn([table_rows, pairs]),
        sin: drawn([table_rows, pairs]),
    };
    let all = SEQUENCES * ROWS;
    let positions: Vec<i32> = (0..all).map(|row| (row % table_rows) as i32).collect();
    let positions =
        Tensor::<1, Int>::from_data(TensorData::new(positions, [all]), (device, DType::I32));
    let options = |start, count| HeadOptions {
        start,
        count,
        compact: None,
        epsilon,
    };
    let by_sequence = |heads: Tensor<4>, count: usize| {
        let shape = [SEQUENCES, ROWS, count, head_dim];
        heads.reshape(shape).swap_dims(1, 2)
    };
    // Compute the expected heads with the kernels that write to a KV cache. Each row is treated as a sequence with a
    // cache of one slot.
    let slots = || Tensor::<4>::full([all, own_heads, 1, head_dim], f32::NAN, device).cast(dtype);
    let expected = [
        query_heads(
            projected.clone(),
            query_weight.clone(),
            &tables,
            positions.clone(),
            options(0, count),
        ),
        by_sequence(
            write_keys(
                projected.clone(),
                key_weight.clone(),
                &tables,
                positions.clone(),
                slots(),
                options(count, own_count),
            ),
            own_heads,
        ),
        by_sequence(
            write_values(
                projected.clone(),
                positions,
                slots(),
                options(count + own_count, own_count),
            ),
            own_heads,
        ),
    ];
    let parts = PartsInOrder {
        projected,
        query_weight,
        key_weight,
        tables: &tables,
    };
    let columns = LayerColumns {
        queries: 0,
        count,
        keys: count,
        values: count + own_count,
        epsilon,
    };
    let own = OwnShape {
        sequences: SEQUENCES,
        columns: own_count,
    };
    let found = layer_heads_in_order(parts, columns, own);
    for (found, expected) in found.into_iter().zip(expected) {
        assert_eq!(found.dims(), expected.dims());
        assert_eq!(bits(found), bits(expected), "{table_rows} rows, {dtype:?}");
    }
}

#[test]
fn layer_heads_in_order_match_separate_launches() {
    let device = Device::default();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        if !op::serves(&device, dtype) {
            continue;
        }
        check_in_order(4, &device, dtype);
        check_in_order(8, &device, dtype);
    }
}
