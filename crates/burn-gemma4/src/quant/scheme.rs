//! The schemes by which compressed-tensors quantizes matrices.

use super::packed::Scheme;

/// The scheme of a matrix. It says which tensors store the matrix, and in which shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightScheme {
    /// Integers of 4 or 8 bits in words, the format `pack-quantized`.
    Packed(Scheme),
    /// Floats of 8 bits (E4M3), the format `float-quantized`.
    Fp8(Fp8Scheme),
    /// Floats of 4 bits (E2M1), the formats `nvfp4-pack-quantized` and `mxfp4-pack-quantized`.
    Fp4(Fp4Scheme),
}

/// The elements of an FP8 matrix that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fp8Scheme {
    /// All elements.
    Tensor,
    /// The elements of a row.
    Channel,
    /// The elements of a block of so many rows and columns. The last blocks may be smaller.
    Block([usize; 2]),
}

/// The scales of a matrix of 4-bit floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fp4Scheme {
    /// NVFP4: an FP8 scale for each 16 columns of a row, divided by an f32 scale of the whole matrix.
    Nv,
    /// MXFP4: a power of two for each 32 columns of a row.
    Mx,
}

impl Fp4Scheme {
    /// Returns the number of columns that share a scale.
    pub const fn group(self) -> usize {
        match self {
            Self::Nv => 16,
            Self::Mx => 32,
        }
    }
}
