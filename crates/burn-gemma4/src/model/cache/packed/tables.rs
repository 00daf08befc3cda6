//! The ranges that kernels copy between prefixes, packed tokens and the buffers of KV caches, as tables on the device.

use super::layout::PackedLayout;
use crate::config::LayerType;
use crate::model::cache::prefix::PrefixRows;
use crate::op::in_place::ranges::{RangeTable, SlotRange};
use burn::tensor::Device;

/// The tables of copies to the keys and values of a pass: one for each prefix, and one for the new tokens. All layers
/// of a type have the same tables.
#[derive(Default)]
pub(super) struct GatherTables {
    sliding: Vec<Option<RangeTable>>,
    full: Vec<Option<RangeTable>>,
}

impl GatherTables {
    /// Returns the tables of layers of type `kind`. `prefixes` has the prefixes in one of these layers, and `count`
    /// is the number of new tokens.
    pub fn of(
        &mut self,
        kind: LayerType,
        prefixes: &[PrefixRows],
        count: usize,
        device: &Device,
    ) -> &[Option<RangeTable>] {
        let tables = match kind {
            LayerType::Sliding => &mut self.sliding,
            LayerType::Full => &mut self.full,
        };
        if tables.is_empty() {
            let ranges = prefixes.iter().map(|prefix| (prefix.first, prefix.count));
            let mut target_first = 0;
            let ranges = ranges.chain([(0, count)]).map(|(first, count)| {
                let range = SlotRange {
                    first,
                    row: 0,
                    target_first,
                    count,
                };
                target_first += count;
                RangeTable::upload([range], device)
            });
            *tables = ranges.collect();
        }
        tables
    }
}

/// The tables of copies to the buffers of a KV cache.
pub(super) struct ScatterTables<'a> {
    layout: &'a PackedLayout,
    /// The indices and buffer rows of the prompts to copy.
    rows: &'a [(usize, usize)],
    device: Device,
    /// The tables for each layer type and number of slots of a buffer row.
    tables: Vec<(LayerType, usize, Vec<Option<RangeTable>>)>,
}

impl<'a> ScatterTables<'a> {
    pub fn new(layout: &'a PackedLayout, rows: &'a [(usize, usize)], device: Device) -> Self {
        Self {
            layout,
            rows,
            device,
            tables: Vec::new(),
        }
    }

    /// Returns a table for each prefix, and one for the new tokens. `slots` is the number of slots of a buffer row, and
    /// `prefixes` has the prefixes in a layer of type `kind`.
    pub fn of(
        &mut self,
        kind: LayerType,
        slots: usize,
        prefixes: &[PrefixRows],
    ) -> &[Option<RangeTable>] {
        let is_known = |(other, count, _): &(_, usize, _)| *other == kind && *count == slots;
        let index = self.tables.iter().position(is_known).unwrap_or_else(|| {
            let of_prefix = |(index, prefix): (usize, &PrefixRows)| {
                let prompts = self.rows.iter();
                let prompts =
                    prompts.filter(|(prompt, _)| self.layout.prefix_index(*prompt) == Some(index));
                RangeTable::upload(
                    prompts.map(|(prompt, row)| {
                        let end = self.layout.reused(*prompt);
                        let tokens = self.layout.tokens(*prompt);
                        last_slots(prefix.first, end - prefix.count, end, tokens, slots, *row)
                    }),
                    &self.device,
                )
            };
            let new = self.rows.iter().map(|(prompt, row)| {
                let first = self.layout.new_rows(*prompt).start;
                let (start, end) = (self.layout.reused(*prompt), self.layout.tokens(*prompt));
                last_slots(first, start, end, end, slots, *row)
            });
            let mut tables: Vec<_> = prefixes.iter().enumerate().map(of_prefix).collect();
            tables.push(RangeTable::upload(new, &self.device));
            self.tables.push((kind, slots, tables));
            self.tables.len() - 1
        });
        &self.tables[index].2
    }
}

/// Returns the copy of the tokens from `start` to `end` of a sequence of `tokens` tokens to a buffer row of `slots`
/// slots. Token `t` is in slot `t % slots`, as in a ring buffer. Tokens that later tokens would overwrite are left out.
/// `first` is the source's slot of the token `start`.
fn last_slots(
    first: usize,
    start: usize,
    end: usize,
    tokens: usize,
    slots: usize,
    row: usize,
) -> SlotRange {
    let from = tokens.saturating_sub(slots).clamp(start, end);
    SlotRange {
        first: first + from - start,
        row,
        target_first: from % slots,
        count: end - from,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_slots_of_a_text_longer_than_a_ring_are_those_of_its_last_tokens() {
        let range = |first, target_first, count| SlotRange {
            first,
            row: 2,
            target_first,
            count,
        };
        assert_eq!(last_slots(5, 0, 3, 3, 4, 2), range(5, 0, 3));
        assert_eq!(last_slots(5, 0, 7, 7, 4, 2), range(8, 3, 4));
        // The tokens 6 to 8 of 11 tokens, in a ring of 4 slots: only token 7 stays.
        assert_eq!(last_slots(5, 6, 8, 11, 4, 2), range(6, 3, 1));
        assert_eq!(last_slots(5, 2, 6, 11, 4, 2), range(9, 2, 0));
    }
}
