//! The keys that the tokens of packed prompts see.

use super::layout::PackedLayout;
use crate::config::LayerType;
use crate::model::cache::key_values::Visible;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use std::ops::Range;

/// The keys that each token sees, as intervals of the rows of keys: first the prompt's new tokens, then the prefix, if
/// a prompt of the pass has one. An interval is its first key and the first key after it, `[1, tokens]` each.
pub(crate) struct PackedIntervals {
    sliding: Vec<[Tensor<2, Int>; 2]>,
    full: Vec<[Tensor<2, Int>; 2]>,
}

impl PackedIntervals {
    /// Returns the intervals of some tokens of the pass. Each token is given as its prompt and its index among the new
    /// tokens of the prompt.
    pub fn new(
        layout: &PackedLayout,
        tokens: &[(usize, usize)],
        window: usize,
        device: &Device,
    ) -> Self {
        let of_kind = |kind| {
            let prefixes = layout.prefix_rows(kind);
            let first_new = prefixes.last().map_or(0, |rows| rows.end);
            let window = match kind {
                LayerType::Sliding => window,
                LayerType::Full => usize::MAX,
            };
            let new = tokens.iter().map(|(prompt, index)| {
                let start = first_new + layout.new_rows(*prompt).start;
                let end = start + index + 1;
                start.max(end.saturating_sub(window))..end
            });
            let mut intervals = vec![upload(new, device)];
            if !prefixes.is_empty() {
                let earlier = tokens.iter().map(|(prompt, index)| {
                    let prefix = layout.prefix_index(*prompt);
                    let rows = prefix.map_or(0..0, |prefix| prefixes[prefix].clone());
                    let visible = window.saturating_sub(index + 1).min(rows.len());
                    rows.end - visible..rows.end
                });
                intervals.push(upload(earlier, device));
            }
            intervals
        };
        Self {
            sliding: of_kind(LayerType::Sliding),
            full: of_kind(LayerType::Full),
        }
    }

    /// Returns the rules of a layer of type `kind`.
    pub fn visible(&self, kind: LayerType) -> Visible {
        let intervals = match kind {
            LayerType::Sliding => &self.sliding,
            LayerType::Full => &self.full,
        };
        Visible {
            intervals: intervals.clone(),
            ..Visible::default()
        }
    }
}

/// Uploads the first keys of the intervals, and the first keys after them.
fn upload(
    intervals: impl Iterator<Item = Range<usize>> + Clone,
    device: &Device,
) -> [Tensor<2, Int>; 2] {
    let bounds = |bounds: Vec<i32>| {
        let shape = [1, bounds.len()];
        Tensor::from_data(TensorData::new(bounds, shape), (device, DType::I32))
    };
    [
        bounds(intervals.clone().map(|keys| keys.start as i32).collect()),
        bounds(intervals.map(|keys| keys.end as i32).collect()),
    ]
}
