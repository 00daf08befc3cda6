//! The first tokens of a prompt whose keys and values an earlier prompt's KV cache has. Prompts read them without a
//! copy of the whole cache.

use super::{Cache, Store, buffers::Buffers, checkpoint::Checkpoint};
use crate::config::LayerType;
use burn::tensor::Tensor;
use std::sync::Arc;

/// The first tokens of an earlier prompt, from which other prompts continue. Clones share the keys and values.
#[derive(Clone, Debug)]
pub(crate) struct Prefix {
    cache: Arc<Cache>,
    /// The ring buffers at the end of the prefix, or `None` if those of `cache` still hold what the next query sees.
    checkpoint: Option<Arc<Checkpoint>>,
    columns: usize,
}

/// The keys and values of a prefix in one layer. Sliding layers have those that the next query sees.
#[derive(Clone, Debug)]
pub(crate) struct PrefixRows {
    /// Keys and values, `[1, kv_heads, slots, head_dim]` each.
    pub key_values: [Tensor<4>; 2],
    /// The slot of the first token. After the last slot, the tokens continue at slot 0.
    pub first: usize,
    /// The number of tokens.
    pub count: usize,
}

impl Prefix {
    /// Returns the first `columns` tokens of `cache`. `checkpoint` is a checkpoint after these tokens. It is needed if
    /// [`can_fork`](Cache::can_fork) is false there.
    ///
    /// # Panics
    /// Panics if the checkpoint is needed but missing, or if it belongs to another token.
    pub fn new(cache: Arc<Cache>, columns: usize, checkpoint: Option<Arc<Checkpoint>>) -> Self {
        let checkpoint = checkpoint.filter(|_| !cache.can_fork(columns));
        let at = checkpoint.as_ref().map(|checkpoint| checkpoint.column);
        assert!(
            at == Some(columns) || cache.can_fork(columns),
            "the checkpoint holds the state after the prefix"
        );
        Self {
            cache,
            checkpoint,
            columns,
        }
    }

    /// The number of tokens.
    pub fn len(&self) -> usize {
        self.columns
    }

    /// True if both prefixes are the same tokens of the same cache.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.cache, &other.cache) && self.columns == other.columns
    }

    /// Copies the prefix to a new cache, which has slots for `end` tokens.
    pub fn fork(&self, end: usize) -> Cache {
        let checkpoint = self.checkpoint.as_deref();
        self.cache.fork(self.columns, checkpoint, end)
    }

    /// True if the copied prefix fills the window of sliding layers: see [`Cache::fills_history`].
    #[cfg(feature = "cube")]
    pub fn fills_history(&self) -> bool {
        self.cache.has_one_plain_sequence() && (2..=self.columns + 1).contains(&self.cache.window)
    }

    /// Returns the number of tokens whose keys the next query sees in a layer of type `kind`.
    pub fn visible(&self, kind: LayerType) -> usize {
        match kind {
            LayerType::Sliding => self.columns.min(self.cache.window - 1),
            LayerType::Full => self.columns,
        }
    }

    /// Returns the keys and values in a layer that computes its own.
    ///
    /// # Panics
    /// Panics if the cache does not store keys and values as the model computes them.
    pub fn rows(&self, layer: usize) -> PrefixRows {
        let key_values =
            |buffers: &Buffers| [&buffers.key, &buffers.value].map(|slots| slots.clone().numbers());
        let (key_values, first, kind) = match &self.cache.stores[layer] {
            Store::Ring(Some(ring)) => {
                let count = self.visible(LayerType::Sliding);
                let kept = self.checkpoint.as_ref().and_then(|checkpoint| {
                    let ring = checkpoint.rings[layer].as_ref();
                    ring.map(|ring| (ring, checkpoint.kept - count))
                });
                let (buffers, first) = kept.unwrap_or_else(|| {
                    let [_, _, slots, _] = ring.key.dims();
                    (ring, (self.columns - count) % slots)
                });
                (key_values(buffers), first, LayerType::Sliding)
            }
            Store::Growing(Some(buffers)) => (key_values(buffers), 0, LayerType::Full),
            Store::Ring(None) | Store::Growing(None) | Store::Compact(..) => {
                panic!("the cache has tokens, in separate buffers of keys and values")
            }
        };
        PrefixRows {
            key_values,
            first,
            count: self.visible(kind),
        }
    }
}

impl PrefixRows {
    /// Returns the keys and values in text order, as one or two parts along the tokens.
    pub fn parts(&self) -> [Vec<Tensor<4>>; 2] {
        self.key_values.clone().map(|rows| {
            let [_, _, slots, _] = rows.dims();
            let before_end = self.count.min(slots - self.first);
            let mut parts = vec![rows.clone().narrow(2, self.first, before_end)];
            if self.count > before_end {
                parts.push(rows.narrow(2, 0, self.count - before_end));
            }
            parts
        })
    }
}
