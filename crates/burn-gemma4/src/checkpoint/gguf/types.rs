//! The tensor types of ggml.

use crate::quant::blocks::BlockFormat;
use burn::tensor::DType;
use std::fmt;

/// The type of a tensor's elements, represented by ggml's id of the type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Type(pub u32);

/// The encoding of a tensor's elements: a floating-point dtype, or quantized blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::checkpoint) enum Encoding {
    Floats(DType),
    Blocks(BlockFormat),
}

/// All tensor types of ggml, each with its id, its name and its encoding. If this crate cannot read a type, the
/// encoding is `None`.
const TYPES: [(u32, &str, Option<Encoding>); 35] = {
    use Encoding::{Blocks, Floats};
    [
        (0, "F32", Some(Floats(DType::F32))),
        (1, "F16", Some(Floats(DType::F16))),
        (2, "Q4_0", Some(Blocks(BlockFormat::Q4_0))),
        (3, "Q4_1", Some(Blocks(BlockFormat::Q4_1))),
        (6, "Q5_0", Some(Blocks(BlockFormat::Q5_0))),
        (7, "Q5_1", Some(Blocks(BlockFormat::Q5_1))),
        (8, "Q8_0", Some(Blocks(BlockFormat::Q8_0))),
        (9, "Q8_1", None),
        (10, "Q2_K", Some(Blocks(BlockFormat::Q2K))),
        (11, "Q3_K", Some(Blocks(BlockFormat::Q3K))),
        (12, "Q4_K", Some(Blocks(BlockFormat::Q4K))),
        (13, "Q5_K", Some(Blocks(BlockFormat::Q5K))),
        (14, "Q6_K", Some(Blocks(BlockFormat::Q6K))),
        (15, "Q8_K", None),
        (16, "IQ2_XXS", None),
        (17, "IQ2_XS", None),
        (18, "IQ3_XXS", None),
        (19, "IQ1_S", None),
        (20, "IQ4_NL", Some(Blocks(BlockFormat::Iq4Nl))),
        (21, "IQ3_S", None),
        (22, "IQ2_S", None),
        (23, "IQ4_XS", Some(Blocks(BlockFormat::Iq4Xs))),
        (24, "I8", None),
        (25, "I16", None),
        (26, "I32", None),
        (27, "I64", None),
        (28, "F64", Some(Floats(DType::F64))),
        (29, "IQ1_M", None),
        (30, "BF16", Some(Floats(DType::BF16))),
        (34, "TQ1_0", None),
        (35, "TQ2_0", None),
        (39, "MXFP4", Some(Blocks(BlockFormat::Mxfp4))),
        (40, "NVFP4", None),
        (41, "Q1_0", None),
        (42, "Q2_0", None),
    ]
};

impl Type {
    /// Returns the encoding of the type's elements, or `None` if this crate cannot read the type.
    pub fn encoding(self) -> Option<Encoding> {
        let known = TYPES.iter().find(|(id, _, _)| *id == self.0);
        known.and_then(|(_, _, encoding)| *encoding)
    }

    /// Returns the name of the type that is nearest in size to this type and that this crate can read.
    pub fn nearest(self) -> &'static str {
        match TYPES.iter().find(|(id, _, _)| *id == self.0) {
            Some((_, name, Some(_))) => name,
            Some((_, "IQ3_XXS" | "IQ3_S", None)) => "Q3_K",
            Some((_, "NVFP4", None)) => "MXFP4",
            Some((_, "I8" | "I16" | "I32" | "I64" | "Q8_1" | "Q8_K", None)) => "Q8_0",
            Some((_, _, None)) => "Q2_K",
            None => "Q4_K",
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match TYPES.iter().find(|(id, _, _)| *id == self.0) {
            Some((_, name, _)) => f.write_str(name),
            None => write!(f, "type {}", self.0),
        }
    }
}

impl Encoding {
    /// Returns the id of the ggml type that has this encoding.
    ///
    /// # Panics
    /// Panics if ggml has no type for the dtype.
    pub fn id(self) -> u32 {
        let known = TYPES
            .iter()
            .find(|(_, _, encoding)| *encoding == Some(self));
        known.expect("ggml has a type for the encoding").0
    }

    /// Returns ggml's name of the type that has this encoding.
    ///
    /// # Panics
    /// Panics if ggml has no type for the dtype.
    pub fn name(self) -> String {
        Type(self.id()).to_string()
    }

    /// Returns the number of elements per block. An unquantized element is a block of its own.
    pub fn block_numbers(self) -> usize {
        match self {
            Self::Floats(_) => 1,
            Self::Blocks(format) => format.numbers(),
        }
    }

    /// Returns the number of bytes per block. An unquantized element is a block of its own.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::Floats(dtype) => dtype.size(),
            Self::Blocks(format) => format.bytes(),
        }
    }
}
