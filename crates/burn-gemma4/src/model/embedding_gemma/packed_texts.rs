//! The texts of a call. Their rows lie one after another, without padding, so that each product multiplies all rows
//! together.

use crate::config::LayerType;
use crate::model::cache::key_values::Visible;
use crate::op::rope::Positions;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use std::ops::Range;

/// The rows of packed texts. A token sees only the tokens of its own text, in both directions.
pub(crate) struct PackedTexts {
    /// The rows of each text.
    rows: Vec<Range<usize>>,
    /// The first row of each token's text, and the first row after it, `[1, tokens]` each. `None` if there is one text.
    intervals: Option<[Tensor<2, Int>; 2]>,
}

impl PackedTexts {
    /// Packs texts with these numbers of tokens.
    pub fn new(lengths: impl Iterator<Item = usize>, device: &Device) -> Self {
        let mut end = 0;
        let rows = lengths.map(|length| {
            end += length;
            end - length..end
        });
        let rows: Vec<Range<usize>> = rows.collect();
        let bounds = |bound: fn(&Range<usize>) -> usize| {
            let tokens = rows.iter();
            let bounds = tokens.flat_map(|text| vec![bound(text) as i32; text.len()]);
            let bounds = TensorData::new(bounds.collect::<Vec<i32>>(), [1, end]);
            Tensor::<2, Int>::from_data(bounds, (device, DType::I32))
        };
        let intervals =
            (rows.len() > 1).then(|| [bounds(|text| text.start), bounds(|text| text.end)]);
        Self { rows, intervals }
    }

    /// Returns the rows of each text.
    pub fn rows(&self) -> &[Range<usize>] {
        &self.rows
    }

    /// Returns the position of each token in its text.
    pub fn positions(&self) -> Positions {
        match self.rows.as_slice() {
            [text] => Positions::Range {
                first: 0,
                count: text.len(),
            },
            texts => Positions::Each(vec![texts.iter().flat_map(|text| 0..text.len()).collect()]),
        }
    }

    /// Returns the rules of a layer of type `kind`. In sliding layers, a query sees fewer than `window` keys before its
    /// own position, and fewer than `window` keys after it.
    pub fn visible(&self, kind: LayerType, window: usize) -> Visible {
        Visible {
            radius: (kind == LayerType::Sliding).then(|| window - 1),
            intervals: self.intervals.iter().cloned().collect(),
            ..Visible::default()
        }
    }
}
