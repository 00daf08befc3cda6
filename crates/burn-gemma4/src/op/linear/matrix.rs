//! A weight as products take it.

use crate::{op::dequantize::dequantize, quantized::layout::Layout};
use burn::tensor::{DType, Int, Tensor};

/// `[rows, columns]`, whole or quantized.
#[derive(Clone)]
pub(crate) enum Matrix {
    Whole(Tensor<2>),
    Quantized(QuantizedMatrix),
}

/// `[matrices, rows, columns]`, whole or quantized.
#[cfg(feature = "cube")]
#[derive(Clone)]
pub(crate) enum Matrices {
    Whole(Tensor<3>),
    /// All rows, and how many a matrix has.
    Quantized {
        all: QuantizedMatrix,
        rows: usize,
    },
}

/// A matrix by the words of its rows.
#[derive(Clone)]
pub(crate) struct QuantizedMatrix {
    /// `[rows, words]`.
    pub words: Tensor<2, Int>,
    pub layout: Layout,
}

impl Matrix {
    /// How many rows it has.
    pub fn rows(&self) -> usize {
        match self {
            Self::Whole(matrix) => matrix.dims()[0],
            Self::Quantized(matrix) => matrix.words.dims()[0],
        }
    }

    /// The rows of these numbers.
    pub fn select(&self, rows: Tensor<1, Int>) -> Self {
        match self {
            Self::Whole(matrix) => Self::Whole(matrix.clone().select(0, rows)),
            Self::Quantized(matrix) => Self::Quantized(matrix.select(rows)),
        }
    }

    /// Its numbers, unless it is quantized.
    #[cfg(feature = "cuda")]
    pub fn into_whole(self) -> Option<Tensor<2>> {
        match self {
            Self::Whole(matrix) => Some(matrix),
            Self::Quantized(_) => None,
        }
    }

    /// As a constant.
    pub fn inner(self) -> Self {
        match self {
            Self::Whole(matrix) => Self::Whole(matrix.inner()),
            Self::Quantized(matrix) => Self::Quantized(QuantizedMatrix {
                words: matrix.words.without_autodiff(),
                ..matrix
            }),
        }
    }

    /// The matrix if it has gradients.
    pub fn tracked(&self) -> Option<Tensor<2>> {
        match self {
            Self::Whole(matrix) => matrix.is_tracked().then(|| matrix.clone()),
            Self::Quantized(_) => None,
        }
    }

    /// All of its numbers; those of a quantized matrix in `dtype`.
    pub fn whole(&self, dtype: DType) -> Tensor<2> {
        match self {
            Self::Whole(matrix) => matrix.clone(),
            Self::Quantized(matrix) => matrix.dequantized(dtype),
        }
    }
}

impl From<Tensor<2>> for Matrix {
    fn from(matrix: Tensor<2>) -> Self {
        Self::Whole(matrix)
    }
}

impl From<QuantizedMatrix> for Matrix {
    fn from(matrix: QuantizedMatrix) -> Self {
        Self::Quantized(matrix)
    }
}

impl QuantizedMatrix {
    /// So many rows from the first on.
    pub fn rows(&self, first: usize, count: usize) -> Self {
        Self {
            words: self.words.clone().narrow(0, first, count),
            layout: self.layout,
        }
    }

    /// The rows of these numbers.
    pub fn select(&self, rows: Tensor<1, Int>) -> Self {
        Self {
            words: self.words.clone().select(0, rows),
            layout: self.layout,
        }
    }

    /// All numbers, rounded to `dtype`: constants where the words are on a device with autodiff.
    pub fn dequantized(&self, dtype: DType) -> Tensor<2> {
        let strategy = self.words.gradient_checkpointing_strategy();
        let numbers = dequantize(self.words.clone().without_autodiff(), self.layout, dtype);
        match strategy {
            Some(strategy) => numbers
                .autodiff()
                .with_gradient_checkpointing_strategy(strategy),
            None => numbers,
        }
    }
}
