//! The ring buffer of a warp: the addresses within a stage, and the copies into it.

use super::super::super::sums::ProjectPlan;
use super::super::parts::Lane;
use super::super::word_rows::WordRows;
use super::{FRAGMENT_BYTES, ROW_BYTES, Staging};
use cube_kit::ampere::cp_async::{
    PIECE_BYTES, commit_copies, copy_piece, copy_small, narrow_piece_offset,
};
use cube_kit::ampere::gemv::PRODUCT_ROWS;
use cubecl::prelude::*;

/// The ring buffer of a warp.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(in super::super) struct Ring {
    /// The number of stages that the warp multiplies.
    pub stages: u32,
    /// The number of columns of a row.
    pub columns: u32,
    /// [`WordRows::mask`].
    pub mask: u32,
    /// The shared-memory address of the ring.
    pub start: u32,
    /// The address within a stage to which the thread copies codes of fragment 0.
    pub codes_to: u32,
    /// The address within a stage to which the thread copies scales.
    pub scales_to: u32,
}

/// Returns the ring of the unit's warp. `memory` is the address of the rings of all warps of the cube. The warps of a
/// team take the stages of a row in turn.
#[cube]
pub(in super::super) fn ring_of_warp(
    memory: u32,
    word_rows: WordRows,
    lane: Lane,
    #[comptime] staging: Staging,
    #[comptime] plan: ProjectPlan,
) -> Ring {
    let parts = comptime!(plan.team.parts() as u32);
    let all = word_rows
        .columns
        .div_ceil(comptime!(staging.columns() as u32));
    let warp = UNIT_POS_Y * parts + lane.warp;
    Ring {
        stages: (all + parts - 1u32 - lane.warp) / parts,
        columns: word_rows.columns,
        mask: word_rows.mask,
        start: memory + warp * comptime!(staging.warp_bytes(plan) as u32),
        codes_to: narrow_piece_offset(lane.row, lane.column),
        scales_to: place_of_scales(lane.column, lane.row, staging, plan),
    }
}

/// Returns the index, within a weight row, of the first word of codes that the thread copies.
#[cube]
pub(in super::super) fn first_code(lane: Lane) -> u32 {
    (lane.warp * comptime!((ROW_BYTES / PIECE_BYTES) as u32) + lane.column)
        * comptime!(PIECE_BYTES as u32 / 4)
}

/// Returns the index, within a weight row, of the first word of scales that the thread copies. `scales` is the index of
/// the row's first scale.
#[cube]
pub(in super::super) fn first_scale(scales: u32, lane: Lane, #[comptime] staging: Staging) -> u32 {
    scales + lane.warp * comptime!(staging.scale_bytes() as u32 / 4)
}

/// True if the thread copies the scales of a fragment. The four threads of a weight row copy the scales of different
/// fragments.
#[cube]
pub(in super::super) fn copies_scales(lane: Lane, #[comptime] fragment: usize) -> bool {
    lane.column == comptime!(fragment as u32)
}

/// Starts the copies of the first stages, as many as the ring has.
#[cube]
pub(in super::super) fn fill_ring(
    ring: Ring,
    code_addresses: &Array<u64>,
    scale_address: u64,
    lane: Lane,
    #[comptime] staging: Staging,
    #[comptime] plan: ProjectPlan,
) {
    #[unroll]
    for slot in 0..plan.unroll {
        copy_stage(
            ring,
            code_addresses,
            scale_address,
            comptime!(slot as u32).runtime(),
            comptime!((slot * staging.stage_bytes(plan)) as u32).runtime(),
            lane,
            staging,
            plan,
        );
    }
}

/// Returns the address within a stage of the scales of a weight row.
#[cube]
pub(super) fn place_of_scales(
    fragment: u32,
    row: u32,
    #[comptime] staging: Staging,
    #[comptime] plan: ProjectPlan,
) -> u32 {
    let first = comptime!((plan.fragments() * FRAGMENT_BYTES) as u32);
    first
        + (fragment * comptime!(PRODUCT_ROWS as u32) + row)
            * comptime!(staging.scale_bytes() as u32)
}

/// Starts the copies of the warp's stage `stage` to the ring, `slot` bytes after its start. The addresses are those of
/// the warp's first stage. Closes a group of copies, which is empty if the warp has no such stage.
#[cube]
pub(super) fn copy_stage(
    ring: Ring,
    code_addresses: &Array<u64>,
    scale_address: u64,
    stage: u32,
    slot: u32,
    lane: Lane,
    #[comptime] staging: Staging,
    #[comptime] plan: ProjectPlan,
) {
    let parts = comptime!(plan.team.parts());
    if stage < ring.stages {
        let mut code_bytes = comptime!(PIECE_BYTES as u32).runtime();
        let mut scale_bytes = comptime!(staging.scale_bytes() as u32).runtime();
        if comptime!(staging.has_half) && is_half(ring, stage, lane, staging, plan) {
            code_bytes = select(lane.column < 2u32, code_bytes, 0u32);
            scale_bytes = comptime!(staging.scale_bytes() as u32 / 2).runtime();
        }
        let to = ring.start + slot + ring.codes_to;
        let codes_before = u64::cast_from(stage * comptime!((ROW_BYTES * parts) as u32));
        #[unroll]
        for fragment in 0..plan.fragments() {
            copy_piece(
                to + comptime!((fragment * FRAGMENT_BYTES) as u32),
                code_addresses[fragment] + codes_before,
                code_bytes,
            );
        }
        let scales_before =
            u64::cast_from(stage * comptime!((staging.scale_bytes() * parts) as u32));
        // With fewer than four fragments, some threads of a weight row have no scales to copy.
        if lane.column < comptime!(plan.fragments() as u32) {
            copy_small(
                ring.start + slot + ring.scales_to,
                scale_address + scales_before,
                scale_bytes,
                staging.scale_bytes(),
            );
        }
    }
    commit_copies();
}

/// True if only the first half of the warp's stage `stage` lies within the row.
#[cube]
pub(super) fn is_half(
    ring: Ring,
    stage: u32,
    lane: Lane,
    #[comptime] staging: Staging,
    #[comptime] plan: ProjectPlan,
) -> bool {
    let all = stage * comptime!(plan.team.parts() as u32) + lane.warp;
    let of_stage = comptime!(staging.columns() as u32);
    ring.columns - all * of_stage < of_stage
}
