//! What a cube of the Hopper kernels works on: a tile of queries, and the blocks of keys that it visits.

use crate::fragment::bias::bias_of_head;
use crate::fragment::{FragmentKind, MaskWords, RowPair, mask_words, words_of_segments};
use crate::math::schedule::{Grid, Schedule, WorkTile, assignment, block_count};
use crate::math::score::is_hidden;
use crate::math::side::Side;
use crate::math::visibility::{
    Extent, Run, Sight, documents_of, is_inside, segments_meet, sight, visible_keys,
    within_segments,
};
use crate::passes::mask_bits::kernel::{
    EVERY_KEY, EVERYTHING, MaskPlaces, NOTHING, sight_of_block,
};
use cube_kit::hopper::ROW_BYTES;
use cube_kit::hopper::ptx::{async_proxy_fence, zero_fill_shared};
use cubecl::prelude::*;

/// What the Hopper kernels are compiled for, besides their tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct HopperKind {
    pub fragment: FragmentKind,
    /// Query heads of a group that share a tile.
    pub heads: usize,
    /// The output is a partial one, of `splits` parts.
    pub split: bool,
    /// The copy engine writes the output.
    pub stores_output_by_tma: bool,
}

impl HopperKind {
    /// Whether keys in the middle of a block may be hidden from a whole tile.
    pub(crate) const fn leaves_masked(&self) -> bool {
        self.fragment.score.leaves_masked(&self.fragment.structure)
    }

    /// Whether the forward's cubes take whichever item is next, and not those of their numbers.
    pub(crate) const fn takes_items(&self) -> bool {
        self.fragment.structure.segments && !self.split
    }

    /// Whether it is known beforehand what tiles see of blocks by the mask.
    pub(crate) const fn sums_up_mask(&self) -> bool {
        self.fragment.structure.mask && self.heads == 1
    }
}

/// Which way sequences and heads lead through a tensor: 0 where it is broadcast, else 1.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Steps {
    pub query_batch: u32,
    pub key_batch: u32,
    pub key_head: u32,
    pub value_batch: u32,
    pub value_head: u32,
    pub bias_batch: u32,
    pub bias_head: u32,
}

/// A tile of queries and the keys it sees.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Tile {
    pub batch: u32,
    pub kv_head: u32,
    /// Of the first row, head by head where heads share a tile.
    pub first_head: u32,
    pub first_query: i32,
    /// Rows that exist.
    pub rows: i32,
    /// Rows of a head: all of them, or the queries of each head that shares the tile.
    pub head_rows: i32,
    /// The number of the tile among the blocks of queries that segments are bounded by.
    pub query_block: u32,
    pub keys: Run,
    /// Blocks to visit.
    pub first_block: i32,
    pub end_block: i32,
    /// Where the output goes: the sequence, counted through the parts.
    pub part: u32,
}

/// What a cube works on in one turn.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct AssignedTile {
    pub exists: bool,
    pub sight: Sight,
    pub tile: Tile,
    /// The first block that it visits, or the end of its blocks.
    pub first: i32,
}

/// A cube's `turn`-th tile, at `item`: `rows` queries, keys in blocks of `block`.
#[cube]
pub(crate) fn assigned_tile(
    grid: &Grid,
    schedule: &Schedule,
    item: u32,
    turn: u32,
    extent: &Extent,
    mask: &ComptimeOption<&Tensor<u32>>,
    mask_places: &MaskPlaces,
    lengths_and_ids: &ComptimeOption<&Tensor<i32>>,
    group: u32,
    #[comptime] rows: usize,
    #[comptime] block: usize,
    #[comptime] kind: HopperKind,
) -> AssignedTile {
    let assignment = assignment(grid, schedule, item, turn);
    let structure = comptime!(kind.fragment.structure);
    let sight = sight(
        extent,
        lengths_and_ids,
        assignment.work_tile.batch,
        structure,
    );
    let tile = tile(
        assignment.work_tile,
        grid,
        extent,
        &sight,
        lengths_and_ids,
        group,
        rows,
        block,
        kind,
    );
    AssignedTile {
        exists: assignment.exists,
        sight,
        tile,
        first: next_block(
            &tile,
            tile.first_block,
            extent,
            mask,
            mask_places,
            lengths_and_ids,
            kind,
        ),
    }
}

/// The tile of a cube with this share.
#[cube]
fn tile(
    work_tile: WorkTile,
    grid: &Grid,
    extent: &Extent,
    sight: &Sight,
    lengths_and_ids: &ComptimeOption<&Tensor<i32>>,
    group: u32,
    #[comptime] rows: usize,
    #[comptime] block: usize,
    #[comptime] kind: HopperKind,
) -> Tile {
    let heads = comptime!(kind.heads as u32);
    let mut kv_head = work_tile.head;
    let mut first_head = work_tile.head;
    let mut first_query = (work_tile.tile * comptime!(rows as u32)) as i32;
    let mut head_rows = i32::new(comptime!(rows as i64));
    let mut existing = min(head_rows, extent.q_len - first_query);
    let mut end_query = first_query + existing;
    let mut query_block = work_tile.tile;
    if comptime!(kind.heads > 1) {
        first_head = work_tile.head * group + work_tile.tile * heads;
        first_query = 0i32;
        head_rows = extent.q_len;
        existing = min(heads, group - work_tile.tile * heads) as i32 * extent.q_len;
        end_query = extent.q_len;
        query_block = 0u32;
    } else {
        kv_head = work_tile.head / group;
    }
    // Rows that do not exist may see what the others see, but they must not read a bias.
    let mut full = true;
    if comptime!(kind.fragment.has_own_biases()) {
        full = existing == comptime!(rows as i32);
    }
    let keys = visible_keys(sight, first_query, end_query - 1i32, full);
    let size = comptime!(block as i32);
    let mut first_block = keys.first / size;
    let mut end_block = block_count(keys.end, size);
    if comptime!(kind.fragment.structure.segments) {
        let blocks = within_segments(
            first_block,
            end_block,
            extent,
            lengths_and_ids,
            work_tile.batch,
            query_block,
            Side::Queries,
            kind.fragment.structure,
        );
        first_block = blocks.first;
        end_block = blocks.end;
    }
    if comptime!(kind.split) {
        let blocks = max(end_block - first_block, 0i32);
        let each = (blocks + grid.splits as i32 - 1i32) / grid.splits as i32;
        first_block += work_tile.split as i32 * each;
        end_block = min(first_block + each, end_block);
    }
    let mut part = work_tile.batch;
    if comptime!(kind.split) {
        part = work_tile.batch + work_tile.split * (grid.planes / grid.heads);
    }
    Tile {
        batch: work_tile.batch,
        kv_head,
        first_head,
        first_query,
        rows: existing,
        head_rows,
        query_block,
        keys,
        first_block,
        end_block,
        part,
    }
}

/// Rows that the copy engine brings for a tile.
#[cube]
pub(crate) fn copied_rows(
    tile: &Tile,
    #[comptime] rows: usize,
    #[comptime] kind: HopperKind,
) -> u32 {
    if comptime!(kind.heads > 1) {
        tile.head_rows as u32 * comptime!(kind.heads as u32)
    } else {
        u32::new(comptime!(rows as i64))
    }
}

/// Where heads share a tile, writes zeros over its rows that no copy fills: what lay there would take part in moving the
/// references of the rows beside them. All threads of the cube meet afterwards, before anything is copied.
#[cube]
pub(crate) fn zero_fill_other_queries(
    queries: u32,
    extent: &Extent,
    #[comptime] rows: usize,
    #[comptime] subtiles: usize,
    #[comptime] units: usize,
    #[comptime] kind: HopperKind,
) {
    if comptime!(kind.heads > 1) {
        let first = extent.q_len as u32 * comptime!((kind.heads * ROW_BYTES) as u32);
        let end = comptime!((rows * ROW_BYTES) as u32);
        #[unroll]
        for subtile in 0..subtiles {
            let mut at = first + 16u32 * UNIT_POS;
            while at < end {
                zero_fill_shared(queries + comptime!((subtile * rows * ROW_BYTES) as u32) + at);
                at += comptime!(16 * units as u32);
            }
        }
        async_proxy_fence();
    }
}

/// Rows `first` and `first + 8` of a tile.
#[cube]
pub(crate) fn row_pair<F: Float, NB: Size>(
    tile: &Tile,
    extent: &Extent,
    bias: &ComptimeOption<&Tensor<Vector<F, NB>>>,
    first: i32,
    #[comptime] kind: HopperKind,
) -> RowPair {
    let second = first + 8i32;
    let mut head_0 = tile.first_head;
    let mut head_1 = tile.first_head;
    let mut position_0 = tile.first_query + first;
    let mut position_1 = tile.first_query + second;
    if comptime!(kind.heads > 1) {
        // Of a row that does not exist, the last one's mask and bias are read.
        let last = tile.rows - 1i32;
        head_0 = tile.first_head + (min(first, last) / tile.head_rows) as u32;
        head_1 = tile.first_head + (min(second, last) / tile.head_rows) as u32;
        position_0 = first % tile.head_rows;
        position_1 = second % tile.head_rows;
    }
    RowPair {
        batch: tile.batch,
        head_0,
        head_1,
        position_0: select(first < tile.rows, position_0, extent.q_len),
        position_1: select(second < tile.rows, position_1, extent.q_len),
        bias_of_head: bias_of_head::<F, NB>(bias, tile.batch, tile.first_head, kind.fragment),
    }
}

/// Where a tile stands among the blocks of the other side.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct TilePosition {
    pub batch: u32,
    pub head: u32,
    /// The number of the tile among the blocks that segments are bounded by.
    pub row_block: u32,
    pub run: Run,
}

/// Where a tile of queries stands.
#[cube]
pub(crate) fn tile_position(tile: &Tile) -> TilePosition {
    TilePosition {
        batch: tile.batch,
        head: tile.first_head,
        row_block: tile.query_block,
        run: tile.keys,
    }
}

/// The first block from `block` on that the tile visits, or `end_block`.
#[cube]
pub(crate) fn next_block(
    tile: &Tile,
    block: i32,
    extent: &Extent,
    mask: &ComptimeOption<&Tensor<u32>>,
    mask_places: &MaskPlaces,
    lengths_and_ids: &ComptimeOption<&Tensor<i32>>,
    #[comptime] kind: HopperKind,
) -> i32 {
    let mut block = block;
    if comptime!(kind.fragment.structure.segments || kind.sums_up_mask()) {
        let tile_position = tile_position(tile);
        let mut searching = block < tile.end_block;
        while searching {
            if meets(
                &tile_position,
                block,
                extent,
                mask,
                mask_places,
                lengths_and_ids,
                kind,
            ) {
                searching = false;
            } else {
                block += 1i32;
                searching = block < tile.end_block;
            }
        }
    }
    block
}

/// Whether the tile may see something of a block in its run, by segments and mask.
#[cube]
pub(crate) fn meets(
    tile_position: &TilePosition,
    block: i32,
    extent: &Extent,
    mask: &ComptimeOption<&Tensor<u32>>,
    mask_places: &MaskPlaces,
    lengths_and_ids: &ComptimeOption<&Tensor<i32>>,
    #[comptime] kind: HopperKind,
) -> bool {
    let structure = comptime!(kind.fragment.structure);
    let blocks = block_pair(tile_position, block, kind.fragment.side);
    let mut meets = segments_meet(
        extent,
        lengths_and_ids,
        tile_position.batch,
        blocks.query,
        blocks.key,
        structure,
    );
    if comptime!(kind.sums_up_mask()) {
        meets = meets && mask_sight(tile_position, block, mask, mask_places) != NOTHING;
    }
    meets
}

/// A block of queries and one of keys.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct BlockPair {
    query: u32,
    key: u32,
}

/// The tile and a block, each by its number on its side.
#[cube]
fn block_pair(tile_position: &TilePosition, block: i32, #[comptime] side: Side) -> BlockPair {
    if comptime!(side == Side::Queries) {
        BlockPair {
            query: tile_position.row_block,
            key: block as u32,
        }
    } else {
        BlockPair {
            query: block as u32,
            key: tile_position.row_block,
        }
    }
}

/// What the mask lets the tile see of a block.
#[cube]
fn mask_sight(
    tile_position: &TilePosition,
    block: i32,
    mask: &ComptimeOption<&Tensor<u32>>,
    mask_places: &MaskPlaces,
) -> u32 {
    sight_of_block(
        mask,
        mask_places,
        tile_position.batch,
        tile_position.head,
        tile_position.row_block,
        block as u32,
    )
}

/// How a tile sees a block.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct View {
    /// Every query sees every key, but for what a bias hides.
    pub whole: bool,
    /// There may be keys that nobody sees, other than those before and after the tile's run.
    pub may_have_masked: bool,
    pub mask_words: MaskWords,
}

/// How the tile sees the block, of `size` keys. Asked for before the scores are there, the mask's words of the thread's
/// rows, for `columns` keys from the `first_word`-th of the block's words on, come while these are computed.
#[cube]
pub(crate) fn view(
    tile_position: &TilePosition,
    rows: &RowPair,
    block: i32,
    first_word: u32,
    extent: &Extent,
    mask: &ComptimeOption<&Tensor<u32>>,
    mask_places: &MaskPlaces,
    lengths_and_ids: &ComptimeOption<&Tensor<i32>>,
    #[comptime] size: usize,
    #[comptime] columns: usize,
    #[comptime] kind: HopperKind,
) -> View {
    let structure = comptime!(kind.fragment.structure);
    let block_words = comptime!(size.div_ceil(32) as u32);
    let size = comptime!(size as i32);
    let inside = is_inside(&tile_position.run, block * size, size);
    let mut whole = inside;
    // A mask and a run hide different keys from different queries, and together one from all.
    let mut may_have_masked = false;
    let side = comptime!(kind.fragment.side);
    let own = documents_of(
        extent,
        lengths_and_ids,
        tile_position.batch,
        tile_position.row_block,
        side,
        structure,
    );
    let other = comptime!(side.other());
    let other = documents_of(
        extent,
        lengths_and_ids,
        tile_position.batch,
        block as u32,
        other,
        structure,
    );
    let is_one = other.first == other.last;
    let shared = is_one && own.first == own.last && own.first == other.first;
    if comptime!(structure.segments) {
        whole = whole && shared;
        may_have_masked = !shared;
        if comptime!(!structure.mask) {
            // Some row is of the first of the tile's documents, and some of the last, and sees what is of it.
            let meets = is_one && (other.first == own.first || other.first == own.last);
            may_have_masked = !(shared || (inside && meets));
        }
    }
    if comptime!(kind.sums_up_mask()) {
        let sight = mask_sight(tile_position, block, mask, mask_places);
        whole = whole && sight == EVERYTHING;
        may_have_masked = may_have_masked || !inside || sight < EVERY_KEY;
    }
    if comptime!(structure.mask && !kind.sums_up_mask()) {
        whole = false;
    }
    if comptime!(kind.fragment.has_bias_of_head()) {
        let hidden = is_hidden(rows.bias_of_head);
        whole = whole && !hidden;
        may_have_masked = may_have_masked || hidden;
    }
    if comptime!(kind.fragment.has_own_biases() || (structure.mask && !kind.sums_up_mask())) {
        may_have_masked = true;
    }
    let words = mask_words(
        mask,
        mask_places,
        rows,
        extent,
        block as u32 * block_words + first_word,
        whole,
        columns,
        kind.fragment,
    );
    let words = if comptime!(structure.segments) {
        words_of_segments(
            words,
            lengths_and_ids,
            rows,
            extent,
            block * size + (first_word * 32u32) as i32,
            other,
            shared,
            columns,
            kind.fragment,
        )
    } else {
        words
    };
    View {
        whole,
        may_have_masked,
        mask_words: words,
    }
}
