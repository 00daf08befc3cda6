//! Tests of masks with one element per block of queries and block of keys. The reference gets the same mask with one
//! element per score.

use crate::case::{Case, FULL};
use crate::dense::{Dense, read};
use crate::devices::devices;
use attention_cube::CausalAlignment::BottomRight;
use attention_cube::{AttentionOptions, BlockMask, fused_attention};
use burn::tensor::{Bool, DType, Device, Distribution, Int, Tensor, TensorData};

/// Returns a case with 2 sequences, 4 query heads, 2 key heads and a random block mask.
fn case([q_len, kv_len]: [usize; 2], block: [usize; 2]) -> Case {
    Case {
        mask: Some(FULL),
        mask_block: Some(block),
        ..Case::new([2, 4, 2, q_len, kv_len, 32, 32])
    }
}

/// Checks a case in which keys that no query sees are NaN on the devices. The second block of keys is hidden from all
/// queries that read the first key head.
fn check(case: &Case) {
    let mut given = case.inputs();
    let group = case.q_heads / case.kv_heads;
    if let Some((mask, [_, keys])) = given.mask.as_mut().zip(case.mask_block) {
        *mask = Dense::from_fn(mask.shape, |[b, h, i, j]| {
            match h < group && j / keys == 1 {
                true => 0.0,
                false => mask.at([b, h, i, j]),
            }
        });
    }
    let equivalent = given.with_mask_of_scores();
    case.poison_unused_keys(&mut given);
    case.check_inputs(&given, &equivalent);
}

#[test]
fn block_mask_of_every_block_size_equals_a_mask() {
    for block in [[64, 64], [1, 64], [48, 80], [7, 3], [1000, 1000]] {
        check(&case([150, 230], block));
    }
}

#[test]
fn block_mask_with_other_options_equals_a_mask() {
    let plain = || case([130, 170], [32, 24]);
    check(&Case {
        causal: Some(BottomRight),
        kv_lengths: Some(vec![170, 91]),
        query_lengths: Some(vec![40, 130]),
        ..plain()
    });
    check(&Case {
        window: (Some(70), Some(9)),
        sinks: true,
        softcap: Some(2.0),
        ..plain()
    });
    check(&Case {
        bias: Some([false, true, true, true]),
        dropout: Some((0.3, 5)),
        ..plain()
    });
}

#[test]
fn block_mask_of_broadcast_shapes_equals_a_mask() {
    for bits in 0..16 {
        check(&Case {
            mask: Some([0, 1, 2, 3].map(|dim| bits >> dim & 1 == 1)),
            expanded: bits % 3 == 0,
            ..case([40, 70], [16, 32])
        });
    }
}

/// Checks few query rows, for which kernels put the query heads of a GQA group in one tile and split the keys.
#[test]
fn block_mask_of_few_queries_equals_a_mask() {
    for (q_len, block) in [(1, [1, 64]), (1, [1, 100]), (3, [2, 32])] {
        check(&case([q_len, 1500], block));
    }
    // Five query heads read a key head, so the last of several tiles has rows of fewer heads than the others.
    for mask in [FULL, [true, false, true, true]] {
        check(&Case {
            q_heads: 10,
            mask: Some(mask),
            ..case([6, 700], [2, 48])
        });
    }
}

#[test]
fn block_mask_in_half_precision_equals_a_mask() {
    for dtype in [DType::F16, DType::BF16] {
        check(&Case {
            dtype,
            causal: Some(BottomRight),
            ..case([150, 230], [64, 64])
        });
        for (width, block) in [(192, [64, 64]), (256, [1, 33])] {
            check(&Case {
                batch: 1,
                q_heads: 2,
                kv_heads: 1,
                dtype,
                head_dim: width,
                value_dim: width,
                ..case([70, 180], block)
            });
        }
    }
    // On Hopper, the blocks of the plain kernel would cross the bounds of these elements.
    check(&Case {
        dtype: DType::BF16,
        head_dim: 64,
        value_dim: 64,
        ..case([300, 520], [128, 128])
    });
}

/// Returns a random tensor with 2 sequences, 4 heads and head size 16.
fn random(length: usize, device: &Device) -> Tensor<4> {
    Tensor::random([2, 4, length, 16], Distribution::Default, device)
}

fn output(mask: BlockMask, device: &Device, [query, key]: [&Tensor<4>; 2]) -> Vec<f64> {
    let options = AttentionOptions::new().causal().block_mask(mask);
    let [query, key] = [query, key].map(|rows| rows.clone().to_device(device));
    read(fused_attention(query, key.clone(), key, options))
}

#[test]
fn from_table_with_repeats_and_absent_entries_equals_a_block_mask() {
    // Six key blocks. The entries −1 and 6 and above list no block.
    let rows: [[i64; 4]; 3] = [[0, -1, 0, 6], [5, 1, -7, 1], [2, 3, 100, 0]];
    let visible: Vec<bool> = (rows.iter())
        .flat_map(|row| (0..6).map(|block| row.contains(&block)))
        .collect();
    for target in devices() {
        let device = &target.device;
        let [query, key] = [33, 90].map(|length| random(length, device));
        let mask = TensorData::new(visible.clone(), [1, 1, 3, 6]);
        let mask = BlockMask::new(Tensor::<4, Bool>::from_data(mask, device), [16, 16]);
        let expected = output(mask, device, [&query, &key]);
        for dtype in [DType::I32, DType::I64, DType::I8, DType::I16] {
            if !device.supports_dtype(dtype) {
                continue;
            }
            let table = TensorData::new(rows.concat(), [1, 1, 3, 4]).convert_dtype(dtype);
            let table = Tensor::<4, Int>::from_data(table, (device, dtype));
            let mask = BlockMask::from_table(table, 6, [16, 16]);
            let found = output(mask, device, [&query, &key]);
            assert_eq!(found, expected, "{}, {dtype:?}", target.name);
        }
    }
}

/// Checks a table on an autodiff device, in an unsigned dtype, and with an entry whose low bits list a block.
#[test]
fn from_table_of_tracked_call_has_gradients() {
    for target in devices() {
        let device = &target.device.clone().autodiff();
        let [query, key] = [6, 12].map(|length| random(length, device));
        let gradient = |dtype, entries: Vec<i64>| {
            let table = TensorData::new(entries, [1, 1, 2, 2]).convert_dtype(dtype);
            let table = Tensor::<4, Int>::from_data(table, (device, dtype));
            let options =
                AttentionOptions::new().block_mask(BlockMask::from_table(table, 3, [4, 4]));
            let query = query.clone().detach().require_grad();
            let output = fused_attention(query.clone(), key.clone(), key.clone(), options);
            let gradients = (output.clone() * output).sum().backward();
            read(query.grad(&gradients).expect("the query has a gradient"))
        };
        let expected = gradient(DType::I32, vec![0, 2, 1, 7]);
        assert!(
            expected.iter().any(|value| *value != 0.0),
            "{}",
            target.name
        );
        for dtype in [DType::U32, DType::U8] {
            if target.device.supports_dtype(dtype) {
                let found = gradient(dtype, vec![0, 2, 1, 7]);
                assert_eq!(found, expected, "{}, {dtype:?}", target.name);
            }
        }
        if target.device.supports_dtype(DType::I64) {
            let found = gradient(DType::I64, vec![0, 2, 1, (1 << 32) + 2]);
            assert_eq!(found, expected, "{}", target.name);
        }
    }
}

#[test]
fn from_table_without_keys_gives_zeros() {
    for target in devices() {
        let device = &target.device;
        let [query, key] = [3, 0].map(|length| random(length, device));
        let table = Tensor::<4, Int>::from_ints([[[[0]]]], device);
        let mask = BlockMask::from_table(table, 0, [4, 4]);
        let found = output(mask, device, [&query, &key]);
        assert!(found.iter().all(|value| *value == 0.0), "{}", target.name);
    }
}

/// Checks a table of a narrow dtype that cannot represent the number of key blocks, and tables that list nothing.
#[test]
fn from_table_of_narrow_or_empty_tables_shows_the_listed_blocks() {
    for target in devices() {
        let device = &target.device;
        let [query, key] = [2, 600].map(|length| random(length, device));
        let of_table = |entries: &[i64], dtype| {
            let table = TensorData::new(entries.to_vec(), [1, 1, 1, entries.len()]);
            let table = Tensor::<4, Int>::from_data(table.convert_dtype(dtype), (device, dtype));
            let mask = BlockMask::from_table(table, 300, [2, 2]);
            output(mask, device, [&query, &key])
        };
        if device.supports_dtype(DType::I8) {
            let [narrow, wide] =
                [DType::I8, DType::I32].map(|dtype| of_table(&[0, 127, -1], dtype));
            assert_eq!(narrow, wide, "{}", target.name);
            assert!(wide.iter().any(|value| *value != 0.0), "{}", target.name);
        }
        for entries in [&[][..], &[-1, 300]] {
            let found = of_table(entries, DType::I32);
            assert!(found.iter().all(|value| *value == 0.0), "{}", target.name);
        }
    }
}

#[test]
fn per_kv_head_repeats_each_head_for_its_group() {
    for target in devices() {
        let device = &target.device;
        let lists = Tensor::<4, Int>::from_data([[[[0]], [[1]]]], device);
        let mask = BlockMask::from_table(lists, 2, [8, 8]).per_kv_head(2);
        let query = random(8, device);
        let values = Tensor::<4>::from_data([[[[1.0], [2.0]]]], device)
            .repeat_dim(3, 16)
            .reshape([1, 1, 2, 16]);
        let values = values.repeat_dim(2, 1).expand([2, 2, 2, 16]);
        // Keys 0 to 7 have the value 1, and keys 8 to 15 have the value 2.
        let values = values.reshape([2, 2, 2, 1, 16]).expand([2, 2, 2, 8, 16]);
        let values = values.reshape([2, 2, 16, 16]);
        let options = AttentionOptions::new().block_mask(mask);
        let found = read(fused_attention(query, values.clone(), values, options));
        for (index, value) in found.iter().enumerate() {
            let head = index / (8 * 16) % 4;
            let expected = if head < 2 { 1.0 } else { 2.0 };
            assert!((value - expected).abs() < 1e-3, "{}, {head}", target.name);
        }
    }
}
