//! The prefill of several prompts in one forward pass.

use super::next::Next;
use super::prefill::Prefill;
use super::row_logits::RowLogits;
use crate::error::Gemma4Error;
use crate::model::Gemma4Model;
use crate::model::cache::Cache;
use crate::model::cache::packed::copies::PackedKeyValues;
use crate::model::cache::prefix::Prefix;
use crate::model::packed_prompts::PackedTokens;
use crate::op::is_hopper;
use std::sync::Arc;

/// The number of prompts from which one pass is faster than a CUDA graph for each prompt.
///
/// A pass over packed prompts launches its kernels one by one. In E2B on an H200 (2026-11-28), these launches took
/// 11 ms, and the graph of a prompt of 128 tokens took 3 ms: see docs/prefill.md.
const LEAST_PACKED: usize = 4;

/// The largest size of the prefixes in the keys and values of one layer of a pass, in bytes. A pass over 64 prompts
/// after one prefix of 8,000 tokens has 16 MiB of E2B's, and 64 MiB of 31B's.
const MOST_PREFIX_BYTES: usize = 512 << 20;

/// The largest number of distinct prefixes of a pass. Each one costs a launch per layer, and another one when the
/// sequences join a batch. With many prefixes, these launches would take the host longer than the pass saves.
const MOST_PREFIXES: usize = 8;

/// The largest size of the keys and values of one pass over packed prompts, in bytes. E4B's keys and values of 8,192
/// tokens have 448 MiB in bf16. In larger models, fewer tokens already take a device longer than their launches take
/// the host.
const MOST_PACKED_BYTES: usize = 512 << 20;

/// A prompt that was read in one pass with other prompts. The pass computed the keys and values of all of them.
#[derive(Clone, Debug)]
pub(super) struct PackedPrompt {
    pub key_values: Arc<PackedKeyValues>,
    /// The index of the prompt in the pass.
    pub index: usize,
}

impl PackedPrompt {
    /// Copies the keys and values of the prompt to `cache`, which must be empty.
    pub fn fill(&self, cache: &mut Cache) {
        cache.fill_from_packed(&self.key_values, self.index);
    }
}

impl Prefill {
    /// True if [`read_packed`](Self::read_packed) can run this prompt in one pass with others. The prompt may
    /// continue from a [prefix](crate::PrefixCache::resume). The model must not have run over a part of the prompt.
    /// The rest must have no images or audio, and the prefill no adapter. The prefill must not stop within the prompt
    /// to store a state, and not [run alone](Self::run_alone). The KV cache must store keys and values as the model
    /// computes them.
    pub fn can_pack(&self) -> bool {
        self.is_one_call() && self.adapter().is_none() && self.cache().kind().is_plain()
    }

    /// True if one pass over all prompts is expected to take less time than a pass for each prompt. One prompt is faster
    /// alone. Few prompts are also faster alone if all of them can replay a CUDA graph.
    pub fn is_faster_packed(prefills: &[&Self]) -> bool {
        prefills.len() > 1
            && (prefills.len() >= LEAST_PACKED
                || prefills.iter().any(|prefill| !prefill.can_replay()))
    }

    /// Returns the number of the first prefills that one pass over at most `most_tokens` tokens can run. The tokens of
    /// prefixes do not count, because the model does not run over them. Each distinct prefix is copied once per layer.
    /// A pass has at most 8 of them, and their copies in one layer have at most 512 MiB.
    pub fn count_packable(prefills: &[&Self], most_tokens: usize) -> usize {
        let (mut tokens, mut bytes) = (0, 0);
        let mut prefixes: Vec<&Prefix> = Vec::new();
        let packable = prefills.iter().take_while(|prefill| {
            tokens += prefill.remaining();
            if let Some(prefix) = prefill.prefix()
                && !prefixes.iter().any(|other| other.is_same(prefix))
            {
                prefixes.push(prefix);
                bytes += prefix.len() * prefill.model().most_bytes_of_layer_token();
            }
            prefill.can_pack()
                && tokens <= most_tokens
                && prefixes.len() <= MOST_PREFIXES
                && bytes <= MOST_PREFIX_BYTES
        });
        packable.count()
    }

    /// Returns the largest number of tokens that one pass over packed prompts should have. The keys and values of the
    /// pass then need at most 512 MiB on the device, in addition to the KV cache of the batch. `chunk` is the largest
    /// number of tokens that the caller passes to [`advance`](Self::advance).
    ///
    /// The pass also needs memory for activations, in proportion to its tokens. Longer passes than `chunk` were
    /// measured on Hopper cards only. Other devices therefore get at most `chunk` tokens, as in `advance`.
    pub fn most_packed_tokens(model: &Gemma4Model, chunk: usize) -> usize {
        let most = MOST_PACKED_BYTES / model.bytes_of_packed_token().max(1);
        match is_hopper(&model.device()) {
            true => most,
            false => most.min(chunk),
        }
    }

    /// Runs the model over the prompts of several prefills in one forward pass. Returns the logits after the last
    /// token of each prompt, one row for each prefill. The logits are those of the prompt alone, up to rounding.
    /// Prompts that continue from a prefix run over their other tokens only. Prompts with the same prefix read one
    /// copy of its keys.
    ///
    /// If a prompt's keys or values are NaN or infinite, the logits of the other prompts may be NaN, too. If a row of
    /// the result [has no token](crate::RowResult::has_token), call [`run_alone`](Self::run_alone) for all prefills,
    /// and run each prompt by `advance`.
    ///
    /// Each prefill keeps the keys and values of all prompts of the pass on the device until it is dropped. One prefill
    /// that is kept therefore holds the memory of the whole pass. It also holds the earlier prompts from which the
    /// prompts of the pass continue, even if the prefix cache has dropped them. To keep a prompt for later ones, pass
    /// its prefill to [`PrefixCache::keep`](crate::PrefixCache::keep), which copies the keys and values of this prompt
    /// only.
    ///
    /// The time and the memory of the pass grow with the sum of the prompts' lengths. The caller limits this sum, for
    /// example to [`most_packed_tokens`](Self::most_packed_tokens).
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::Device;
    /// use burn_gemma4::{Batch, CacheKind, Gemma4, LoadOptions, Prefill, RowChoice};
    ///
    /// let gemma = Gemma4::embedded(&Device::flex(), LoadOptions::new())?;
    /// let kind = CacheKind::default();
    /// let mut first = gemma.prefill(vec![2, 17, 5], kind)?;
    /// let mut second = gemma.prefill(vec![2, 44], kind)?;
    /// let logits = Prefill::read_packed(&mut [&mut first, &mut second])?;
    /// let tokens = logits.choose(&[RowChoice::Argmax; 2])?;
    /// let mut batch = Batch::new(gemma.model(), kind)?;
    /// batch.join_all(&[&first, &second])?;
    /// assert_eq!((tokens.len(), batch.lengths()), (2, vec![3, 2]));
    /// # }
    /// # Ok::<(), burn_gemma4::Gemma4Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if there are no prefills, if [`can_pack`](Self::can_pack) is false for one of
    /// them, or if the prefills belong to different models.
    pub fn read_packed(prefills: &mut [&mut Self]) -> Result<RowLogits<'static>, Gemma4Error> {
        let refuse = |reason: String| {
            let argument = "prefills";
            Err(Gemma4Error::Argument { argument, reason })
        };
        let Some(first) = prefills.first() else {
            return refuse("are none; expected at least 1".into());
        };
        let model = first.model().clone();
        for (index, prefill) in prefills.iter().enumerate() {
            if !prefill.can_pack() {
                return refuse(format!(
                    "cannot run in one pass, because the model has read a part of number {index}, or it has images or \
                     audio after its prefix, an adapter or a checkpoint to take, must run alone, or stores its keys \
                     and values in another format; read such a prompt by `advance`"
                ));
            }
            if prefill.parameters() != first.parameters() {
                return refuse(format!(
                    "belong to different models; expected that number {index} has the model of number 0"
                ));
            }
        }
        let prompts = prefills.iter().map(|prefill| PackedTokens {
            prefix: prefill.prefix(),
            new: &prefill.tokens()[prefill.reused()..],
        });
        let prompts: Vec<_> = prompts.collect();
        let (hidden, key_values) = model.hidden_of_packed(&prompts);
        let key_values = Arc::new(key_values);
        for (index, prefill) in prefills.iter_mut().enumerate() {
            let key_values = key_values.clone();
            prefill.end_packed(PackedPrompt { key_values, index });
        }
        let rows = (0..prefills.len()).collect();
        Ok(RowLogits::of(Next::of_hidden(&model, hidden), rows))
    }
}
