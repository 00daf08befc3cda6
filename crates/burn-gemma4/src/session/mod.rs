//! Generations of one model, one after the other, that share what they have read.
//!
//! What two prompts have in common is where their tokens are the same, whatever template made them. The keys and values up to there are kept:
//! full layers have all of them, and rings, which forget, are copied where a turn begins. So a conversation's next turn reads what is new,
//! and where its template has changed the past, such as by leaving out thoughts, what comes after the change.

mod checkpoints;
mod file;
mod fingerprint;

pub use file::SavedSession;

use crate::{
    Cache, ChatOptions, Gemma4, Gemma4Error, GenerateOptions, Generation, Prompt, Token, generate,
};
use checkpoints::Checkpoints;
use std::{ops::ControlFlow, time::Instant};

/// Tokens at the end of a text that may be others once it goes on, so that it is not kept up to its end.
const MARGIN: usize = 8;

/// Generations of one model, one after the other, that share the keys and values of what they begin with.
#[derive(Debug)]
pub struct Session<'a> {
    gemma: &'a Gemma4,
    cache: Cache,
    /// The tokens in the cache.
    read: Vec<u32>,
    checkpoints: Checkpoints,
}

impl<'a> Session<'a> {
    pub(crate) fn new(gemma: &'a Gemma4) -> Self {
        Self {
            gemma,
            cache: gemma.model().cache(vec![0]),
            read: Vec::new(),
            checkpoints: Checkpoints::default(),
        }
    }

    /// Goes on from a prompt, as [`Gemma4::generate`]. Where the prompt begins with tokens that the session has read, it goes on from the
    /// last column that it can go back to, if keys are kept in the same way and there are drafts again, or none: the end of what was read, the place
    /// before an answer, or any column as long as sliding layers' windows have not moved on.
    ///
    /// # Errors
    /// As [`Gemma4::generate`].
    pub fn generate(
        &mut self,
        prompt: impl Into<Prompt>,
        options: &GenerateOptions,
        mut on_token: impl FnMut(&Token<'_>) -> ControlFlow<()>,
    ) -> Result<Generation, Gemma4Error> {
        let prompt = prompt.into();
        let tokens =
            self.gemma
                .tokens_until(&prompt, options.chat, options.cancellation.as_ref())?;
        let max_tokens = generate::check(
            self.gemma.config(),
            std::slice::from_ref(&tokens),
            self.gemma.drafter(),
            options,
        )?;
        let common = self.go_back(&tokens, options);
        // Where a prompt has branched off, the next one may do so again.
        let mut boundaries = [common, self.boundary(&prompt, &tokens, options.chat)];
        boundaries.sort_unstable();
        let generation =
            self.read_and_generate(tokens, boundaries, max_tokens, options, &mut |token| {
                on_token(token)
            });
        let Ok(generation) = generation else {
            // What the cache holds after a failure is not known.
            self.reset();
            return generation;
        };
        self.read = [&generation.prompt_tokens[..], &generation.tokens].concat();
        self.read.truncate(self.cache.len());
        Ok(generation)
    }

    fn read_and_generate(
        &mut self,
        tokens: Vec<u32>,
        boundaries: [usize; 2],
        max_tokens: usize,
        options: &GenerateOptions,
        on_token: &mut dyn FnMut(&Token<'_>) -> ControlFlow<()>,
    ) -> Result<Generation, Gemma4Error> {
        let (start, before) = (Instant::now(), self.cache.len());
        for boundary in boundaries {
            if boundary > self.cache.len() {
                let beginning = &tokens[..boundary];
                generate::read_beginning(self.gemma.model(), beginning, &mut self.cache, options)?;
            }
            if self.cache.len() == boundary && boundary > before {
                self.checkpoints.push(&self.cache);
            }
        }
        let (time, count) = (start.elapsed(), self.cache.len() - before);
        let mut generation =
            self.gemma
                .run(tokens, &mut self.cache, options, max_tokens, on_token)?;
        generation.timings.prefill += time;
        generation.timings.prefill_tokens += count;
        Ok(generation)
    }

    /// Goes back to the last column that the tokens have in common with what was read, and that there is a way to; how many tokens they
    /// have in common.
    fn go_back(&mut self, tokens: &[u32], options: &GenerateOptions) -> usize {
        // The last token must be read again for its logits.
        let common = common(&self.read, tokens).min(tokens.len() - 1);
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
        common
    }

    /// The column that the next prompt is likely to have in common with these tokens: where a conversation's answer is to begin.
    fn boundary(&self, prompt: &Prompt, tokens: &[u32], chat: ChatOptions) -> usize {
        let history = match prompt {
            Prompt::Chat(_) => {
                let chat = ChatOptions {
                    add_generation_prompt: false,
                    ..chat
                };
                // A template may want a conversation to end in another way.
                self.gemma.tokens(prompt, chat).ok()
            }
            Prompt::Text(_) | Prompt::Tokens(_) => None,
        };
        match history {
            Some(history) => common(&history, tokens).min(tokens.len() - 1),
            None => tokens.len().saturating_sub(MARGIN),
        }
    }

    /// Forgets everything read.
    pub fn reset(&mut self) {
        let empty = Cache::new(self.gemma.config(), vec![0], self.cache.kind());
        self.cache = empty.forgetting(self.cache.spare());
        self.read.clear();
        self.checkpoints.clear();
    }

    /// Tokens in the cache.
    pub fn len(&self) -> usize {
        self.cache.len()
    }

    /// Whether nothing has been read.
    pub fn is_empty(&self) -> bool {
        self.cache.is_empty()
    }
}

/// How many tokens two texts begin with in common.
fn common(one: &[u32], other: &[u32]) -> usize {
    let pairs = one.iter().zip(other);
    pairs.take_while(|(one, other)| one == other).count()
}
