//! Normalizes and rotates the heads of a projection (queries, keys or values), and writes the heads in the layout that
//! attention reads. The operators serve inference on CubeCL devices.

use super::RotationTables;
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension,
        fusion::custom::TensorSpec,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{Int, Shape, Tensor},
};

/// The columns of a projection's output that hold heads, and the layout in which the heads' channels are written.
#[derive(Clone, Copy, Debug)]
pub struct HeadOptions {
    /// The first column of the heads in the projection's output.
    pub start: usize,
    /// The number of columns of all heads together.
    pub count: usize,
    /// The number of rotated channel pairs if the KV cache stores compact keys, or `None` otherwise. A slot with
    /// compact keys holds the whole value, then only the rotated channels of the key. In a channel without rotation,
    /// the key is the value times a weight, so the slot stores only the value.
    pub compact: Option<usize>,
    /// The epsilon of the norm.
    pub epsilon: f64,
}

/// The columns of a layer's queries, keys and values in the output of one projection.
#[derive(Clone, Copy, Debug)]
pub struct LayerColumns {
    /// The first column of the queries.
    pub queries: usize,
    pub count: usize,
    /// The first column of the keys.
    pub keys: usize,
    pub values: usize,
    /// The epsilon of the norms.
    pub epsilon: f64,
}

/// The shape of keys and values that are written to new tensors instead of an existing KV cache.
#[derive(Clone, Copy, Debug)]
pub struct OwnShape {
    pub sequences: usize,
    /// The number of columns of the keys. The values have the same number of columns.
    pub columns: usize,
}

impl OwnShape {
    /// Returns the shape `[sequences, heads, count, head_dim]` of keys or values for `rows` rows of the projection.
    pub(super) fn of(self, rows: usize, head_dim: usize) -> [usize; 4] {
        let heads = self.columns / head_dim;
        [self.sequences, heads, rows / self.sequences, head_dim]
    }
}

/// Computes query heads from a range of the projection's columns: normalizes each head, and rotates the head by the
/// position of the head's row.
///
/// # Shapes
/// - `projected`: `[rows, …]`.
/// - `weight`: `[head_dim]`.
/// - `positions`: `[rows]`.
/// - output: `[rows, heads, 1, head_dim]`.
pub(crate) fn query_heads(
    projected: Tensor<2>,
    weight: Tensor<1>,
    tables: &RotationTables,
    positions: Tensor<1, Int>,
    options: HeadOptions,
) -> Tensor<4> {
    Tensor::from_dispatch(Dispatch::query_heads(
        projected.into_dispatch(),
        weight.into_dispatch(),
        tables.cos.clone().into_dispatch(),
        tables.sin.clone().into_dispatch(),
        positions.into_dispatch(),
        options,
    ))
}

/// The inputs of [`layer_heads`], for a layer that writes its own keys and values to a KV cache.
pub(crate) struct LayerParts<'a> {
    pub projected: Tensor<2>,
    pub query_weight: Tensor<1>,
    pub key_weight: Tensor<1>,
    pub tables: &'a RotationTables,
    pub positions: Tensor<1, Int>,
    /// The KV cache's buffer of keys. The field `values` is the buffer of values. The kernel writes to both buffers in
    /// place.
    pub keys: Tensor<4>,
    pub values: Tensor<4>,
}

/// Computes [`query_heads`], [`write_keys`] and [`write_values`] for a layer, in one launch if the device can bind
/// enough buffers. Returns the queries, and the buffers of keys and values.
pub(crate) fn layer_heads(parts: LayerParts<'_>, columns: LayerColumns) -> [Tensor<4>; 3] {
    let tensors = LayerTensors {
        projected: parts.projected.into_dispatch(),
        query_weight: parts.query_weight.into_dispatch(),
        key_weight: parts.key_weight.into_dispatch(),
        cos: parts.tables.cos.clone().into_dispatch(),
        sin: parts.tables.sin.clone().into_dispatch(),
        positions: parts.positions.into_dispatch(),
        keys: parts.keys.into_dispatch(),
        values: parts.values.into_dispatch(),
    };
    let heads: LayerHeads<Dispatch> = Dispatch::layer_heads(tensors, columns);
    [heads.queries, heads.keys, heads.values].map(Tensor::from_dispatch)
}

/// The inputs of [`layer_heads_in_order`]. Row `r` of the projection uses row `r % n` of the tables, which have `n`
/// rows.
pub(crate) struct PartsInOrder<'a> {
    pub projected: Tensor<2>,
    pub query_weight: Tensor<1>,
    pub key_weight: Tensor<1>,
    pub tables: &'a RotationTables,
}

/// Computes a layer's heads in one launch. Queries are `[rows, heads, 1, head_dim]`. Keys and values are
/// `[sequences, heads, count, head_dim]` each. Row `r` of the projection uses row `r % n` of the rotation tables, which
/// have `n` rows.
pub(crate) fn layer_heads_in_order(
    parts: PartsInOrder<'_>,
    columns: LayerColumns,
    own: OwnShape,
) -> [Tensor<4>; 3] {
    let heads: LayerHeads<Dispatch> = Dispatch::layer_heads_in_order(
        parts.projected.into_dispatch(),
        parts.query_weight.into_dispatch(),
        parts.key_weight.into_dispatch(),
        parts.tables.cos.clone().into_dispatch(),
        parts.tables.sin.clone().into_dispatch(),
        columns,
        own,
    );
    [heads.queries, heads.keys, heads.values].map(Tensor::from_dispatch)
}

/// Computes [`query_heads`] without a tensor of positions. Row `r` of the projection uses row `r % n` of the rotation
/// tables, which have `n` rows.
pub(crate) fn heads_in_order(
    projected: Tensor<2>,
    weight: Tensor<1>,
    tables: &RotationTables,
    epsilon: f64,
) -> Tensor<4> {
    Tensor::from_dispatch(Dispatch::heads_in_order(
        projected.into_dispatch(),
        weight.into_dispatch(),
        tables.cos.clone().into_dispatch(),
        tables.sin.clone().into_dispatch(),
        epsilon,
    ))
}

/// Computes keys as [`query_heads`] computes queries, and writes them to `buffer`,
/// `[sequences, heads, slots, head_dim]`. A row's slot is its position modulo `slots`. Each sequence has the same
/// number of consecutive rows.
///
/// The write happens in place, so every handle to the buffer's memory sees the new keys. Reads through the returned
/// handle are ordered after the write.
pub(crate) fn write_keys(
    projected: Tensor<2>,
    weight: Tensor<1>,
    tables: &RotationTables,
    positions: Tensor<1, Int>,
    buffer: Tensor<4>,
    options: HeadOptions,
) -> Tensor<4> {
    Tensor::from_dispatch(Dispatch::write_keys(
        projected.into_dispatch(),
        weight.into_dispatch(),
        tables.cos.clone().into_dispatch(),
        tables.sin.clone().into_dispatch(),
        positions.into_dispatch(),
        buffer.into_dispatch(),
        options,
    ))
}

/// Writes values to their slots, as [`write_keys`] does for keys. Values are normalized without a weight, and are not
/// rotated.
pub(crate) fn write_values(
    projected: Tensor<2>,
    positions: Tensor<1, Int>,
    buffer: Tensor<4>,
    options: HeadOptions,
) -> Tensor<4> {
    Tensor::from_dispatch(Dispatch::write_values(
        projected.into_dispatch(),
        positions.into_dispatch(),
        buffer.into_dispatch(),
        options,
    ))
}

/// The tensors of a layer's heads: see [`LayerParts`].
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct LayerTensors<B: Backend> {
    pub projected: FloatTensor<B>,
    pub query_weight: FloatTensor<B>,
    pub key_weight: FloatTensor<B>,
    pub cos: FloatTensor<B>,
    pub sin: FloatTensor<B>,
    pub positions: IntTensor<B>,
    pub keys: FloatTensor<B>,
    pub values: FloatTensor<B>,
}

/// A layer's queries, and the buffers of its keys and values.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct LayerHeads<B: Backend> {
    pub queries: FloatTensor<B>,
    pub keys: FloatTensor<B>,
    pub values: FloatTensor<B>,
}

/// The heads kernel as operators of a backend. Each operator is documented at the function of this module that calls
/// the operator.
#[backend_extension(Cube, Fusion)]
pub trait HeadsBackend: Backend {
    #[fusion(meta = |projected, _weight, cos, _sin, _positions, options| {
        metadata(projected, cos, options.count)
    })]
    fn query_heads(
        projected: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        positions: IntTensor<Self>,
        options: HeadOptions,
    ) -> FloatTensor<Self>;

    #[fusion(meta = layer_metadata)]
    fn layer_heads(
        #[extension_type] tensors: LayerTensors<Self>,
        columns: LayerColumns,
    ) -> LayerHeads<Self>;

    #[fusion(meta = |projected, _weight, _key_weight, cos, _sin, columns, own| {
        metadata_in_order(projected, cos, columns, *own)
    })]
    fn layer_heads_in_order(
        projected: FloatTensor<Self>,
        query_weight: FloatTensor<Self>,
        key_weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        columns: LayerColumns,
        own: OwnShape,
    ) -> LayerHeads<Self>;

    #[fusion(meta = |projected, _weight, cos, _sin, _epsilon| {
        metadata(projected, cos, projected.shape[1])
    })]
    fn heads_in_order(
        projected: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self>;

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
}

/// Returns the shape and dtype of the heads, which Burn's fusion needs before it runs the operator.
fn metadata(projected: &TensorSpec, cos: &TensorSpec, columns: usize) -> TensorSpec {
    let head_dim = 2 * cos.shape[1];
    let rows = projected.shape[0];
    TensorSpec::new(
        Shape::new([rows, columns / head_dim, 1, head_dim]),
        projected.dtype,
    )
}

fn metadata_in_order(
    projected: &TensorSpec,
    cos: &TensorSpec,
    columns: &LayerColumns,
    own: OwnShape,
) -> LayerHeadsMetadata {
    let shape = Shape::new(own.of(projected.shape[0], 2 * cos.shape[1]));
    let own = TensorSpec::new(shape, projected.dtype);
    LayerHeadsMetadata {
        queries: metadata(projected, cos, columns.count),
        keys: own.clone(),
        values: own,
    }
}

fn layer_metadata(tensors: &LayerTensorsMetadata, columns: &LayerColumns) -> LayerHeadsMetadata {
    LayerHeadsMetadata {
        queries: metadata(&tensors.projected, &tensors.cos, columns.count),
        keys: tensors.keys.clone(),
        values: tensors.values.clone(),
    }
}
