//! Computes the gradient of a table from sums of dS along diagonals, for score mods that depend on the distance only.
//!
//! Algorithm: all scores of a diagonal of a head have the same distance, and so the same table element and the same
//! derivative. Another kernel has summed dS over pieces of the diagonals. Each unit turns the sum of a piece into a
//! share of the table's gradient. The cube then adds these shares.
//!
//! Tensors: `sums [splits · batch, q_heads, tile diagonals, 128]` in f32, and `partial [parts · elements]` in f32,
//! which must hold zeros. A *tile diagonal* consists of all square tiles of scores with the same difference between
//! query tile and key tile. It covers 127 distances.
//!
//! Budget: 8 bytes of shared memory per unit. Bound: reads of shared memory, because each unit reads all shares of its
//! cube. The number of shares is linear in the lengths of the sequences.

use super::add_shares;
use crate::math::schedule::block_count;
use crate::math::score::Scoring;
use crate::math::score_mod::kernel::table_slope;
use crate::math::score_mod::{ScoreCode, ScorePlace};
use crate::math::visibility::{Structure, seq_info};
use cubecl::prelude::*;

/// The number of units of a cube.
pub(crate) const UNITS: usize = 256;

/// The number of queries and of keys in a square tile of scores.
pub(crate) const TILE: usize = 64;

/// The number of f32 that `sums` has for a tile diagonal. The last one is unused.
pub(crate) const DISTANCES: usize = 2 * TILE;

/// The sizes of the launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct DiagonalCounts {
    /// The number of partial sums, which is the number of cubes with work.
    pub parts: u32,
    /// The number of elements of the table.
    pub elements: u32,
    pub batches: u32,
    pub q_heads: u32,
    /// The number of tile diagonals.
    pub diagonals: u32,
    /// The number of partial sums of a piece of a diagonal.
    pub splits: u32,
}

/// Returns the difference between query tile and key tile on a tile diagonal. Under a causal mask, the long diagonals
/// come before the short ones.
#[cube]
pub(crate) fn tile_difference(diagonal: u32, kv_len: i32) -> i32 {
    diagonal as i32 + 1i32 - block_count(kv_len, comptime!(TILE as i32))
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn gradient_of_diagonals<M: Numeric, F: Float>(
    sums: &Tensor<f32>,
    scoring: Scoring<M, F>,
    partial: &mut Tensor<f32>,
    counts: DiagonalCounts,
    #[comptime] structure: Structure,
    #[comptime] code: Option<ScoreCode>,
    #[define(M, F)] _elements: [ElemType; 2],
) {
    let part = CUBE_POS as u32;
    if part >= counts.parts {
        terminate!();
    }
    let mut amounts = Shared::<[f32]>::new_slice(UNITS);
    let mut elements = Shared::<[u32]>::new_slice(UNITS);
    let own_part = part as usize * counts.elements as usize;
    let pieces = counts.batches * counts.q_heads * counts.diagonals * comptime!(DISTANCES as u32);
    let mut first = part * comptime!(UNITS as u32);
    while first < pieces {
        let piece = first + UNIT_POS;
        let mut amount = 0.0f32;
        let mut element = 0u32;
        if piece < pieces {
            let within = piece % comptime!(DISTANCES as u32);
            let diagonal = piece / comptime!(DISTANCES as u32) % counts.diagonals;
            let plane = piece / comptime!(DISTANCES as u32) / counts.diagonals;
            let head = plane % counts.q_heads;
            let batch = plane / counts.q_heads;
            let mut sum = 0.0f32;
            for split in 0..counts.splits {
                let at = (split * counts.batches + batch) as usize * sums.stride(0)
                    + head as usize * sums.stride(1)
                    + diagonal as usize * sums.stride(2)
                    + within as usize;
                sum += sums[at];
            }
            // The derivative of a hidden score may be NaN, and the gradient of a hidden score is 0.
            if sum != 0.0f32 {
                let info = seq_info(
                    &scoring.seq_lens,
                    &scoring.lengths_and_ids,
                    batch,
                    structure,
                );
                let distance = tile_difference(diagonal, scoring.seq_lens.kv_len)
                    * comptime!(TILE as i32)
                    + within as i32
                    + comptime!(1 - TILE as i32)
                    + info.offset;
                let place = ScorePlace::new(batch, head, distance, 0i32, 0i32);
                let slope = table_slope(0.0f32, place, &scoring.tables, code);
                amount = sum * slope.derivative;
                element = min(slope.element, counts.elements - 1u32);
            }
        }
        amounts[UNIT_POS as usize] = amount;
        elements[UNIT_POS as usize] = element;
        add_shares(&amounts, &elements, partial, own_part, UNITS, UNITS);
        first += counts.parts * comptime!(UNITS as u32);
    }
}
