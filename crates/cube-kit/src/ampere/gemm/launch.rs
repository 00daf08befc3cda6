//! Launches GEMM on NVIDIA GPUs since Ampere.

use super::kernel::{SizesLaunch, product};
use super::plan::Tiles;
use super::reduce::add_splits;
use crate::ampere::cp_async::{PIECE, PIECE_BYTES};
use crate::ampere::has_product;
use crate::hopper::multiprocessors;
use crate::launch::{address_type, cube_count, empty, exact_cube_count};
use crate::nvidia::Half;
use crate::nvidia::matrix::{Major, MatrixError, check_operands};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::CubeDim;

/// The number of tile rows whose tiles are numbered column by column.
const TOGETHER: usize = 16;

/// The number of units in a cube that adds up splits.
const UNITS: usize = 256;

/// The number of elements in a vector that a unit adds up.
const VECTOR: usize = 4;

/// The largest supported size of a dimension, so that tiles at the end do not overflow 32 bits.
const LONGEST: usize = i32::MAX as usize / 2;

/// Multiplies f16 or bf16 matrices on tensor cores with `mma.sync`. Accumulates in f32 and rounds the result once. If
/// the inner dimension is split, the splits are added up in f32 in a fixed order, so every run gives the same bits. The
/// number of splits depends on the shape, so a row may have other bits among more rows.
///
/// Returns `None` if the device has no `mma.sync` of 16 × 8 × 16, if the dtype is neither f16 nor bf16, or if an
/// operand cannot be copied in pieces of 16 bytes. An operand must be contiguous along one dimension, and its stride
/// along the other dimension must be a multiple of 8 elements. The number of result columns must be a multiple of 8.
///
/// # Shapes
/// `lhs [rows, inner]`, `rhs [inner, columns]` → `[rows, columns]`, all of one dtype.
///
/// # Errors
/// Returns [`MatrixError`] if an operand is not a matrix, or if the operands differ in inner size, dtype or device.
pub fn matrix_product(
    lhs: &CubeTensor,
    rhs: &CubeTensor,
) -> Result<Option<CubeTensor>, MatrixError> {
    check_operands(lhs, rhs)?;
    Ok(served(lhs, rhs))
}

/// Returns the dimension along which an operand is contiguous, and the stride of the other one in elements. The
/// tensor's dimension `outer` is the outer dimension of the GEMM, and `inner` is the inner dimension. Returns `None` if
/// the operand cannot be copied in pieces of 16 bytes.
fn layout(operand: &CubeTensor, [outer, inner]: [usize; 2]) -> Option<(Major, u32)> {
    let begins_at = operand.handle.offset_start.unwrap_or(0) as usize;
    if operand.meta.is_tiled() || !begins_at.is_multiple_of(PIECE_BYTES) {
        return None;
    }
    let (shape, strides) = (operand.meta.shape(), operand.meta.strides());
    let stride = |together: usize, apart: usize| {
        let is_together = strides[together] == 1 || shape[together] == 1;
        let stride = match shape[apart] {
            1 => 0,
            _ => strides[apart],
        };
        let is_read =
            is_together && (stride > 0 || shape[apart] == 1) && stride.is_multiple_of(PIECE);
        is_read.then(|| u32::try_from(stride).ok()).flatten()
    };
    let along_inner = stride(inner, outer).map(|stride| (Major::Inner, stride));
    along_inner.or_else(|| stride(outer, inner).map(|stride| (Major::Outer, stride)))
}

/// Returns the result for operands that fit each other, or `None` if the kernel cannot compute the result.
fn served(lhs: &CubeTensor, rhs: &CubeTensor) -> Option<CubeTensor> {
    let client = &lhs.client;
    let half = Half::of(lhs.dtype).filter(|half| has_product(client, *half))?;
    let sizes = sizes(lhs, rhs);
    let [_, _, columns] = sizes;
    if !columns.is_multiple_of(PIECE) || sizes.iter().any(|size| *size == 0 || *size > LONGEST) {
        return None;
    }
    let (lhs_major, _) = layout(lhs, [0, 1])?;
    let (rhs_major, _) = layout(rhs, [1, 0])?;
    let majors = [lhs_major, rhs_major];
    let (tiles, splits) = Tiles::choose(sizes, multiprocessors(client), majors, half);
    if tiles.shared_memory() > client.properties().hardware.max_shared_memory_size {
        return None;
    }
    launch(lhs, rhs, tiles, splits)
}

fn sizes(lhs: &CubeTensor, rhs: &CubeTensor) -> [usize; 3] {
    let [rows, inner] = lhs.meta.shape().dims();
    [rows, inner, rhs.meta.shape()[1]]
}

/// Launches the kernel with the given tiles and number of splits. Returns `None` if an operand cannot be copied in
/// pieces of 16 bytes.
fn launch(lhs: &CubeTensor, rhs: &CubeTensor, tiles: Tiles, splits: usize) -> Option<CubeTensor> {
    let client = lhs.client.clone();
    let [rows, inner, columns] = sizes(lhs, rhs);
    let (_, lhs_stride) = layout(lhs, [0, 1])?;
    let (_, rhs_stride) = layout(rhs, [1, 0])?;
    let (tile_rows, tile_columns) = (rows.div_ceil(Tiles::ROWS), columns.div_ceil(tiles.columns));
    let split_chunks = inner.div_ceil(Tiles::DEPTH).div_ceil(splits);
    let output = empty(lhs, [rows, columns], lhs.dtype);
    let sums = match splits {
        1 => output.clone(),
        _ => empty(lhs, [splits, rows, columns], DType::F32),
    };
    let elements = [lhs.dtype, sums.dtype].map(dtype_to_storage_type);
    // SAFETY: copies read only elements inside the operands, because they are shortened at the operands' ends. Threads
    // write only outputs below `rows` and `columns`. Both are multiples of what a thread writes at once.
    unsafe {
        product::launch_unchecked(
            &client,
            exact_cube_count(&client, tile_rows * tile_columns * splits),
            CubeDim::new_1d(tiles.units() as u32),
            address_type([lhs, rhs, &sums]),
            lhs.clone().into_tensor_arg(),
            rhs.clone().into_tensor_arg(),
            sums.clone().into_tensor_arg(),
            SizesLaunch::new(
                rows as u32,
                inner as u32,
                columns as u32,
                lhs_stride,
                rhs_stride,
                tile_columns as u32,
                tile_rows as u32,
                TOGETHER as u32,
                split_chunks as u32,
            ),
            tiles,
            elements,
        );
    }
    if splits > 1 {
        let vectors = rows * columns / VECTOR;
        // SAFETY: a unit reads and writes only vectors below `vectors`, and each split has `vectors` vectors.
        unsafe {
            add_splits::launch_unchecked(
                &client,
                cube_count(&client, vectors.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                address_type([&sums, &output]),
                sums.into_tensor_arg(),
                output.clone().into_tensor_arg(),
                vectors as u32,
                splits,
                dtype_to_storage_type(output.dtype),
                VECTOR,
            );
        }
    }
    Some(output)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::{ops::FloatTensorOps, read_sync};
    use burn::tensor::{Slice, TensorData};
    use burn_cubecl::{CubeBackend, CubeDevice};

    /// An operand with the given memory layout, and its values. Everything around the operand is NaN.
    struct Drawn {
        tensor: CubeTensor,
        values: Vec<f64>,
    }

    fn values(tensor: CubeTensor) -> Vec<f64> {
        let data = read_sync(CubeBackend::float_into_data(tensor)).expect("the device computes");
        data.iter::<f64>().collect()
    }

    /// Draws a matrix `[rows, columns]` that is contiguous along its rows, or along its columns if `transposed`. The
    /// stride of the other dimension is a multiple of 8 elements.
    fn drawn(
        [rows, columns]: [usize; 2],
        transposed: bool,
        dtype: DType,
        device: &CubeDevice,
    ) -> Drawn {
        let [apart, together] = match transposed {
            true => [columns, rows],
            false => [rows, columns],
        };
        let stride = together.next_multiple_of(8) + 8;
        let mut all = vec![f32::NAN; (apart + 2) * stride];
        for row in all.chunks_exact_mut(stride).take(apart) {
            row[..together].fill_with(|| rand::random_range(-1.0..1.0));
        }
        let data = TensorData::new(all, [apart + 2, stride]).convert_dtype(dtype);
        let whole = CubeBackend::float_from_data(data, device);
        let slices = [Slice::from(0..apart), Slice::from(0..together)];
        let tensor = CubeBackend::float_slice(whole, &slices);
        let tensor = match transposed {
            true => CubeBackend::float_transpose(tensor),
            false => tensor,
        };
        Drawn {
            values: values(tensor.clone()),
            tensor,
        }
    }

    /// Checks every width of tiles, with and without splits, for all layouts of the operands. Sizes are smaller and
    /// larger than a tile, and no multiples of one. Two runs give the same bits.
    #[test]
    fn products_of_all_plans_match_reference() {
        let device = CubeDevice::default();
        for dtype in [DType::BF16, DType::F16] {
            let half = Half::of(dtype).expect("a half precision");
            let probe = drawn([8, 8], false, dtype, &device);
            if !has_product(&probe.tensor.client, half) {
                continue;
            }
            // The last shape has more rows of tiles than a group.
            let shapes = [
                [130, 200, 264],
                [5, 7, 8],
                [257, 41, 72],
                [64, 320, 520],
                [1, 40, 136],
                [40, 1, 8],
                [17 * 128 + 1, 33, 136],
            ];
            for (index, [rows, inner, columns]) in shapes.into_iter().enumerate() {
                for layout in 0..4 {
                    let lhs = drawn([rows, inner], layout % 2 == 1, dtype, &device);
                    let rhs = drawn([inner, columns], layout / 2 == 1, dtype, &device);
                    let expected = |row: usize, column: usize| -> f64 {
                        let products = (0..inner).map(|i| {
                            lhs.values[row * inner + i] * rhs.values[i * columns + column]
                        });
                        products.sum()
                    };
                    let expected: Vec<f64> = (0..rows * columns)
                        .map(|at| expected(at / columns, at % columns))
                        .collect();
                    let majors = [(&lhs.tensor, [0, 1]), (&rhs.tensor, [1, 0])]
                        .map(|(tensor, order)| super::layout(tensor, order).expect("aligned").0);
                    for tiles in Tiles::all(majors, half) {
                        for splits in [1, 3] {
                            let tiles = Tiles {
                                is_split: splits > 1,
                                ..tiles
                            };
                            let run = || {
                                let product = launch(&lhs.tensor, &rhs.tensor, tiles, splits);
                                values(product.expect("the operands are aligned"))
                            };
                            let found = run();
                            let what = format!("{dtype:?}, shape {index}, {tiles:?}, {splits}");
                            let epsilon = match half {
                                Half::F16 => 2f64.powi(-11),
                                Half::Bf16 => 2f64.powi(-8),
                            };
                            for (found, expected) in found.iter().zip(&expected) {
                                let error = (found - expected).abs();
                                let most = epsilon * expected.abs() + 1e-5 * inner as f64;
                                assert!(error <= most, "{what}: {found}, expected {expected}");
                            }
                            assert_eq!(found, run(), "{what}: two runs");
                        }
                    }
                }
            }
        }
    }
}
