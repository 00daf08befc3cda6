//! The forward pass over several whole prompts at once. The rows of all prompts lie one after another, without padding,
//! so that each product multiplies all rows together. A token sees only the tokens of its own prompt.

use super::cache::key_values::{KeyValues, SharedKeyValues, Visible};
use super::cache::packed::PackedKeyValues;
use super::cache::slots::Slots;
#[cfg(feature = "cube")]
use super::decode_ops::DecodeOps;
use super::forward::Text;
use super::layer::ops::ResidualStream;
use super::prefill_ops::{KvDestination, PrefillOps};
use super::text_model::Gemma4Model;
use super::tokens::Tokens;
use crate::config::LayerType;
use crate::op::rope::Positions;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use std::ops::Range;

/// The keys that the tokens of packed prompts see, as an interval of the packed rows for each token. All tensors are
/// `[1, tokens]`.
pub(crate) struct PackedIntervals {
    /// The first key that each token sees in sliding layers.
    sliding_start: Tensor<2, Int>,
    /// The first key that each token sees in full-attention layers: the first token of its prompt.
    full_start: Tensor<2, Int>,
    /// The first key after those that each token sees: the key after its own.
    end: Tensor<2, Int>,
}

/// The place for the keys and values of packed prompts.
pub(crate) struct PackedDestination<'a> {
    pub intervals: &'a PackedIntervals,
    /// A list with the keys and values of each layer that computes its own, each `[1, kv_heads, tokens, head_dim]`.
    pub layers: &'a mut Vec<[Tensor<4>; 2]>,
}

impl PackedIntervals {
    /// Returns the intervals of the tokens with the indices `offsets` in the prompts, whose rows are `ranges`.
    fn new<'a>(
        ranges: &'a [Range<usize>],
        offsets: impl Fn(&Range<usize>) -> Range<usize> + 'a,
        window: usize,
        device: &Device,
    ) -> Self {
        let tokens = || {
            let of_prompt = |range: &'a Range<usize>| {
                offsets(range).map(|offset| (range.start, range.start + offset + 1))
            };
            ranges.iter().flat_map(of_prompt)
        };
        let bounds = |bounds: Vec<i32>| {
            let shape = [1, bounds.len()];
            Tensor::from_data(TensorData::new(bounds, shape), (device, DType::I32))
        };
        let in_window = |(start, end): (usize, usize)| start.max(end.saturating_sub(window)) as i32;
        Self {
            sliding_start: bounds(tokens().map(in_window).collect()),
            full_start: bounds(tokens().map(|(start, _)| start as i32).collect()),
            end: bounds(tokens().map(|(_, end)| end as i32).collect()),
        }
    }

    /// Returns the rules of a layer of type `kind`.
    fn visible(&self, kind: LayerType) -> Visible {
        let start = match kind {
            LayerType::Sliding => &self.sliding_start,
            LayerType::Full => &self.full_start,
        };
        Visible {
            interval: Some([start.clone(), self.end.clone()]),
            ..Visible::default()
        }
    }
}

impl PackedDestination<'_> {
    /// Keeps the keys and values of a layer. Returns the keys and values that the layer's queries attend to.
    pub fn extend(&mut self, kind: LayerType, key: Tensor<4>, value: Tensor<4>) -> KeyValues {
        self.layers.push([key.clone(), value.clone()]);
        let visible = self.intervals.visible(kind);
        KeyValues::new(Slots::Whole(key), Slots::Whole(value), visible)
    }
}

impl Gemma4Model {
    /// Returns the size of the keys and values of one packed token on the device in bytes. In contrast to a KV cache, a
    /// pass over packed prompts keeps the keys and values of all tokens in sliding layers too.
    pub(crate) fn bytes_of_packed_token(&self) -> usize {
        let config = &self.config;
        let elements = (0..config.first_shared_layer())
            .map(|layer| 2 * config.key_value_heads(layer) * config.head_dim(layer));
        elements.sum::<usize>() * self.dtype().size()
    }

    /// Runs the model over whole prompts in one pass. Returns the normalized hidden state of each prompt's last token,
    /// `[rows, 1, hidden]`, and the keys and values of all tokens. Rows beyond the prompts repeat the last prompt.
    ///
    /// # Panics
    /// Panics if there are no prompts, or if a prompt is empty.
    pub(crate) fn hidden_of_packed(&self, prompts: &[&[u32]]) -> (Tensor<3>, PackedKeyValues) {
        assert!(
            !prompts.is_empty() && prompts.iter().all(|prompt| !prompt.is_empty()),
            "there is a prompt, and each prompt has a token"
        );
        let (device, window) = (self.device(), self.config.sliding_window);
        let count = prompts.len();
        let ranges = consecutive(prompts.iter().map(|prompt| prompt.len()));
        let positions = ranges.iter().flat_map(|range| 0..range.len()).collect();
        let positions = Positions::Each(vec![positions]);
        let tokens = prompts.concat();
        let shape = [1, tokens.len()];
        let tokens = Tokens::upload(tokens, shape, &device);
        let Text {
            ids,
            from_host,
            rotations,
            images,
            ..
        } = self.text(&tokens, &positions);
        let (embedded, embeddings) = self.embedded_rows(&ids, from_host, &images, None, &mut ());

        let intervals = PackedIntervals::new(&ranges, |range| 0..range.len(), window, &device);
        let mut layers = Vec::new();
        let mut all_rows = PrefillOps {
            batch: 1,
            rotations,
            window,
            segments: None,
            destination: KvDestination::Packed(PackedDestination {
                intervals: &intervals,
                layers: &mut layers,
            }),
            adapters: None,
            mlp_recompute: false,
            observer: &mut (),
        };
        let mut shared = SharedKeyValues::default();
        let own = 0..self.config.first_shared_layer();
        let stream = ResidualStream::new(embedded);
        let stream = self.layers(own, stream, embeddings.as_ref(), &mut shared, &mut all_rows);

        // The shared KV layers run only for the last tokens.
        let rows = self.rows_of_last_tokens(count);
        let ended: Vec<_> = (0..rows)
            .map(|row| ranges[row.min(count - 1)].clone())
            .collect();
        let last: Vec<i32> = ended.iter().map(|range| range.end as i32 - 1).collect();
        let last = Tensor::<1, Int>::from_data(TensorData::new(last, [rows]), &device);
        let last_rows = |rows: Tensor<2>| rows.select(0, last.clone());
        let mut stream = ResidualStream::new(last_rows(stream.into_rows()));
        let rest = self.config.first_shared_layer()..self.config.num_layers();
        if !rest.is_empty() {
            let embeddings = embeddings.map(last_rows);
            let embeddings = embeddings.as_ref();
            let of_last = |range: &Range<usize>| range.len() - 1..range.len();
            let intervals = PackedIntervals::new(&ended, of_last, window, &device);
            shared.see(|kind| intervals.visible(kind));
            stream = match rows {
                #[cfg(feature = "cube")]
                rows if DecodeOps::serve(self, rows) => {
                    let positions = ended.iter().map(|range| vec![range.len() - 1]);
                    let positions = Positions::Each(positions.collect());
                    let after = &mut |_| ();
                    let few_rows =
                        self.last_position(&positions, rows, self.dtype(), &device, after);
                    // The rows of all prompts are the queries of one sequence, whose keys are the packed keys.
                    let mut few_rows = DecodeOps {
                        batch: 1,
                        ..few_rows
                    };
                    self.layers(rest, stream, embeddings, &mut shared, &mut few_rows)
                }
                _ => {
                    all_rows.rotations = all_rows.rotations.select(&last);
                    self.layers(rest, stream, embeddings, &mut shared, &mut all_rows)
                }
            };
        }
        let normed = stream.norm(&self.norm);
        let [_, hidden] = normed.dims();
        let key_values = PackedKeyValues { layers, ranges };
        (normed.reshape([rows, 1, hidden]), key_values)
    }

    /// Returns the number of rows of the pass behind the layers that compute keys and values. The decode kernels are
    /// compiled for each number of rows, so they get a power of two.
    fn rows_of_last_tokens(&self, prompts: usize) -> usize {
        match prompts.next_power_of_two() {
            #[cfg(feature = "cube")]
            rows if DecodeOps::serve(self, rows) => rows,
            _ => prompts,
        }
    }
}

/// Returns consecutive ranges with these lengths, of which the first begins at 0.
fn consecutive(lengths: impl Iterator<Item = usize>) -> Vec<Range<usize>> {
    let mut end = 0;
    lengths
        .map(|length| {
            let start = end;
            end += length;
            start..end
        })
        .collect()
}
