//! Embeddings of few rows: one launch for token embeddings with the first layer's norm, and one for per-layer embeddings.
//! Burn's own operators would need five more launches.

mod kernel;
mod launch;
#[cfg(test)]
mod tests;

use crate::op::gemv::Origin;
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension,
        fusion::custom::TensorSpec,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{Int, Shape, Tensor},
};

/// Rows of an embedding table, selected by tokens. The kernel may read the tokens before the previous kernel launch has
/// ended. Therefore no other kernel in the same CUDA graph may write the tokens.
pub(crate) struct TokenRows {
    /// The embedding table, `[tokens, columns]`.
    pub table: Tensor<2>,
    /// The origin of the table: parameters that no launch writes, or the output of an earlier launch.
    pub origin: Origin,
    /// The tokens of the rows, `[rows]`.
    pub tokens: Tensor<1, Int>,
    /// The scalar that multiplies the rows. Both the scalar and the scaled rows are rounded to the table's dtype.
    pub scale: f64,
}

/// The weight of an RMS norm, `[columns]` in the dtype of the rows, and its epsilon.
pub(crate) struct NormWeight {
    pub weight: Tensor<1>,
    pub epsilon: f64,
}

/// Returns the scaled embeddings of the tokens, and the norm of these embeddings. Both tensors are `[rows, columns]`.
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

/// The part of the per-layer embeddings that comes from the table: the table, the tokens that select its rows, and the scale
/// of the rows.
pub(crate) struct OfTokens {
    /// The per-layer embedding table, with one row of `layers · columns` elements per token of the vocabulary, or per
    /// output row if `tokens` is `None`.
    table: Tensor<2>,
    origin: Origin,
    /// The tokens whose table rows the kernel reads, or `None` if the kernel reads all rows in order.
    tokens: Option<Tensor<1, Int>>,
    scale: f64,
}

impl OfTokens {
    /// Wraps embeddings that are already looked up and scaled, one per output row: `[rows, layers · columns]`.
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

/// The scalar factors of per-layer embeddings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PerLayerFactors {
    /// The scalar that multiplies the projection before its norm.
    pub projected: f64,
    /// The scalar that multiplies the sum of the normed projection and the tokens' embeddings.
    pub sum: f64,
}

/// Computes per-layer embeddings, `(norm(projected · factors.projected) + of_tokens) · factors.sum`, in f32, and rounds once.
/// In the formula, `of_tokens` stands for the scaled table rows of the tokens. The norm applies to each layer's columns
/// separately. `projected` and the output are `[rows, layers · columns]`.
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

/// The options of [`embed`].
#[derive(Clone, Copy, Debug)]
pub struct EmbedOptions {
    scale: f64,
    epsilon: f64,
    origin: Origin,
}

/// The options of [`per_layer`].
#[derive(Clone, Copy, Debug)]
pub struct PerLayerOptions {
    of_table: EmbedOptions,
    factors: PerLayerFactors,
}

/// The selection of a table's rows.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub enum MaybeTokens<B: Backend> {
    /// Reads all rows, in order.
    InOrder,
    /// Reads the rows with these token ids.
    InOrderOf(IntTensor<B>),
}

/// The tokens' embeddings, and the norm of these embeddings.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct Embedded<B: Backend> {
    pub rows: FloatTensor<B>,
    pub normed: FloatTensor<B>,
}

/// The backend operators that run the kernels. For each operator, see the function of the same name in this module.
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

/// Returns the shapes and dtypes of the outputs, which Burn's fusion needs before it runs the operator.
fn metadata(tokens: &TensorSpec, table: &TensorSpec) -> EmbeddedMetadata {
    let rows = TensorSpec::new(Shape::new([tokens.shape[0], table.shape[1]]), table.dtype);
    EmbeddedMetadata {
        rows: rows.clone(),
        normed: rows,
    }
}
