//! Sizes of KV caches and checkpoints of one sequence, before they exist.

use super::{Cache, Store, buffers::capacity, precision::KvPrecision};
use crate::config::Gemma4Config;
use burn::tensor::DType;

impl Cache {
    /// Returns the size on the device in bytes of this cache when it holds one sequence of `columns` tokens. `dtype` is
    /// the dtype in which the model computes keys and values.
    pub(crate) fn bytes_at(&self, config: &Gemma4Config, columns: usize, dtype: DType) -> usize {
        self.sum(config, dtype, |store| match store {
            Store::Ring(_) => self.ring_slots(),
            Store::Growing(_) | Store::Compact(..) => capacity(columns),
        })
    }

    /// Returns the largest size on the device in bytes of a checkpoint of this cache, if it holds one sequence.
    pub(crate) fn checkpoint_bytes(&self, config: &Gemma4Config, dtype: DType) -> usize {
        self.sum(config, dtype, |store| match store {
            Store::Ring(_) => self.window - 1 + self.spare,
            Store::Growing(_) | Store::Compact(..) => 0,
        })
    }

    /// Returns the size in bytes of `slots` slots of each layer, as this cache stores them.
    fn sum(&self, config: &Gemma4Config, dtype: DType, slots: impl Fn(&Store) -> usize) -> usize {
        // An int8 row has an f32 scale.
        let row = |width: usize| match self.kind.precision {
            KvPrecision::Model => width * dtype.size(),
            KvPrecision::Q8 => width + size_of::<f32>(),
        };
        let layers = self.stores.iter().enumerate();
        let bytes = layers.map(|(layer, store)| {
            let of_slot = match store {
                Store::Ring(_) | Store::Growing(_) => 2 * row(config.head_dim(layer)),
                Store::Compact(layout, _) => row(layout.width()),
            };
            slots(store) * config.key_value_heads(layer) * of_slot
        });
        bytes.sum()
    }
}
