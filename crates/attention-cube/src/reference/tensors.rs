//! Tensor operations of the reference implementation: grouping of heads, broadcast masks, and dtypes.

use crate::problem::AttentionProblem;
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::{BoolDType, DType, FloatDType, Shape};

/// Reshapes `[batch, q_heads, q_len, n]` to `[batch, kv_heads, group · q_len, n]`, so that a matmul needs no repeated keys
/// and values.
pub(crate) fn to_groups<B: Backend>(
    tensor: FloatTensor<B>,
    problem: &AttentionProblem,
) -> FloatTensor<B> {
    let columns = tensor.shape()[3];
    let rows = problem.group() * problem.q_len;
    B::float_reshape(
        tensor,
        Shape::new([problem.batch, problem.kv_heads, rows, columns]),
    )
}

/// Reshapes the result of [`to_groups`] back to `[batch, q_heads, q_len, n]`.
pub(crate) fn from_groups<B: Backend>(
    tensor: FloatTensor<B>,
    problem: &AttentionProblem,
) -> FloatTensor<B> {
    let columns = tensor.shape()[3];
    let shape = [problem.batch, problem.q_heads, problem.q_len, columns];
    B::float_reshape(tensor, Shape::new(shape))
}

/// Sets the elements of the tensor to zero where the mask, broadcast to the tensor's shape, is true.
pub(crate) fn fill_rows<B: Backend>(
    tensor: FloatTensor<B>,
    mask: &BoolTensor<B>,
) -> FloatTensor<B> {
    let mask = B::bool_expand(mask.clone(), tensor.shape());
    B::float_mask_fill(tensor, mask, 0.0.into())
}

/// Sums the tensor over the dimensions that have size 1 in `shape`.
pub(crate) fn sum_to<B: Backend>(mut tensor: FloatTensor<B>, shape: &Shape) -> FloatTensor<B> {
    for dim in 0..shape.num_dims() {
        if shape[dim] == 1 && tensor.shape()[dim] != 1 {
            tensor = B::float_sum_dim(tensor, dim);
        }
    }
    tensor
}

pub(crate) fn elementwise_max<B: Backend>(a: FloatTensor<B>, b: FloatTensor<B>) -> FloatTensor<B> {
    let b = B::float_expand(b, a.shape());
    let bools = bool_dtype::<B>(&a);
    let smaller = B::float_lower(a.clone(), b.clone(), bools);
    B::float_mask_where(a, smaller, b)
}

/// Returns a mask of the elements that are −∞. A sink of −∞, for example, counts as no sink.
pub(crate) fn is_negative_infinity<B: Backend>(tensor: &FloatTensor<B>) -> BoolTensor<B> {
    let bools = bool_dtype::<B>(tensor);
    B::float_equal_elem(tensor.clone(), f64::NEG_INFINITY.into(), bools)
}

pub(crate) fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if tensor.dtype() == dtype {
        return tensor;
    }
    B::float_cast(tensor, float_dtype(dtype))
}

pub(crate) fn float_dtype(dtype: DType) -> FloatDType {
    dtype.into()
}

pub(crate) fn bool_dtype<B: Backend>(tensor: &FloatTensor<B>) -> BoolDType {
    get_or_init_device_settings::<B>(&tensor.device()).bool_dtype
}
