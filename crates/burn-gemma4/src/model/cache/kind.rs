//! How a cache keeps keys and values, and what a model has no cache of.

use super::{compact::CompactLayout, slots::CODES};
use crate::{Gemma4Config, Gemma4Error};

/// In what a cache keeps keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvPrecision {
    /// The dtype that the model computes in.
    #[default]
    Model,
    /// int8, with a scale in f32 a token and head: see [`attention_cube::quantized`].
    Q8,
}

/// How a cache keeps keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheKind {
    /// Of keys only what their values do not say, where layers make both of the same projection: of them, the rotated channels. Those
    /// layers keep five eighths at Gemma 4's shapes, and a token reads as much less. It is the same mathematics, rounded elsewhere. Models
    /// without such layers keep what they always keep.
    pub compact_keys: bool,
    /// In what.
    pub precision: KvPrecision,
}

impl CacheKind {
    /// Refuses what a model of this shape has no cache of.
    ///
    /// # Errors
    /// [`Gemma4Error::Argument`] where int8 is asked for, and a head has a part of a word.
    pub(crate) fn check(self, config: &Gemma4Config) -> Result<(), Gemma4Error> {
        if self.precision == KvPrecision::Model {
            return Ok(());
        }
        let refuse = |reason| {
            let argument = "kv_precision";
            Err(Gemma4Error::Argument { argument, reason })
        };
        for layer in 0..config.first_shared_layer() {
            let head_dim = config.head_dim(layer);
            let compact = CompactLayout::of(config, layer).filter(|_| self.compact_keys);
            if !head_dim.is_multiple_of(CODES) {
                return refuse(format!(
                    "is q8, which keeps numbers by fours, but layer {layer} has heads of {head_dim}"
                ));
            }
            if let Some(layout) = compact.filter(|layout| !layout.has_words()) {
                return refuse(format!(
                    "is q8, which keeps numbers by fours, but with compact keys layer {layer} keeps {} rotated ones apart",
                    layout.rotated()
                ));
            }
        }
        Ok(())
    }
}
