//! The multiplication of a warp's stages by the input rows.

use super::super::super::sums::{ProjectPlan, place_of_part};
use super::super::codes::{GROUP, as_codes_lie, numbers};
use super::super::parts::Lane;
use super::super::plan::WARP;
use super::ring::{Ring, copy_stage, is_half, place_of_scales};
use super::{FRAGMENT_BYTES, InputMemory, Staging, TILE};
use cube_kit::ampere::cp_async::{await_copies, narrow_piece_offset};
use cube_kit::ampere::gemv::{
    PRODUCT_ROWS, add_pairs_of_two_rows, read_half_pieces_if, read_piece_if,
};
use cube_kit::nvidia::Half;
use cube_kit::nvidia::ptx::{
    load_matrices, load_shared, load_shared_four, load_shared_pair, unpack,
};
use cubecl::prelude::*;

/// The thread's inputs.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(in super::super) struct InputRows {
    /// The address of the first column of the thread's row in the first tile of 8 input rows. The address is one in the
    /// memory that [`Staging::input`] names.
    pub address: u64,
    /// The distance between tiles, in bytes.
    pub tile_distance: u64,
    /// 1 if the thread has a row in each whole tile, and 0 otherwise. The inputs of a missing row are zeros.
    pub is_there: u32,
}

/// Multiplies the warp's stages by the input rows, and adds the results to the sums. The ring holds the first stages:
/// see [`fill_ring`](super::fill_ring).
#[cube]
pub(in super::super) fn multiply_stages(
    sums: &mut Array<Vector<f32, Const<4>>>,
    ring: Ring,
    code_addresses: &Array<u64>,
    scale_address: u64,
    input: InputRows,
    lane: Lane,
    #[comptime] staging: Staging,
    #[comptime] plan: ProjectPlan,
) {
    let parts = comptime!(plan.team.parts());
    let tiles = comptime!(plan.input_tiles());
    let column = lane.warp * comptime!(staging.columns() as u32)
        + lane.column * comptime!(staging.own_columns() as u32);
    let first = input.address + u64::cast_from(2u32 * column);
    let distance = comptime!((2 * staging.columns() * parts) as u32);
    let mut rows = Array::<Vector<u32, Const<4>>>::new(tiles);
    read_rows(
        &mut rows,
        first,
        input.tile_distance,
        input.is_there,
        lane,
        0usize,
        staging,
        plan,
    );
    let mut stage = 0u32;
    let mut slot = 0u32;
    while stage < ring.stages {
        await_copies(comptime!(plan.unroll - 1));
        sync_plane();
        let mut has_second_half = input.is_there;
        if comptime!(staging.has_half) && is_half(ring, stage, lane, staging, plan) {
            has_second_half = 0u32;
        }
        let next = stage + 1u32;
        multiply_stage(
            sums,
            &mut rows,
            first + u64::cast_from(stage * distance),
            first + u64::cast_from(next * distance),
            input,
            has_second_half,
            select(next < ring.stages, input.is_there, 0u32),
            ring.start + slot,
            ring.mask,
            lane,
            staging,
            plan,
        );
        // Wait until all threads of the warp have read the stage, before the next copies overwrite it.
        sync_plane();
        copy_stage(
            ring,
            code_addresses,
            scale_address,
            stage + comptime!(plan.unroll as u32),
            slot,
            lane,
            staging,
            plan,
        );
        slot += comptime!(staging.stage_bytes(plan) as u32);
        if slot == comptime!(staging.warp_bytes(plan) as u32) {
            slot = 0u32;
        }
        stage = next;
    }
}

/// Loads the thread's 8 inputs of a group in all tiles of 8 input rows. If `is_there` is 0, and in rows beyond the last
/// input row, the inputs are zeros.
#[cube]
fn read_rows(
    rows: &mut Array<Vector<u32, Const<4>>>,
    address: u64,
    tile_distance: u64,
    is_there: u32,
    lane: Lane,
    #[comptime] group: usize,
    #[comptime] staging: Staging,
    #[comptime] plan: ProjectPlan,
) {
    let offset = comptime!(2 * GROUP * group);
    #[unroll]
    for tile in 0..plan.input_tiles() {
        let first_row = comptime!(tile * TILE);
        let is_row = if comptime!(first_row + TILE <= plan.rows) {
            is_there
        } else {
            let rows_left = comptime!((plan.rows - first_row) as u32);
            select(lane.row < rows_left, is_there, 0u32)
        };
        let of_tile = address + tile_distance * comptime!(tile as u64);
        rows[tile] = if comptime!(staging.input == InputMemory::Shared) {
            shared_inputs_if(u32::cast_from(of_tile), is_row, offset, staging)
        } else if comptime!(staging.words() == 1) {
            read_piece_if(of_tile, is_row, offset)
        } else {
            read_half_pieces_if(of_tile, is_row, offset, GROUP)
        };
    }
}

/// Loads the thread's 8 inputs of a group from shared memory, or returns zeros if `is_there` is 0.
#[cube]
fn shared_inputs_if(
    address: u32,
    is_there: u32,
    #[comptime] offset: usize,
    #[comptime] staging: Staging,
) -> Vector<u32, Const<4>> {
    let mut inputs = Vector::<u32, Const<4>>::zeroed();
    if is_there != 0u32 {
        let from = address + comptime!(offset as u32);
        if comptime!(staging.words() == 1) {
            inputs = Vector::<u32, Const<4>>::reinterpret(load_shared_four(from));
        } else {
            let near = load_shared_pair(from);
            let far = load_shared_pair(from + comptime!(GROUP as u32));
            #[unroll]
            for word in 0..2usize {
                inputs.insert(word, u32::reinterpret(near.extract(word)));
                inputs.insert(comptime!(word + 2), u32::reinterpret(far.extract(word)));
            }
        }
    }
    inputs
}

/// Multiplies the codes in a stage by the inputs of all rows, and adds the scaled results to the sums. `rows` holds the
/// inputs of the stage's first group, and afterwards those of the warp's next stage. The addresses are those of the
/// thread's inputs in both stages. If `has_second_half` or `has_next` is 0, the inputs of the stage's second half or of
/// the next stage are zeros. `stage` is the shared-memory address of the stage, and
/// `mask` is [`Codes::mask`](super::super::codes::Codes::mask).
#[cube]
fn multiply_stage(
    sums: &mut Array<Vector<f32, Const<4>>>,
    rows: &mut Array<Vector<u32, Const<4>>>,
    address: u64,
    next_address: u64,
    input: InputRows,
    has_second_half: u32,
    has_next: u32,
    stage: u32,
    mask: u32,
    lane: Lane,
    #[comptime] staging: Staging,
    #[comptime] plan: ProjectPlan,
) {
    let codes = comptime!(staging.codes);
    let fragments = comptime!(plan.fragments());
    let tiles = comptime!(plan.input_tiles());
    let groups = comptime!(staging.groups());
    let words = comptime!(staging.words());
    let scale_words = comptime!(groups / 2);
    let of_lane = UNIT_POS_X % comptime!(WARP as u32);
    let codes_from = stage + narrow_piece_offset(of_lane % 8u32, of_lane / 8u32);
    let scales_from = stage + place_of_scales(0u32, lane.row, staging, plan);
    let mut read = Array::<Vector<u32, Const<4>>>::new(fragments);
    let mut scales = Array::<u32>::new(comptime!(fragments * scale_words));
    #[unroll]
    for fragment in 0..fragments {
        read[fragment] = load_matrices(codes_from + comptime!((fragment * FRAGMENT_BYTES) as u32));
        let of_fragment = comptime!((fragment * PRODUCT_ROWS * staging.scale_bytes()) as u32);
        #[unroll]
        for word in 0..scale_words {
            scales[comptime!(fragment * scale_words + word)] =
                load_shared(scales_from + of_fragment + comptime!(4 * word as u32));
        }
    }
    #[unroll]
    for group in 0..groups {
        let mut pairs = Array::<u32>::new(comptime!(4 * tiles));
        #[unroll]
        for tile in 0..tiles {
            let mut of_tile = Array::<u32>::new(4usize);
            as_codes_lie(&mut of_tile, rows[tile], codes);
            #[unroll]
            for pair in 0..4usize {
                pairs[comptime!(4 * tile + pair)] = of_tile[pair];
            }
        }
        // The inputs of this group are packed, so that those of the next group take their registers.
        let next_group = comptime!((group + 1) % groups);
        let (from, is_there) = if comptime!(next_group == 0) {
            (next_address, has_next)
        } else if comptime!(next_group < groups / 2) {
            (address, input.is_there)
        } else {
            (address, has_second_half)
        };
        read_rows(
            rows,
            from,
            input.tile_distance,
            is_there,
            lane,
            next_group,
            staging,
            plan,
        );
        #[unroll]
        for couple in 0..comptime!(fragments / 2) {
            let upper = comptime!(2 * couple);
            let lower = comptime!(2 * couple + 1);
            let mut upper_words = Array::<u32>::new(words);
            let mut lower_words = Array::<u32>::new(words);
            #[unroll]
            for word in 0..words {
                upper_words[word] = read[upper].extract(comptime!(group * words + word));
                lower_words[word] = read[lower].extract(comptime!(group * words + word));
            }
            let upper_scale = scale_of(scales[comptime!(upper * scale_words + group / 2)], group);
            let lower_scale = scale_of(scales[comptime!(lower * scale_words + group / 2)], group);
            let mut uppers = Array::<u32>::new(4usize);
            let mut lowers = Array::<u32>::new(4usize);
            #[unroll]
            for pair in 0..4usize {
                uppers[pair] = numbers(&upper_words, mask, pair, codes);
                lowers[pair] = numbers(&lower_words, mask, pair, codes);
            }
            #[unroll]
            for tile in 0..tiles {
                let mut group_sums = Vector::<f32, Const<4>>::zeroed();
                #[unroll]
                for product in 0..2usize {
                    let one = comptime!(2 * product);
                    let other = comptime!(2 * product + 1);
                    group_sums = add_pairs_of_two_rows(
                        group_sums,
                        uppers[one],
                        uppers[other],
                        lowers[one],
                        lowers[other],
                        pairs[comptime!(4 * tile + one)],
                        pairs[comptime!(4 * tile + other)],
                        codes.half,
                    );
                }
                let place = comptime!(couple * tiles + tile);
                let mut sum = sums[place];
                #[unroll]
                for element in 0..2usize {
                    let below = comptime!(element + 2);
                    sum.insert(
                        element,
                        sum.extract(element) + group_sums.extract(element) * upper_scale,
                    );
                    sum.insert(
                        below,
                        sum.extract(below) + group_sums.extract(below) * lower_scale,
                    );
                }
                sums[place] = sum;
            }
        }
    }
}

/// Returns the scale of a group from a word with two scales.
#[cube]
fn scale_of(word: u32, #[comptime] group: usize) -> f32 {
    unpack(word, Half::F16).extract(comptime!(group % 2))
}

/// Writes a warp's partial sums of 16 weight rows and 8 input rows to shared memory. The thread has the sums of two
/// neighboring input rows, first for a weight row of fragment `2 · couple`, then for one of the next fragment.
#[cube]
pub(in super::super) fn leave_sums(
    partial: &mut Shared<[f32]>,
    sum: Vector<f32, Const<4>>,
    lane: Lane,
    #[comptime] couple: usize,
    #[comptime] tile: usize,
    #[comptime] plan: ProjectPlan,
) {
    #[unroll]
    for element in 0..4usize {
        let row = comptime!((tile * TILE + element % 2) as u32) + 2u32 * lane.column;
        let fragment = comptime!(2 * couple + element / 2);
        let weight = comptime!((fragment * PRODUCT_ROWS) as u32) + lane.row;
        if row < comptime!(plan.rows as u32) {
            partial[place_of_part(lane.warp, row, weight, plan)] = sum.extract(element);
        }
    }
}
