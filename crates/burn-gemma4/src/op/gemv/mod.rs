//! GEMVs (matrix-vector products), and GEMMs of at most [`BATCH_MAX_ROWS`] input rows, for inference on CubeCL devices.
//! In this module a GEMV may have several input rows. GEMVs of several rows in half precision run on tensor cores if
//! possible, because they would be compute-bound on CUDA cores.

mod concat;
mod experts;
mod fused_residual;
#[cfg(feature = "cuda")]
mod hopper;
mod kernel;
mod launch;
mod launch_options;
mod per_layer;
mod quantized;
mod residual_row;
mod sums;
#[cfg(feature = "cuda")]
mod tensor_core;
#[cfg(test)]
mod tests;

pub(crate) use fused_residual::multiply_after_residual;
pub(crate) use per_layer::{PerLayerWeights, per_layer_block};

use super::linear::{Matrices, Matrix};
use crate::quant::layout::Layout;
use burn::{
    backend::{
        Backend, Dispatch, DispatchDevice, ExtensionType, backend_extension,
        fusion::custom::TensorSpec,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Device, Int, Shape, Tensor},
};

/// The largest number of input rows of a GEMV on CUDA cores.
pub(crate) const GEMV_MAX_ROWS: usize = 8;

/// The largest number of input rows for which a GEMV on tensor cores reads each weight only once. See [`most_rows`].
pub(crate) const BATCH_MAX_ROWS: usize = 64;

/// Returns the largest number of input rows of `dtype` for which a GEMV reads each weight only once: [`BATCH_MAX_ROWS`]
/// with tensor cores, or else [`GEMV_MAX_ROWS`]. If the tensor-core kernels do not support the shape of a GEMV, the
/// input is multiplied in chunks of [`GEMV_MAX_ROWS`] rows. Each chunk then reads all weights.
pub(crate) fn most_rows(device: &Device, dtype: DType) -> usize {
    match device.clone().without_autodiff().as_dispatch() {
        DispatchDevice::Cube(device) => launch::most_rows(&device.client(), dtype),
        #[allow(
            unreachable_patterns,
            reason = "with only the Cube backend, no other device exists"
        )]
        _ => GEMV_MAX_ROWS,
    }
}

/// The right-hand side of a GEMV: its weight matrices.
#[derive(Clone)]
pub(crate) enum Factors {
    /// Up to three matrices, `[columns out, columns in]`, whose transposes multiply the input. The outputs are
    /// concatenated.
    Concat(Vec<Matrix>),
    /// GeGLU: `gelu(input · gateᵀ) · (input · throughᵀ)`. The matrix `through` is the up projection.
    Gated { gate: Matrix, through: Matrix },
    /// The product of `gelu(input · gateᵀ)` and given activations, element by element. The activations are the columns
    /// of `through`, `[rows, …]`, beginning at column `start`.
    GateOf {
        gate: Matrix,
        through: Tensor<2>,
        start: usize,
    },
}

impl Factors {
    /// True if all matrices have one quantization format, so that one launch can multiply by all of them.
    pub fn are_of_one_launch(&self) -> bool {
        let all = match self {
            Self::Concat(matrices) => matrices.iter().collect(),
            Self::Gated { gate, through } => vec![gate, through],
            Self::GateOf { gate, .. } => vec![gate],
        };
        let layout = |matrix: &Matrix| match matrix {
            Matrix::Whole(_) => None,
            Matrix::Quantized(matrix) => Some(matrix.layout),
        };
        all.iter().all(|matrix| layout(matrix) == layout(all[0]))
    }
}

/// The origin of a GEMV's weight matrices: parameters, or the output of an earlier launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// No launch writes the matrices, because they are parameters. The GEMV may read them before the previous launch
    /// has ended (PDL).
    Parameters,
    /// An earlier launch, possibly the previous one, writes the matrices.
    Computed,
}

/// Multiplies `input`, `[rows, columns in]`, by the transpose of `weight`, `[columns out, columns in]`. The output is
/// `[rows, columns out]`. If there is a `cap`, each output `x` becomes `cap · tanh(x / cap)` (soft cap).
pub(crate) fn project(
    input: Tensor<2>,
    weight: Matrix,
    cap: Option<f64>,
    origin: Origin,
) -> Tensor<2> {
    let factors = Factors::Concat(vec![weight]);
    let (tensors, options) = ProductTensors::new(input, factors, origin);
    let options = ProductOptions { cap, ..options };
    Tensor::from_dispatch(Dispatch::product(tensors, options))
}

/// Multiplies `input`, `[rows, columns in]`, by `factors`. The output is `[rows, columns out]`.
pub(crate) fn multiply(input: Tensor<2>, factors: Factors, origin: Origin) -> Tensor<2> {
    if factors.are_of_one_launch() {
        let (tensors, options) = ProductTensors::new(input, factors, origin);
        return Tensor::from_dispatch(Dispatch::product(tensors, options));
    }
    match factors {
        Factors::Concat(matrices) => {
            let project = |matrix| project(input.clone(), matrix, None, origin);
            Tensor::cat(matrices.into_iter().map(project).collect(), 1)
        }
        Factors::Gated { gate, through } => {
            let through = project(input.clone(), through, None, origin);
            let start = 0;
            let factors = Factors::GateOf {
                gate,
                through,
                start,
            };
            multiply(input, factors, origin)
        }
        Factors::GateOf { .. } => unreachable!("a single matrix has a single format"),
    }
}

/// Computes the GeGLU `gelu(x · gateᵀ) · (x · throughᵀ)` of each row for each of the row's chosen experts.
///
/// # Shapes
/// - `input`: `[rows, columns in]`.
/// - `weight`: for each expert the rows of the gate projection, then the rows of the up projection `through`.
/// - `chosen`: `[rows, top_k]`, the indices of each row's experts.
/// - output: `[rows · top_k, columns]`.
pub(crate) fn gate_experts(
    input: Tensor<2>,
    weight: Matrices,
    chosen: Tensor<2, Int>,
) -> Tensor<2> {
    let (input, chosen) = (input.into_dispatch(), chosen.into_dispatch());
    Tensor::from_dispatch(match weight {
        Matrices::Whole(weight) => Dispatch::gate_experts(input, weight.into_dispatch(), chosen),
        Matrices::Quantized { all, rows } => {
            let (words, layout) = (all.words.into_dispatch(), all.layout);
            Dispatch::gate_experts_words(input, words, chosen, layout, rows)
        }
    })
}

/// For each of a row's experts, multiplies the expert's inner activations by the transpose of the expert's down
/// projection. Adds up the results of a row's experts, weighted by `shares`.
///
/// # Shapes
/// - `input`: `[rows · top_k, inner]`.
/// - `chosen`: `[rows, top_k]`, the indices of each row's experts.
/// - `shares`: `[rows, top_k]` in f32, the router's weights.
/// - output: `[rows, columns]`.
pub(crate) fn mix_experts(
    input: Tensor<2>,
    weight: Matrices,
    chosen: Tensor<2, Int>,
    shares: Tensor<2>,
) -> Tensor<2> {
    let (input, chosen) = (input.into_dispatch(), chosen.into_dispatch());
    let shares = shares.into_dispatch();
    Tensor::from_dispatch(match weight {
        Matrices::Whole(weight) => {
            Dispatch::mix_experts(input, weight.into_dispatch(), chosen, shares)
        }
        Matrices::Quantized { all, rows } => {
            let (words, layout) = (all.words.into_dispatch(), all.layout);
            Dispatch::mix_experts_words(input, words, chosen, shares, layout, rows)
        }
    })
}

/// An optional weight matrix of a GEMV.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion)]
pub enum MaybeMatrix<B: Backend> {
    Absent,
    Whole(FloatTensor<B>),
    /// The packed words of quantized rows.
    Words(IntTensor<B>),
}

/// The tensors of a GEMV.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct ProductTensors<B: Backend> {
    /// The input rows, `[rows, columns in]`.
    pub input: FloatTensor<B>,
    #[extension_type]
    pub first: MaybeMatrix<B>,
    #[extension_type]
    pub second: MaybeMatrix<B>,
    #[extension_type]
    pub third: MaybeMatrix<B>,
    /// The tensor of activations that the gate multiplies. Only a range of the tensor's columns is used.
    #[extension_type]
    pub through: MaybeMatrix<B>,
}

/// The options of a GEMV.
#[derive(Clone, Copy, Debug)]
pub struct ProductOptions {
    /// The layout of quantized matrices; `None` for float matrices.
    pub layout: Option<Layout>,
    /// True for GeGLU: the kernel multiplies the second matrix's output by the GELU of the first matrix's output. If
    /// false, the kernel concatenates the outputs.
    pub gated: bool,
    /// The first column of `through` that the gate multiplies.
    pub start: usize,
    /// The soft cap: each output `x` becomes `cap · tanh(x / cap)`.
    pub cap: Option<f64>,
    pub origin: Origin,
}

impl ProductTensors<Dispatch> {
    /// Collects the tensors and options of `factors`. All matrices must have the same format, so that one launch can
    /// read all of them.
    fn new(input: Tensor<2>, factors: Factors, origin: Origin) -> (Self, ProductOptions) {
        let mut options = ProductOptions {
            layout: None,
            gated: false,
            start: 0,
            cap: None,
            origin,
        };
        let mut through_columns = MaybeMatrix::Absent;
        let matrices = match factors {
            Factors::Concat(matrices) => matrices,
            Factors::Gated { gate, through } => {
                assert_eq!(
                    gate.rows(),
                    through.rows(),
                    "`gate` and `through`: expected the same number of rows"
                );
                options.gated = true;
                vec![gate, through]
            }
            Factors::GateOf {
                gate,
                through,
                start,
            } => {
                let [_, columns] = through.dims();
                assert!(
                    start + gate.rows() <= columns,
                    "`through`: it has fewer columns than the gate needs"
                );
                options.start = start;
                through_columns = MaybeMatrix::Whole(through.into_dispatch());
                vec![gate]
            }
        };
        assert!(
            matrices.len() <= concat::MOST_SIDES,
            "`factors`: expected at most three matrices"
        );
        let mut matrices = matrices.into_iter().map(|matrix| match matrix {
            Matrix::Whole(matrix) => MaybeMatrix::Whole(matrix.into_dispatch()),
            Matrix::Quantized(matrix) => {
                options.layout = Some(matrix.layout);
                MaybeMatrix::Words(matrix.words.into_dispatch())
            }
        });
        let mut next = || matrices.next().unwrap_or(MaybeMatrix::Absent);
        let tensors = Self {
            input: input.into_dispatch(),
            first: next(),
            second: next(),
            third: next(),
            through: through_columns,
        };
        (tensors, options)
    }
}

/// The GEMV kernels as operators of a backend. For each operator, see the function of this module that calls it.
#[backend_extension(Cube, Fusion)]
pub trait GemvBackend: Backend {
    #[fusion(meta = metadata)]
    fn product(
        #[extension_type] tensors: ProductTensors<Self>,
        options: ProductOptions,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |input, weight, chosen| gated_metadata(input, chosen, weight.shape[1]))]
    fn gate_experts(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        chosen: IntTensor<Self>,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |input, weight, chosen, _shares| mixed_metadata(input, chosen, weight.shape[1]))]
    fn mix_experts(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        chosen: IntTensor<Self>,
        shares: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |input, _words, chosen, _layout, rows| gated_metadata(input, chosen, *rows))]
    fn gate_experts_words(
        input: FloatTensor<Self>,
        words: IntTensor<Self>,
        chosen: IntTensor<Self>,
        layout: Layout,
        rows: usize,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |input, _words, chosen, _shares, _layout, rows| {
        mixed_metadata(input, chosen, *rows)
    })]
    fn mix_experts_words(
        input: FloatTensor<Self>,
        words: IntTensor<Self>,
        chosen: IntTensor<Self>,
        shares: FloatTensor<Self>,
        layout: Layout,
        rows: usize,
    ) -> FloatTensor<Self>;
}

/// Returns the shape and dtype of the output of a GEMV, which Burn's fusion needs before it runs the operator.
fn metadata(tensors: &ProductTensorsMetadata, options: &ProductOptions) -> TensorSpec {
    let rows_of = |matrix: &MaybeMatrixMetadata| match matrix {
        MaybeMatrixMetadata::Absent => 0,
        MaybeMatrixMetadata::Whole(matrix) | MaybeMatrixMetadata::Words(matrix) => matrix.shape[0],
    };
    let beside = match options.gated {
        true => 0,
        false => rows_of(&tensors.second) + rows_of(&tensors.third),
    };
    let shape = [tensors.input.shape[0], rows_of(&tensors.first) + beside];
    TensorSpec::new(Shape::new(shape), tensors.input.dtype)
}

fn gated_metadata(input: &TensorSpec, chosen: &TensorSpec, rows: usize) -> TensorSpec {
    let items = chosen.shape[0] * chosen.shape[1];
    TensorSpec::new(Shape::new([items, rows / 2]), input.dtype)
}

fn mixed_metadata(input: &TensorSpec, chosen: &TensorSpec, rows: usize) -> TensorSpec {
    TensorSpec::new(Shape::new([chosen.shape[0], rows]), input.dtype)
}
