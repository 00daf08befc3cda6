//! The methods that run the model over whole texts, and over tokens that follow the tokens in a KV cache.

use super::adapters::PassAdapters;
use super::cache::{Cache, kind::CacheKind};
#[cfg(feature = "cube")]
use super::decode_ops::DecodeOps;
use super::forward::{After, Text};
use super::logits::Logits;
use super::observe::Observer;
use super::text_model::Gemma4Model;
use super::tokens::Tokens;
use crate::error::Gemma4Error;
#[cfg(feature = "cube")]
use crate::op::gemv;
use crate::op::{flat_rows, linear};
use burn::tensor::{Int, Tensor};

impl Gemma4Model {
    /// Computes the logits of every position. Position `i` sees the tokens at positions `0` to `i`.
    ///
    /// # Shapes
    /// `tokens` is `[batch, positions]`; the result is `[batch, positions, vocabulary]`.
    ///
    /// # Errors
    /// Returns an error if a token is outside the vocabulary. The check waits for the device.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Result<Tensor<3>, Gemma4Error> {
        self.forward_observed(tokens, &mut ())
    }

    /// Runs [`forward`](Self::forward) with an observer of intermediate tensors.
    ///
    /// # Errors
    /// Passes on the errors of [`forward`](Self::forward).
    pub fn forward_observed(
        &self,
        tokens: Tensor<2, Int>,
        observer: &mut impl Observer,
    ) -> Result<Tensor<3>, Gemma4Error> {
        let tokens = self.read_tokens(tokens)?;
        let hidden = self.hidden_states(self.whole_text(&tokens), None, Logits::All, observer);
        Ok(self.logits(hidden))
    }

    /// Computes the normalized hidden states of the positions that `asked` selects. The head would compute the logits
    /// from these hidden states.
    ///
    /// # Shapes
    /// `tokens` is `[batch, positions]`; the result is `[batch, selected positions, hidden]`.
    ///
    /// # Errors
    /// Passes on the errors of [`forward`](Self::forward).
    pub fn hidden(&self, tokens: Tensor<2, Int>, asked: Logits) -> Result<Tensor<3>, Gemma4Error> {
        let [_, positions] = tokens.dims();
        let asked_positions = asked.of(positions);
        let tokens = self.read_tokens(tokens)?;
        let hidden = self.hidden_states(self.whole_text(&tokens), None, asked, &mut ());
        Ok(hidden.narrow(1, 0, asked_positions))
    }

    /// True if the model's device is a CubeCL device that can run the kernels in the model's dtype. Such a device
    /// queues its work and computes it later. A CPU backend computes each operation before it returns.
    pub fn is_accelerated(&self) -> bool {
        #[cfg(feature = "cube")]
        return crate::op::runs(&self.device(), self.dtype());
        #[cfg(not(feature = "cube"))]
        false
    }

    /// Creates an empty KV cache for a batch of sequences. Sequence `i` begins with `padding[i]` padding tokens.
    pub fn cache(&self, padding: Vec<usize>) -> Cache {
        Cache::new(&self.config, padding, CacheKind::default())
    }

    /// Creates a [`cache`](Self::cache) with [compact keys](CacheKind::compact_keys), which affect only layers whose
    /// values come from the key projection ([`Gemma4Config::values_are_keys`](crate::Gemma4Config::values_are_keys)).
    pub fn compact_cache(&self, padding: Vec<usize>) -> Cache {
        let kind = CacheKind {
            compact_keys: true,
            ..CacheKind::default()
        };
        Cache::new(&self.config, padding, kind)
    }

    /// Creates a [`cache`](Self::cache) with the storage format `kind`.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if int8 is requested and a head's channels do not fill whole 32-bit words.
    pub fn cache_of(&self, kind: CacheKind, padding: Vec<usize>) -> Result<Cache, Gemma4Error> {
        kind.check(&self.config)?;
        Ok(Cache::new(&self.config, padding, kind))
    }

    /// Processes tokens that follow the tokens in the KV cache, and returns the logits of the positions that `logits`
    /// requests.
    ///
    /// # Shapes
    /// `tokens` is `[batch, positions]`; the result is `[batch, asked, vocabulary]`, or `None` for [`Logits::None`].
    /// `asked` is the number of requested positions.
    ///
    /// # Errors
    /// Returns an error if the batch size differs from the cache's, or if `tokens` has no positions. Also passes on the
    /// errors of [`forward`](Self::forward).
    pub fn step(
        &self,
        tokens: Tensor<2, Int>,
        cache: &mut Cache,
        logits: Logits,
    ) -> Result<Option<Tensor<3>>, Gemma4Error> {
        let tokens = self.read_tokens(tokens)?;
        let hidden = self.step_hidden(&tokens, cache, logits)?;
        Ok(hidden.map(|hidden| self.logits(hidden)))
    }

    /// Runs [`step`](Self::step) without the head. Returns the normalized hidden states of the positions that `logits`
    /// requests, `[batch, requested positions, hidden]`.
    pub(crate) fn step_hidden(
        &self,
        tokens: &Tokens,
        cache: &mut Cache,
        logits: Logits,
    ) -> Result<Option<Tensor<3>>, Gemma4Error> {
        self.step_adapted(tokens, cache, logits, None)
    }

    /// Runs [`step_hidden`](Self::step_hidden) with the adapters that the rows select. If the rows select different
    /// adapters, each sequence has one position.
    pub(crate) fn step_adapted(
        &self,
        tokens: &Tokens,
        cache: &mut Cache,
        logits: Logits,
        adapters: Option<PassAdapters>,
    ) -> Result<Option<Tensor<3>>, Gemma4Error> {
        let [batch, positions] = tokens.ids.dims();
        if batch != cache.batch() {
            return Err(Gemma4Error::Argument {
                argument: "tokens",
                reason: format!("has {batch} sequences, but the cache has {}", cache.batch()),
            });
        }
        if positions == 0 {
            return Err(Gemma4Error::Argument {
                argument: "tokens",
                reason: "has no positions".into(),
            });
        }
        #[cfg(feature = "cube")]
        cache.turn_back();
        let after = After {
            positions: cache.positions(positions),
            cache,
        };
        let text = Text {
            adapters,
            ..self.text(tokens, &after.positions)
        };
        let hidden = self.hidden_states(text, Some(after), logits, &mut ());
        Ok((logits.of(positions) > 0).then_some(hidden))
    }

    /// Computes logits, `[batch, positions, vocabulary]`, from normalized hidden states, `[batch, positions, hidden]`.
    pub(crate) fn logits(&self, hidden: Tensor<3>) -> Tensor<3> {
        let [batch, positions, _] = hidden.dims();
        let rows = flat_rows(hidden);
        let cap = self.config.final_logit_softcapping;
        let shape = [batch, positions, self.config.vocab_size];
        #[cfg(feature = "cube")]
        if positions == 1 && DecodeOps::serve(self, batch) {
            return gemv::project(rows, self.head(), cap, gemv::Origin::Computed).reshape(shape);
        }
        let project = |rows| linear::rows(rows, self.head());
        let logits = match &self.lm_head {
            Some(head) => head.rounded(rows, project),
            None => project(rows),
        };
        let logits = logits.reshape(shape);
        match cap {
            Some(cap) => (logits / cap).tanh() * cap,
            None => logits,
        }
    }
}
