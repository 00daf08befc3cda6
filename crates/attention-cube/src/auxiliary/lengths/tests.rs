//! Tests of the block ranges of tiles. The block range of a query tile holds the key blocks that may share a document
//! with the tile. The block range of a key tile holds the query blocks that may share a document with the tile. All
//! tokens of a document have one segment id.

use super::*;
use crate::options::AttentionOptions;
use crate::testing::{cube_device, device};
use crate::types::tensors::{MaybeBool, MaybeFloat, MaybeInt};
use burn::backend::{
    ops::{FloatTensorOps, IntTensorOps},
    read_sync,
};
use burn::tensor::{Tensor, TensorData};

/// Returns the expected block range of each tile of `size` tokens. `stationary_side` holds the segment ids of the
/// tokens in the tiles. `others` holds the segment ids of the tokens that the kernel streams in blocks of `other_size`
/// tokens. A returned range consists of the index of the first block that shares a segment id with the tile, and the
/// index after the last block that shares one.
fn expected(
    stationary_side: &[i32],
    others: &[i32],
    size: usize,
    other_size: usize,
) -> Vec<[i32; 2]> {
    let span = |block: &[i32]| {
        let shares = |other: &&[i32]| other.iter().any(|id| block.contains(id));
        let others: Vec<&[i32]> = others.chunks(other_size).collect();
        let first = others.iter().position(&shares);
        let last = others.iter().rposition(shares);
        match first.zip(last) {
            Some((first, last)) => [first as i32, last as i32 + 1],
            None => [others.len() as i32, 0],
        }
    };
    stationary_side.chunks(size).map(span).collect()
}

/// Returns the expected order of a sequence's tiles of queries, given their block ranges. Tiles are ranked from the last
/// tile. The order sorts ranks by the number of base-4 digits of the range's size, and is stable.
fn longest_first(ranges: &[[i32; 2]]) -> Vec<i32> {
    let mut order: Vec<usize> = (0..ranges.len()).collect();
    order.sort_by_key(|rank| {
        let [first, end] = ranges[ranges.len() - 1 - rank];
        std::cmp::Reverse((end - first).max(0).checked_ilog(4))
    });
    order.into_iter().map(|rank| rank as i32).collect()
}

/// Checks the block ranges of query tiles and key tiles, and the order of query tiles. `queries` and `keys` hold one list of segment ids per sequence.
fn check(queries: [Vec<i32>; 2], keys: [Vec<i32>; 2]) {
    let cube = cube_device();
    let (q_len, kv_len) = (queries[0].len(), keys[0].len());
    let ids = |ids: &[Vec<i32>; 2], length: usize| {
        let data = TensorData::new(ids.concat(), [2, length]);
        MaybeInt::Present(CubeBackend::int_from_data(data, &cube))
    };
    let operand = |length| Tensor::<4>::zeros([2, 1, length, 8], &device());
    let options = AttentionOptions::new();
    let problem = AttentionProblem::new(
        &operand(q_len),
        &operand(kv_len),
        &operand(kv_len),
        &options,
    );
    let problem = AttentionProblem {
        segments: true,
        ..problem.expect("the sizes fit each other")
    };
    let zeros = |length| {
        let data = TensorData::zeros::<f32, _>([2, 1, length, 8]);
        CubeBackend::float_from_data(data, &cube)
    };
    let inputs = AttentionInputs::<CubeBackend> {
        query: zeros(q_len),
        key: zeros(kv_len),
        value: zeros(kv_len),
        page_table: MaybeInt::Absent,
        mask: MaybeBool::Absent,
        bias: MaybeFloat::Absent,
        kv_lengths: MaybeInt::Absent,
        query_lengths: MaybeInt::Absent,
        query_segments: ids(&queries, q_len),
        key_segments: ids(&keys, kv_len),
        intervals: MaybeInt::Absent,
        sinks: MaybeFloat::Absent,
        score_table: MaybeFloat::Absent,
        mask_table: MaybeFloat::Absent,
    };
    let blocks =
        [(64, 32, Side::Queries), (16, 128, Side::Keys)].map(|(queries, keys, stationary_side)| {
            Blocks {
                queries,
                keys,
                stationary_side,
                longest_first: stationary_side == Side::Queries,
            }
        });
    let (packed, offsets) = prepare(&inputs, &problem, &blocks);
    let packed = packed.expect("the inputs have segments");
    let data = read_sync(CubeBackend::int_into_data(packed)).expect("the tensor can be read");
    let lengths_and_ids: Vec<i32> = data.try_into_vec().expect("the tensor has dtype i32");
    for (blocks, offsets) in blocks.into_iter().zip(offsets) {
        for batch in 0..2 {
            let (start, size, expected) = match blocks.stationary_side {
                Side::Queries => (
                    offsets.query_bounds,
                    q_len.div_ceil(blocks.queries),
                    expected(&queries[batch], &keys[batch], blocks.queries, blocks.keys),
                ),
                Side::Keys => (
                    offsets.key_bounds,
                    kv_len.div_ceil(blocks.keys),
                    expected(&keys[batch], &queries[batch], blocks.keys, blocks.queries),
                ),
            };
            let of_blocks = &lengths_and_ids[start + BLOCK_BOUNDS * batch * size..];
            let found: Vec<[i32; 2]> = of_blocks
                .chunks(BLOCK_BOUNDS)
                .take(size)
                .map(|block| [block[3], block[4]])
                .collect();
            assert_eq!(
                found, expected,
                "{:?}, sequence {batch}",
                blocks.stationary_side
            );
            if blocks.longest_first {
                let counter = offsets.key_bounds + BLOCK_BOUNDS * 2 * kv_len.div_ceil(blocks.keys);
                let of_sequence = &lengths_and_ids[counter + 1 + batch * size..][..size];
                assert_eq!(of_sequence, longest_first(&found), "sequence {batch}");
            }
        }
    }
}

/// Checks that the block range of a tile covers only blocks that contain documents of the tile. The tokens of every
/// document are contiguous in this test.
#[test]
fn prepare_block_range_covers_only_own_documents() {
    let ids = |length: usize, document: usize| (0..length).map(move |i| (i / document) as i32);
    // In the second sequence, the keys lack the segment ids 21 to 29, which the queries have.
    let leaps = |id: i32| if id > 20 { id + 9 } else { id };
    check(
        [ids(1000, 7).collect(), ids(1000, 27).collect()],
        [ids(1100, 7).collect(), ids(1100, 27).map(leaps).collect()],
    );
}

/// Checks that padding does not widen a block range. The padding starts in the block in which the last document ends.
/// The padding tokens have a segment id that no document has.
#[test]
fn prepare_padding_does_not_widen_block_range() {
    let ids = |padding: i32| -> Vec<i32> {
        let id = |i: usize| if i < 950 { i as i32 / 100 + 1 } else { padding };
        (0..1000).map(id).collect()
    };
    check([ids(0), ids(-1)], [ids(0), ids(-1)]);
}

/// Checks the order if documents, and with them the block ranges, differ in length by up to 64 times.
#[test]
fn prepare_order_of_documents_of_all_lengths() {
    let ids = |documents: &[usize]| -> Vec<i32> {
        let of_document = |(id, length): (usize, &usize)| vec![id as i32; *length];
        documents.iter().enumerate().flat_map(of_document).collect()
    };
    let mixed = ids(&[10, 640, 20, 80, 330, 40, 5, 160, 15]);
    let shorter = ids(&[300, 30, 30, 940]);
    check([mixed.clone(), shorter.clone()], [mixed, shorter]);
}
