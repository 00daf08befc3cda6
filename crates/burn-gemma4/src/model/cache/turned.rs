//! Where the columns of a batch with padding lie: aligned at the sequences' ends, or turned, so that each sequence's first token is in
//! slot 0.
//!
//! Prompts are read aligned at their ends. Decoding's kernels turn the cache once: then a slot is a position, padding is nowhere, and
//! what a query sees is told by its sequence's length alone, which is on the device.

use super::{Cache, Store, slots::Slots};

impl Cache {
    /// Turns every sequence to slot 0. Each must have been read up to its first token.
    pub(crate) fn turn(&mut self) {
        if !self.turned {
            self.turn_by(|padding, _| padding);
            self.turned = true;
        }
    }

    /// Undoes [`turn`](Self::turn).
    pub(crate) fn turn_back(&mut self) {
        if self.turned {
            self.turn_by(|padding, slots| (slots - padding % slots) % slots);
            self.turned = false;
        }
    }

    /// Whether what comes next is of the text in every sequence.
    pub(crate) fn has_begun(&self) -> bool {
        self.columns > 0 && self.columns >= self.most_padding()
    }

    /// The position of each sequence's next column.
    pub(crate) fn next_positions(&self) -> impl Iterator<Item = usize> + '_ {
        self.padding.iter().map(|padding| self.columns - padding)
    }

    /// Moves each sequence's slots by what `slots` makes of its padding and their count.
    fn turn_by(&mut self, slots: impl Fn(usize, usize) -> usize) {
        if self.most_padding() == 0 {
            return;
        }
        let padding = &self.padding;
        let turn = |buffer: &mut Slots| {
            let count = buffer.dims()[2];
            let by = padding.iter().map(|padding| slots(*padding, count) % count);
            *buffer = turned(buffer, by);
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
