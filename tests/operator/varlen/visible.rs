//! Tests of the keys that each query sees, for cumulative lengths of any size and dtype.

use super::{Options, Packed};
use crate::case::seed;
use crate::dense::read;
use crate::devices::{TestDevice, devices};
use attention_cube::varlen::{Sequences, varlen_attention};
use attention_cube::{AttentionOptions, CausalAlignment, fused_attention};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Returns a table with a flag for each pair of a query and a key. The flag is true if the query sees the key. In the
/// call, the queries are zeros and the values are the unit vectors. The output of a query is therefore positive in
/// exactly those columns whose keys the query sees.
fn visible(
    device: &Device,
    [q_len, kv_len]: [usize; 2],
    sequences: &Sequences,
    options: AttentionOptions,
) -> Vec<bool> {
    let zeros = |length| Tensor::<4>::zeros([1, 1, length, 1], (device, DType::F32));
    let units: Vec<f32> = (0..kv_len * kv_len)
        .map(|index| f32::from(index % (kv_len + 1) == 0))
        .collect();
    let units = TensorData::new(units, [1, 1, kv_len, kv_len]);
    let units = Tensor::<4>::from_data(units, (device, DType::F32));
    let options = sequences.options(q_len, kv_len, options);
    let options = options.expect("the bounds fit each other");
    let output = fused_attention(zeros(q_len), zeros(kv_len), units, options);
    read(output).into_iter().map(|share| share > 0.0).collect()
}

/// Returns the same table as [`visible`], computed from the definition of packed sequences.
fn visible_by_definition(packed: &Packed, options: &Options) -> Vec<bool> {
    let mut visible = vec![false; packed.q_len * packed.kv_len];
    for [q0, q1, k0, k1] in packed.sequences() {
        let shift = match options.causal.unwrap_or_default() {
            CausalAlignment::TopLeft => 0,
            _ => (k1 - k0) as i128 - (q1 - q0) as i128,
        };
        let (left, right) = options.window.unwrap_or_default();
        let right = if options.causal.is_some() {
            Some(0)
        } else {
            right
        };
        for i in q0..q1 {
            for j in k0..k1 {
                let distance = (j - k0) as i128 - ((i - q0) as i128 + shift);
                visible[i * packed.kv_len + j] = left.is_none_or(|left| -distance <= left as i128)
                    && right.is_none_or(|right| distance <= right as i128);
            }
        }
    }
    visible
}

/// Checks every alignment and window over sequences of any lengths. The kernels find a query's sequence by a binary
/// search over the bounds of the sequences. The number of search steps grows at each power of two, so the tests have
/// numbers of bounds near powers of two.
pub fn check_visible(device: &TestDevice) {
    let mut rng = StdRng::seed_from_u64(seed());
    for count in [1, 2, 3, 4, 6, 7, 8, 40] {
        let most = 180 / count;
        let lengths: Vec<_> = (0..count)
            .map(|_| (rng.random_range(0..=most), rng.random_range(0..=most)))
            .collect();
        let packed = Packed::new(&lengths);
        let alignments = [CausalAlignment::BottomRight, CausalAlignment::TopLeft];
        let causal = [None, Some(alignments[0]), Some(alignments[1])];
        let edges = [None, Some(0), Some(5), Some(usize::MAX)];
        for options in causal.into_iter().flat_map(|causal| {
            edges.into_iter().flat_map(move |left| {
                edges.map(|right| Options {
                    causal,
                    window: Some((left, right)),
                    others: false,
                })
            })
        }) {
            let found = visible(
                &device.device,
                [packed.q_len, packed.kv_len],
                &packed.on(&device.device),
                options.positions(),
            );
            assert!(
                found == visible_by_definition(&packed, &options),
                "{} {options:?} {lengths:?}",
                device.name
            );
        }
    }
}

#[test]
fn varlen_of_any_lengths_shows_keys_of_definition() {
    for device in devices() {
        check_visible(&device);
    }
}

/// Checks cumulative lengths of every integer dtype. Some cumulative lengths exceed the number of rows, and some descend.
#[test]
fn varlen_bounds_of_every_dtype_are_clamped() {
    for device in devices() {
        let on = &device.device;
        let sizes = [6, 9];
        for (dtype, beyond) in [
            (DType::I8, 127),
            (DType::U8, 255),
            (DType::I32, i64::from(i32::MAX)),
            (DType::U32, i64::from(u32::MAX)),
            (DType::I64, 1 << 33),
        ] {
            if !on.supports_dtype(dtype) {
                continue;
            }
            let bounds = |bounds: [i64; 3]| Tensor::<1, Int>::from_data(bounds, (on, dtype));
            let seen = |queries: [i64; 3], keys: [i64; 3]| {
                let sequences = Sequences {
                    cu_seqlens_q: bounds(queries),
                    cu_seqlens_k: bounds(keys),
                };
                visible(on, sizes, &sequences, AttentionOptions::new().causal())
            };
            // The expected cumulative lengths are the given ones, clamped to the number of rows. The clamped lengths
            // decide the causal alignment of the second sequence.
            for (given, clamped) in [
                (([0, 2, beyond], [0, 2, 6]), ([0, 2, 6], [0, 2, 6])),
                (([0, 2, 5], [0, 4, beyond]), ([0, 2, 5], [0, 4, 9])),
                (([1, beyond, beyond], [3, 8, 8]), ([1, 6, 6], [3, 8, 8])),
            ] {
                let found = seen(given.0, given.1);
                let name = device.name;
                assert_eq!(
                    found,
                    seen(clamped.0, clamped.1),
                    "{name} {dtype:?} {given:?}"
                );
                assert!(found.contains(&true), "{name} {dtype:?} {given:?}");
            }
            for descending in [[4, 1, 6], [6, 3, 0], [beyond, 3, 1]] {
                // The result for descending bounds is not specified, but no access may leave the tensors.
                seen(descending, descending);
            }
        }
    }
}

#[test]
fn varlen_without_sequences_or_rows_gives_zeros() {
    for device in devices() {
        let on = &device.device;
        let bounds =
            |bounds: &[i32]| Sequences::of_self_attention(Tensor::<1, Int>::from_ints(bounds, on));
        let attend = |rows: Tensor<3>, sequences: Sequences| {
            let options = AttentionOptions::new().causal();
            varlen_attention(rows.clone(), rows.clone(), rows, &sequences, options)
        };
        let found = attend(Tensor::ones([6, 1, 8], on), bounds(&[0]));
        assert_eq!(read(found), [0.0; 48], "{}", device.name);
        for empty in [[0, 1, 8], [0, 0, 8], [3, 0, 8]] {
            let rows = Tensor::ones(empty, &on.clone().autodiff()).require_grad();
            let found = attend(rows.clone(), bounds(&[0, 0, 0]));
            assert_eq!(found.dims(), empty, "{}", device.name);
            let gradient = rows.grad(&found.sum().backward());
            let gradient = gradient.expect("the rows have a gradient");
            assert_eq!(gradient.dims(), empty, "{}", device.name);
        }
    }
}
