//! MoE GEMMs on Hopper's tensor cores. The rows of each expert are copied to tiles that hold only rows of this expert.
//! The tiles form the padded matrix, which a grouped GEMM multiplies.
//!
//! The host does not wait for the router's choice, because the padded matrix has enough tiles for every possible
//! choice. The number of tiles is computed for the worst case, in which each expert has one tile that is not full.

use super::kernel::Form;
use super::launch::{Product, Right};
use super::tiles::ExpertTiles;
use crate::op::dequantize::DequantizeBackend;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Device, Shape};
use burn_cubecl::{CubeBackend, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::hopper::gemm::{grouped_inner, grouped_rows};
use cube_kit::hopper::is_hopper;

/// True if the device's tensor cores can multiply the experts' rows, with or without autodiff. This function does not
/// check the widths of the matrices. If a width is not a multiple of 8, the kernel without tensor cores runs instead.
/// No published model has such a width.
pub(super) fn serves(device: &Device, dtype: DType) -> bool {
    crate::op::is_hopper(device) && is_half(dtype)
}

fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// Computes an MoE GEMM with tensor cores, or returns `None` if the kernels do not support the device, the dtype or the
/// sizes.
pub(super) fn product(
    product: &Product,
    order: &CubeTensor,
    starts: &CubeTensor,
) -> Option<CubeTensor> {
    let Product {
        form,
        left,
        right,
        columns_out,
        columns_in,
        of_row,
    } = product;
    let is_served = is_hopper(&left.client)
        && is_half(left.dtype)
        && has_legal_sizes(&[*columns_out, *columns_in])
        && order.meta.shape()[0] > 0;
    if !is_served {
        return None;
    }
    let left = rows_in_order(left);
    let tiles = ExpertTiles::new(order, starts);
    match (form, right) {
        (Form::Weight, Right::Whole(input)) => {
            let gradients = tiles.to_slots(&left, 1);
            let inputs = tiles.to_slots(&rows_in_order(input), *of_row);
            grouped_inner(&gradients, &inputs, &tiles.table, tiles.experts)
        }
        (Form::Weight, Right::Words(..)) => None,
        (Form::Rows | Form::Columns, right) => {
            let matrices = right.matrices(left.dtype, tiles.experts, *columns_in);
            // The matrices are `[experts, columns_out, columns_in]`. The right operand of a GEMM needs the inner
            // dimension first.
            let matrices = match form {
                Form::Rows => CubeBackend::float_swap_dims(matrices, 1, 2),
                Form::Columns | Form::Weight => matrices,
            };
            let slots = tiles.to_slots(&left, *of_row);
            let output = grouped_rows(&slots, &matrices, &tiles.table)?;
            Some(tiles.to_pairs(&output))
        }
    }
}

/// True if TMA can read and write rows with these numbers of columns.
pub(super) fn has_legal_sizes(columns: &[usize]) -> bool {
    columns.iter().all(|columns| columns.is_multiple_of(8))
}

/// Returns the matrix in a memory layout in which each row is contiguous. There may be gaps between the rows.
pub(super) fn rows_in_order(matrix: &CubeTensor) -> CubeTensor {
    match matrix.meta.strides()[1] == 1 && !matrix.meta.is_tiled() {
        true => matrix.clone(),
        false => into_contiguous(matrix.clone()),
    }
}

/// Returns matrices that TMA can read, `[experts, columns_out, columns_in]`. Copies the matrices only if TMA does not
/// support their strides.
pub(super) fn with_legal_strides(matrices: &CubeTensor) -> CubeTensor {
    let strides = matrices.meta.strides();
    let is_aligned =
        |stride: &usize| *stride > 0 && (stride * matrices.dtype.size()).is_multiple_of(16);
    match strides[2] == 1 && !matrices.meta.is_tiled() && strides[..2].iter().all(is_aligned) {
        true => matrices.clone(),
        false => into_contiguous(matrices.clone()),
    }
}

impl Right {
    /// Returns the experts' matrices, `[experts, columns_out, columns_in]`, in `dtype`.
    fn matrices(&self, dtype: DType, experts: usize, columns_in: usize) -> CubeTensor {
        match self {
            Self::Whole(matrices) => with_legal_strides(matrices),
            Self::Words(words, stacked) => {
                let whole = CubeBackend::dequantize(words.clone(), stacked.layout, dtype);
                CubeBackend::float_reshape(whole, Shape::new([experts, stacked.rows, columns_in]))
            }
        }
    }
}
