//! GEMM with `mma.sync`, for the projections around attention and their gradients.
//!
//! Algorithm: a cube computes a tile of 128 rows and 64, 128 or 256 columns. Each warp computes 64 rows and 32 or 64
//! columns. `cp.async` copies chunks of 32 inner elements to a ring buffer in shared memory, and `ldmatrix` loads the
//! operands. Either operand may be contiguous along either dimension. The output is rounded once, staged in shared
//! memory, and written in pieces of 16 bytes.
//!
//! If a GEMM has few tiles, several cubes divide the inner dimension of a tile (split-K). Each writes its sums in f32,
//! and [`reduce`](super::reduce) adds them up in a fixed order.
//!
//! Budget: shared memory holds 48 to 96 KB ([`Tiles::shared_memory`]). A thread has up to 128 accumulators, and 20
//! registers of operands.
//!
//! Schedule: all but one stage of the ring are in flight while one is multiplied. There is one barrier per chunk.
//!
//! Bound: the tensor cores, for tiles of 128 and 256 columns. A chunk of 256 columns takes them about 804 clocks of an
//! H200. Its reads and writes of shared memory, 88 KB, take 704. A tile of 64 columns is bound by shared memory.

use super::operand::{
    OUTPUT_SUBTILE_BYTES, Operand, copy_chunk, left_fragment, pair_offset, right_fragments,
};
use super::plan::Tiles;
use crate::ampere::FRAGMENT_ROWS;
use crate::ampere::cp_async::{
    PIECE, PIECE_BYTES, await_copies, commit_copies, half_address, piece_address, store_pair,
    store_piece,
};
use crate::ampere::gemv::add_pairs_of_two_rows;
use crate::nvidia::ptx::{element_address, pack, shared_address, store_shared};
use cubecl::prelude::*;

/// The sizes of a GEMM, and the strides of its operands in elements.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Sizes {
    pub rows: u32,
    pub inner: u32,
    pub columns: u32,
    pub lhs_stride: u32,
    pub rhs_stride: u32,
    /// The width of the grid of tiles.
    pub tile_columns: u32,
    /// The height of the grid of tiles.
    pub tile_rows: u32,
    /// The number of tile rows whose tiles are numbered column by column.
    pub together: u32,
    /// The number of chunks of each split but the last.
    pub split_chunks: u32,
}

/// A cube's tile: its first row and column, and its chunks of the inner dimension.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Place {
    row: u32,
    column: u32,
    split: u32,
    first_chunk: u32,
    chunks: u32,
}

/// Multiplies `lhs`, `[rows, inner]`, by `rhs`, `[inner, columns]`. `output` is `[rows, columns]`, or `[splits, rows,
/// columns]` in f32 if `tiles.is_split`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn product<E: Float, O: Float>(
    lhs: &Tensor<E>,
    rhs: &Tensor<E>,
    output: &mut Tensor<O>,
    sizes: Sizes,
    #[comptime] tiles: Tiles,
    #[define(E, O)] _elements: [ElemType; 2],
) {
    let memory = Shared::<[u32]>::new_aligned_slice(comptime!(tiles.shared_memory() / 4), 128usize);
    let start = shared_address(&memory);
    let place = place_of_cube(sizes, tiles);
    // SAFETY: the pointer only gives the address of `output`. Only elements of `output` are written.
    let output = unsafe { output.as_slice().as_ptr_unchecked() };
    let target = element_address::<O>(output, 0u64, 2usize);
    let left = Operand {
        start: half_address::<E>(lhs, 0u64),
        stride: sizes.lhs_stride,
        outer: sizes.rows,
        inner: sizes.inner,
    };
    let right = Operand {
        start: half_address::<E>(rhs, 0u64),
        stride: sizes.rhs_stride,
        outer: sizes.columns,
        inner: sizes.inner,
    };
    let warp = UNIT_POS / 32u32;
    let warp_row = warp / comptime!(tiles.warps as u32) * comptime!(Tiles::WARP_ROWS as u32);
    let warp_column = warp % comptime!(tiles.warps as u32) * comptime!(tiles.warp_columns() as u32);
    let accumulators = comptime!(Tiles::FRAGMENTS * tiles.groups());
    let mut sums = Array::<Vector<f32, Const<4>>>::new(accumulators);
    #[unroll]
    for sum in 0..accumulators {
        sums[sum] = Vector::<f32, Const<4>>::zeroed();
    }

    #[unroll]
    for stage in 0..comptime!(tiles.stages - 1) {
        let slot = start + comptime!((stage * tiles.stage_bytes()) as u32);
        copy_stage(
            slot,
            left,
            right,
            place,
            comptime!(stage as u32).runtime(),
            tiles,
        );
    }
    let mut chunk = 0u32;
    let mut slot = 0u32;
    let mut free_slot = comptime!(((tiles.stages - 1) * tiles.stage_bytes()) as u32).runtime();
    while chunk < place.chunks {
        await_copies(comptime!(tiles.stages - 2));
        // All warps have multiplied the previous chunk, whose stage the next copies overwrite.
        sync_cube();
        copy_stage(
            start + free_slot,
            left,
            right,
            place,
            chunk + comptime!(tiles.stages as u32 - 1),
            tiles,
        );
        multiply_stage(&mut sums, start + slot, warp_row, warp_column, tiles);
        free_slot = slot;
        slot += comptime!(tiles.stage_bytes() as u32);
        if slot == comptime!((tiles.stages * tiles.stage_bytes()) as u32) {
            slot = 0u32;
        }
        chunk += 1u32;
    }

    if comptime!(tiles.is_split) {
        write_sums(&sums, target, sizes, place, warp_row, warp_column, tiles);
    } else {
        await_copies(0usize);
        sync_cube();
        stage_output(&sums, start, warp_row, warp_column, tiles);
        sync_cube();
        write_output(target, start, sizes, place, tiles);
    }
}

/// Returns the cube's tile. The rows of the grid of tiles are divided into groups of `together` rows, and the tiles of
/// a group are numbered column by column. Neighboring cubes therefore read the same parts of the operands.
#[cube]
fn place_of_cube(sizes: Sizes, #[comptime] tiles: Tiles) -> Place {
    let of_split = sizes.tile_rows * sizes.tile_columns;
    let split = CUBE_POS as u32 / of_split;
    let tile = CUBE_POS as u32 % of_split;
    let of_group = sizes.together * sizes.tile_columns;
    let first = tile / of_group * sizes.together;
    let height = min(sizes.together, sizes.tile_rows - first);
    let within = tile % of_group;
    let all_chunks = sizes.inner.div_ceil(comptime!(Tiles::DEPTH as u32));
    let first_chunk = split * sizes.split_chunks;
    Place {
        row: (first + within % height) * comptime!(Tiles::ROWS as u32),
        column: within / height * comptime!(tiles.columns as u32),
        split,
        first_chunk,
        chunks: min(
            sizes.split_chunks,
            all_chunks - min(first_chunk, all_chunks),
        ),
    }
}

/// Starts the copies of chunk `chunk` of the cube's tile. Closes a group of copies, which is empty if there is no such
/// chunk.
#[cube]
fn copy_stage(
    slot: u32,
    left: Operand,
    right: Operand,
    place: Place,
    chunk: u32,
    #[comptime] tiles: Tiles,
) {
    if chunk < place.chunks {
        let inner = (place.first_chunk + chunk) * comptime!(Tiles::DEPTH as u32);
        copy_chunk(
            slot,
            left,
            place.row,
            inner,
            Tiles::ROWS,
            tiles.lhs,
            comptime!(tiles.units()),
        );
        copy_chunk(
            slot + comptime!(tiles.lhs_bytes() as u32),
            right,
            place.column,
            inner,
            tiles.columns,
            tiles.rhs,
            comptime!(tiles.units()),
        );
    }
    commit_copies();
}

/// Multiplies the chunk in a stage, and adds the products to the warp's sums.
#[cube]
fn multiply_stage(
    sums: &mut Array<Vector<f32, Const<4>>>,
    slot: u32,
    warp_row: u32,
    warp_column: u32,
    #[comptime] tiles: Tiles,
) {
    let groups = comptime!(tiles.groups());
    let right_start = slot + comptime!(tiles.lhs_bytes() as u32);
    #[unroll]
    for step in 0..comptime!(Tiles::DEPTH / 16) {
        let mut lefts = Array::<Vector<u32, Const<4>>>::new(Tiles::FRAGMENTS);
        #[unroll]
        for fragment in 0..Tiles::FRAGMENTS {
            let row = warp_row + comptime!((fragment * FRAGMENT_ROWS) as u32);
            lefts[fragment] = left_fragment(slot, row, step, tiles.lhs);
        }
        #[unroll]
        for pair in 0..comptime!(groups / 2) {
            let column = warp_column + comptime!((16 * pair) as u32);
            let rights = right_fragments(right_start, column, step, tiles.rhs);
            #[unroll]
            for fragment in 0..Tiles::FRAGMENTS {
                let left = lefts[fragment];
                #[unroll]
                for group in 0..2usize {
                    let at = comptime!(fragment * groups + 2 * pair + group);
                    sums[at] = add_pairs_of_two_rows(
                        sums[at],
                        left.extract(0usize),
                        left.extract(2usize),
                        left.extract(1usize),
                        left.extract(3usize),
                        rights.extract(comptime!(2 * group)),
                        rights.extract(comptime!(2 * group + 1)),
                        tiles.half,
                    );
                }
            }
        }
    }
}

/// Rounds the warp's sums, and writes them to shared memory.
#[cube]
fn stage_output(
    sums: &Array<Vector<f32, Const<4>>>,
    start: u32,
    warp_row: u32,
    warp_column: u32,
    #[comptime] tiles: Tiles,
) {
    let lane = UNIT_POS % 32u32;
    #[unroll]
    for fragment in 0..Tiles::FRAGMENTS {
        #[unroll]
        for group in 0..comptime!(tiles.groups()) {
            let sum = sums[comptime!(fragment * tiles.groups() + group)];
            let column = warp_column + comptime!(8 * group as u32) + lane % 4u32 * 2u32;
            #[unroll]
            for below in 0..2usize {
                let row = warp_row
                    + comptime!((fragment * FRAGMENT_ROWS + 8 * below) as u32)
                    + lane / 4u32;
                let word = pack(
                    sum.extract(comptime!(2 * below)),
                    sum.extract(comptime!(2 * below + 1)),
                    tiles.half,
                );
                store_shared(start + pair_offset(row, column), word);
            }
        }
    }
}

/// Writes the staged output to global memory in pieces of 16 bytes. `output` is the address of the output.
#[cube]
fn write_output(output: u64, start: u32, sizes: Sizes, place: Place, #[comptime] tiles: Tiles) {
    let of_row =
        comptime!((tiles.subtiles() * OUTPUT_SUBTILE_BYTES / Tiles::ROWS / PIECE_BYTES) as u32);
    let pieces = comptime!(Tiles::ROWS as u32) * of_row;
    let mut index = UNIT_POS;
    while index < pieces {
        let row = index / of_row;
        let piece = index % of_row;
        let all_row = place.row + row;
        let column = place.column + piece * comptime!(PIECE as u32);
        if all_row < sizes.rows && column < sizes.columns {
            let element =
                u64::cast_from(all_row) * u64::cast_from(sizes.columns) + u64::cast_from(column);
            store_piece(
                output + 2u64 * element,
                piece_address(start, row, piece, Tiles::ROWS),
            );
        }
        index += comptime!(tiles.units() as u32);
    }
}

/// Writes the warp's sums in f32 to the matrix of the cube's split. `output` is the address of the first split's
/// matrix.
#[cube]
fn write_sums(
    sums: &Array<Vector<f32, Const<4>>>,
    output: u64,
    sizes: Sizes,
    place: Place,
    warp_row: u32,
    warp_column: u32,
    #[comptime] tiles: Tiles,
) {
    let lane = UNIT_POS % 32u32;
    #[unroll]
    for fragment in 0..Tiles::FRAGMENTS {
        #[unroll]
        for below in 0..2usize {
            let row = place.row
                + warp_row
                + comptime!((fragment * FRAGMENT_ROWS + 8 * below) as u32)
                + lane / 4u32;
            if row < sizes.rows {
                let of_split =
                    u64::cast_from(place.split) * u64::cast_from(sizes.rows) + u64::cast_from(row);
                let of_row = of_split * u64::cast_from(sizes.columns);
                #[unroll]
                for group in 0..comptime!(tiles.groups()) {
                    let sum = sums[comptime!(fragment * tiles.groups() + group)];
                    let column = place.column
                        + warp_column
                        + comptime!(8 * group as u32)
                        + lane % 4u32 * 2u32;
                    if column < sizes.columns {
                        store_pair(
                            output + (of_row + u64::cast_from(column)) * 4u64,
                            sum.extract(comptime!(2 * below)),
                            sum.extract(comptime!(2 * below + 1)),
                        );
                    }
                }
            }
        }
    }
}
