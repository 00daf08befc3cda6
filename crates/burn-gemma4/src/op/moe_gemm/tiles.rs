//! The tiles of a padded matrix: each tile has rows of one expert.

use super::NUMBERS;
use super::tiles_kernel::{
    Direction, MoveSizesLaunch, ROWS, SumSizesLaunch, TABLE_UNITS, UNITS_OF_ROW, move_rows,
    slots_of_pairs, tile_table, weighted_sums,
};
use crate::op::launch::vector_size;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::{cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::hopper::gemm::plan::MatrixTiles;
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

/// The (row, chosen expert) pairs sorted by expert, and the tiles of the experts.
pub(super) struct ExpertTiles<'a> {
    order: &'a CubeTensor,
    starts: &'a CubeTensor,
    /// See [`tile_table()`].
    pub table: CubeTensor,
    pub experts: usize,
    /// The number of rows in the padded matrix.
    slots: usize,
}

impl<'a> ExpertTiles<'a> {
    pub fn new(order: &'a CubeTensor, starts: &'a CubeTensor) -> Self {
        let experts = starts.meta.shape()[0] - 1;
        let pairs = order.meta.shape()[0];
        // Compute the largest possible number of tiles. Every expert has at most one tile that is not full, and an
        // expert without pairs has no tile.
        let tiles = pairs / MatrixTiles::ROWS + experts.min(pairs);
        let table = empty(starts, [experts + 1 + tiles], NUMBERS);
        // SAFETY: the kernel reads the `experts + 1` elements of `starts`. It writes the first `experts + 1` elements
        // of `table`, and then one element per tile. All experts together have at most `tiles` tiles.
        unsafe {
            tile_table::launch_unchecked(
                &starts.client,
                cube_count(&starts.client, 1),
                CubeDim::new_1d(TABLE_UNITS as u32),
                starts.clone().into_tensor_arg(),
                table.clone().into_tensor_arg(),
                experts as u32,
                MatrixTiles::ROWS as u32,
            );
        }
        Self {
            order,
            starts,
            table,
            experts,
            slots: tiles * MatrixTiles::ROWS,
        }
    }

    /// Copies the rows of the pairs to slots, which are the rows of the padded matrix. Every `of_row` consecutive pairs
    /// read the same row of `rows`.
    pub fn to_slots(&self, rows: &CubeTensor, of_row: usize) -> CubeTensor {
        let columns = rows.meta.shape()[1];
        let slots = empty(rows, [self.slots, columns], rows.dtype);
        self.move_rows(rows, &slots, of_row, Direction::ToSlots);
        slots
    }

    /// Copies the slots (rows of the padded matrix) back to one row per pair.
    pub fn to_pairs(&self, slots: &CubeTensor) -> CubeTensor {
        let columns = slots.meta.shape()[1];
        let pairs = self.order.meta.shape()[0];
        let rows = empty(slots, [pairs, columns], slots.dtype);
        self.move_rows(slots, &rows, 1, Direction::ToPairs);
        rows
    }

    /// Adds up the slots (rows of the padded matrix) of each row's pairs, weighted by `weights`, `[rows, top_k]` in
    /// f32. Returns `[rows, columns]`.
    pub fn weighted_sums(&self, slots: &CubeTensor, weights: CubeTensor) -> CubeTensor {
        let client = &slots.client;
        let weights = into_contiguous(weights);
        let [rows, top_k] = weights.meta.shape().dims();
        let pairs = self.order.meta.shape()[0];
        assert_eq!(rows * top_k, pairs, "weights: expected one for each pair");
        assert_eq!(weights.dtype, DType::F32, "weights: expected f32");
        let of_pairs = empty(slots, [pairs], NUMBERS);
        let columns = slots.meta.shape()[1];
        let sums = empty(slots, [rows, columns], slots.dtype);
        let strides = [slots, &sums].map(|rows| rows.meta.strides()[0]);
        let vector = vector_size(
            client,
            slots.dtype.size(),
            &[columns, strides[0], strides[1]],
        );
        let [source_stride, target_stride] = strides.map(|stride| (stride / vector) as u32);
        let sizes = SumSizesLaunch::new(
            rows as u32,
            top_k as u32,
            (columns / vector) as u32,
            source_stride,
            target_stride,
        );
        // SAFETY: the first kernel writes one element of `of_pairs` for each slot that holds a pair. `order` lists each
        // pair once. The second kernel reads slots of pairs, and writes rows below `rows`.
        unsafe {
            slots_of_pairs::launch_unchecked(
                client,
                cube_count(client, self.slots.div_ceil(TABLE_UNITS)),
                CubeDim::new_1d(TABLE_UNITS as u32),
                self.order.clone().into_tensor_arg(),
                self.starts.clone().into_tensor_arg(),
                self.table.clone().into_tensor_arg(),
                of_pairs.clone().into_tensor_arg(),
                self.experts as u32,
                MatrixTiles::ROWS as u32,
            );
            weighted_sums::launch_unchecked(
                client,
                cube_count(client, rows.div_ceil(ROWS)),
                CubeDim::new_1d((ROWS * UNITS_OF_ROW) as u32),
                address_type([slots, &sums]),
                slots.clone().into_tensor_arg(),
                of_pairs.into_tensor_arg(),
                weights.into_tensor_arg(),
                sums.clone().into_tensor_arg(),
                sizes,
                dtype_to_storage_type(slots.dtype),
                vector,
            );
        }
        sums
    }

    fn move_rows(
        &self,
        source: &CubeTensor,
        target: &CubeTensor,
        of_row: usize,
        direction: Direction,
    ) {
        let client = &source.client;
        let columns = source.meta.shape()[1];
        let strides = [source, target].map(|rows| rows.meta.strides()[0]);
        let vector = vector_size(
            client,
            source.dtype.size(),
            &[columns, strides[0], strides[1]],
        );
        let [source_stride, target_stride] = strides.map(|stride| (stride / vector) as u32);
        let sizes = MoveSizesLaunch::new(
            self.experts as u32,
            (columns / vector) as u32,
            source_stride,
            target_stride,
            of_row as u32,
        );
        // SAFETY: a group of units copies one row between a slot and a pair. The slot is below `slots`, and `order`
        // lists only existing pairs. Units of unused tiles terminate at once.
        unsafe {
            move_rows::launch_unchecked(
                client,
                cube_count(client, self.slots / ROWS),
                CubeDim::new_1d((ROWS * UNITS_OF_ROW) as u32),
                address_type([source, target]),
                source.clone().into_tensor_arg(),
                target.clone().into_tensor_arg(),
                self.order.clone().into_tensor_arg(),
                self.starts.clone().into_tensor_arg(),
                self.table.clone().into_tensor_arg(),
                sizes,
                direction,
                MatrixTiles::ROWS as u32,
                dtype_to_storage_type(source.dtype),
                vector,
            );
        }
    }
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use super::super::{GroupBackend, Grouped};
    use super::*;
    use burn::backend::CubeDevice;
    use burn::backend::ops::{FloatTensorOps, IntTensorOps};
    use burn::tensor::TensorData;
    use burn_cubecl::CubeBackend;
    use burn_cubecl::cubecl::future::block_on;

    fn floats(tensor: CubeTensor) -> Vec<f32> {
        let data = block_on(CubeBackend::float_into_data(tensor)).expect("the device works");
        data.iter::<f32>().collect()
    }

    /// Checks the tiles of 300 pairs: three experts share 299 pairs, one expert has one pair, and three have none. The
    /// slots of an expert hold its rows in order, and then zeros. Copying the slots back gives the rows of the pairs.
    #[test]
    fn to_slots_groups_rows_and_to_pairs_undoes_it() {
        let device = CubeDevice::default();
        let (experts, top_k, columns) = (7, 2, 6);
        let chosen: Vec<i32> = (0..300)
            .map(|pair| match pair {
                77 => 5,
                _ => [1, 3, 6][pair * pair % 7 % 3],
            })
            .collect();
        let data = TensorData::new(chosen.clone(), [chosen.len() / top_k, top_k]);
        let of_pairs = CubeBackend::int_from_data(data, &device);
        let of_pairs = CubeBackend::int_cast(of_pairs, burn::tensor::IntDType::I32);
        let Grouped { order, starts } = CubeBackend::group(of_pairs, experts);
        let tiles = ExpertTiles::new(&order, &starts);
        let rows: Vec<f32> = (1..=chosen.len() / top_k * columns)
            .map(|x| x as f32)
            .collect();
        let data = TensorData::new(rows.clone(), [rows.len() / columns, columns]);
        let source = CubeBackend::float_from_data(data, &device);
        assert_eq!(source.dtype, DType::F32);
        let slots = tiles.to_slots(&source, top_k);

        let mut expected = Vec::new();
        let mut of_tiles = Vec::new();
        for expert in 0..experts as i32 {
            let pairs = chosen.iter().enumerate().filter(|(_, of)| **of == expert);
            for (pair, _) in pairs {
                expected.extend(&rows[pair / top_k * columns..][..columns]);
            }
            let filled = (expected.len() / columns).next_multiple_of(MatrixTiles::ROWS);
            expected.resize(filled * columns, 0.0);
            of_tiles.resize(filled / MatrixTiles::ROWS, expert);
        }
        assert_eq!(floats(slots.clone())[..expected.len()], expected);
        let table = block_on(CubeBackend::int_into_data(tiles.table.clone()));
        let table: Vec<i32> = table.expect("the device works").iter::<i32>().collect();
        assert_eq!(table[experts] as usize, of_tiles.len());
        assert_eq!(table[experts + 1..][..of_tiles.len()], of_tiles);

        // The weights of the pairs are 1, 2, 3 …
        let weights: Vec<f32> = (1..=chosen.len()).map(|weight| weight as f32).collect();
        let data = TensorData::new(weights.clone(), [chosen.len() / top_k, top_k]);
        let weights_of_pairs = CubeBackend::float_from_data(data, &device);
        let sums = floats(tiles.weighted_sums(&slots, weights_of_pairs));
        for (row, sums) in sums.chunks_exact(columns).enumerate() {
            let weight: f32 = weights[row * top_k..][..top_k].iter().sum();
            let expected = rows[row * columns..][..columns].iter().map(|x| x * weight);
            assert_eq!(sums, expected.collect::<Vec<_>>());
        }

        let back = floats(tiles.to_pairs(&slots));
        for (pair, row) in back.chunks_exact(columns).enumerate() {
            assert_eq!(row, &rows[pair / top_k * columns..][..columns]);
        }
    }
}
