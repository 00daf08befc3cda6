//! Packs the mask for the Hopper kernels: see `kernel.rs`.

use crate::AttentionProblem;
use crate::arguments::distinct;
use crate::backend::AttentionInputs;
use crate::math::side::Side;
use crate::passes::mask_bits::kernel::{
    MaskPlacesLaunch, PLANES, pack_mask_overlapped, sum_up_mask,
};
use crate::passes::mask_bits::plan::MaskWords;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::ops::BoolTensorOps;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{address_type, cube_count, empty};
use cube_kit::overlap::overlaps;
use cubecl::prelude::CubeDim;
use cubecl::prelude::TensorArg;

const PLANE: u32 = 32;

/// A mask, if there is one, as the kernels read it.
#[derive(Clone, Default)]
pub(crate) struct PackedMask {
    pub bits: Option<CubeTensor>,
    /// In the order of [`MaskPlaces`](crate::passes::mask_bits::kernel::MaskPlaces).
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
pub(crate) fn pack(
    inputs: &AttentionInputs<CubeBackend>,
    problem: &AttentionProblem,
    side: Side,
    tile_rows: Option<usize>,
    block_keys: usize,
) -> PackedMask {
    let Some(mask) = inputs.mask.as_option() else {
        return PackedMask::default();
    };
    let mask = rows_of_mask(mask, problem, side);
    let shape = mask.meta.shape();
    let [batch, heads, rows, columns] = [0, 1, 2, 3].map(|dim| shape[dim]);
    let own = match side {
        Side::Queries => [batch, heads, rows, columns],
        Side::Keys => [batch, heads, columns, rows],
    };
    let words = MaskWords::new(own, problem, side, tile_rows, block_keys);
    let bits = empty(&inputs.query, [words.all()], DType::U32);
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
        pack_mask_overlapped::launch_unchecked(
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
            overlaps(&client),
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
                bits.clone().into_tensor_arg(),
                words.of_rows() as u32,
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

/// `[sequences, heads, rows, columns]` of a mask, rows of one side and as many columns as the other has: those that differ, since
/// the others are read with a step of 0.
fn rows_of_mask(mask: &CubeTensor, problem: &AttentionProblem, side: Side) -> CubeTensor {
    let (mask, columns) = match side {
        Side::Queries => (mask.clone(), problem.kv_len),
        Side::Keys => (
            CubeBackend::bool_swap_dims(mask.clone(), 2, 3),
            problem.q_len,
        ),
    };
    let mask = distinct(&mask, 3);
    let shape = mask.meta.shape();
    let rows = [shape[0], shape[1], shape[2], columns];
    CubeBackend::bool_expand(mask, Shape::new(rows))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AttentionOptions;
    use crate::testing::{cube_device, device};
    use burn::tensor::{BoolDType, Tensor};

    /// A mask that the caller expanded is packed as one that attention broadcasts.
    #[test]
    fn what_repeats_is_packed_once() {
        let cube = cube_device();
        let scores = [2, 3, 5, 7];
        let operand = |length| Tensor::<4>::zeros([2, 3, length, 8], &device());
        let options = AttentionOptions::new();
        let problem = AttentionProblem::new(&operand(5), &operand(7), &operand(7), &options)
            .expect("sizes that fit");
        for bits in 0..16 {
            let own = [0, 1, 2, 3].map(|dim| if bits >> dim & 1 == 1 { scores[dim] } else { 1 });
            let mask = CubeBackend::bool_empty(Shape::new(own), &cube, BoolDType::U32);
            let expanded = CubeBackend::bool_expand(mask.clone(), Shape::new(scores));
            for (side, rows, columns) in [(Side::Queries, own[2], 7), (Side::Keys, own[3], 5)] {
                let expected = Shape::new([own[0], own[1], rows, columns]);
                for mask in [&mask, &expanded] {
                    let packed = rows_of_mask(mask, &problem, side);
                    assert_eq!(
                        packed.meta.shape(),
                        &expected,
                        "{own:?}, {side:?}, {mask:?}"
                    );
                }
            }
        }
    }
}
