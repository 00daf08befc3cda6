//! Packs the mask for the Hopper kernels: see `kernel/mask_bits.rs`.

use super::*;
use crate::kernel::mask_bits::{MaskPlacesLaunch, WORDS_PER_PLANE, pack_mask, sum_up_mask};
use crate::plan::wgmma::Side;
use cubecl::prelude::CubeDim;

const UNITS: usize = 256;
const PLANE: usize = 32;

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
    let blocks = columns.div_ceil(block_keys);
    let pieces = (blocks * block_keys.div_ceil(32)).div_ceil(WORDS_PER_PLANE);
    let words = pieces * WORDS_PER_PLANE;
    let bits_end = batch * heads * rows * words;
    let tiles = tile_rows.map_or(0, |tile_rows| rows.div_ceil(tile_rows));
    let block_count = batch * heads * tiles * blocks;
    let bits = empty(&inputs.query, [bits_end + block_count], DType::U32);
    let client = bits.client.clone();
    let launch = |planes: usize| {
        (
            cube_count(&client, (planes * PLANE).div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
        )
    };

    let count = batch * heads * rows * pieces;
    let (cubes, units) = launch(count);
    let element = dtype_to_storage_type(mask.dtype);
    // SAFETY: a plane a piece of a row, the rest does nothing; columns stay below their number.
    unsafe {
        pack_mask::launch_unchecked(
            &client,
            cubes,
            units,
            mask.into_tensor_arg(),
            bits.clone().into_tensor_arg(),
            heads as u32,
            rows as u32,
            columns as u32,
            pieces as u32,
            count as u32,
            block_keys as u32,
            element,
        );
    }
    if let Some(tile_rows) = tile_rows {
        let (cubes, units) = launch(block_count);
        // SAFETY: a plane a pair, inside the words that the first launch wrote.
        unsafe {
            sum_up_mask::launch_unchecked(
                &client,
                cubes,
                units,
                bits.clone().into_tensor_arg(),
                bits_end as u32,
                rows as u32,
                columns as u32,
                words as u32,
                tiles as u32,
                blocks as u32,
                block_count as u32,
                tile_rows as u32,
                block_keys as u32,
            );
        }
    }
    let step = |size: usize, step: usize| if size == 1 { 0 } else { step as u32 };
    let places = [
        step(batch, heads * rows * words),
        step(heads, rows * words),
        step(rows, words),
        bits_end as u32,
        step(batch, heads * tiles * blocks),
        step(heads, tiles * blocks),
        step(rows, blocks),
    ];
    PackedMask {
        bits: Some(bits),
        places,
    }
}
