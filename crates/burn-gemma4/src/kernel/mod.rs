//! Kernels for inference: products of a few rows, bound by the memory's rate, and what lies between products, of any rows,
//! in as few launches as possible.
//!
//! They are operators of CubeCL devices alone. Other devices and training go through Burn's own operators, which compute the
//! same.

mod argmax;
mod cube;
mod heads;
mod norm;
mod norm_gradient;
mod project;
mod residual;
mod sums;

use burn::{
    backend::{
        Backend, Dispatch, DispatchDevice, DispatchTensor, ExtensionType, backend_extension,
        fusion::custom::TensorSpec,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Device, Int, Shape, Tensor},
};

/// Rows that a product takes at most.
pub(crate) const MOST_ROWS: usize = 8;

/// Whether the kernels serve tensors of `dtype` on `device`.
pub(crate) fn serves(device: &Device, dtype: DType) -> bool {
    !device.is_autodiff() && runs(device, dtype)
}

/// Whether the device, tracking gradients or not, runs kernels on `dtype`: those with a backward of their own serve it.
pub(crate) fn runs(device: &Device, dtype: DType) -> bool {
    match device.clone().without_autodiff().as_dispatch() {
        DispatchDevice::Cube(device) => cube::serves(device, dtype),
        #[allow(
            unreachable_patterns,
            reason = "without other backends it is the only device"
        )]
        _ => false,
    }
}

/// `[rows, columns in]` times the transpose of `[columns out, columns in]`.
pub(crate) fn project(input: Tensor<2>, weight: Tensor<2>, cap: Option<f64>) -> Tensor<2> {
    float(Dispatch::project_rows(
        input.into_dispatch(),
        weight.into_dispatch(),
        cap,
    ))
}

/// `gelu(input · gateᵀ) · (input · throughᵀ)`.
pub(crate) fn project_gated(input: Tensor<2>, gate: Tensor<2>, through: Tensor<2>) -> Tensor<2> {
    float(Dispatch::project_gated(
        input.into_dispatch(),
        gate.into_dispatch(),
        through.into_dispatch(),
    ))
}

/// `gelu(input · gateᵀ)` times the columns of `[rows, …]` from `start` on.
pub(crate) fn project_gate_of(
    input: Tensor<2>,
    gate: Tensor<2>,
    through: Tensor<2>,
    start: usize,
) -> Tensor<2> {
    float(Dispatch::project_gate_of(
        input.into_dispatch(),
        gate.into_dispatch(),
        through.into_dispatch(),
        start,
    ))
}

/// Whether the kernels serve this tensor.
pub(crate) fn serve<const D: usize>(tensor: &Tensor<D>) -> bool {
    serves(&tensor.device(), tensor.dtype())
}

/// `x / √(mean(x²) + ε)` of each row of `[rows, columns]`.
pub(crate) fn norm_without_weight(input: Tensor<2>, epsilon: f64) -> Tensor<2> {
    float(Dispatch::norm_without_weight(
        input.into_dispatch(),
        epsilon,
    ))
}

/// What a block adds to the residual stream.
pub(crate) struct Added {
    /// `[rows, columns]`.
    pub stream: Tensor<2>,
    /// `[rows, columns]`, before its norm.
    pub added: Tensor<2>,
    /// `[columns]`, of that norm.
    pub weight: Tensor<1>,
    /// Of all norms.
    pub epsilon: f64,
}

/// `stream + norm(added)`.
pub(crate) fn residual(added: Added) -> Tensor<2> {
    float(Dispatch::residual(
        added.stream.into_dispatch(),
        added.added.into_dispatch(),
        added.weight.into_dispatch(),
        added.epsilon,
    ))
}

/// `stream' = (stream + norm(added)) · scalar`, `scalar` being 1 where there is none, and `norm(stream')` with the next
/// block's weight.
pub(crate) fn residual_and_norm(
    added: Added,
    scalar: Option<Tensor<1>>,
    next_weight: Tensor<1>,
) -> (Tensor<2>, Tensor<2>) {
    let [stream, of_block, weight] = [
        added.stream.into_dispatch(),
        added.added.into_dispatch(),
        added.weight.into_dispatch(),
    ];
    let next = next_weight.into_dispatch();
    let result: Residual<Dispatch> = match scalar {
        Some(scalar) => Dispatch::residual_scale_norm(
            stream,
            of_block,
            weight,
            scalar.into_dispatch(),
            next,
            added.epsilon,
        ),
        None => Dispatch::residual_norm(stream, of_block, weight, next, added.epsilon),
    };
    (float(result.stream), float(result.normed))
}

/// The rotation by position, `[positions, head_dim / 2]` each.
#[derive(Clone, Debug)]
pub(crate) struct RotationTables {
    pub cos: Tensor<2>,
    pub sin: Tensor<2>,
}

/// How heads are made and where they go.
#[derive(Clone, Copy, Debug)]
pub struct HeadOptions {
    /// Where keys share their values' slots, the pairs of channels that are rotated: values begin with them, of keys they are
    /// written behind, and queries are in these keys' order.
    pub compact: Option<usize>,
    /// Of the norm.
    pub epsilon: f64,
}

/// Queries as attention reads them, `[rows, heads, 1, head_dim]`, of `[rows, heads · head_dim]`: normalised by heads and
/// rotated by `positions`, one a row.
pub(crate) fn query_heads(
    projected: Tensor<2>,
    weight: Tensor<1>,
    tables: &RotationTables,
    positions: Tensor<1, Int>,
    options: HeadOptions,
) -> Tensor<4> {
    float(Dispatch::query_heads(
        projected.into_dispatch(),
        weight.into_dispatch(),
        tables.cos.clone().into_dispatch(),
        tables.sin.clone().into_dispatch(),
        positions.into_dispatch(),
        options,
    ))
}

/// [`query_heads`] of rows that are at the tables' positions in their order, and from their beginning again after the last.
pub(crate) fn heads_in_order(
    projected: Tensor<2>,
    weight: Tensor<1>,
    tables: &RotationTables,
    epsilon: f64,
) -> Tensor<4> {
    float(Dispatch::heads_in_order(
        projected.into_dispatch(),
        weight.into_dispatch(),
        tables.cos.clone().into_dispatch(),
        tables.sin.clone().into_dispatch(),
        epsilon,
    ))
}

/// Writes keys into their slots of `[rows, heads, slots, head_dim]`, as [`query_heads`] makes queries: the row's position,
/// modulo the slots.
///
/// Every handle to the buffer's memory sees what was written; the result is one of them, and what reads it comes after.
pub(crate) fn write_keys(
    projected: Tensor<2>,
    weight: Tensor<1>,
    tables: &RotationTables,
    positions: Tensor<1, Int>,
    buffer: Tensor<4>,
    options: HeadOptions,
) -> Tensor<4> {
    float(Dispatch::write_keys(
        projected.into_dispatch(),
        weight.into_dispatch(),
        tables.cos.clone().into_dispatch(),
        tables.sin.clone().into_dispatch(),
        positions.into_dispatch(),
        buffer.into_dispatch(),
        options,
    ))
}

/// Writes values into their slots as [`write_keys`] does keys: normalised without a weight, and not rotated.
pub(crate) fn write_values(
    projected: Tensor<2>,
    positions: Tensor<1, Int>,
    buffer: Tensor<4>,
    options: HeadOptions,
) -> Tensor<4> {
    float(Dispatch::write_values(
        projected.into_dispatch(),
        positions.into_dispatch(),
        buffer.into_dispatch(),
        options,
    ))
}

/// `count` columns of `[batch, heads, slots, width]` from `start` on; a view where the device addresses by pointers, and else where
/// Burn's own slice is one.
pub(crate) fn columns(slots: Tensor<4>, start: usize, count: usize) -> Tensor<4> {
    float(Dispatch::columns(slots.into_dispatch(), start, count))
}

/// The first of the largest columns of each row of `[rows, columns]`: `[rows]`. NaN counts as the smallest.
pub(crate) fn argmax(logits: Tensor<2>) -> Tensor<1, Int> {
    Tensor::from_dispatch(Dispatch::argmax(logits.into_dispatch()))
}

/// Writes `[count]` integers over as many others, which every handle to them sees.
pub(crate) fn overwrite(target: Tensor<1, Int>, source: Tensor<1, Int>) -> Tensor<1, Int> {
    Tensor::from_dispatch(Dispatch::overwrite(
        target.into_dispatch(),
        source.into_dispatch(),
    ))
}

fn float<const D: usize>(tensor: DispatchTensor) -> Tensor<D> {
    Tensor::from_dispatch(tensor)
}

/// The residual stream, and its norm.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct Residual<B: Backend> {
    pub stream: FloatTensor<B>,
    pub normed: FloatTensor<B>,
}

/// What Burn's fusion must know of the results before they exist.
mod metadata {
    use super::*;

    pub fn product(input: &TensorSpec, weight: &TensorSpec) -> TensorSpec {
        TensorSpec::new(Shape::new([input.shape[0], weight.shape[0]]), input.dtype)
    }

    pub fn residual(stream: &TensorSpec) -> ResidualMetadata {
        ResidualMetadata {
            stream: stream.clone(),
            normed: stream.clone(),
        }
    }

    pub fn heads(projected: &TensorSpec, cos: &TensorSpec) -> TensorSpec {
        let head_dim = 2 * cos.shape[1];
        let [rows, columns] = [projected.shape[0], projected.shape[1]];
        TensorSpec::new(
            Shape::new([rows, columns / head_dim, 1, head_dim]),
            projected.dtype,
        )
    }

    pub fn columns(slots: &TensorSpec, count: usize) -> TensorSpec {
        let [batch, heads, rows] = [slots.shape[0], slots.shape[1], slots.shape[2]];
        TensorSpec::new(Shape::new([batch, heads, rows, count]), slots.dtype)
    }

    pub fn norm_gradients(input: &TensorSpec) -> NormGradientsMetadata {
        let shape = [NORM_PARTS.min(input.shape[0]), input.shape[1]];
        NormGradientsMetadata {
            input: input.clone(),
            weight: TensorSpec::new(Shape::new(shape), DType::F32),
        }
    }

    pub fn numbers(rows: &TensorSpec) -> TensorSpec {
        TensorSpec::new(Shape::new([rows.shape[0]]), NUMBERS)
    }
}

/// The dtype of tokens' numbers.
const NUMBERS: DType = DType::I32;

/// The gradient of a norm's input, and the parts whose sum is the weight's, `[parts, columns]` in f32.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct NormGradients<B: Backend> {
    pub input: FloatTensor<B>,
    pub weight: FloatTensor<B>,
}

/// Parts of the sums of a weight's gradient: enough to keep any device busy.
const NORM_PARTS: usize = 256;

/// The norm with a weight, which has a backward of its own.
#[backend_extension(Cube, Autodiff, Fusion)]
pub trait NormBackend: Backend {
    /// `x / √(mean(x²) + ε) · weight` of each row of `[rows, columns]`, by a weight `[columns]` of any dtype.
    #[fusion(meta = |input, _weight, _epsilon| input.clone())]
    fn norm(input: FloatTensor<Self>, weight: FloatTensor<Self>, epsilon: f64)
    -> FloatTensor<Self>;

    /// Its gradients.
    #[fusion(meta = |input, _weight, _gradient, _epsilon| metadata::norm_gradients(input))]
    fn norm_gradients(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        epsilon: f64,
    ) -> NormGradients<Self>;
}

/// The kernels as operators of a backend. The functions above say what they compute.
#[backend_extension(Cube, Fusion)]
pub trait InferenceBackend: Backend {
    #[fusion(meta = |input, weight, _cap| metadata::product(input, weight))]
    fn project_rows(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cap: Option<f64>,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |input, gate, _through| metadata::product(input, gate))]
    fn project_gated(
        input: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        through: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |input, gate, _through, _start| metadata::product(input, gate))]
    fn project_gate_of(
        input: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        through: FloatTensor<Self>,
        start: usize,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |stream, _added, _weight, _epsilon| stream.clone())]
    fn residual(
        stream: FloatTensor<Self>,
        added: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |stream, _added, _weight, _next, _epsilon| metadata::residual(stream))]
    fn residual_norm(
        stream: FloatTensor<Self>,
        added: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        next_weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> Residual<Self>;

    #[fusion(meta = |stream, _added, _weight, _scalar, _next, _epsilon| metadata::residual(stream))]
    fn residual_scale_norm(
        stream: FloatTensor<Self>,
        added: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        scalar: FloatTensor<Self>,
        next_weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> Residual<Self>;

    #[fusion(meta = |projected, _weight, cos, _sin, _positions, _options| metadata::heads(projected, cos))]
    fn query_heads(
        projected: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        positions: IntTensor<Self>,
        options: HeadOptions,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |projected, _weight, cos, _sin, _epsilon| metadata::heads(projected, cos))]
    fn heads_in_order(
        projected: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |input, _epsilon| input.clone())]
    fn norm_without_weight(input: FloatTensor<Self>, epsilon: f64) -> FloatTensor<Self>;

    #[fusion(meta = |_projected, _weight, _cos, _sin, _positions, buffer, _options| buffer.clone())]
    fn write_keys(
        projected: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        positions: IntTensor<Self>,
        buffer: FloatTensor<Self>,
        options: HeadOptions,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |_projected, _positions, buffer, _options| buffer.clone())]
    fn write_values(
        projected: FloatTensor<Self>,
        positions: IntTensor<Self>,
        buffer: FloatTensor<Self>,
        options: HeadOptions,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |slots, _start, count| metadata::columns(slots, *count))]
    fn columns(slots: FloatTensor<Self>, start: usize, count: usize) -> FloatTensor<Self>;

    #[fusion(meta = |logits| metadata::numbers(logits))]
    fn argmax(logits: FloatTensor<Self>) -> IntTensor<Self>;

    #[fusion(meta = |target, _source| target.clone())]
    fn overwrite(target: IntTensor<Self>, source: IntTensor<Self>) -> IntTensor<Self>;
}
