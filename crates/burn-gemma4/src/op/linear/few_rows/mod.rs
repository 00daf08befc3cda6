//! Products of a few rows, bound by the memory's rate, for inference on CubeCL devices. Several rows in half precision go to matrix units where
//! they can be had: ordinary ones would be busier than the memory.

mod after_residual;
mod experts;
mod kernel;
mod launch;
#[cfg(feature = "cuda")]
mod matrix_units;
mod sides;
mod sums;
#[cfg(test)]
mod tests;
mod words;

pub(crate) use after_residual::multiply_after_residual;

use super::{Matrices, Matrix};
use crate::{model::layer::weight::Weight, quantized::layout::Layout};
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension,
        fusion::custom::TensorSpec,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{Int, Shape, Tensor},
};

/// Rows that a product takes at most.
pub(crate) const MOST_ROWS: usize = 8;

/// What rows are multiplied by.
#[derive(Clone)]
pub(crate) enum Factors {
    /// The transposes of up to three matrices, `[columns out, columns in]`, whose outputs lie side by side.
    Sides(Vec<Matrix>),
    /// `gelu(input · gateᵀ) · (input · throughᵀ)`.
    Gated { gate: Matrix, through: Matrix },
    /// `gelu(input · gateᵀ)` times the columns of `[rows, …]` from `start` on.
    GateOf {
        gate: Matrix,
        through: Tensor<2>,
        start: usize,
    },
}

impl Factors {
    /// Whether one launch reads them: files may be of mixed formats.
    pub fn are_of_one_launch(&self) -> bool {
        let all = match self {
            Self::Sides(matrices) => matrices.iter().collect(),
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

/// Who writes the matrices of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// No launch: they are parameters as they are, which a product may read before the launches before it have ended.
    Parameters,
    /// An earlier launch, maybe the last one.
    Computed,
}

impl Origin {
    /// Of what [`Weight::matrix`](crate::model::layer::weight::Weight::matrix) tells: what an adapter adds is computed.
    pub(crate) fn of<const D: usize>(weight: &Weight<D>) -> Self {
        match weight.adapter() {
            None => Self::Parameters,
            Some(_) => Self::Computed,
        }
    }
}

/// `[rows, columns in]` times the transpose of `[columns out, columns in]`.
pub(crate) fn project(
    input: Tensor<2>,
    weight: Matrix,
    cap: Option<f64>,
    origin: Origin,
) -> Tensor<2> {
    let factors = Factors::Sides(vec![weight]);
    let (tensors, options) = ProductTensors::new(input, factors, origin);
    let options = ProductOptions { cap, ..options };
    Tensor::from_dispatch(Dispatch::product(tensors, options))
}

/// `[rows, columns in]` times `factors`.
pub(crate) fn multiply(input: Tensor<2>, factors: Factors, origin: Origin) -> Tensor<2> {
    if factors.are_of_one_launch() {
        let (tensors, options) = ProductTensors::new(input, factors, origin);
        return Tensor::from_dispatch(Dispatch::product(tensors, options));
    }
    match factors {
        Factors::Sides(matrices) => {
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
        Factors::GateOf { .. } => unreachable!("one matrix is read by one launch"),
    }
}

/// `gelu(x · gateᵀ) · (x · throughᵀ)` of each row by each of its experts, `chosen`, `[rows, top_k]`: `[rows · top_k, columns]`. A matrix has
/// the rows of the gate and, below them, those of what goes through.
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

/// The sums of what each row's experts make of its inner ones, `[rows · top_k, inner]`, times their `shares`, `[rows, top_k]` in f32:
/// `[rows, columns]`.
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

/// What a product with several matrices may lack.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub enum MaybeMatrix<B: Backend> {
    Absent,
    Whole(FloatTensor<B>),
    /// The words of quantized rows.
    Words(IntTensor<B>),
}

/// The tensors of a product.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct ProductTensors<B: Backend> {
    /// `[rows, columns in]`.
    pub input: FloatTensor<B>,
    #[extension_type]
    pub first: MaybeMatrix<B>,
    #[extension_type]
    pub second: MaybeMatrix<B>,
    #[extension_type]
    pub third: MaybeMatrix<B>,
    /// What the first matrix opens the gates of: some columns of it.
    #[extension_type]
    pub through: MaybeMatrix<B>,
}

/// What a product does beside adding up.
#[derive(Clone, Copy, Debug)]
pub struct ProductOptions {
    /// Of quantized matrices.
    pub layout: Option<Layout>,
    /// Whether the first matrix opens the gates of the second; else their outputs lie side by side.
    pub gated: bool,
    /// The first column of what `through` has for the gates.
    pub start: usize,
    /// `cap · tanh(x / cap)` of the outputs.
    pub cap: Option<f64>,
    pub origin: Origin,
}

impl ProductTensors<Dispatch> {
    /// Of factors of one launch.
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
            Factors::Sides(matrices) => matrices,
            Factors::Gated { gate, through } => {
                assert_eq!(gate.rows(), through.rows(), "a gate for each");
                options.gated = true;
                vec![gate, through]
            }
            Factors::GateOf {
                gate,
                through,
                start,
            } => {
                let [_, columns] = through.dims();
                assert!(start + gate.rows() <= columns, "something for each gate");
                options.start = start;
                through_columns = MaybeMatrix::Whole(through.into_dispatch());
                vec![gate]
            }
        };
        assert!(
            matrices.len() <= sides::MOST_SIDES,
            "three matrices at most"
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

/// The kernels as operators of a backend. The functions above say what they compute.
#[backend_extension(Cube, Fusion)]
pub trait FewRowsBackend: Backend {
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

/// What Burn's fusion must know of a product before it exists.
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
