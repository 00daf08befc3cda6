//! The number format of keys and values in the KV cache.

/// The number format of keys and values in the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvPrecision {
    /// The dtype that the model computes in.
    #[default]
    Model,
    /// int8, with an f32 scale per token and head: see [`attention_cube::quantized`].
    Q8,
}

/// The number of int8 codes in a 32-bit word.
pub(crate) const CODES: usize = 4;
