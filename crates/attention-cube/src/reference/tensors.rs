//! Burn's operations as the definition needs them: groups of heads, masks that are broadcast, dtypes.

use crate::AttentionProblem;
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::{BoolDType, DType, FloatDType, Shape};

/// `[batch, q_heads, q_len, n]` → `[batch, kv_heads, group · q_len, n]`, so that no key is repeated.
pub(super) fn to_groups<B: Backend>(
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

/// The inverse of [`to_groups`].
pub(super) fn from_groups<B: Backend>(
    tensor: FloatTensor<B>,
    problem: &AttentionProblem,
) -> FloatTensor<B> {
    let columns = tensor.shape()[3];
    let shape = [problem.batch, problem.q_heads, problem.q_len, columns];
    B::float_reshape(tensor, Shape::new(shape))
}

/// Zeros where `mask` says so, which is broadcast.
pub(super) fn fill_rows<B: Backend>(
    tensor: FloatTensor<B>,
    mask: &BoolTensor<B>,
) -> FloatTensor<B> {
    let mask = B::bool_expand(mask.clone(), tensor.shape());
    B::float_mask_fill(tensor, mask, 0.0.into())
}

/// Sums the dimensions that `shape` has as 1.
pub(super) fn sum_to<B: Backend>(mut tensor: FloatTensor<B>, shape: &Shape) -> FloatTensor<B> {
    for dim in 0..shape.num_dims() {
        if shape[dim] == 1 && tensor.shape()[dim] != 1 {
            tensor = B::float_sum_dim(tensor, dim);
        }
    }
    tensor
}

pub(super) fn elementwise_max<B: Backend>(a: FloatTensor<B>, b: FloatTensor<B>) -> FloatTensor<B> {
    let b = B::float_expand(b, a.shape());
    let bools = bool_dtype::<B>(&a);
    let smaller = B::float_lower(a.clone(), b.clone(), bools);
    B::float_mask_where(a, smaller, b)
}

/// Where a tensor is −∞, as a sink is that is none.
pub(super) fn is_negative_infinity<B: Backend>(tensor: &FloatTensor<B>) -> BoolTensor<B> {
    let bools = bool_dtype::<B>(tensor);
    B::float_equal_elem(tensor.clone(), f64::NEG_INFINITY.into(), bools)
}

pub(super) fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if tensor.dtype() == dtype {
        return tensor;
    }
    B::float_cast(tensor, float_dtype(dtype))
}

pub(super) fn float_dtype(dtype: DType) -> FloatDType {
    dtype.into()
}

pub(super) fn bool_dtype<B: Backend>(tensor: &FloatTensor<B>) -> BoolDType {
    get_or_init_device_settings::<B>(&tensor.device()).bool_dtype
}
