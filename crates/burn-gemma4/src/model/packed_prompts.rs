//! The forward pass over several prompts at once. The rows of all prompts lie one after another, without padding, so
//! that each product multiplies all rows together. A token sees only the tokens of its own prompt.
//!
//! A prompt may continue from a prefix, whose keys and values an earlier prompt's cache has. The pass then runs only
//! over the other tokens of the prompt. Prompts with the same prefix read one copy of its keys and values.

use super::cache::key_values::SharedKeyValues;
use super::cache::packed::copies::PackedKeyValues;
use super::cache::packed::destination::PackedDestination;
use super::cache::packed::intervals::PackedIntervals;
use super::cache::packed::layout::PackedLayout;
use super::cache::prefix::Prefix;
#[cfg(feature = "cube")]
use super::decode_ops::DecodeOps;
use super::forward::Text;
use super::layer::ops::ResidualStream;
use super::prefill_ops::{KvDestination, PrefillOps};
use super::row_rules::RowRules;
use super::text_model::Gemma4Model;
use super::tokens::Tokens;
use crate::op::rope::Positions;
use burn::tensor::{Int, Tensor, TensorData};

/// A prompt of a pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedTokens<'a> {
    /// The first tokens of the prompt, whose keys and values exist, or `None` if the pass runs over the whole prompt.
    pub prefix: Option<&'a Prefix>,
    /// The other tokens of the prompt.
    pub new: &'a [u32],
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

    /// Returns the largest size of the key and the value of one token in a layer, in bytes.
    pub(crate) fn most_bytes_of_layer_token(&self) -> usize {
        let config = &self.config;
        let elements = (0..config.first_shared_layer())
            .map(|layer| 2 * config.key_value_heads(layer) * config.head_dim(layer));
        elements.max().unwrap_or(0) * self.dtype().size()
    }

    /// Runs the model over the new tokens of prompts in one pass. Returns the normalized hidden state of each
    /// prompt's last token, `[rows, 1, hidden]`, and the keys and values of all tokens. Rows beyond the prompts
    /// repeat the last prompt.
    ///
    /// # Panics
    /// Panics if there are no prompts, or if a prompt has no new tokens.
    pub(crate) fn hidden_of_packed(
        &self,
        prompts: &[PackedTokens<'_>],
    ) -> (Tensor<3>, PackedKeyValues) {
        assert!(
            !prompts.is_empty() && prompts.iter().all(|prompt| !prompt.new.is_empty()),
            "there is a prompt, and each prompt has a new token"
        );
        let (device, window) = (self.device(), self.config.sliding_window);
        let count = prompts.len();
        let counts = prompts.iter();
        let layout = PackedLayout::new(counts.map(|prompt| (prompt.prefix, prompt.new.len())));
        // The prompt of each new token, and the token's index among the new tokens of the prompt.
        let rows = prompts.iter().enumerate().flat_map(|(prompt, tokens)| {
            let indices = 0..tokens.new.len();
            indices.map(move |index| (prompt, index))
        });
        let rows: Vec<(usize, usize)> = rows.collect();
        let position = |(prompt, index): &(usize, usize)| layout.reused(*prompt) + index;
        let positions = Positions::Each(vec![rows.iter().map(position).collect()]);
        let tokens: Vec<u32> = prompts
            .iter()
            .flat_map(|prompt| prompt.new)
            .copied()
            .collect();
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

        let intervals = PackedIntervals::new(&layout, &rows, window, &device);
        let mut layers = Vec::new();
        let mut all_rows = PrefillOps {
            batch: 1,
            rotations,
            window,
            rules: RowRules::default(),
            destination: KvDestination::Packed(PackedDestination::new(
                &layout,
                &intervals,
                &mut layers,
            )),
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
        let ended = (0..rows).map(|row| {
            let prompt = row.min(count - 1);
            (prompt, prompts[prompt].new.len() - 1)
        });
        let ended: Vec<(usize, usize)> = ended.collect();
        let last = ended
            .iter()
            .map(|(prompt, index)| layout.new_rows(*prompt).start + index);
        let last: Vec<i32> = last.map(|row| row as i32).collect();
        let last = Tensor::<1, Int>::from_data(TensorData::new(last, [rows]), &device);
        let last_rows = |rows: Tensor<2>| rows.select(0, last.clone());
        let mut stream = ResidualStream::new(last_rows(stream.into_rows()));
        let rest = self.config.first_shared_layer()..self.config.num_layers();
        if !rest.is_empty() {
            let embeddings = embeddings.map(last_rows);
            let embeddings = embeddings.as_ref();
            let intervals = PackedIntervals::new(&layout, &ended, window, &device);
            shared.see(|kind| intervals.visible(kind));
            stream = match rows {
                #[cfg(feature = "cube")]
                rows if DecodeOps::serve(self, rows) => {
                    let positions = ended.iter().map(|row| vec![position(row)]);
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
        let key_values = PackedKeyValues { layers, layout };
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
