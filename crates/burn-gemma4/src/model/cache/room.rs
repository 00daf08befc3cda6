//! What kernels that write a few columns at a time have of a cache: room for them, and where they go.

use super::{
    Cache, Store,
    buffers::{BLOCK, Buffers, capacity, grown},
    compact::CompactBuffer,
    slots::Slots,
};
use crate::LayerType;

/// Where a layer's next key and value are written.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    /// Each in a buffer of its own.
    Apart(Box<Buffers>),
    /// Both in the same slots.
    Compact(Box<CompactBuffer>),
}

impl Cache {
    /// Columns up to which every buffer has slots.
    pub(crate) fn room(&self) -> usize {
        self.room
    }

    /// Gets room for at least `count` more columns. Whoever writes a few columns at a time notices that buffers move, so they
    /// grow by an eighth, and not by fewer than 1,024 columns, up to the model's positions.
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

    /// Where every layer that has keys and values of its own writes the next ones.
    ///
    /// # Panics
    /// If the cache is empty.
    pub(crate) fn targets(&self) -> Vec<Target> {
        self.stores.iter().map(Store::target).collect()
    }

    /// Where the last layer of `kind` that has keys and values of its own keeps them; nothing where there is none.
    ///
    /// # Panics
    /// If the cache is empty.
    pub(crate) fn last_target(&self, kind: LayerType) -> Option<Target> {
        let is_of =
            |store: &&Store| matches!(store, Store::Ring(_)) == (kind == LayerType::Sliding);
        self.stores.iter().rfind(is_of).map(Store::target)
    }
}

impl Store {
    /// Where the layer's next key and value are written.
    fn target(&self) -> Target {
        match self {
            Self::Ring(Some(buffers)) | Self::Growing(Some(buffers)) => {
                Target::Apart(Box::new(buffers.clone()))
            }
            Self::Compact(_, Some(buffer)) => Target::Compact(buffer.clone()),
            Self::Ring(None) | Self::Growing(None) | Self::Compact(_, None) => {
                panic!("an empty cache has no buffers")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Gemma4Config, KvPrecision, model::cache::kind::CacheKind};

    #[test]
    fn there_is_none_beyond_the_positions() {
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
            assert_eq!(cache.room(), room, "{columns} and {count}");
        }
    }
}
