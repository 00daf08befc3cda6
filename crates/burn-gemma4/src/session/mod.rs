//! Sessions: consecutive generations of one model that share the KV cache of their common prefix.
//!
//! The common prefix of two prompts is the prefix in which their tokens are equal. A session keeps the keys and values
//! of this prefix. A *column* is one token position in the cache.
//!
//! Full layers hold the keys and values of all columns. Sliding layers hold only the columns of their window, in ring
//! buffers that overwrite old columns. The session therefore takes a checkpoint of the ring buffers at the beginning of
//! each answer.
//!
//! For the next turn of a conversation, the session restores a checkpoint, and prefills only the tokens after the
//! checkpoint. If the template changes earlier turns, the session restores the cache to a position at or before the
//! first changed token, and prefills from there.

mod checkpoints;
mod file;
mod fingerprint;

pub use file::SavedSession;

use crate::error::Gemma4Error;
use crate::gemma::{Gemma4, Prompt};
use crate::generate;
use crate::generate::encoded::{EncodedPrompt, PlacedMedium, before_media};
use crate::generate::{GenerateOptions, Generation, Token};
use crate::model::cache::Cache;
use crate::text::chat::ChatOptions;
use checkpoints::Checkpoints;
use std::{ops::ControlFlow, time::Instant};

/// If a text continues, the tokenizer may merge the text's last tokens with the next characters. At most the last
/// `MARGIN` tokens are assumed to change. For a prompt that is not a conversation, the session takes its checkpoint
/// before these tokens.
const MARGIN: usize = 8;

/// Consecutive generations of one model that share the keys and values of their common prefix.
#[derive(Debug)]
pub struct Session<'a> {
    gemma: &'a Gemma4,
    cache: Cache,
    /// The tokens whose keys and values are in the cache.
    read: Vec<u32>,
    /// The images and audio clips whose soft tokens are in the cache.
    media: Vec<PlacedMedium>,
    checkpoints: Checkpoints,
}

impl<'a> Session<'a> {
    pub(crate) fn new(gemma: &'a Gemma4) -> Self {
        Self {
            gemma,
            cache: gemma.model().cache(vec![0]),
            read: Vec::new(),
            media: Vec::new(),
            checkpoints: Checkpoints::default(),
        }
    }

    /// Continues a prompt as [`Gemma4::generate`] does. If the prompt begins with cached tokens, the session restores
    /// the cache to a token position within the cached tokens. The model then processes only the tokens after this
    /// position.
    ///
    /// While no ring buffer of a sliding layer has overwritten a token, the cache can be restored to any position.
    /// Afterwards, the cache can be restored to the end of the cached tokens, or to a checkpoint. The session takes a
    /// checkpoint at the beginning of each answer.
    ///
    /// The cache is reused only if the previous and the new generation store keys in the same format. The two
    /// generations must also agree on whether they use drafts.
    ///
    /// # Errors
    /// Passes on the errors of [`Gemma4::generate`].
    pub fn generate(
        &mut self,
        prompt: impl Into<Prompt>,
        options: &GenerateOptions,
        mut on_token: impl FnMut(&Token<'_>) -> ControlFlow<()>,
    ) -> Result<Generation, Gemma4Error> {
        let prompt = prompt.into();
        let cancellation = options.cancellation.as_ref();
        let encoded = self.gemma.encode(&prompt, options.chat, cancellation)?;
        let media = encoded.media.clone();
        let max_tokens = generate::check(
            self.gemma.config(),
            std::slice::from_ref(&encoded),
            self.gemma.drafter(),
            options,
        )?;
        let common = self.go_back(&encoded, options);
        // Take a checkpoint at the token where this prompt begins to differ from the cached tokens, because the next
        // prompt may begin to differ at the same token. Take another checkpoint at the beginning of the answer.
        let mut boundaries = [common, self.boundary(&prompt, &encoded, options.chat)];
        boundaries.sort_unstable();
        let generation =
            self.read_and_generate(encoded, boundaries, max_tokens, options, &mut |token| {
                on_token(token)
            });
        let Ok(generation) = generation else {
            // After a failure the contents of the cache are unknown, so clear the session.
            self.reset();
            return generation;
        };
        self.read = [&generation.prompt_tokens[..], &generation.tokens].concat();
        self.read.truncate(self.cache.len());
        self.media = media;
        self.forget_media();
        Ok(generation)
    }

    fn read_and_generate(
        &mut self,
        prompt: EncodedPrompt,
        boundaries: [usize; 2],
        max_tokens: usize,
        options: &GenerateOptions,
        on_token: &mut dyn FnMut(&Token<'_>) -> ControlFlow<()>,
    ) -> Result<Generation, Gemma4Error> {
        let (start, before) = (Instant::now(), self.cache.len());
        for boundary in boundaries {
            if boundary > self.cache.len() {
                self.gemma
                    .read_beginning(&prompt, boundary, &mut self.cache, options)?;
            }
            if self.cache.len() == boundary && boundary > before {
                self.checkpoints.push(&self.cache);
            }
        }
        let (time, count) = (start.elapsed(), self.cache.len() - before);
        let mut generation =
            self.gemma
                .run(prompt, &mut self.cache, options, max_tokens, on_token)?;
        generation.timings.prefill += time;
        generation.timings.prefill_tokens += count;
        Ok(generation)
    }

    /// Restores the cache to the last restorable position in the common prefix of `prompt` and the cached tokens.
    /// Returns the length of the common prefix. The restored cache may hold fewer tokens than the common prefix.
    fn go_back(&mut self, prompt: &EncodedPrompt, options: &GenerateOptions) -> usize {
        // Exclude the prompt's last token, which must run through the model for its logits.
        let common = prompt.common(&self.read, &self.media);
        let common = before_media(&prompt.media, common.min(prompt.tokens.len() - 1));
        if !options.fits(&self.cache) {
            self.cache = options.cache(self.gemma.config(), vec![0]);
            self.checkpoints.clear();
        } else if !self.cache.rewind(common) {
            match self.checkpoints.up_to(common) {
                Some(checkpoint) => self.cache.restore(checkpoint),
                None => self.cache = options.cache(self.gemma.config(), vec![0]),
            }
        }
        self.checkpoints.forget_after(self.cache.len());
        self.read.truncate(self.cache.len());
        self.forget_media();
        common
    }

    /// Forgets the images and audio clips that the cache does not hold whole.
    fn forget_media(&mut self) {
        let length = self.cache.len();
        self.media.retain(|medium| medium.tokens.end <= length);
    }

    /// Returns the probable length of the common prefix of `encoded` and the next prompt. In a conversation, this prefix
    /// consists of the tokens before the answer.
    fn boundary(&self, prompt: &Prompt, encoded: &EncodedPrompt, chat: ChatOptions) -> usize {
        let history = match prompt {
            Prompt::Chat(_) => {
                let chat = ChatOptions {
                    add_generation_prompt: false,
                    ..chat
                };
                // Ignore an error of the template, which may reject a conversation without a generation prompt at its
                // end.
                self.gemma.encode(prompt, chat, None).ok()
            }
            Prompt::Text(_) | Prompt::Tokens(_) => None,
        };
        let length = encoded.tokens.len();
        let boundary = match history {
            Some(history) => encoded
                .common(&history.tokens, &history.media)
                .min(length - 1),
            None => length.saturating_sub(MARGIN),
        };
        before_media(&encoded.media, boundary)
    }

    /// Removes all tokens from the session.
    pub fn reset(&mut self) {
        let empty = Cache::new(self.gemma.config(), vec![0], self.cache.kind());
        self.cache = empty.forgetting(self.cache.spare());
        self.read.clear();
        self.media.clear();
        self.checkpoints.clear();
    }

    /// The number of tokens in the cache.
    pub fn len(&self) -> usize {
        self.cache.len()
    }

    /// True if the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.cache.is_empty()
    }
}
