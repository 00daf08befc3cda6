//! The main loop of a CTA over the blocks of its tile.
//!
//! A *pass* is one iteration. In a pass, the warps multiply the queries by the current block's keys, and P of the
//! previous block by the previous block's values. The warps that compute the same output rows form a *row group*. Each
//! row group has its own barriers.

use super::chunks::{MainloopStep, Operands, fill};
use super::shared_offsets::SharedOffsets;
use super::softmax::{
    compute_p, load_used_keys, score_fragment, share, shared_probabilities, store_row_max,
};
use super::warp_roles::Roles;
use crate::engine::tensor_core::common::RowPair;
use crate::engine::tensor_core::common::bias::BiasWords;
use crate::engine::tensor_core::common::block_mask::{BlockMask, block_mask};
use crate::engine::tensor_core::common::block_range::{next_block, tile_position};
use crate::engine::tensor_core::common::score::score;
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::softmax::{SoftmaxState, empty_state};
use crate::engine::tensor_core::common::tile_scheduler::{AssignedTile, Tile, TileKind};
use crate::engine::tensor_core::mma::fragments::load_row_pair;
use crate::engine::tensor_core::mma::plan::split_d::MmaSplitDTiles;
use crate::engine::tensor_core::mma::ring::{
    RingSlot, RingTurn, await_full, ring_slot_of, signal_empty, turn_after,
};
use cube_kit::ampere::mma::{
    Scores, SharedSums, add_scores, add_shared_product, left_address, right_address, scores,
    turn_address,
};
use cube_kit::ampere::{BARRIER_BYTES, FRAGMENT_ROWS};
use cube_kit::nvidia::ROW_BYTES;
use cube_kit::nvidia::SUBTILE;
use cube_kit::nvidia::mbarrier::{arrive_as_warp, await_phase};
use cube_kit::nvidia::ptx::load_shared;
use cubecl::prelude::*;

/// The byte offsets of the barriers of a row group. A row group is the warps that compute the same output rows. Each
/// barrier completes when all warps of the row group have done one step:
///
/// - `TOLD`: the warps have stored their row maxima.
/// - `SHARED`: the warps have stored P.
/// - `MULTIPLIED`: the warps have finished the GEMM P·V.
const TOLD: u32 = 0;
const SHARED: u32 = BARRIER_BYTES as u32;
const MULTIPLIED: u32 = 2 * BARRIER_BYTES as u32;

/// The result of a warp's main loop: the warp's rows and columns of O, and the softmax states of the rows whose scores
/// the warp has computed.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct MainloopOutput<AO: Size> {
    pub o: Vector<f32, AO>,
    pub state_0: SoftmaxState,
    pub state_1: SoftmaxState,
}

/// Processes a tile's blocks. Before the call, the caller must start the copies of the queries. A warp that waits for
/// the first chunk also waits for these copies.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is decided at compile time, the inner one at run time"
)]
pub(super) fn run_mainloop<E: Float, F: Float, NB: Size, NS: Size, AS: Size, AO: Size>(
    assigned: &AssignedTile,
    query: &Tensor<E>,
    rows_0: &RowPair,
    rows_1: &RowPair,
    scoring: &Scoring<F, NB>,
    operands: &Operands,
    offsets: &SharedOffsets,
    roles: &Roles,
    scale_log2: f32,
    #[comptime] tiles: MmaSplitDTiles,
    #[comptime] kind: TileKind,
) -> MainloopOutput<AO> {
    let masking = &scoring.masking;
    let tile = &assigned.tile;
    let end = tile.end_block;
    let position = tile_position(tile);
    let hidden = scoring.arguments.negative_infinity;
    // The tile row of the score in the thread's first score register.
    let row = roles.score_row + UNIT_POS % 32u32 / 4u32;
    // One half of the warps computes P before the GEMM with the first chunk of values, the second half after this GEMM. Each
    // warp scheduler has one warp of each half, so exponentials overlap with `mma`.
    let weighs_first = roles.warp < comptime!(MmaSplitDTiles::WARPS as u32 / 2);
    let mut o = Vector::<f32, AO>::zeroed();
    let mut state_0 = empty_state(hidden);
    let mut state_1 = empty_state(hidden);
    let mut may_have_masked = false.runtime();
    let mut values = end;
    let mut keys = assigned.first;
    let mut slot = 0u32;
    let mut ring_parity = 0u32;
    let mut parity = 0u32;
    if keys < end {
        let pass = MainloopStep {
            values,
            keys,
            after: end,
            first: RingTurn {
                slot,
                parity: ring_parity,
            },
        };
        #[unroll]
        for chunk in 0..comptime!(tiles.slots - 1) {
            fill::<E>(operands, query, tile, &pass, chunk, tiles, kind);
        }
    }
    while keys < end || values < end {
        let pass = MainloopStep {
            values,
            keys,
            after: next_block(tile, keys + 1i32, masking, kind),
            first: RingTurn {
                slot,
                parity: ring_parity,
            },
        };
        let has_keys = keys < end;
        let has_values = values < end;
        let seen_block = min(keys, end - 1i32);
        let seen_0 = block_mask(
            &position,
            rows_0,
            seen_block,
            roles.key_group,
            masking,
            tiles.keys,
            MmaSplitDTiles::SCORE_KEYS,
            kind,
        );
        let seen_1 = if comptime!(tiles.score_fragments() == 2) {
            block_mask(
                &position,
                rows_1,
                seen_block,
                roles.key_group,
                masking,
                tiles.keys,
                MmaSplitDTiles::SCORE_KEYS,
                kind,
            )
        } else {
            seen_0
        };
        let mut s = Vector::<f32, AS>::zeroed();
        #[unroll]
        for chunk in 0..tiles.key_chunks() {
            let place = await_chunk(operands, &pass, chunk, tiles);
            if has_keys {
                s = scores_of_chunk::<AS>(s, &place, offsets, roles, chunk, tiles);
            }
            leave_chunk::<E>(operands, query, tile, &pass, &place, chunk, tiles, kind);
        }
        let mut used = 0u32;
        if has_values {
            // Wait until all warps of the row group have stored the rescale factors, and P of the previous block.
            await_phase(offsets.meetings + SHARED, parity ^ 1u32);
            if comptime!(kind.leaves_masked()) {
                used = load_used_keys(offsets, roles, parity ^ 1u32, tiles);
            }
            o = rescaled_output::<AO>(o, offsets, roles, tiles);
        }
        let first_key = keys * comptime!(tiles.keys as i32)
            + (roles.key_group * comptime!(MmaSplitDTiles::SCORE_KEYS as u32)) as i32;
        if has_keys {
            s = scored::<F, NB, NS, AS>(s, 0usize, first_key, &seen_0, rows_0, scoring, kind);
            store_row_max::<NS>(
                score_fragment::<AS, NS>(s, 0usize),
                state_0.row_max.reference,
                row,
                offsets,
                roles,
                tiles,
            );
            if comptime!(tiles.score_fragments() == 2) {
                s = scored::<F, NB, NS, AS>(s, 1usize, first_key, &seen_1, rows_1, scoring, kind);
                store_row_max::<NS>(
                    score_fragment::<AS, NS>(s, 1usize),
                    state_1.row_max.reference,
                    row + comptime!(FRAGMENT_ROWS as u32),
                    offsets,
                    roles,
                    tiles,
                );
            }
            // First wait until all lanes have read the previous rescale factors. The signal below tells other warps
            // that this warp has stored its row maxima. After the signal, these other warps may overwrite the factors.
            sync_plane();
            arrive_as_warp(offsets.meetings + TOLD);
        }
        #[unroll]
        for chunk in 0..tiles.value_chunks() {
            let index = comptime!(tiles.key_chunks() + chunk);
            let place = await_chunk(operands, &pass, index, tiles);
            if comptime!(chunk == 0) {
                if has_keys && weighs_first {
                    await_phase(offsets.meetings + TOLD, parity);
                    let weighed = compute_p::<F, NB, NS, AS>(
                        s, first_key, rows_0, rows_1, scoring, state_0, state_1, row, offsets,
                        roles, scale_log2, tiles, kind,
                    );
                    s = weighed.pairs;
                    state_0 = weighed.state_0;
                    state_1 = weighed.state_1;
                }
            }
            if has_values {
                o = with_chunk::<AO>(
                    o,
                    &place,
                    shared_probabilities(offsets, parity ^ 1u32, tiles),
                    roles,
                    may_have_masked,
                    used,
                    chunk,
                    tiles,
                    kind,
                );
            }
            leave_chunk::<E>(operands, query, tile, &pass, &place, index, tiles, kind);
            if comptime!(chunk == 0) {
                if has_keys && !weighs_first {
                    await_phase(offsets.meetings + TOLD, parity);
                    let weighed = compute_p::<F, NB, NS, AS>(
                        s, first_key, rows_0, rows_1, scoring, state_0, state_1, row, offsets,
                        roles, scale_log2, tiles, kind,
                    );
                    s = weighed.pairs;
                    state_0 = weighed.state_0;
                    state_1 = weighed.state_1;
                }
            }
        }
        if has_keys {
            if comptime!(tiles.shares == 1) {
                // With one buffer for P, wait until all warps have finished the GEMM with the previous P, which the new
                // P overwrites. With two buffers, the earlier wait for the row maxima of all warps suffices. A warp
                // stores its row maxima only after its last read of the buffer that the new P overwrites.
                arrive_as_warp(offsets.meetings + MULTIPLIED);
                await_phase(offsets.meetings + MULTIPLIED, parity);
            }
            share::<AS>(s, offsets, roles, parity, tiles, kind);
            sync_plane();
            arrive_as_warp(offsets.meetings + SHARED);
        }
        may_have_masked = seen_0.may_have_masked;
        values = keys;
        keys = pass.after;
        let turn = turn_after(
            &pass.first,
            comptime!(tiles.chunks()),
            comptime!(tiles.ring()),
        );
        slot = turn.slot;
        ring_parity = turn.parity;
        parity ^= 1u32;
    }
    MainloopOutput::<AO> {
        o,
        state_0,
        state_1,
    }
}

/// Waits until the copies of the `chunk`-th chunk have completed, and returns the shared-memory slot that holds the chunk.
#[cube]
fn await_chunk(
    operands: &Operands,
    pass: &MainloopStep,
    #[comptime] chunk: usize,
    #[comptime] tiles: MmaSplitDTiles,
) -> RingSlot {
    let place = ring_slot_of(operands.start, &pass.first, chunk, comptime!(tiles.ring()));
    await_full(&place);
    place
}

/// Signals that this warp has read the `chunk`-th chunk. Then waits until all warps have read the preceding chunk, and
/// refills the slot of the preceding chunk. The function seldom waits, because all warps have usually read the
/// preceding chunk by then.
#[cube]
fn leave_chunk<E: Float>(
    operands: &Operands,
    query: &Tensor<E>,
    tile: &Tile,
    pass: &MainloopStep,
    place: &RingSlot,
    #[comptime] chunk: usize,
    #[comptime] tiles: MmaSplitDTiles,
    #[comptime] kind: TileKind,
) {
    signal_empty(place);
    let next = comptime!(chunk + tiles.slots - 1);
    fill::<E>(operands, query, tile, pass, next, tiles, kind);
}

/// Adds `q·k` over one chunk of columns to the warp's scores.
#[cube]
fn scores_of_chunk<AS: Size>(
    s: Vector<f32, AS>,
    place: &RingSlot,
    offsets: &SharedOffsets,
    roles: &Roles,
    #[comptime] chunk: usize,
    #[comptime] tiles: MmaSplitDTiles,
) -> Vector<f32, AS> {
    let subtiles = comptime!(chunk * tiles.key_columns / SUBTILE);
    let queries = if comptime!(tiles.holds_queries) {
        offsets.queries + comptime!((subtiles * tiles.rows * ROW_BYTES) as u32)
    } else {
        place.slot + comptime!(tiles.chunk_queries_at() as u32)
    };
    let left = left_address(queries, roles.score_row);
    let right = right_address(
        place.slot + roles.key_group * comptime!((MmaSplitDTiles::SCORE_KEYS * ROW_BYTES) as u32),
    );
    let product = comptime!(Scores {
        fragments: tiles.score_fragments(),
        columns: MmaSplitDTiles::SCORE_KEYS,
        depth: tiles.chunk_columns(chunk),
        left_rows: tiles.rows,
        right_rows: tiles.keys,
        half: tiles.half,
    });
    if comptime!(chunk == 0) {
        scores::<AS>(left, right, product)
    } else {
        add_scores::<AS>(s, left, right, product)
    }
}

/// Computes the masked scores of one fragment from the fragment's dot products `q·k`.
#[cube]
fn scored<F: Float, NB: Size, NS: Size, AS: Size>(
    dots: Vector<f32, AS>,
    #[comptime] fragment: usize,
    first_key: i32,
    seen: &BlockMask,
    rows: &RowPair,
    scoring: &Scoring<F, NB>,
    #[comptime] kind: TileKind,
) -> Vector<f32, AS> {
    let own = score::<F, NB, NS>(
        score_fragment::<AS, NS>(dots, fragment),
        first_key,
        seen,
        rows,
        BiasWords::zeroed(),
        scoring,
        MmaSplitDTiles::SCORE_KEYS,
        kind.fragment,
    );
    let mut s = dots;
    #[unroll]
    for i in 0..MmaSplitDTiles::SCORE_REGISTERS {
        s.insert(
            comptime!(fragment * MmaSplitDTiles::SCORE_REGISTERS + i),
            own.extract(i),
        );
    }
    s
}

/// Multiplies O by the rescale factors, if the previous block changed the row maxima that the softmax subtracts.
#[cube]
fn rescaled_output<AO: Size>(
    o: Vector<f32, AO>,
    offsets: &SharedOffsets,
    roles: &Roles,
    #[comptime] tiles: MmaSplitDTiles,
) -> Vector<f32, AO> {
    let mut o = o;
    let row = roles.output_row + UNIT_POS % 32u32 / 4u32;
    let count = comptime!(8 * tiles.value_steps());
    #[unroll]
    for fragment in 0..tiles.output_fragments() {
        let moved =
            load_shared(offsets.moved + roles.output_row / 4u32 + comptime!(4 * fragment as u32));
        if moved != 0u32 {
            let own_row = row + comptime!((fragment * FRAGMENT_ROWS) as u32);
            let factors = load_row_pair(offsets.factors, own_row);
            #[unroll]
            for i in 0..comptime!(count / 4) {
                let first = comptime!(fragment * count + 4 * i);
                o.insert(first, o.extract(first) * factors.first);
                o.insert(
                    comptime!(first + 1),
                    o.extract(comptime!(first + 1)) * factors.first,
                );
                o.insert(
                    comptime!(first + 2),
                    o.extract(comptime!(first + 2)) * factors.second,
                );
                o.insert(
                    comptime!(first + 3),
                    o.extract(comptime!(first + 3)) * factors.second,
                );
            }
        }
    }
    o
}

/// Multiplies P by one chunk of V, and adds the product to O. Rows of V that are hidden from all rows of the tile may
/// be NaN, so the GEMM reads these rows of V as zeros.
#[cube]
fn with_chunk<AO: Size>(
    o: Vector<f32, AO>,
    place: &RingSlot,
    probabilities: u32,
    roles: &Roles,
    may_have_masked: bool,
    used: u32,
    #[comptime] chunk: usize,
    #[comptime] tiles: MmaSplitDTiles,
    #[comptime] kind: TileKind,
) -> Vector<f32, AO> {
    let left = left_address(probabilities, roles.output_row);
    let right = turn_address(place.slot, roles.column_group, tiles.value_keys);
    let mut o = o;
    if comptime!(kind.leaves_masked()) {
        if may_have_masked {
            o = add_shared_product::<AO>(
                o,
                left,
                right,
                used,
                comptime!(value_product(tiles, chunk, true)),
            );
        } else {
            o = add_shared_product::<AO>(
                o,
                left,
                right,
                0u32,
                comptime!(value_product(tiles, chunk, false)),
            );
        }
    } else {
        o = add_shared_product::<AO>(
            o,
            left,
            right,
            0u32,
            comptime!(value_product(tiles, chunk, false)),
        );
    }
    o
}

/// The sizes of the GEMM that multiplies P by the `chunk`-th chunk of values.
const fn value_product(tiles: MmaSplitDTiles, chunk: usize, masked: bool) -> SharedSums {
    let part = chunk % tiles.value_parts;
    SharedSums {
        fragments: tiles.output_fragments(),
        steps: tiles.value_steps(),
        first_step: part * tiles.part_steps(),
        added_steps: tiles.part_steps(),
        groups: tiles.column_groups(),
        first_depth: chunk / tiles.value_parts * tiles.value_keys,
        depth: tiles.value_keys,
        left_rows: tiles.rows,
        right_rows: tiles.value_keys,
        masked,
        half: tiles.half,
    }
}
