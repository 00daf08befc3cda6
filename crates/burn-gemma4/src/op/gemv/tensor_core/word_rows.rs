//! The packed rows of quantized matrices, for the tensor-core kernels of quantized weights.

use super::super::concat::{Side, WeightMatrices};
use super::super::sums::ProjectPlan;
use cube_kit::nvidia::ptx::word_address;
use cubecl::prelude::*;

/// The layout of the packed rows of a quantized matrix.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct WordRows {
    /// The distance between rows, in words.
    pub stride: u32,
    /// The offset of the scales within a row, in words.
    pub scales: u32,
    /// The number of columns in a row.
    pub columns: u32,
    /// [`Codes::mask`](super::codes::Codes::mask). The kernels take it as an argument, because compilers move a
    /// constant into a register again before each use. The moves were a tenth of the kernel's instructions.
    pub mask: u32,
}

/// Returns the address of word `index` in the matrix that a fragment belongs to.
#[cube]
pub(super) fn address_of_side(
    matrices: &WeightMatrices<OwnedTensor<u32>>,
    index: u64,
    side: Side,
    #[comptime] fragment: usize,
    #[comptime] plan: ProjectPlan,
) -> u64 {
    if comptime!(fragment >= plan.fragments_of_matrix()) {
        address_if_there(&matrices.second, index)
    } else {
        let mut found = address(&matrices.first, index);
        if comptime!(plan.sides > 1) {
            if side.number == 1u32 {
                found = address_if_there(&matrices.second, index);
            } else if side.number == 2u32 {
                found = address_if_there(&matrices.third, index);
            }
        }
        found
    }
}

#[cube]
pub(super) fn address(words: &Tensor<u32>, index: u64) -> u64 {
    // SAFETY: the pointer only gives the address of `words`, and is not dereferenced here.
    word_address::<u32>(unsafe { words.as_slice().as_ptr_unchecked() }, index)
}

#[cube]
fn address_if_there(words: &ComptimeOption<OwnedTensor<u32>>, index: u64) -> u64 {
    let mut found = 0u64;
    #[comptime]
    match words {
        ComptimeOption::Some(words) => {
            found = address(words, index);
        }
        ComptimeOption::None => {}
    }
    found
}
