//! Where the columns of a batch with padding lie: aligned at the sequences' ends, or turned, so that each sequence's first token is in
//! slot 0.
//!
//! Prompts are read aligned at their ends. Decoding's kernels turn the cache once: then a slot is a position, padding is nowhere, and
//! what a query sees is told by its sequence's length alone, which is on the device.

use super::{Cache, Store, slots::Slots};
use crate::Gemma4Error;

impl Cache {
    /// Turns every sequence to slot 0. Each must have been read up to its first token.
    #[cfg(feature = "cube")]
    pub(crate) fn turn(&mut self) {
        if !self.turned {
            let padding = self.padding.clone();
            self.turn_by(|row, _| padding[row]);
            self.turned = true;
        }
    }

    /// Undoes [`turn`](Self::turn).
    #[cfg(feature = "cube")]
    pub(crate) fn turn_back(&mut self) {
        if self.turned {
            let padding = self.padding.clone();
            self.turn_by(|row, slots| slots - padding[row] % slots);
            self.turned = false;
        }
    }

    /// Forgets so many of each sequence's last columns, all of which are of its text. Where the counts differ, sequences that are shorter than
    /// the longest begin with as much more padding.
    ///
    /// # Errors
    /// [`Gemma4Error::Argument`] where one is more than [`forgettable`](Self::forgettable).
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
        if !self.turned {
            let before = self.padding.clone();
            self.turn_by(|row, slots| before[row] + slots - padding[row] % slots);
        }
        self.columns = longest;
        self.padding = padding;
        Ok(())
    }

    /// Whether [`forget_each`](Self::forget_each) may bring sequences to different positions.
    #[cfg(feature = "cube")]
    pub(crate) fn may_be_ragged(&self) -> bool {
        self.batch() > 1 && self.spare > 0
    }

    /// Whether what comes next is of the text in every sequence.
    #[cfg(feature = "cube")]
    pub(crate) fn has_begun(&self) -> bool {
        self.columns > 0 && self.columns >= self.most_padding()
    }

    /// The position of each sequence's next column.
    #[cfg(feature = "cube")]
    pub(crate) fn next_positions(&self) -> impl Iterator<Item = usize> + '_ {
        self.padding.iter().map(|padding| self.columns - padding)
    }

    /// Moves each sequence's slots so that they begin with the one that `first` makes of its number and their count, which may be beyond them.
    fn turn_by(&mut self, first: impl Fn(usize, usize) -> usize) {
        let rows = 0..self.batch();
        let turn = |buffer: &mut Slots| {
            let count = buffer.dims()[2];
            let by: Vec<usize> = rows.clone().map(|row| first(row, count) % count).collect();
            if by.iter().any(|by| *by > 0) {
                *buffer = turned(buffer, by.into_iter());
            }
        };
        for store in &mut self.stores {
            match store {
                Store::Ring(Some(buffers)) | Store::Growing(Some(buffers)) => {
                    turn(&mut buffers.key);
                    turn(&mut buffers.value);
                }
                Store::Compact(_, Some(buffer)) => turn(&mut buffer.slots),
                Store::Ring(None) | Store::Growing(None) | Store::Compact(_, None) => {}
            }
        }
    }
}

/// A copy of `[batch, kv_heads, slots, columns]` whose sequences begin with the slot that `by` says.
fn turned(buffer: &Slots, by: impl Iterator<Item = usize>) -> Slots {
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
    use crate::{Gemma4Config, model::cache::kind::CacheKind};
    use burn::tensor::{Device, Tensor, TensorData};

    #[test]
    fn turned_back_it_is_what_it_was() {
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
        let there = turned(&buffer, [3, 0].into_iter());
        assert_eq!(slots(&there)[..5], [3.0, 4.0, 0.0, 1.0, 2.0]);
        assert_eq!(slots(&there)[5..], slots(&buffer)[5..]);
        assert_eq!(slots(&turned(&there, [2, 0].into_iter())), slots(&buffer));
    }

    #[test]
    fn a_text_begins_where_its_padding_ends() {
        let mut cache = Cache::new(&Gemma4Config::e2b(), vec![0, 3], CacheKind::default());
        assert!(!cache.has_begun());
        cache.advance_by(2);
        assert!(!cache.has_begun());
        cache.advance_by(1);
        assert!(cache.has_begun());
        assert_eq!(cache.next_positions().collect::<Vec<_>>(), [3, 0]);
    }
}
