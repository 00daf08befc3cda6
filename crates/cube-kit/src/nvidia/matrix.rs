//! The operands of a GEMM: their layout, and the errors of operands that do not fit each other.

#[cfg(feature = "cuda")]
use burn::{backend::TensorMetadata, tensor::DType};
#[cfg(feature = "cuda")]
use burn_cubecl::tensor::CubeTensor;

/// The dimension along which an operand is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Major {
    /// The inner dimension. The GEMM sums over the inner dimension.
    Inner,
    /// The outer dimension: the rows of the left operand, or the columns of the right operand.
    Outer,
}

/// The reason why a GEMM was refused: the argument, its value, and the expected value.
#[cfg(feature = "cuda")]
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MatrixError {
    /// An operand is not a matrix, or the operands differ in inner size.
    #[error(
        "{argument} has shape {has:?}: its {dimension} is {found}, and it should be {expected}"
    )]
    Shape {
        /// The argument's name.
        argument: &'static str,
        /// The argument's shape.
        has: Vec<usize>,
        /// The dimension that does not fit.
        dimension: &'static str,
        /// The size of the dimension that does not fit.
        found: usize,
        /// The expected size, and the reason for it.
        expected: String,
    },
    /// The operands differ in dtype.
    #[error("{argument} has dtype {has:?}, and it should have {expected}")]
    Dtype {
        /// The argument's name.
        argument: &'static str,
        /// The argument's dtype.
        has: DType,
        /// The expected dtype.
        expected: String,
    },
    /// The operands are on different devices.
    #[error("{argument} is on {has}, and it should be on the {whose}'s device, {expected}")]
    Device {
        /// The argument's name.
        argument: &'static str,
        /// The argument's device.
        has: String,
        /// The name of the left operand. The right operand must be on the same device.
        whose: &'static str,
        /// The device of the left operand.
        expected: String,
    },
}

/// Checks that the operands are matrices of one inner size, dtype and device.
#[cfg(feature = "cuda")]
pub(crate) fn check_operands(lhs: &CubeTensor, rhs: &CubeTensor) -> Result<(), MatrixError> {
    for (argument, matrix) in [("lhs", lhs), ("rhs", rhs)] {
        let shape = matrix.shape();
        if shape.num_dims() != 2 {
            return Err(MatrixError::Shape {
                argument,
                has: shape.to_vec(),
                dimension: "rank",
                found: shape.num_dims(),
                expected: "2".into(),
            });
        }
    }
    let ([_, inner], [found, columns]) = (lhs.shape().dims(), rhs.shape().dims());
    if found != inner {
        return Err(MatrixError::Shape {
            argument: "rhs",
            has: vec![found, columns],
            dimension: "inner size",
            found,
            expected: format!("{inner}, the lhs's"),
        });
    }
    if rhs.dtype != lhs.dtype {
        return Err(MatrixError::Dtype {
            argument: "rhs",
            has: rhs.dtype,
            expected: format!("{:?} (the lhs's)", lhs.dtype),
        });
    }
    if rhs.device != lhs.device {
        return Err(MatrixError::Device {
            argument: "rhs",
            has: format!("{:?}", rhs.device),
            whose: "lhs",
            expected: format!("{:?}", lhs.device),
        });
    }
    Ok(())
}
