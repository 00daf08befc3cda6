//! An operand or the result of a GEMM, as TMA accesses it.

use super::plan::MatrixTiles;
use crate::hopper::tma::boxes;
use crate::nvidia::SUBTILE;
use crate::nvidia::matrix::Major;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::{TensorMapArg, Tiled};

/// The alignment that TMA requires of strides, in bytes.
pub(super) const BOX_ALIGNMENT: usize = 16;

/// The layout of a matrix, or of a stack of matrices.
pub(super) struct Operand {
    /// The size of each dimension of `[matrices, rows in memory, contiguous elements]`. The field `strides` holds the
    /// strides of these dimensions.
    shape: [usize; 3],
    strides: [usize; 3],
    /// The dimension of the GEMM along which the operand is contiguous.
    pub major: Major,
}

impl Operand {
    /// Describes an operand. The tensor's dimension with the index `outer` is the outer dimension of the GEMM, and the
    /// dimension with the index `inner` is the inner dimension. In a stack of matrices, dimension 0 counts the
    /// matrices. Returns `None` if TMA cannot access the operand.
    pub fn of(operand: &CubeTensor, [outer, inner]: [usize; 2]) -> Option<Self> {
        let (shape, strides) = (operand.meta.shape(), operand.meta.strides());
        let is_legal = |stride: usize| {
            stride > 0 && (stride * operand.dtype.size()).is_multiple_of(BOX_ALIGNMENT)
        };
        let reads = |together: usize, apart: usize| {
            (strides[together] == 1 || shape[together] == 1)
                && (is_legal(strides[apart]) || shape[apart] == 1)
        };
        let (major, [apart, together]) = if reads(inner, outer) {
            (Major::Inner, [outer, inner])
        } else if reads(outer, inner) {
            (Major::Outer, [inner, outer])
        } else {
            return None;
        };
        // Set the stride of a dimension of size 1 to a stride that TMA accepts. TMA checks this stride, although TMA
        // never uses the stride.
        let row = match shape[apart] {
            1 => shape[together].next_multiple_of(SUBTILE),
            _ => strides[apart],
        };
        let is_stack = shape.num_dims() == 3 && shape[0] > 1;
        let matrix = match is_stack {
            true => strides[0],
            false => row * shape[apart],
        };
        let fits = !operand.meta.is_tiled() && (!is_stack || is_legal(matrix));
        let matrices = if is_stack { shape[0] } else { 1 };
        fits.then_some(Self {
            shape: [matrices, shape[apart], shape[together]],
            strides: [matrix, row, 1],
            major,
        })
    }

    /// Builds the tensor map. A box has one chunk of inner elements. If the operand is contiguous along the inner
    /// dimension, a box has `extent` outer elements. Otherwise a box has 64 outer elements, and a load of `extent`
    /// elements needs several boxes.
    pub fn map(&self, operand: &CubeTensor, extent: usize) -> TensorMapArg<Tiled> {
        let [matrices, rows, columns] = self.shape;
        let [matrix, row, _] = self.strides;
        let extent = match self.major {
            Major::Inner => extent,
            Major::Outer => MatrixTiles::DEPTH,
        };
        boxes(
            operand,
            vec![1, matrices, rows, columns],
            vec![matrix * matrices, matrix, row, 1],
            vec![1, 1, extent, SUBTILE],
        )
    }
}
