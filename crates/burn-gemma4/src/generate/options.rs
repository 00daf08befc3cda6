//! The options of a generation.

use crate::cancellation::Cancellation;
use crate::config::Gemma4Config;
use crate::config::sampling::Sampling;
use crate::model::cache::Cache;
use crate::model::cache::kind::CacheKind;
use crate::model::cache::precision::KvPrecision;
use crate::speculative::drafts::{Drafts, MAX_DRAFT_TOKENS};
use crate::text::chat::ChatOptions;

/// Options of a generation.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// The maximum number of tokens to generate. Generation also ends at the model's last position.
    pub max_tokens: usize,
    /// The maximum length of a prompt plus its generated text, in tokens. In a batch, every prompt counts as if it were
    /// as long as the longest prompt.
    pub max_length: Option<usize>,
    /// The minimum number of generated tokens before a [stop token](Self::stop_tokens) may be chosen.
    pub min_new_tokens: Option<usize>,
    /// The minimum length of a prompt plus its generated text, in tokens. In a batch, every prompt counts as if it were
    /// as long as the longest prompt. Ignored if [`min_new_tokens`](Self::min_new_tokens) is set.
    pub min_length: Option<usize>,
    /// Tokens that are forbidden as the first generated token.
    pub begin_suppress_tokens: Vec<u32>,
    /// The settings that decide how the next token is chosen from the logits.
    pub sampling: Sampling,
    /// Tokens that end the text.
    pub stop_tokens: Vec<u32>,
    /// True if generation continues after a stop token.
    pub ignore_stop_tokens: bool,
    /// Strings that end the generated text. A stop string may begin and end in the middle of a token, and may contain
    /// the names of special tokens. As in Hugging Face Transformers, the text keeps the stop string and the rest of the
    /// last token.
    pub stop_strings: Vec<String>,
    /// If set to `n`, each generated token comes with its log-probability and with the `n` most likely tokens at its position.
    pub logprobs: Option<usize>,
    /// The number of tokens that one prefill chunk takes from each prompt. Smaller chunks need less memory. The default
    /// is 8,192 tokens (512 on a CPU), divided by the batch size. A chunk that would divide an image or an
    /// audio clip ends after it.
    pub prefill_chunk: Option<usize>,
    /// A flag that another thread sets to stop the generation, also during prefill.
    pub cancellation: Option<Cancellation>,
    /// If true, a CUDA graph replays the launches of a decode step on devices that support graphs. Set this option to
    /// false if other threads use the same CUDA device: see [`Decoder`](crate::generate::decode::Decoder).
    pub graph_capture: bool,
    /// True if the cache stores keys in compact form in the layers that support it: see [`CacheKind::compact_keys`].
    pub compact_keys: bool,
    /// The storage format of keys and values in the KV cache.
    pub kv_precision: KvPrecision,
    /// The source of draft tokens for speculative decoding. The generated text does not depend on the source.
    pub drafts: Drafts,
    /// The number of draft tokens per sequence in each verification pass, from 1 to 8. By default the number adapts to the
    /// acceptance rate so far.
    ///
    /// A pass processes the draft tokens of each sequence and the token before them. By default a pass has at most 8 tokens,
    /// counted over all sequences. A single sequence then has 1 to 7 draft tokens. Two sequences have up to 3 each, and three
    /// or four sequences have 1 each. More than four sequences have none.
    pub draft_tokens: Option<usize>,
    /// Options of the chat template.
    pub chat: ChatOptions,
}

impl GenerateOptions {
    /// Creates an empty KV cache with one sequence per element of `padding`. An element is the number of padding tokens
    /// before the sequence's prompt.
    pub(crate) fn cache(&self, config: &Gemma4Config, padding: Vec<usize>) -> Cache {
        Cache::new(config, padding, self.cache_kind()).forgetting(self.forgettable())
    }

    /// The storage format of the KV cache.
    pub(crate) fn cache_kind(&self) -> CacheKind {
        CacheKind {
            compact_keys: self.compact_keys,
            precision: self.kv_precision,
        }
    }

    /// True if a session's cache can be reused in a generation with these options.
    pub(crate) fn fits(&self, cache: &Cache) -> bool {
        cache.kind() == self.cache_kind() && cache.spare() == self.forgettable()
    }

    /// Returns the largest number of tokens that may have to be removed from the end of a sequence in the cache. The
    /// model adds draft tokens to the cache before it accepts or rejects them.
    fn forgettable(&self) -> usize {
        match self.drafts {
            Drafts::None => 0,
            _ => MAX_DRAFT_TOKENS,
        }
    }

    /// The minimum number of generated tokens before a text may end. `longest` is the length of the longest prompt in tokens.
    pub(super) fn fewest_tokens(&self, longest: usize) -> usize {
        let by_length = self.min_length.unwrap_or(0).saturating_sub(longest);
        self.min_new_tokens.unwrap_or(by_length)
    }

    /// True if device samplers should choose the tokens. This requires sampling that needs more than the argmax of the
    /// raw logits. It also requires that no log-probabilities are requested.
    pub(super) fn draws_all(&self) -> bool {
        !self.sampling.is_argmax() && self.logprobs.is_none()
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancellation
            .as_ref()
            .is_some_and(Cancellation::is_cancelled)
    }
}
