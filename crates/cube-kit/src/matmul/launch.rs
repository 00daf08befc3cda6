//! Launches the matrix product of Hopper.

use crate::hopper::tma::boxes;
use crate::hopper::{ASSUMED_MULTIPROCESSORS, Half, PRODUCT_ROWS, SUBTILE, is_hopper};
use crate::launch::empty;
use crate::matmul::kernel::{MatrixGridLaunch, StartsLaunch, product, product_of_sides};
use crate::matmul::plan::{Major, MatrixTiles, TOGETHER};
use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::CubeCount;
use cubecl::prelude::{CubeDim, TensorMapArg, Tiled};

/// Why a product was refused: which argument, what it has, and what it should have.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MatrixError {
    /// An operand's shape does not fit.
    #[error(
        "{argument} has shape {has:?}: its {dimension} is {found}, and it should be {expected}"
    )]
    Shape {
        /// The argument's name.
        argument: &'static str,
        /// Its shape.
        has: Vec<usize>,
        /// The dimension that does not fit.
        dimension: &'static str,
        /// The size found there.
        found: usize,
        /// The size wanted, and why.
        expected: String,
    },
    /// The operands differ in dtype.
    #[error("{argument} has dtype {has:?}, and it should have {expected}")]
    Dtype {
        /// The argument's name.
        argument: &'static str,
        /// Its dtype.
        has: DType,
        /// The dtype wanted.
        expected: String,
    },
    /// The operands are on different devices.
    #[error("{argument} is on {has}, and it should be on the {whose}'s device, {expected}")]
    Device {
        /// The argument's name.
        argument: &'static str,
        /// Its device.
        has: String,
        /// The other one.
        whose: &'static str,
        /// Its device.
        expected: String,
    },
}

/// `[rows, inner]` times `[inner, columns]` of f16 or bf16, summed in f32 and rounded once, at the speed of Hopper's matrix
/// units; `None` where the device is no Hopper, the dtype another, or where the copy engine cannot read an operand or write
/// the result.
///
/// It reads either operand along either dimension: each must have one that lies together, and a stride of a multiple of 16
/// bytes along the other. The result, `[rows, columns]`, needs a multiple of 8 columns. For the projections around
/// attention and their gradients.
///
/// # Errors
/// [`MatrixError`] where an operand is no matrix, or where the two differ in inner size, dtype or device.
pub fn matrix_product(
    lhs: &CubeTensor,
    rhs: &CubeTensor,
) -> Result<Option<CubeTensor>, MatrixError> {
    check_operands(lhs, rhs)?;
    Ok(served(lhs, &[rhs]))
}

/// [`matrix_product`] with each of one to three right operands, side by side in one matrix, by one launch; `None`, too, where
/// [`multiplies_side_by_side`] says no, or where they lie along different dimensions.
///
/// # Errors
/// As of [`matrix_product`].
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

/// Whether [`matrix_products`] multiplies with matrices of so many columns, as far as these alone say: up to three, whose tiles have columns
/// of one of them.
pub fn multiplies_side_by_side(client: &Client, dtype: DType, columns: &[usize]) -> bool {
    let [others @ .., _] = columns else {
        return false;
    };
    let whole = |columns: &usize| columns.is_multiple_of(MatrixTiles::NARROWEST);
    is_hopper(client) && Half::of(dtype).is_some() && others.len() < 3 && others.iter().all(whole)
}

fn check_operands(lhs: &CubeTensor, rhs: &CubeTensor) -> Result<(), MatrixError> {
    for (argument, matrix) in [("lhs", lhs), ("rhs", rhs)] {
        let shape = matrix.shape();
        if shape.num_dims() != 2 {
            return Err(MatrixError::Shape {
                argument,
                has: shape.to_vec(),
                dimension: "rank",
                found: shape.num_dims(),
                expected: "2".into(),
            });
        }
    }
    let ([_, inner], [found, columns]) = (lhs.shape().dims(), rhs.shape().dims());
    if found != inner {
        return Err(MatrixError::Shape {
            argument: "rhs",
            has: vec![found, columns],
            dimension: "inner size",
            found,
            expected: format!("{inner}, the lhs's"),
        });
    }
    if rhs.dtype != lhs.dtype {
        return Err(MatrixError::Dtype {
            argument: "rhs",
            has: rhs.dtype,
            expected: format!("{:?} (the lhs's)", lhs.dtype),
        });
    }
    if rhs.device != lhs.device {
        return Err(MatrixError::Device {
            argument: "rhs",
            has: format!("{:?}", rhs.device),
            whose: "lhs",
            expected: format!("{:?}", lhs.device),
        });
    }
    Ok(())
}

/// The product of operands that fit each other, where this multiplies them. Of several right ones the others' first columns are multiples of
/// the narrowest tile's.
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
    let [lhs_major, rhs_major] = [major(lhs, [0, 1])?, major(rhs, [1, 0])?];
    if others
        .iter()
        .any(|other| major(other, [1, 0]) != Some(rhs_major))
    {
        return None;
    }
    let multiprocessors = client
        .properties()
        .hardware
        .num_streaming_multiprocessors
        .map_or(ASSUMED_MULTIPROCESSORS, |count| count as usize);
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
    let extent = |major, outer| match major {
        Major::Inner => outer,
        Major::Outer => MatrixTiles::DEPTH,
    };
    let of_lhs = map(lhs, [0, 1], lhs_major, extent(lhs_major, MatrixTiles::ROWS));
    let of_side = |side| map(side, [1, 0], rhs_major, extent(rhs_major, tiles.columns));
    let of_output = map(&output, [0, 1], Major::Inner, PRODUCT_ROWS);
    let grid = MatrixGridLaunch::new(
        grid[0] as u32,
        grid[1] as u32,
        TOGETHER as u32,
        inner.div_ceil(MatrixTiles::DEPTH) as u32,
    );
    let count = CubeCount::Static(cubes as u32, 1, 1);
    let units = CubeDim::new_1d(MatrixTiles::UNITS as u32);
    let element = dtype_to_storage_type(lhs.dtype);
    // No column is of a third matrix where there are two.
    let start = |side: usize| starts.get(side).copied().unwrap_or(columns) as u32;
    let starts = StartsLaunch::new(start(0), start(1));
    // SAFETY: the copy engine stays inside the shapes of its maps.
    unsafe {
        match others {
            [] => product::launch_unchecked(
                &client,
                count,
                units,
                of_lhs,
                of_side(rhs),
                of_output,
                grid,
                starts,
                tiles,
                element,
                tiles.columns / 2,
            ),
            [second, rest @ ..] => product_of_sides::launch_unchecked(
                &client,
                count,
                units,
                of_lhs,
                of_side(rhs),
                of_side(second),
                of_side(rest.first().unwrap_or(second)),
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

/// Strides that the copy engine takes are multiples of so many bytes.
const BOX_ALIGNMENT: usize = 16;

/// Coordinates are 32 bits wide.
const LONGEST: usize = i32::MAX as usize / 2;

fn shape(matrix: &CubeTensor) -> [usize; 2] {
    [matrix.meta.shape()[0], matrix.meta.shape()[1]]
}

/// Which of the dimensions, the operand's own and the inner one, lies together, if the copy engine reads the operand.
fn major(matrix: &CubeTensor, [outer, inner]: [usize; 2]) -> Option<Major> {
    let (shape, strides) = (matrix.meta.shape(), matrix.meta.strides());
    let reads = |together: usize, apart: usize| {
        let stride = strides[apart] * matrix.dtype.size();
        let is_legal = stride > 0 && stride.is_multiple_of(BOX_ALIGNMENT);
        (strides[together] == 1 || shape[together] == 1) && (is_legal || shape[apart] == 1)
    };
    if reads(inner, outer) {
        return Some(Major::Inner);
    }
    reads(outer, inner).then_some(Major::Outer)
}

/// How the copy engine sees an operand: boxes of 64 elements that lie together, and `extent` of them.
fn map(
    matrix: &CubeTensor,
    [outer, inner]: [usize; 2],
    major: Major,
    extent: usize,
) -> TensorMapArg<Tiled> {
    let [apart, together] = match major {
        Major::Inner => [outer, inner],
        Major::Outer => [inner, outer],
    };
    let (shape, strides) = (matrix.meta.shape(), matrix.meta.strides());
    let row = match shape[apart] {
        // A stride that nothing is read by must still be a legal one.
        1 => shape[together].next_multiple_of(SUBTILE),
        _ => strides[apart],
    };
    let shape = vec![1, 1, shape[apart], shape[together]];
    let whole = row * shape[2];
    boxes(
        matrix,
        shape,
        vec![whole, whole, row, 1],
        vec![1, 1, extent, SUBTILE],
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Shape;
    use burn_cubecl::CubeDevice;
    use burn_cubecl::cubecl::device::CudaDevice;
    use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;

    /// What does not fit is an error that names what does not, whatever the device; what fits is served or not.
    #[test]
    fn operands_that_do_not_fit_are_errors() {
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
