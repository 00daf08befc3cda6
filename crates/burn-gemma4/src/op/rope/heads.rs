//! Heads as attention reads them, of a projection, in one launch: for inference on CubeCL devices.

use super::RotationTables;
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension,
        fusion::custom::TensorSpec,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{Int, Shape, Tensor},
};

/// How heads are made and where they go.
#[derive(Clone, Copy, Debug)]
pub struct HeadOptions {
    /// The first column of the projection that is theirs.
    pub start: usize,
    /// How many are.
    pub count: usize,
    /// Where keys share their values' slots, the pairs of channels that are rotated: values begin with them, of keys they are
    /// written behind, and queries are in these keys' order.
    pub compact: Option<usize>,
    /// Of the norm.
    pub epsilon: f64,
}

/// Columns of one projection that are a layer's queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub struct LayerColumns {
    /// The first column of queries, and how many are theirs.
    pub queries: usize,
    pub count: usize,
    /// The first columns of keys and values, of which there are as many as the cache has room for.
    pub keys: usize,
    pub values: usize,
    /// Of the norms.
    pub epsilon: f64,
}

/// What keys and values become that have no buffer yet.
#[derive(Clone, Copy, Debug)]
pub struct OwnShape {
    pub sequences: usize,
    /// Columns of keys, and as many of values.
    pub columns: usize,
}

impl OwnShape {
    /// `[sequences, heads, count, head_dim]`, of so many rows.
    pub(super) fn of(self, rows: usize, head_dim: usize) -> [usize; 4] {
        let heads = self.columns / head_dim;
        [self.sequences, heads, rows / self.sequences, head_dim]
    }
}

/// Queries as attention reads them, `[rows, heads, 1, head_dim]`, of some columns of `[rows, …]`: normalised by heads and
/// rotated by `positions`, one a row.
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

/// What a layer with keys and values of its own has its heads made of.
pub(crate) struct LayerParts<'a> {
    pub projected: Tensor<2>,
    pub query_weight: Tensor<1>,
    pub key_weight: Tensor<1>,
    pub tables: &'a RotationTables,
    pub positions: Tensor<1, Int>,
    /// The cache's.
    pub keys: Tensor<4>,
    pub values: Tensor<4>,
}

/// [`query_heads`], [`write_keys`] and [`write_values`] of a layer, in one launch where the device can: the queries, the keys' buffer and
/// the values'.
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

/// What a layer has its heads made of whose rows are at the tables' positions in their order.
pub(crate) struct PartsInOrder<'a> {
    pub projected: Tensor<2>,
    pub query_weight: Tensor<1>,
    pub key_weight: Tensor<1>,
    pub tables: &'a RotationTables,
}

/// The heads of a layer's queries, `[rows, heads, 1, head_dim]`, and of its keys and values, `[sequences, heads, count, head_dim]`
/// each, in one launch. Rows are at the tables' positions, and from their beginning again after the last; as many after one
/// another are of each sequence.
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

/// [`query_heads`] of rows that are at the tables' positions in their order, and from their beginning again after the last.
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

/// Writes keys into their slots of `[sequences, heads, slots, head_dim]`, as [`query_heads`] makes queries: the row's position,
/// modulo the slots. As many rows after one another are of each sequence.
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

/// Writes values into their slots as [`write_keys`] does keys: normalised without a weight, and not rotated.
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

/// The tensors that a layer's heads are made of: [`LayerParts`].
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

/// A layer's queries, and the buffers that its keys and values were written into.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct LayerHeads<B: Backend> {
    pub queries: FloatTensor<B>,
    pub keys: FloatTensor<B>,
    pub values: FloatTensor<B>,
}

/// The kernel as operators of a backend. The functions above say what they compute.
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

/// What Burn's fusion must know of heads before they exist.
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
