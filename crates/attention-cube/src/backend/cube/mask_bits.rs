//! Packs the mask for the Hopper kernels: see `kernel/mask_bits.rs`.

use super::*;
use crate::kernel::mask_bits::{MaskPlacesLaunch, PLANES, WORDS_PER_PLANE, pack_mask, sum_up_mask};
use crate::plan::wgmma::Side;
use cubecl::prelude::CubeDim;

const PLANE: u32 = 32;

/// A mask, if there is one, as the kernels read it.
#[derive(Clone, Default)]
pub(super) struct PackedMask {
    pub bits: Option<CubeTensor>,
    /// In the order of [`MaskPlaces`](crate::kernel::mask_bits::MaskPlaces).
    places: [u32; 7],
}

impl PackedMask {
    pub fn argument(&self) -> Option<TensorArg> {
        self.bits.clone().map(CubeTensor::into_tensor_arg)
    }

    pub fn places(&self) -> MaskPlacesLaunch {
        let [
            batch,
            head,
            row,
            blocks,
            block_batch,
            block_head,
            block_tile,
        ] = self.places;
        MaskPlacesLaunch::new(
            batch,
            head,
            row,
            blocks,
            block_batch,
            block_head,
            block_tile,
        )
    }
}

/// The words of a packed mask in one buffer: those of its rows first, then what tiles see of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Words {
    batch: usize,
    heads: usize,
    rows: usize,
    /// Of a row, in pieces that a plane packs each.
    pieces: usize,
    /// Of a head; 0 where they are not told what they see of blocks.
    tiles: usize,
    /// Of a row.
    blocks: usize,
}

impl Words {
    fn new(
        [batch, heads, rows]: [usize; 3],
        columns: usize,
        tile_rows: Option<usize>,
        block_keys: usize,
    ) -> Self {
        let blocks = columns.div_ceil(block_keys);
        Self {
            batch,
            heads,
            rows,
            pieces: (blocks * block_keys.div_ceil(32)).div_ceil(WORDS_PER_PLANE),
            tiles: tile_rows.map_or(0, |tile_rows| rows.div_ceil(tile_rows)),
            blocks,
        }
    }

    /// Of a row.
    fn of_row(&self) -> usize {
        self.pieces * WORDS_PER_PLANE
    }

    /// Pieces of all rows.
    fn all_pieces(&self) -> usize {
        self.batch * self.heads * self.rows * self.pieces
    }

    /// Where the words about blocks start.
    fn of_rows(&self) -> usize {
        self.all_pieces() * WORDS_PER_PLANE
    }

    /// Pairs of a tile and a block, which have a word each.
    fn pairs(&self) -> usize {
        self.batch * self.heads * self.tiles * self.blocks
    }

    /// In the order of [`MaskPlaces`](crate::kernel::mask_bits::MaskPlaces).
    fn places(&self) -> [u32; 7] {
        let step = |size: usize, step: usize| if size == 1 { 0 } else { step as u32 };
        let (row, tile) = (self.pieces, self.blocks);
        [
            step(self.batch, self.heads * self.rows * row),
            step(self.heads, self.rows * row),
            step(self.rows, row),
            self.all_pieces() as u32,
            step(self.batch, self.heads * self.tiles * tile),
            step(self.heads, self.tiles * tile),
            step(self.rows, tile),
        ]
    }
}

/// The packed mask, if there is one, for tiles of `tile_rows` rows of one side and blocks of `block_keys` rows of
/// the other; without `tile_rows` tiles are not told what they see of blocks.
pub(super) fn pack(
    inputs: &AttentionInputs<CubeBackend>,
    problem: &AttentionProblem,
    side: Side,
    tile_rows: Option<usize>,
    block_keys: usize,
) -> PackedMask {
    let Some(mask) = inputs.mask.as_option() else {
        return PackedMask::default();
    };
    let (mask, columns) = match side {
        Side::Queries => (mask.clone(), problem.kv_len),
        Side::Keys => (
            CubeBackend::bool_swap_dims(mask.clone(), 2, 3),
            problem.q_len,
        ),
    };
    let shape = mask.meta.shape();
    let [batch, heads, rows] = [shape[0], shape[1], shape[2]];
    let mask = CubeBackend::bool_expand(mask, Shape::new([batch, heads, rows, columns]));
    let words = Words::new([batch, heads, rows], columns, tile_rows, block_keys);
    let bits = empty(&inputs.query, [words.of_rows() + words.pairs()], DType::U32);
    let client = bits.client.clone();
    let launch = |planes: usize| {
        (
            cube_count(&client, planes.div_ceil(PLANES as usize)),
            CubeDim::new_1d(PLANES * PLANE),
        )
    };

    let (cubes, units) = launch(words.all_pieces());
    let element = dtype_to_storage_type(mask.dtype);
    // SAFETY: a plane a piece of a row, the rest does nothing; columns stay below their number.
    unsafe {
        pack_mask::launch_unchecked(
            &client,
            cubes,
            units,
            address_type([&mask, &bits]),
            mask.into_tensor_arg(),
            bits.clone().into_tensor_arg(),
            heads as u32,
            rows as u32,
            columns as u32,
            words.pieces as u32,
            words.all_pieces() as u32,
            block_keys as u32,
            element,
        );
    }
    if let Some(tile_rows) = tile_rows {
        let (cubes, units) = launch(words.pairs());
        // SAFETY: a plane a pair, inside the words that the first launch wrote.
        unsafe {
            sum_up_mask::launch_unchecked(
                &client,
                cubes,
                units,
                address_type([&bits]),
                bits.clone().into_tensor_arg(),
                words.of_rows(),
                rows as u32,
                columns as u32,
                words.of_row() as u32,
                words.tiles as u32,
                words.blocks as u32,
                words.pairs() as u32,
                tile_rows as u32,
                block_keys as u32,
            );
        }
    }
    PackedMask {
        bits: Some(bits),
        places: words.places(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row's bits and a pair's word are where the launches put them, also where 32 bits count neither the mask's elements
    /// nor its words; the numbers that stay 32 bits wide hold theirs.
    #[test]
    fn places_are_the_words_of_masks_of_any_size() {
        for (shape, columns) in [
            ([2, 3, 70], 300),
            ([1, 1, 70], 300),
            // 5·2³⁰ elements.
            ([5, 1, 32_768], 32_768),
            // 2³² words of bits, of fewer elements that are broadcast along the keys.
            ([8, 16, 1024], 1 << 20),
            // 2³⁶ elements.
            ([4, 16, 32_768], 32_768),
        ] {
            for (tile_rows, block_keys) in [(Some(128), 176), (Some(64), 64), (None, 128)] {
                let [batch, heads, rows] = shape;
                let words = Words::new(shape, columns, tile_rows, block_keys);
                let context = format!("{shape:?}, {columns}: {words:?}");
                assert!(words.of_row() * 32 >= columns, "{context}");
                for number in [words.of_row(), words.all_pieces(), words.pairs()] {
                    assert!(u32::try_from(number).is_ok(), "{context}");
                }
                let [
                    of_batch,
                    of_head,
                    of_row,
                    blocks,
                    block_batch,
                    block_head,
                    block_tile,
                ] = words.places().map(|place| place as usize);
                let row = (batch - 1) * of_batch + (heads - 1) * of_head + (rows - 1) * of_row;
                let end = (row + words.pieces) * WORDS_PER_PLANE;
                assert_eq!(end, words.of_rows(), "{context}");
                assert_eq!(blocks * WORDS_PER_PLANE, words.of_rows(), "{context}");
                if let Some(tile_rows) = tile_rows {
                    let tile = rows.div_ceil(tile_rows) - 1;
                    let pair =
                        (batch - 1) * block_batch + (heads - 1) * block_head + tile * block_tile;
                    assert_eq!(pair + words.blocks, words.pairs(), "{context}");
                }
            }
        }
    }
}
