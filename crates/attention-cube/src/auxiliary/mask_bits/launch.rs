//! Launches the kernels that pack a mask for the tensor-core kernels: see `kernel.rs`.

use crate::auxiliary::mask_bits::kernel::{
    MaskOffsetsLaunch, PLANES, SummaryGridLaunch, pack_mask_pdl, sum_up_block_mask, sum_up_mask,
};
use crate::auxiliary::mask_bits::plan::{MaskTile, MaskWords};
use crate::kernel_args::collapse_broadcast_dims;
use crate::math::side::Side;
use crate::problem::AttentionProblem;
use crate::types::tensors::AttentionInputs;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::ops::BoolTensorOps;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{address_type, cube_count, empty};
use cube_kit::pdl::supports_pdl;
use cubecl::prelude::CubeDim;
use cubecl::prelude::TensorArg;

const PLANE: u32 = 32;

/// A packed mask. The field `bits` is `None` if the problem has no mask.
#[derive(Clone, Default)]
pub(crate) struct PackedMask {
    pub bits: Option<CubeTensor>,
    /// The offsets in the order of the fields of [`MaskOffsets`](crate::auxiliary::mask_bits::kernel::MaskOffsets).
    offsets: [u32; 7],
}

impl PackedMask {
    pub fn argument(&self) -> Option<TensorArg> {
        self.bits.clone().map(CubeTensor::into_tensor_arg)
    }

    pub fn offsets(&self) -> MaskOffsetsLaunch {
        let [
            batch,
            head,
            row,
            blocks,
            block_batch,
            block_head,
            block_tile,
        ] = self.offsets;
        MaskOffsetsLaunch::new(
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

/// Packs the mask, if the problem has one. If `side` is queries, a row of the packed mask belongs to one query and
/// holds one bit per key. If `side` is keys, a row belongs to one key and holds one bit per query. A block mask has one
/// row per block of rows, and one bit per block of columns. A summary covers the rows of `tile` and `block_keys`
/// neighboring columns.
pub(crate) fn pack(
    inputs: &AttentionInputs<CubeBackend>,
    problem: &AttentionProblem,
    side: Side,
    tile: MaskTile,
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
    let words = MaskWords::new(own, problem, side, tile, block_keys);
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
    // SAFETY: a plane writes only the words of its own piece, and planes without a piece do nothing. The kernel reads `mask`
    // only at existing rows and at columns below `columns`.
    unsafe {
        pack_mask_pdl::launch_unchecked(
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
            // The bits of a block mask have no gaps, as if each block had 32 keys.
            if problem.has_block_mask() {
                32
            } else {
                block_keys as u32
            },
            supports_pdl(&client),
            element,
        );
    }
    if problem.has_block_mask() {
        let (cubes, units) = launch(words.pairs());
        let (tile_rows, tile_heads) = match tile {
            MaskTile::Rows(rows) => (rows, 1),
            MaskTile::Heads(heads) => (problem.q_len, heads),
        };
        let [of_queries, of_keys] = problem.mask_block;
        let (row_size, column_size, all_columns) = match side {
            Side::Queries => (of_queries, of_keys, problem.kv_len),
            Side::Keys => (of_keys, of_queries, problem.q_len),
        };
        // SAFETY: each plane reads the words that the first launch wrote, and writes the summary of one pair of a tile
        // and a block after these words. Planes without a pair do nothing.
        unsafe {
            sum_up_block_mask::launch_unchecked(
                &client,
                cubes,
                units,
                bits.clone().into_tensor_arg(),
                SummaryGridLaunch::new(
                    words.of_rows() as u32,
                    rows as u32,
                    words.of_row() as u32,
                    all_columns as u32,
                    words.tiles as u32,
                    words.blocks as u32,
                    words.pairs() as u32,
                    tile_rows as u32,
                    block_keys as u32,
                ),
                if heads == 1 { 1 } else { tile_heads as u32 },
                problem.group() as u32,
                row_size as u32,
                column_size as u32,
            );
        }
    } else if let MaskTile::Rows(tile_rows) = tile {
        let (cubes, units) = launch(words.pairs());
        // SAFETY: each plane reads the words that the first launch wrote, and writes the summary of one pair of a tile and a
        // block after these words. Planes without a pair do nothing.
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
        offsets: words.offsets(),
    }
}

/// Returns the mask as `[sequences, heads, rows, columns]`. If `side` is queries, the rows are queries and the columns
/// keys. If `side` is keys, the rows are keys and the columns queries. A block mask has rows and columns of elements.
/// The columns are expanded, and all other
/// broadcast dimensions keep size 1.
fn rows_of_mask(mask: &CubeTensor, problem: &AttentionProblem, side: Side) -> CubeTensor {
    let [of_queries, of_keys] = problem.mask_block;
    let (mask, columns) = match side {
        Side::Queries => (mask.clone(), problem.kv_len.div_ceil(of_keys)),
        Side::Keys => (
            CubeBackend::bool_swap_dims(mask.clone(), 2, 3),
            problem.q_len.div_ceil(of_queries),
        ),
    };
    let mask = collapse_broadcast_dims(&mask, 3);
    let shape = mask.meta.shape();
    let rows = [shape[0], shape[1], shape[2], columns];
    CubeBackend::bool_expand(mask, Shape::new(rows))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::AttentionOptions;
    use crate::testing::{cube_device, device};
    use burn::tensor::{BoolDType, Tensor};

    /// Checks that `rows_of_mask` undoes the expansion of a broadcast mask, so that repeated rows, heads and sequences
    /// are packed only once. The result must keep size 1 in each broadcast dimension except the columns.
    #[test]
    fn rows_of_mask_of_expanded_mask_keeps_own_shape() {
        let cube = cube_device();
        let scores = [2, 3, 5, 7];
        let operand = |length| Tensor::<4>::zeros([2, 3, length, 8], &device());
        let options = AttentionOptions::new();
        let problem = AttentionProblem::new(&operand(5), &operand(7), &operand(7), &options)
            .expect("the sizes fit each other");
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
