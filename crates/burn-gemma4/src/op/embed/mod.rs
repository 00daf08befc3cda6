//! What the layers begin with, of few rows, each in a launch: tokens' rows with the norm that comes next, and per-layer embeddings. As Burn's own
//! operators they are five launches more, which do not overlap.

mod kernel;
mod launch;
#[cfg(test)]
mod tests;

use crate::op::linear::few_rows::Origin;
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension,
        fusion::custom::TensorSpec,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{Int, Shape, Tensor},
};

/// Rows of a table, by tokens that no launch of a graph writes.
pub(crate) struct TokenRows {
    /// `[tokens, columns]`.
    pub table: Tensor<2>,
    /// Who writes the table.
    pub origin: Origin,
    /// `[rows]`.
    pub tokens: Tensor<1, Int>,
    /// What the rows are multiplied by. It is rounded to the table's dtype, and so is the product.
    pub scale: f64,
}

/// A norm's weight, `[columns]` of the same dtype, and what it adds to the mean of squares.
pub(crate) struct NormWeight {
    pub weight: Tensor<1>,
    pub epsilon: f64,
}

/// The tokens' rows, scaled, and their norm: `[rows, columns]` each.
pub(crate) fn embed(rows: TokenRows, norm: NormWeight) -> (Tensor<2>, Tensor<2>) {
    let options = EmbedOptions {
        scale: rows.scale,
        epsilon: norm.epsilon,
        origin: rows.origin,
    };
    let embedded: Embedded<Dispatch> = Dispatch::embed(
        rows.tokens.into_dispatch(),
        rows.table.into_dispatch(),
        norm.weight.into_dispatch(),
        options,
    );
    (
        Tensor::from_dispatch(embedded.rows),
        Tensor::from_dispatch(embedded.normed),
    )
}

/// The tokens' part of per-layer embeddings.
pub(crate) struct OfTokens {
    /// `[rows, layers · columns]`.
    table: Tensor<2>,
    origin: Origin,
    /// Which of its rows; all in their order, where they are not told.
    tokens: Option<Tensor<1, Int>>,
    scale: f64,
}

impl OfTokens {
    /// `[rows, layers · columns]`, in the tokens' order, scaled.
    pub fn there(rows: Tensor<2>) -> Self {
        Self {
            table: rows,
            origin: Origin::Computed,
            tokens: None,
            scale: 1.0,
        }
    }
}

impl From<TokenRows> for OfTokens {
    fn from(rows: TokenRows) -> Self {
        Self {
            table: rows.table,
            origin: rows.origin,
            tokens: Some(rows.tokens),
            scale: rows.scale,
        }
    }
}

/// What per-layer embeddings are multiplied by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PerLayerFactors {
    /// The projection, before its norm.
    pub projected: f64,
    /// The sum of both parts.
    pub sum: f64,
}

/// `(norm(projected · factor) + of_tokens) · factor`, the norm of each layer's columns, of which the weight has as many; in f32, rounded once.
/// `[rows, layers · columns]`.
pub(crate) fn per_layer(
    projected: Tensor<2>,
    of_tokens: OfTokens,
    norm: NormWeight,
    factors: PerLayerFactors,
) -> Tensor<2> {
    let tokens = match of_tokens.tokens {
        Some(tokens) => MaybeTokens::InOrderOf(tokens.into_dispatch()),
        None => MaybeTokens::InOrder,
    };
    let options = PerLayerOptions {
        of_table: EmbedOptions {
            scale: of_tokens.scale,
            epsilon: norm.epsilon,
            origin: of_tokens.origin,
        },
        factors,
    };
    Tensor::from_dispatch(Dispatch::per_layer(
        projected.into_dispatch(),
        of_tokens.table.into_dispatch(),
        tokens,
        norm.weight.into_dispatch(),
        options,
    ))
}

/// Beside the tensors.
#[derive(Clone, Copy, Debug)]
pub struct EmbedOptions {
    scale: f64,
    epsilon: f64,
    origin: Origin,
}

/// Beside the tensors of per-layer embeddings.
#[derive(Clone, Copy, Debug)]
pub struct PerLayerOptions {
    of_table: EmbedOptions,
    factors: PerLayerFactors,
}

/// Which rows of a table are read.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub enum MaybeTokens<B: Backend> {
    /// From the first on.
    InOrder,
    /// Those of these numbers.
    InOrderOf(IntTensor<B>),
}

/// Tokens' rows, and their norm.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct Embedded<B: Backend> {
    pub rows: FloatTensor<B>,
    pub normed: FloatTensor<B>,
}

/// The kernels as operators of a backend. The functions above say what they compute.
#[backend_extension(Cube, Fusion)]
pub trait EmbedBackend: Backend {
    #[fusion(meta = |tokens, table, _weight, _options| metadata(tokens, table))]
    fn embed(
        tokens: IntTensor<Self>,
        table: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        options: EmbedOptions,
    ) -> Embedded<Self>;

    #[fusion(meta = |projected, _table, _tokens, _weight, _options| projected.clone())]
    fn per_layer(
        projected: FloatTensor<Self>,
        table: FloatTensor<Self>,
        #[extension_type] tokens: MaybeTokens<Self>,
        weight: FloatTensor<Self>,
        options: PerLayerOptions,
    ) -> FloatTensor<Self>;
}

/// What Burn's fusion must know of the rows before they exist.
fn metadata(tokens: &TensorSpec, table: &TensorSpec) -> EmbeddedMetadata {
    let rows = TensorSpec::new(Shape::new([tokens.shape[0], table.shape[1]]), table.dtype);
    EmbeddedMetadata {
        rows: rows.clone(),
        normed: rows,
    }
}
