//! Views of a column range in a KV cache, without a copy. Some caches store a channel only once if it is equal in key and
//! value: see `model::cache::compact`. A token's key and value are then two overlapping ranges of columns.

use burn::tensor::{Int, Tensor};
#[cfg(feature = "cube")]
use burn::{
    backend::{
        Backend, Dispatch, backend_extension,
        fusion::custom::TensorSpec,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::Shape,
};
#[cfg(feature = "cube")]
use burn_cubecl::{
    CubeBackend,
    kernel::{slice, untile},
    tensor::CubeTensor,
};

/// Returns `count` columns of `slots`, `[batch, heads, slots, width]`, beginning at column `start`. The result is a
/// view under two conditions: the device's kernels address buffers by pointers, and the range is aligned to 16 bytes.
/// Otherwise the result may be a copy.
pub(crate) fn columns(slots: Tensor<4>, start: usize, count: usize) -> Tensor<4> {
    #[cfg(feature = "cube")]
    if super::serve(&slots) {
        return Tensor::from_dispatch(Dispatch::columns(slots.into_dispatch(), start, count));
    }
    slots.narrow(3, start, count)
}

/// Returns a range of columns of a quantized cache's int8 values, which are packed in 32-bit words. The result is a
/// view under the conditions of [`columns`], and if the kernels support the device and dtype of `scales`. `scales` is a
/// float tensor of the same cache.
pub(crate) fn columns_of_words(
    words: Tensor<4, Int>,
    scales: &Tensor<4>,
    start: usize,
    count: usize,
) -> Tensor<4, Int> {
    #[cfg(feature = "cube")]
    if super::serve(scales) {
        let words = Dispatch::columns_of_words(words.into_dispatch(), start, count);
        return Tensor::from_dispatch(words);
    }
    let _ = scales;
    words.narrow(3, start, count)
}

/// The backend operators that return a view of a column range.
#[cfg(feature = "cube")]
#[backend_extension(Cube, Fusion)]
pub trait ColumnsBackend: Backend {
    /// See [`columns`].
    #[fusion(meta = |slots, _start, count| metadata(slots, *count))]
    fn columns(slots: FloatTensor<Self>, start: usize, count: usize) -> FloatTensor<Self>;

    /// See [`columns_of_words`].
    #[fusion(meta = |words, _start, count| metadata(words, *count))]
    fn columns_of_words(words: IntTensor<Self>, start: usize, count: usize) -> IntTensor<Self>;
}

/// Returns the shape and dtype of the output tensor, which Burn's fusion needs before it runs the operator.
#[cfg(feature = "cube")]
fn metadata(slots: &TensorSpec, count: usize) -> TensorSpec {
    let [batch, heads, rows] = [slots.shape[0], slots.shape[1], slots.shape[2]];
    TensorSpec::new(Shape::new([batch, heads, rows, count]), slots.dtype)
}

/// The width of a kernel's widest load in bytes. The address of a tensor's first element must be a multiple of this
/// width.
#[cfg(feature = "cube")]
const WIDEST_LOAD: u64 = 16;

#[cfg(feature = "cube")]
impl ColumnsBackend for CubeBackend {
    fn columns(slots: FloatTensor<Self>, start: usize, count: usize) -> FloatTensor<Self> {
        view(slots, start, count)
    }

    fn columns_of_words(words: IntTensor<Self>, start: usize, count: usize) -> IntTensor<Self> {
        view(words, start, count)
    }
}

/// Returns a view of a range of columns, or a copy by Burn's slice if no view is possible. The elements may be floats or
/// integers.
#[cfg(feature = "cube")]
fn view(slots: CubeTensor, start: usize, count: usize) -> CubeTensor {
    let slots = untile(slots);
    let [batch, heads, rows, width] = slots.meta.shape().dims();
    assert!(
        start + count <= width,
        "columns: the range exceeds the width of the slots"
    );
    let strides = slots.meta.strides();
    let bytes = |columns: usize| (columns * strides[3] * slots.dtype.size()) as u64;
    let (before, behind) = (bytes(start), bytes(width - start - count));
    let by_pointers = matches!(slots.client.name(), "cuda" | "hip");
    if !by_pointers || !before.is_multiple_of(WIDEST_LOAD) {
        return slice(slots, &[0..batch, 0..heads, 0..rows, start..start + count]);
    }
    let mut view = slots;
    view.handle = view.handle.offset_start(before).offset_end(behind);
    view.meta.shape_mut()[3] = count;
    view
}
