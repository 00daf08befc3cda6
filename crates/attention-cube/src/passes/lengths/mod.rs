//! Lengths and segments in one buffer: `[lengths | ids of queries | ids of keys | bounds of query blocks
//! | bounds of key blocks | …]`, so that they take one binding. Bounds are the smallest and the largest
//! id of a block, and its ids' bits, by which kernels skip pairs of blocks without a common document, and, of the side that tiles
//! hold, the first and the last block that a tile has one in common with; kernels with other tiles have bounds of
//! their own. After the bounds of key blocks comes 0, from which cubes count the tiles that they take.

mod kernel;

use crate::AttentionProblem;
use crate::backend::AttentionInputs;
use crate::math::side::Side;
use crate::math::visibility::{BLOCK_BOUNDS, ExtentLaunch, OPEN};
use crate::passes::lengths::kernel::{bound_segments, pack_lengths_and_ids, span_segments};
use crate::tile::tiles::UnitTiles;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{cube_count, empty};
use cubecl::prelude::CubeDim;

/// Tokens of the blocks that a kernel divides queries and keys into, and whose are its tiles.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Blocks {
    pub queries: usize,
    pub keys: usize,
    pub held: Side,
}

impl Blocks {
    /// Of a kernel whose tiles keep queries and stream keys.
    pub fn of_queries(tiles: &UnitTiles) -> Self {
        Self {
            queries: tiles.rows,
            keys: tiles.columns(),
            held: Side::Queries,
        }
    }

    /// Of a kernel whose tiles keep keys and stream queries.
    pub fn of_keys(tiles: &UnitTiles) -> Self {
        Self {
            queries: tiles.columns(),
            keys: tiles.rows,
            held: Side::Keys,
        }
    }
}

/// Where a kernel with these blocks finds the integers.
#[derive(Clone, Copy)]
pub(crate) struct Places {
    blocks: Blocks,
    query_ids: usize,
    key_ids: usize,
    query_bounds: usize,
    key_bounds: usize,
}

impl Places {
    /// Lengths, window and places, as kernels take them.
    pub fn extent(&self, problem: &AttentionProblem) -> ExtentLaunch {
        let window = |side: Option<usize>| side.map_or(OPEN, |side| side.min(OPEN as usize) as i32);
        ExtentLaunch::new(
            problem.q_len as i32,
            problem.kv_len as i32,
            window(problem.window_left),
            window(problem.right()),
            i32::from(problem.is_bottom_right()),
            self.query_ids as u32,
            self.key_ids as u32,
            self.query_bounds as u32,
            self.key_bounds as u32,
            problem.q_len.div_ceil(self.blocks.queries) as u32,
            problem.kv_len.div_ceil(self.blocks.keys) as u32,
        )
    }
}

/// The packed integers, if any, and the places in them for every kind of blocks.
pub(crate) fn prepare(
    inputs: &AttentionInputs<CubeBackend>,
    problem: &AttentionProblem,
    blocks: &[Blocks],
) -> (Option<CubeTensor>, Vec<Places>) {
    let AttentionProblem {
        batch,
        q_len,
        kv_len,
        ..
    } = *problem;
    let lengths = inputs.kv_lengths.as_option();
    let most = Some(kv_len as i32);
    let queries = inputs.query_segments.as_option();
    let keys = inputs.key_segments.as_option();

    let query_ids = if lengths.is_some() { batch } else { 0 };
    let key_ids = query_ids + batch * q_len;
    let mut end = key_ids + batch * kv_len;
    let mut reserve = |blocks: usize, more: usize| {
        let start = end;
        end += BLOCK_BOUNDS * batch * blocks + more;
        start
    };
    // Kernels with the same blocks share their bounds.
    let mut distinct: Vec<Places> = Vec::with_capacity(blocks.len());
    let places = blocks.iter().map(|blocks| {
        if let Some(places) = distinct.iter().find(|places| places.blocks == *blocks) {
            return *places;
        }
        let places = Places {
            blocks: *blocks,
            query_ids,
            key_ids,
            query_bounds: reserve(q_len.div_ceil(blocks.queries), 0),
            key_bounds: reserve(kv_len.div_ceil(blocks.keys), 1),
        };
        distinct.push(places);
        places
    });
    let places = places.collect();

    let packed = match (lengths, queries.zip(keys)) {
        (None, None) => None,
        (Some(lengths), None) => {
            if lie_as_read(lengths, batch) {
                Some(lengths.clone())
            } else {
                let packed = empty(&inputs.query, [batch], DType::I32);
                pack(lengths, &packed, 0, 1, batch, most);
                Some(packed)
            }
        }
        (lengths, Some((queries, keys))) => {
            let packed = empty(&inputs.query, [end], DType::I32);
            if let Some(lengths) = lengths {
                pack(lengths, &packed, 0, 1, batch, most);
            }
            pack(queries, &packed, query_ids, q_len, batch * q_len, None);
            pack(keys, &packed, key_ids, kv_len, batch * kv_len, None);
            for places in &distinct {
                let Blocks {
                    queries,
                    keys,
                    held,
                } = places.blocks;
                bound(
                    &packed,
                    query_ids,
                    places.query_bounds,
                    batch,
                    q_len,
                    queries,
                );
                bound(&packed, key_ids, places.key_bounds, batch, kv_len, keys);
                let of_queries = (places.query_bounds, q_len.div_ceil(queries));
                let of_keys = (places.key_bounds, kv_len.div_ceil(keys));
                let counter = places.key_bounds + BLOCK_BOUNDS * batch * of_keys.1;
                match held {
                    Side::Queries => span(&packed, batch, of_queries, of_keys, counter),
                    Side::Keys => span(&packed, batch, of_keys, of_queries, counter),
                }
            }
            Some(packed)
        }
    };
    (packed, places)
}

/// Whether kernels read the lengths of so many sequences where they are: else a launch writes them.
pub(crate) fn lie_as_read(lengths: &CubeTensor, batch: usize) -> bool {
    lengths.dtype == DType::I32 && (batch == 1 || lengths.meta.strides()[0] == 1)
}

const UNITS: usize = 64;

/// Copies `count` integers, rows of `columns`, to `start`. Those that i32 may not hold are bounded by 0 and `largest` before,
/// if there is such a bound.
fn pack(
    source: &CubeTensor,
    packed: &CubeTensor,
    start: usize,
    columns: usize,
    count: usize,
    largest: Option<i32>,
) {
    let source = match source.meta.shape().num_dims() {
        1 => burn_cubecl::ops::reshape(source.clone(), Shape::new([count, 1])),
        _ => source.clone(),
    };
    let element = dtype_to_storage_type(source.dtype);
    let is_stationary = source.dtype == DType::I32 || source.dtype.size() < DType::I32.size();
    // SAFETY: `count` is the number of elements of `source`, and the callers leave room for it from `start` on.
    unsafe {
        pack_lengths_and_ids::launch_unchecked(
            &packed.client,
            cube_count(&packed.client, count.div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            source.into_tensor_arg(),
            packed.clone().into_tensor_arg(),
            start as u32,
            columns as u32,
            count as u32,
            largest.unwrap_or_default(),
            largest.is_some() && !is_stationary,
            element,
        );
    }
}

/// Writes which of the others each of the blocks may share a document with: where either's bounds start, and how many blocks a
/// sequence has. The counter starts at 0.
fn span(
    packed: &CubeTensor,
    batch: usize,
    (bounds, blocks): (usize, usize),
    (others, other_blocks): (usize, usize),
    counter: usize,
) {
    let count = batch * blocks;
    // SAFETY: the integers of all blocks lie inside `packed`, and were written before.
    unsafe {
        span_segments::launch_unchecked(
            &packed.client,
            cube_count(&packed.client, count),
            CubeDim::new_1d(UNITS as u32),
            packed.clone().into_tensor_arg(),
            bounds as u32,
            others as u32,
            blocks as u32,
            other_blocks as u32,
            count as u32,
            counter as u32,
            UNITS as u32,
        );
    }
}

/// Writes the bounds of every block of `block` tokens, of `batch` sequences whose ids start at `ids`.
fn bound(
    packed: &CubeTensor,
    ids: usize,
    bounds: usize,
    batch: usize,
    length: usize,
    block: usize,
) {
    let blocks = length.div_ceil(block);
    let count = batch * blocks;
    // SAFETY: ids and bounds lie inside `packed`, sized for both by the caller.
    unsafe {
        bound_segments::launch_unchecked(
            &packed.client,
            cube_count(&packed.client, count.div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            packed.clone().into_tensor_arg(),
            ids as u32,
            bounds as u32,
            length as u32,
            blocks as u32,
            count as u32,
            block as u32,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AttentionOptions;
    use crate::backend::{MaybeBool, MaybeFloat, MaybeInt};
    use crate::testing::{cube_device, device};
    use burn::backend::{
        ops::{FloatTensorOps, IntTensorOps},
        read_sync,
    };
    use burn::tensor::{Tensor, TensorData};

    /// For each block of `size` tokens of `held`, the first and the end of the others that share an id with it.
    fn expected(held: &[i32], others: &[i32], size: usize, other_size: usize) -> Vec<[i32; 2]> {
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
        held.chunks(size).map(span).collect()
    }

    /// Checks the spans of both sides' tiles, of two sequences.
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
        let problem = problem.expect("sizes that fit");
        let zeros = |length| {
            let data = TensorData::zeros::<f32, _>([2, 1, length, 8]);
            CubeBackend::float_from_data(data, &cube)
        };
        let inputs = AttentionInputs::<CubeBackend> {
            query: zeros(q_len),
            key: zeros(kv_len),
            value: zeros(kv_len),
            mask: MaybeBool::Absent,
            bias: MaybeFloat::Absent,
            kv_lengths: MaybeInt::Absent,
            query_segments: ids(&queries, q_len),
            key_segments: ids(&keys, kv_len),
            sinks: MaybeFloat::Absent,
        };
        let blocks =
            [(64, 32, Side::Queries), (16, 128, Side::Keys)].map(|(queries, keys, held)| Blocks {
                queries,
                keys,
                held,
            });
        let (packed, places) = prepare(&inputs, &problem, &blocks);
        let packed = packed.expect("there are segments");
        let data = read_sync(CubeBackend::int_into_data(packed)).expect("a device that answers");
        let lengths_and_ids: Vec<i32> = data.try_into_vec().expect("numbers of i32");
        for (blocks, places) in blocks.into_iter().zip(places) {
            for batch in 0..2 {
                let (start, size, expected) = match blocks.held {
                    Side::Queries => (
                        places.query_bounds,
                        q_len.div_ceil(blocks.queries),
                        expected(&queries[batch], &keys[batch], blocks.queries, blocks.keys),
                    ),
                    Side::Keys => (
                        places.key_bounds,
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
                assert_eq!(found, expected, "{:?}, sequence {batch}", blocks.held);
            }
        }
    }

    /// A tile is told no block before or after those of its documents, where these lie together: so many packed documents cost no
    /// search.
    #[test]
    fn tiles_know_the_blocks_of_their_documents() {
        let ids = |length: usize, document: usize| (0..length).map(move |i| (i / document) as i32);
        // The second sequence's keys lack some of its queries' documents.
        let leaps = |id: i32| if id > 20 { id + 9 } else { id };
        check(
            [ids(1000, 7).collect(), ids(1000, 27).collect()],
            [ids(1100, 7).collect(), ids(1100, 27).map(leaps).collect()],
        );
    }

    /// The last block of a document is not told all blocks where the padding behind it has an id of another kind.
    #[test]
    fn padding_does_not_widen_a_span() {
        let ids = |padding: i32| -> Vec<i32> {
            let id = |i: usize| if i < 950 { i as i32 / 100 + 1 } else { padding };
            (0..1000).map(id).collect()
        };
        check([ids(0), ids(-1)], [ids(0), ids(-1)]);
    }
}
