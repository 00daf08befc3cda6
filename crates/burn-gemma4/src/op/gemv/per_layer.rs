//! A layer's per-layer embedding block in one launch: the residual addition before it, the gate, the projection, and the
//! residual addition behind it with the next norm.

use super::fused_residual::{AfterResidualBackend, Block, MaybeParameter};
#[cfg(feature = "cuda")]
use super::tensor_core;
use super::{GemvBackend, MaybeMatrix, Origin, ProductOptions, ProductTensors};
use crate::op::column_slice::ColumnSlice;
use crate::op::linear::Matrix;
use crate::op::residual::{Next, ResidualAdd, ResidualBackend};
use crate::quant::layout::Layout;
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Device, Tensor},
};
use burn_cubecl::CubeBackend;

/// The weights of a layer's per-layer embedding block.
pub(crate) struct PerLayerWeights {
    /// `[embedding columns, hidden]`.
    pub gate: Matrix,
    /// `[hidden, embedding columns]`.
    pub projection: Matrix,
    /// The weight of the norm of the projection's output, `[hidden]`.
    pub norm: Tensor<1>,
}

/// The shape of a block.
#[derive(Clone, Copy, Debug)]
pub struct BlockShape {
    /// The layout of the gate's rows.
    pub gate: Layout,
    /// The layout of the projection's rows.
    pub projection: Layout,
    /// The first column of the layer's embedding.
    pub start: usize,
    /// The epsilon of all norms.
    pub epsilon: f64,
}

/// Adds a block's output to the residual stream: `x = stream + norm(added)`. Then computes
/// `sum = (x + norm(projected)) · scalar`, where `projected` is the projection of the gated embedding
/// `gelu(x · gateᵀ) · embedding`. Returns `sum` and its next norm, `[rows, hidden]` each, or `None` if no kernel
/// computes the block in one launch. No launch may write the weights.
///
/// All norms have the epsilon of `added`. The first addition has no scalar factor.
pub(crate) fn per_layer_block(
    added: &ResidualAdd,
    weights: &PerLayerWeights,
    embedding: &ColumnSlice,
    next: &Next,
) -> Option<(Tensor<2>, Tensor<2>)> {
    let shape = shape_of(added, weights, embedding)?;
    let [rows, _] = added.stream.dims();
    if !serves(&added.stream.device(), shape, rows, added.stream.dtype()) {
        return None;
    }
    computed(added, weights, embedding, next)
}

/// Returns the shape of a block of quantized matrices.
///
/// # Panics
/// Panics if the embedding has fewer columns than the gate needs.
fn shape_of(
    added: &ResidualAdd,
    weights: &PerLayerWeights,
    embedding: &ColumnSlice,
) -> Option<BlockShape> {
    let (Matrix::Quantized(gate), Matrix::Quantized(projection)) =
        (&weights.gate, &weights.projection)
    else {
        return None;
    };
    let [_, columns] = embedding.rows.dims();
    assert!(
        embedding.start + weights.gate.rows() <= columns,
        "`embedding`: it has fewer columns than the gate needs"
    );
    Some(BlockShape {
        gate: gate.layout,
        projection: projection.layout,
        start: embedding.start,
        epsilon: added.epsilon,
    })
}

/// Computes [`per_layer_block`], in separate launches if no kernel computes it in one. Returns `None` if a matrix is not
/// quantized, or if the sum has no scalar factor.
pub(super) fn computed(
    added: &ResidualAdd,
    weights: &PerLayerWeights,
    embedding: &ColumnSlice,
    next: &Next,
) -> Option<(Tensor<2>, Tensor<2>)> {
    let shape = shape_of(added, weights, embedding)?;
    let (Matrix::Quantized(gate), Matrix::Quantized(projection)) =
        (&weights.gate, &weights.projection)
    else {
        return None;
    };
    let tensors = PerLayerTensors {
        stream: added.stream.clone().into_dispatch(),
        added: added.added.clone().into_dispatch(),
        norm_weight: added.weight.clone().into_dispatch(),
        gate: gate.words.clone().into_dispatch(),
        embedding: embedding.rows.clone().into_dispatch(),
        projection: projection.words.clone().into_dispatch(),
        last_weight: weights.norm.clone().into_dispatch(),
        scalar: next.scalar.clone()?.into_dispatch(),
        next_weight: next.weight.clone().into_dispatch(),
    };
    let found: PerLayerOutputs<Dispatch> = Dispatch::per_layer_block(tensors, shape);
    Some((
        Tensor::from_dispatch(found.stream),
        Tensor::from_dispatch(found.normed),
    ))
}

/// True if the device has a kernel that computes the block of `rows` rows in one launch.
fn serves(device: &Device, shape: BlockShape, rows: usize, dtype: DType) -> bool {
    #[cfg(feature = "cuda")]
    if let burn::backend::DispatchDevice::Cube(device) =
        device.clone().without_autodiff().as_dispatch()
    {
        return tensor_core::per_layer::serves(&device.client(), shape, rows, dtype);
    }
    let _ = (device, shape, rows, dtype);
    false
}

/// The tensors of a block.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct PerLayerTensors<B: Backend> {
    /// The residual stream, `[rows, hidden]`.
    pub stream: FloatTensor<B>,
    /// The output that is added first, `[rows, hidden]`.
    pub added: FloatTensor<B>,
    /// The weight of the norm of `added`, `[hidden]`.
    pub norm_weight: FloatTensor<B>,
    /// The packed rows of the gate, `[embedding columns, words]`.
    pub gate: IntTensor<B>,
    /// The per-layer embeddings, `[rows, layers · embedding columns]`.
    pub embedding: FloatTensor<B>,
    /// The packed rows of the projection, `[hidden, words]`.
    pub projection: IntTensor<B>,
    /// The weight of the norm of the projection's output, `[hidden]`.
    pub last_weight: FloatTensor<B>,
    /// The scalar factor of the last sum, `[1]`.
    pub scalar: FloatTensor<B>,
    /// The weight of the last sum's norm, `[hidden]`.
    pub next_weight: FloatTensor<B>,
}

/// The residual stream behind a block, and its next norm.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct PerLayerOutputs<B: Backend> {
    pub stream: FloatTensor<B>,
    pub normed: FloatTensor<B>,
}

/// The fused kernel as an operator of a backend.
#[backend_extension(Cube, Fusion)]
pub trait PerLayerBackend: Backend {
    /// See [`per_layer_block`].
    #[fusion(meta = |tensors, _shape| PerLayerOutputsMetadata {
        stream: tensors.stream.clone(),
        normed: tensors.stream.clone(),
    })]
    fn per_layer_block(
        #[extension_type] tensors: PerLayerTensors<Self>,
        shape: BlockShape,
    ) -> PerLayerOutputs<Self>;
}

impl PerLayerBackend for CubeBackend {
    fn per_layer_block(tensors: PerLayerTensors<Self>, shape: BlockShape) -> PerLayerOutputs<Self> {
        #[cfg(feature = "cuda")]
        let tensors = match tensor_core::per_layer::launch(tensors, shape) {
            Ok(outputs) => return outputs,
            Err(tensors) => *tensors,
        };
        in_separate_launches(tensors, shape)
    }
}

/// Computes the block in four launches, if the kernel cannot read a tensor in its memory layout.
fn in_separate_launches(
    tensors: PerLayerTensors<CubeBackend>,
    shape: BlockShape,
) -> PerLayerOutputs<CubeBackend> {
    let options = |layout, start| ProductOptions {
        layout: Some(layout),
        gated: false,
        start,
        cap: None,
        origin: Origin::Parameters,
    };
    let gate = ProductTensors {
        input: tensors.stream,
        first: MaybeMatrix::Words(tensors.gate),
        second: MaybeMatrix::Absent,
        third: MaybeMatrix::Absent,
        through: MaybeMatrix::Whole(tensors.embedding),
    };
    let first = Block {
        added: tensors.added,
        weight: tensors.norm_weight,
        scalar: MaybeParameter::Absent,
        next_weight: MaybeParameter::Absent,
    };
    let gated = CubeBackend::product_after_residual(
        gate,
        first,
        options(shape.gate, shape.start),
        shape.epsilon,
    );
    let projection = ProductTensors {
        input: gated.product,
        first: MaybeMatrix::Words(tensors.projection),
        second: MaybeMatrix::Absent,
        third: MaybeMatrix::Absent,
        through: MaybeMatrix::Absent,
    };
    let projected = CubeBackend::product(projection, options(shape.projection, 0));
    let last = CubeBackend::residual_scale_norm(
        gated.stream,
        projected,
        tensors.last_weight,
        tensors.scalar,
        tensors.next_weight,
        shape.epsilon,
    );
    PerLayerOutputs {
        stream: last.stream,
        normed: last.normed,
    }
}
