//! The forward pass over several whole prompts at once. The rows of all prompts lie one after another, without padding,
//! so that each product multiplies all rows together. A token sees only the tokens of its own prompt.

use super::cache::key_values::SharedKeyValues;
use super::cache::packed::{PackedDestination, PackedIntervals, PackedKeyValues};
#[cfg(feature = "cube")]
use super::decode_ops::DecodeOps;
use super::forward::Text;
use super::layer::ops::ResidualStream;
use super::prefill_ops::{KvDestination, PrefillOps};
use super::text_model::Gemma4Model;
use super::tokens::Tokens;
use crate::op::rope::Positions;
use burn::tensor::{Int, Tensor, TensorData};
use std::ops::Range;

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
            media,
            ..
        } = self.text(&tokens, &positions);
        let (embedded, embeddings) = self.embedded_rows(&ids, from_host, &media, None, &mut ());

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

/// Returns consecutive ranges with these lengths. The first range begins at 0.
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
