//! The weights that multiply activations, in floats or quantized.

use crate::op::dequantize::dequantize;
use crate::quant::layout::Layout;
use burn::tensor::{DType, Int, Tensor};

/// A matrix `[rows, columns]`, in floats or quantized.
#[derive(Clone)]
pub(crate) enum Matrix {
    Whole(Tensor<2>),
    Quantized(QuantizedMatrix),
}

/// Stacked matrices `[matrices, rows, columns]`, in floats or quantized.
#[cfg(feature = "cube")]
#[derive(Clone)]
pub(crate) enum Matrices {
    Whole(Tensor<3>),
    /// The stacked rows of all matrices, and the number of rows per matrix.
    Quantized {
        all: QuantizedMatrix,
        rows: usize,
    },
}

/// A quantized matrix. Each row is packed into 32-bit words.
#[derive(Clone)]
pub(crate) struct QuantizedMatrix {
    /// The packed rows, `[rows, words]`.
    pub words: Tensor<2, Int>,
    pub layout: Layout,
}

#[cfg(feature = "cuda")]
impl Matrices {
    /// Returns the float matrices, `[matrices, rows, columns]`. Dequantizes quantized matrices to `dtype`.
    pub fn whole(self, dtype: DType) -> Tensor<3> {
        match self {
            Self::Whole(matrices) => matrices,
            Self::Quantized { all, rows } => {
                let count = all.words.dims()[0] / rows;
                let columns = all.layout.columns;
                all.dequantized(dtype).reshape([count, rows, columns])
            }
        }
    }
}

impl Matrix {
    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        match self {
            Self::Whole(matrix) => matrix.dims()[0],
            Self::Quantized(matrix) => matrix.words.dims()[0],
        }
    }

    /// Selects the rows with these indices.
    pub fn select(&self, rows: Tensor<1, Int>) -> Self {
        match self {
            Self::Whole(matrix) => Self::Whole(matrix.clone().select(0, rows)),
            Self::Quantized(matrix) => Self::Quantized(matrix.select(rows)),
        }
    }

    /// Returns the float matrix, or `None` if the matrix is quantized.
    #[cfg(feature = "cuda")]
    pub fn into_whole(self) -> Option<Tensor<2>> {
        match self {
            Self::Whole(matrix) => Some(matrix),
            Self::Quantized(_) => None,
        }
    }

    /// Returns the matrix on the device without autodiff.
    pub fn inner(self) -> Self {
        match self {
            Self::Whole(matrix) => Self::Whole(matrix.inner()),
            Self::Quantized(matrix) => Self::Quantized(QuantizedMatrix {
                words: matrix.words.without_autodiff(),
                ..matrix
            }),
        }
    }

    /// Returns the matrix if autodiff tracks its gradient, and otherwise `None`.
    pub fn tracked(&self) -> Option<Tensor<2>> {
        match self {
            Self::Whole(matrix) => matrix.is_tracked().then(|| matrix.clone()),
            Self::Quantized(_) => None,
        }
    }

    /// Returns the matrix in floats. A quantized matrix is dequantized to `dtype`.
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
    /// Returns `count` rows, beginning at row `first`.
    pub fn rows(&self, first: usize, count: usize) -> Self {
        Self {
            words: self.words.clone().narrow(0, first, count),
            layout: self.layout,
        }
    }

    /// Selects the rows with these indices.
    pub fn select(&self, rows: Tensor<1, Int>) -> Self {
        Self {
            words: self.words.clone().select(0, rows),
            layout: self.layout,
        }
    }

    /// Dequantizes all rows to `dtype`. Autodiff does not track the result. The result is on an autodiff device if the
    /// packed words are on an autodiff device.
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
