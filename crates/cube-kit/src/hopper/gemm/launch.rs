//! Launches GEMM on Hopper.

use crate::hopper::gemm::kernel::{MatrixGridLaunch, StartsLaunch, product, product_of_sides};
use crate::hopper::gemm::operand::{BOX_ALIGNMENT, Operand};
use crate::hopper::gemm::plan::{MatrixTiles, TOGETHER};
use crate::hopper::{PRODUCT_ROWS, is_hopper, multiprocessors};
use crate::launch::empty;
use crate::nvidia::Half;
use crate::nvidia::matrix::{MatrixError, check_operands};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::CubeCount;
use cubecl::prelude::CubeDim;

/// Multiplies f16 or bf16 matrices on Hopper's tensor cores. Accumulates in f32 and rounds the result once.
///
/// Returns `None` if the device is not a Hopper GPU, if the dtype is neither f16 nor bf16, or if TMA cannot read an
/// operand or write the result. An operand must be contiguous along one dimension, and its stride along the other
/// dimension must be a multiple of 16 bytes. The number of result columns must be a multiple of 8.
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
    Ok(served(lhs, &[rhs]))
}

/// Multiplies `lhs` by one to three right operands in one launch, and returns the results side by side in one matrix:
/// see [`matrix_product`].
///
/// Returns `None` in the same cases as [`matrix_product`]. Also returns `None` if [`multiplies_side_by_side`] is false,
/// or if the right operands are contiguous along different dimensions.
///
/// # Shapes
/// `lhs [rows, inner]`, `sides` of `[inner, columns_i]` → `[rows, Σ columns_i]`, all of one dtype.
///
/// # Errors
/// Returns the errors of [`matrix_product`].
pub fn matrix_products(
    lhs: &CubeTensor,
    sides: &[CubeTensor],
) -> Result<Option<CubeTensor>, MatrixError> {
    for side in sides {
        check_operands(lhs, side)?;
    }
    let counts: Vec<_> = sides.iter().map(|side| shape(side)[1]).collect();
    let serves = multiplies_side_by_side(&lhs.client, lhs.dtype, &counts);
    let sides: Vec<_> = sides.iter().collect();
    Ok(serves.then(|| served(lhs, &sides)).flatten())
}

/// True if [`matrix_products`] can multiply by right operands with these numbers of columns. There must be one to three
/// right operands. Each right operand except the last must fill whole tiles. Memory layouts are not checked.
pub fn multiplies_side_by_side(client: &Client, dtype: DType, columns: &[usize]) -> bool {
    let [others @ .., _] = columns else {
        return false;
    };
    let whole = |columns: &usize| columns.is_multiple_of(MatrixTiles::NARROWEST);
    is_hopper(client) && Half::of(dtype).is_some() && others.len() < 3 && others.iter().all(whole)
}

/// Returns the result for operands that fit each other, or `None` if no kernel of this module can compute the result.
///
/// Each right operand after the first must begin at a result column that is a multiple of the narrowest tile's width.
fn served(lhs: &CubeTensor, sides: &[&CubeTensor]) -> Option<CubeTensor> {
    let [rhs, others @ ..] = sides else {
        return None;
    };
    let client = lhs.client.clone();
    let half = Half::of(lhs.dtype)?;
    if !is_hopper(&client) || lhs.meta.is_tiled() || sides.iter().any(|side| side.meta.is_tiled()) {
        return None;
    }
    let [rows, inner] = shape(lhs);
    let mut starts = Vec::new();
    let mut columns = shape(rhs)[1];
    for other in others {
        starts.push(columns);
        columns += shape(other)[1];
    }
    let fits = rows > 0 && inner > 0 && columns > 0 && columns.is_multiple_of(BOX_ALIGNMENT / 2);
    if !fits
        || [rows, inner, columns]
            .into_iter()
            .any(|length| length > LONGEST)
    {
        return None;
    }
    let of_lhs = Operand::of(lhs, [0, 1])?;
    let of_sides: Option<Vec<_>> = sides.iter().map(|side| Operand::of(side, [1, 0])).collect();
    let of_sides = of_sides?;
    let [lhs_major, rhs_major] = [of_lhs.major, of_sides[0].major];
    if of_sides.iter().any(|side| side.major != rhs_major) {
        return None;
    }
    let multiprocessors = multiprocessors(&client);
    let tiles = MatrixTiles::choose(
        [rows, inner, columns],
        &starts,
        multiprocessors,
        [lhs_major, rhs_major],
        half,
    );
    let output = empty(lhs, [rows, columns], lhs.dtype);
    let grid = [
        rows.div_ceil(MatrixTiles::ROWS),
        columns.div_ceil(tiles.columns),
    ];
    let cubes = multiprocessors.min(grid[0] * grid[1]);
    let of_side = |side: usize| of_sides[side].map(sides[side], tiles.columns);
    let of_lhs = of_lhs.map(lhs, MatrixTiles::ROWS);
    let of_output = Operand::of(&output, [0, 1])?.map(&output, PRODUCT_ROWS);
    let grid = MatrixGridLaunch::new(
        grid[0] as u32,
        grid[1] as u32,
        TOGETHER as u32,
        inner.div_ceil(MatrixTiles::DEPTH) as u32,
    );
    let count = CubeCount::Static(cubes as u32, 1, 1);
    let units = CubeDim::new_1d(MatrixTiles::UNITS as u32);
    let element = dtype_to_storage_type(lhs.dtype);
    // A right operand that does not exist starts after the last column of the result, so that no column belongs to it.
    let start = |side: usize| starts.get(side).copied().unwrap_or(columns) as u32;
    let starts = StartsLaunch::new(start(0), start(1));
    // SAFETY: the kernels access global memory only by TMA, which accesses only elements inside its tensor maps. The
    // tensor maps have the shapes of `lhs`, the right operands and `output`.
    unsafe {
        match others {
            [] => product::launch_unchecked(
                &client,
                count,
                units,
                of_lhs,
                of_side(0),
                of_output,
                grid,
                starts,
                tiles,
                element,
                tiles.columns / 2,
            ),
            // Of two right operands, the second is passed again as the third.
            [_, ..] => product_of_sides::launch_unchecked(
                &client,
                count,
                units,
                of_lhs,
                of_side(0),
                of_side(1),
                of_side(sides.len() - 1),
                of_output,
                grid,
                starts,
                tiles,
                element,
                tiles.columns / 2,
            ),
        }
    }
    Some(output)
}

/// The largest supported size of a dimension. The size is limited because TMA coordinates are 32 bits wide.
pub(super) const LONGEST: usize = i32::MAX as usize / 2;

fn shape(matrix: &CubeTensor) -> [usize; 2] {
    [matrix.meta.shape()[0], matrix.meta.shape()[1]]
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Shape;
    use burn_cubecl::CubeDevice;
    use burn_cubecl::cubecl::device::CudaDevice;
    use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;

    /// Checks that operands that do not fit each other give an error on every device. The error must name the size,
    /// dtype or device that does not fit. Operands that fit must give a result or `None`.
    #[test]
    fn matrix_product_of_unfit_operands_is_an_error() {
        let device = CubeDevice::default();
        let matrix = |shape: Vec<usize>, dtype| {
            let shape = Shape::from(shape);
            empty_device_contiguous_dtype(device.client(), device.clone(), shape, dtype)
        };
        let f16 = |shape: &[usize]| matrix(shape.to_vec(), DType::F16);
        let elsewhere = CubeTensor {
            device: CubeDevice::Cuda(CudaDevice::new(97)),
            ..f16(&[64, 8])
        };
        for (lhs, rhs, text) in [
            (f16(&[16, 64]), f16(&[32, 8]), "inner"),
            (f16(&[1, 16, 64]), f16(&[64, 8]), "rank"),
            (f16(&[16, 64]), f16(&[1, 64, 8]), "rank"),
            (f16(&[16, 64]), matrix(vec![64, 8], DType::F32), "F32"),
            (f16(&[16, 64]), elsewhere, "97"),
        ] {
            let outcome = format!("{:?}", matrix_product(&lhs, &rhs));
            assert!(
                outcome.starts_with("Err") && outcome.contains(text),
                "{text}: {outcome}"
            );
        }
        let outcome = format!("{:?}", matrix_product(&f16(&[16, 64]), &f16(&[64, 8])));
        assert!(!outcome.starts_with("Err"), "{outcome}");
    }
}
