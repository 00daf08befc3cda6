//! The alignment of padded sequences in the cache. A column is one position of the padded batch, and a slot is an index
//! in a buffer.
//!
//! Prefill aligns all sequences at their ends, so a shorter sequence begins with padding. Before the first decode step
//! each sequence is rotated once, so that slot 0 holds the sequence's first token. The sequence's length then
//! determines which keys a query sees.

use super::{Cache, Store, slots::Slots};
use crate::error::Gemma4Error;

impl Cache {
    /// Rotates the slots of every sequence so that slot 0 holds the sequence's first token. The cache must already hold
    /// the whole padding of every sequence: see [`has_begun`](Self::has_begun).
    #[cfg(feature = "cube")]
    pub(crate) fn rotate(&mut self) {
        if !self.rotated {
            let padding = self.padding.clone();
            self.rotate_by(|row, _| padding[row]);
            self.rotated = true;
        }
    }

    /// Undoes [`rotate`](Self::rotate), so that each sequence begins with its padding again. In a ragged cache this function
    /// does nothing.
    #[cfg(feature = "cube")]
    pub(crate) fn turn_back(&mut self) {
        if self.rotated && !self.ragged {
            let padding = self.padding.clone();
            self.rotate_by(|row, slots| slots - padding[row] % slots);
            self.rotated = false;
        }
    }

    /// Removes the last `counts[i]` tokens of sequence `i`. These tokens must not be padding. If the counts differ,
    /// each shorter sequence is padded to the length of the longest sequence.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if a count exceeds [`forgettable`](Self::forgettable).
    pub(crate) fn forget_each(&mut self, counts: &[usize]) -> Result<(), Gemma4Error> {
        let most = counts.iter().copied().max().unwrap_or(0);
        if counts.iter().all(|count| *count == most) || most > self.forgettable() {
            return self.forget(most);
        }
        let rows = self.padding.iter().zip(counts);
        let lengths: Vec<usize> = rows
            .map(|(padding, count)| self.columns - padding - count)
            .collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let padding: Vec<usize> = lengths.iter().map(|length| longest - length).collect();
        if !self.rotated {
            let before = self.padding.clone();
            self.rotate_by(|row, slots| before[row] + slots - padding[row] % slots);
        }
        self.columns = longest;
        self.padding = padding;
        Ok(())
    }

    /// True if the sequences may have different lengths: in a ragged cache, or after [`forget_each`](Self::forget_each).
    #[cfg(feature = "cube")]
    pub(crate) fn may_be_ragged(&self) -> bool {
        self.ragged || self.batch() > 1 && self.spare > 0
    }

    /// True if the cache has columns, and already holds the whole padding of every sequence. The next token of each
    /// sequence is then text.
    #[cfg(feature = "cube")]
    pub(crate) fn has_begun(&self) -> bool {
        self.columns > 0 && self.columns >= self.most_padding()
    }

    /// The position of each sequence's next token.
    #[cfg(feature = "cube")]
    pub(crate) fn next_positions(&self) -> impl Iterator<Item = usize> + '_ {
        self.padding.iter().map(|padding| self.columns - padding)
    }

    /// Rotates the slots of each sequence. If a buffer has `slots` slots, slot `first(row, slots) % slots` of the
    /// sequence `row` moves to slot 0.
    fn rotate_by(&mut self, first: impl Fn(usize, usize) -> usize) {
        let rows = 0..self.batch();
        let rotate = |buffer: &mut Slots| {
            let count = buffer.dims()[2];
            let by: Vec<usize> = rows.clone().map(|row| first(row, count) % count).collect();
            if by.iter().any(|by| *by > 0) {
                *buffer = rotated(buffer, by.into_iter());
            }
        };
        for store in &mut self.stores {
            match store {
                Store::Ring(Some(buffers)) | Store::Growing(Some(buffers)) => {
                    rotate(&mut buffers.key);
                    rotate(&mut buffers.value);
                }
                Store::Compact(_, Some(buffer)) => rotate(&mut buffer.slots),
                Store::Ring(None) | Store::Growing(None) | Store::Compact(_, None) => {}
            }
        }
    }
}

/// Returns a copy of `buffer`, `[batch, kv_heads, slots, channels]`, with rotated slots. Slot `by[row]` of the sequence
/// `row` moves to slot 0.
fn rotated(buffer: &Slots, by: impl Iterator<Item = usize>) -> Slots {
    let [_, _, slots, _] = buffer.dims();
    let mut copy = buffer.empty(slots);
    for (row, by) in by.enumerate() {
        let sequence = buffer.narrow(0, row, 1);
        for (from, to, count) in [(by, 0, slots - by), (0, slots - by, by)] {
            if count > 0 {
                let part = sequence.narrow(2, from, count);
                copy = copy.assign(row..row + 1, to..to + count, part);
            }
        }
    }
    copy
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::config::Gemma4Config;
    use crate::model::cache::kind::CacheKind;
    use burn::tensor::{Device, Tensor, TensorData};

    #[test]
    fn rotated_back_gives_the_original() {
        let slots = |text: &Slots| {
            let numbers = text.clone().numbers().into_data();
            numbers.iter::<f32>().collect::<Vec<_>>()
        };
        let device = Device::flex();
        let data = (0..2 * 5).map(|slot| slot as f32).collect::<Vec<_>>();
        let buffer = Slots::Whole(Tensor::from_data(
            TensorData::new(data, [2, 1, 5, 1]),
            &device,
        ));
        let there = rotated(&buffer, [3, 0].into_iter());
        assert_eq!(slots(&there)[..5], [3.0, 4.0, 0.0, 1.0, 2.0]);
        assert_eq!(slots(&there)[5..], slots(&buffer)[5..]);
        assert_eq!(slots(&rotated(&there, [2, 0].into_iter())), slots(&buffer));
    }

    #[cfg(feature = "cube")]
    #[test]
    fn has_begun_is_true_after_the_padding() {
        let mut cache = Cache::new(&Gemma4Config::e2b(), vec![0, 3], CacheKind::default());
        assert!(!cache.has_begun());
        cache.advance_by(2);
        assert!(!cache.has_begun());
        cache.advance_by(1);
        assert!(cache.has_begun());
        assert_eq!(cache.next_positions().collect::<Vec<_>>(), [3, 0]);
    }
}
