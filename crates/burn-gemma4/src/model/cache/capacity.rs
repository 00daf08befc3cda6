//! Reserved slots for future tokens in the buffers of the KV cache, and the buffers that the decode kernels write.
//!
//! A column is one token of every sequence. A full-attention layer stores column `c` in slot `c` of its buffer.

use super::{
    Cache, Store,
    buffers::{BLOCK, Buffers, capacity, grown},
    compact::CompactBuffer,
    slots::Slots,
};
use crate::config::LayerType;
use crate::op::stream::StreamCheck;

/// The buffers to which the decode kernels write a layer's next key and value.
#[derive(Clone, Debug)]
pub(crate) enum WriteTarget {
    /// Separate buffers for keys and values.
    Apart(Box<Buffers>),
    /// One buffer whose slots hold both key and value.
    Compact(Box<CompactBuffer>),
}

impl WriteTarget {
    /// Reports to `check` whether the buffers were allocated on the current stream.
    pub(crate) fn check_streams(&self, check: &mut StreamCheck) {
        let of_slots = |slots: &Slots, check: &mut StreamCheck| match slots {
            Slots::Whole(rows) => check.floats(rows.clone()),
            Slots::Q8 { words, scales } => {
                check.integers(words.clone());
                check.floats(scales.clone());
            }
        };
        match self {
            Self::Apart(buffers) => {
                of_slots(&buffers.key, check);
                of_slots(&buffers.value, check);
            }
            Self::Compact(buffer) => {
                of_slots(&buffer.slots, check);
                buffer.keys.check_streams(check);
            }
        }
    }
}

impl Cache {
    /// Returns the number of tokens per sequence for which every full-attention layer's buffer has slots.
    pub(crate) fn room(&self) -> usize {
        self.room
    }

    /// Reserves slots for at least `count` more tokens of every sequence. A reallocated buffer invalidates the captured CUDA
    /// graphs, so buffers grow rarely. They grow by at least an eighth and by at least 1,024 slots, up to the model's maximum
    /// number of positions.
    pub(crate) fn make_room(&mut self, count: usize) {
        let columns = self.columns;
        let ahead = capacity(columns + count.max(columns / 8).max(4 * BLOCK));
        let room = ahead
            .min(capacity(self.positions))
            .max(capacity(columns + count));
        let grow = |buffer: &mut Slots| *buffer = grown(buffer.clone(), room, columns);
        for store in &mut self.stores {
            match store {
                Store::Growing(Some(buffers)) => {
                    grow(&mut buffers.key);
                    grow(&mut buffers.value);
                }
                Store::Compact(_, Some(buffer)) => grow(&mut buffer.slots),
                Store::Ring(_) | Store::Growing(None) | Store::Compact(_, None) => {}
            }
        }
        self.room = room;
    }

    /// Returns the buffers to which the decode kernels write, in layer order. Only layers that compute their own keys and
    /// values have an entry.
    ///
    /// # Panics
    /// Panics if the cache is empty.
    pub(crate) fn targets(&self) -> Vec<WriteTarget> {
        self.stores.iter().map(Store::target).collect()
    }

    /// Returns the buffers of the last layer of type `kind` that computes its own keys and values, or `None` if no
    /// layer does.
    ///
    /// # Panics
    /// Panics if the cache is empty.
    pub(crate) fn last_target(&self, kind: LayerType) -> Option<WriteTarget> {
        let is_of =
            |store: &&Store| matches!(store, Store::Ring(_)) == (kind == LayerType::Sliding);
        self.stores.iter().rfind(is_of).map(Store::target)
    }
}

impl Store {
    /// Returns the buffers to which the decode kernels write the layer's keys and values.
    fn target(&self) -> WriteTarget {
        match self {
            Self::Ring(Some(buffers)) | Self::Growing(Some(buffers)) => {
                WriteTarget::Apart(Box::new(buffers.clone()))
            }
            Self::Compact(_, Some(buffer)) => WriteTarget::Compact(buffer.clone()),
            Self::Ring(None) | Self::Growing(None) | Self::Compact(_, None) => {
                panic!("an empty cache has no buffers")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Gemma4Config;
    use crate::model::cache::kind::CacheKind;
    use crate::model::cache::precision::KvPrecision;

    #[test]
    fn make_room_near_the_last_position_stops_there() {
        let config = Gemma4Config {
            max_position_embeddings: 2048,
            ..Gemma4Config::e2b()
        };
        let kind = CacheKind {
            compact_keys: false,
            precision: KvPrecision::Model,
        };
        for (columns, count, room) in [
            (0, 1, 1024),
            (1100, 1, 2048),
            (2047, 1, 2048),
            (2048, 9, 2304),
        ] {
            let mut cache = Cache {
                columns,
                ..Cache::new(&config, vec![0], kind)
            };
            cache.make_room(count);
            assert_eq!(cache.room(), room, "{columns} columns and {count} more");
        }
    }
}
