//! The argument `--dtype`: the dtypes that the command line offers.

use burn::tensor::DType;

/// The compute dtypes, by their names on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// 32-bit floats.
    F32,
    /// 16-bit floats with 5 bits of exponent.
    F16,
    /// 16-bit floats with 8 bits of exponent.
    Bf16,
}

impl Dtype {
    /// Returns Burn's dtype for this value of the command line.
    pub fn burn(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }

    /// Returns the command line's value for Burn's `dtype`, or `None` if the command line does not offer this dtype.
    pub fn of(dtype: DType) -> Option<Self> {
        [Self::F32, Self::F16, Self::Bf16]
            .into_iter()
            .find(|known| known.burn() == dtype)
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        })
    }
}
