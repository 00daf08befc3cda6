//! Storage formats of the KV cache, and the check that a model supports a format.

use super::compact::CompactLayout;
use super::precision::{CODES, KvPrecision};
use crate::config::Gemma4Config;
use crate::error::Gemma4Error;

/// The storage format of a KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheKind {
    /// True if a layer with one projection for both keys and values stores whole values, but only the rotated channels
    /// of keys. At Gemma 4's shapes, such a layer needs five eighths of the memory of separate keys and values. The
    /// result differs only by rounding.
    pub compact_keys: bool,
    /// The number format of keys and values: the model's dtype or int8.
    pub precision: KvPrecision,
}

impl CacheKind {
    /// True if the KV cache stores keys and values exactly as the model computes them.
    pub(crate) fn is_plain(self) -> bool {
        self.precision == KvPrecision::Model && !self.compact_keys
    }

    /// Checks that a model of this configuration supports the storage format.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if int8 is requested and a head's channels, or the rotated channels of compact
    /// keys, do not fill whole 32-bit words.
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
                    "is q8, which packs channels by fours, but layer {layer} has heads of {head_dim}"
                ));
            }
            if let Some(layout) = compact.filter(|layout| !layout.has_words()) {
                return refuse(format!(
                    "is q8, which packs channels by fours, but with compact keys layer {layer} stores {} rotated channels apart",
                    layout.rotated()
                ));
            }
        }
        Ok(())
    }
}
