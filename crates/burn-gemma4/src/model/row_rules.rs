//! The rules that decide which keys the tokens of whole rows see, in calls without a KV cache.

use super::cache::key_values::Visible;
use crate::config::LayerType;
use burn::tensor::{Int, Tensor};

/// The rules of rows besides the causal mask and the window. The default rules add nothing.
#[derive(Clone, Debug, Default)]
pub(crate) struct RowRules {
    /// The index of each token's packed document, `[batch, positions]`, or `None` if each row contains one document.
    pub segments: Option<Tensor<2, Int>>,
    /// The keys that each token sees in sliding layers: the first key, and the first key after the interval, each
    /// `[batch, positions]`. `None` if the causal mask, the window and the documents decide.
    pub sliding: Option<[Tensor<2, Int>; 2]>,
}

impl RowRules {
    /// Returns the rules of a layer of type `kind`. `window` is the window of sliding layers, in tokens.
    pub fn visible(&self, kind: LayerType, window: usize) -> Visible {
        match (&self.sliding, kind) {
            (Some(interval), LayerType::Sliding) => Visible {
                intervals: vec![interval.clone()],
                ..Visible::default()
            },
            _ => Visible {
                segments: self.segments.clone(),
                ..Visible::in_order(kind, window)
            },
        }
    }
}
