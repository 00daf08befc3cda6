//! The dtype of positions and indices, and safe conversions to it.

use burn::backend::{Backend, TensorMetadata, tensor::IntTensor};
use burn::tensor::{DType, IntDType};

/// The dtype of positions, lengths, segment ids and page indices: i32, as in kernels. A device's default int dtype may
/// be too narrow. It may also be unsigned, but positions may be negative.
pub(crate) const INTS: IntDType = IntDType::I32;

/// Casts integers that are narrower than i32 to i32. If the integers kept the narrower dtype, a comparison with an i32
/// number might truncate this number.
pub(crate) fn at_least_i32<B: Backend>(integers: IntTensor<B>) -> IntTensor<B> {
    match integers.dtype().size() < DType::from(INTS).size() {
        true => B::int_cast(integers, INTS),
        false => integers,
    }
}

/// Returns the integers in i32, clamped to `0..=most`. The function clamps before it casts, in the wider of i32 and the
/// integers' own dtype.
pub(crate) fn clamped_integers<B: Backend>(integers: IntTensor<B>, most: usize) -> IntTensor<B> {
    let integers = at_least_i32::<B>(integers);
    B::int_cast(B::int_clamp(integers, 0.into(), (most as i64).into()), INTS)
}
