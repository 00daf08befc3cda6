//! The state of one generated sequence: its tokens, decoded text, sampler and stop conditions.

use super::encoded::EncodedPrompt;
use super::generation::{FinishReason, Generation, OnToken, Timings, Token};
use super::options::GenerateOptions;
use crate::config::sampling::Sampling;
use crate::error::Gemma4Error;
use crate::generate::decode::Next;
use crate::generate::logprobs::TokenLogprobs;
use crate::generate::sampling::sampler::Sampler;
use crate::speculative::drafts::DraftCounts;
use crate::text::parts::Parts;
use crate::text::stop::StopStrings;
use crate::text::tokenizer::Tokenizer;

/// The data from which the host gets the next tokens: token ids if the device has chosen the tokens, otherwise logits.
pub(crate) enum Chosen {
    /// The tokens that the device chose, one per row of logits, and the vocabulary size. The token of a row is `None`
    /// if all logits of the row are NaN or −∞.
    Tokens(Vec<Option<u32>>, usize),
    /// The logits, `[rows · vocabulary]`, and the vocabulary size.
    Logits(Vec<f32>, usize),
}

impl Chosen {
    /// Lets the device choose the next tokens, and copies the tokens to the host. If the host must choose the tokens,
    /// copies the logits of `next` instead. The rows of logits are ordered by sequence.
    pub fn of(
        next: Next<'_>,
        sequences: &[Sequence<'_>],
        options: &GenerateOptions,
    ) -> Result<Self, Gemma4Error> {
        let vocabulary = next.vocabulary();
        if options.logprobs.is_some() || begins(sequences) {
            return Ok(Self::Logits(next.logits()?, vocabulary));
        }
        if options.sampling.is_argmax() {
            return Ok(Self::Tokens(next.try_argmax()?, vocabulary));
        }
        let samplers = samplers(sequences);
        match next.draw(&samplers) {
            Some(tokens) => Ok(Self::Tokens(tokens?, vocabulary)),
            None => Ok(Self::Logits(next.logits()?, vocabulary)),
        }
    }

    /// Chooses the next token of each sequence. The token of a finished sequence is arbitrary.
    pub fn tokens(
        &self,
        sequences: &mut [Sequence<'_>],
        options: &GenerateOptions,
    ) -> Result<Vec<u32>, Gemma4Error> {
        let rows = sequences.iter_mut().enumerate();
        rows.map(|(row, sequence)| match (sequence.finished, self) {
            (None, _) => self.token(row, sequence, options),
            (Some(_), Self::Tokens(tokens, _)) => Ok(tokens[row].unwrap_or(0)),
            (Some(_), Self::Logits(..)) => Ok(0),
        })
        .collect()
    }

    /// Returns the next token of `sequence`. If the device has chosen the tokens, this is the token of row `row`.
    /// Otherwise the sequence's sampler chooses the token from the logits of row `row`.
    pub fn token(
        &self,
        row: usize,
        sequence: &mut Sequence<'_>,
        options: &GenerateOptions,
    ) -> Result<u32, Gemma4Error> {
        match self {
            Self::Tokens(tokens, vocabulary) => {
                let token = tokens[row].ok_or_else(|| Gemma4Error::no_number(*vocabulary))?;
                sequence.sampler.read(&[token]);
                Ok(token)
            }
            Self::Logits(logits, vocabulary) => {
                let logits = &logits[row * vocabulary..][..*vocabulary];
                let token = sequence.sampler.sample(logits)?;
                if let Some(count) = options.logprobs {
                    let logprobs = TokenLogprobs::of(logits, token, count);
                    sequence.logprobs.push(logprobs);
                }
                Ok(token)
            }
        }
    }
}

/// Returns the sampler of each sequence.
pub(crate) fn samplers<'a>(sequences: &'a [Sequence<'_>]) -> Vec<&'a Sampler> {
    sequences.iter().map(|sequence| &sequence.sampler).collect()
}

/// True if some unfinished sequence is still so short that its sampler forbids certain tokens, such as stop tokens.
pub(crate) fn begins(sequences: &[Sequence<'_>]) -> bool {
    let mut on_their_way = sequences.iter().filter(|one| one.finished.is_none());
    on_their_way.any(|sequence| sequence.sampler.suppresses_now())
}

/// A sequence and the state of its generation.
pub(crate) struct Sequence<'a> {
    index: usize,
    pub prompt: EncodedPrompt,
    sampler: Sampler,
    pub tokens: Vec<u32>,
    parts: Parts<'a>,
    stop_strings: StopStrings<'a>,
    logprobs: Vec<TokenLogprobs>,
    pub finished: Option<FinishReason>,
    pub drafts: DraftCounts,
}

impl<'a> Sequence<'a> {
    pub fn new(
        index: usize,
        prompt: EncodedPrompt,
        longest: usize,
        tokenizer: &'a Tokenizer,
        options: &'a GenerateOptions,
    ) -> Result<Self, Gemma4Error> {
        let seed = options.sampling.seed;
        let mut sampler = Sampler::new(&Sampling {
            seed: seed.map(|seed| seed.wrapping_add(index as u64)),
            ..options.sampling.clone()
        });
        sampler.read(&prompt.tokens);
        sampler.suppress_for(1, &options.begin_suppress_tokens);
        sampler.suppress_for(options.fewest_tokens(longest), &options.stop_tokens);
        Ok(Self {
            index,
            sampler,
            tokens: Vec::new(),
            parts: Parts::after(&prompt.tokens, tokenizer)?,
            stop_strings: StopStrings::new(&options.stop_strings, tokenizer),
            logprobs: Vec::new(),
            finished: None,
            drafts: DraftCounts::default(),
            prompt,
        })
    }

    pub fn take(
        &mut self,
        token: u32,
        max_tokens: usize,
        options: &GenerateOptions,
        on_token: &mut OnToken<'_>,
    ) -> Result<(), Gemma4Error> {
        if self.finished.is_some() {
            return Ok(());
        }
        self.tokens.push(token);
        if !options.ignore_stop_tokens && options.stop_tokens.contains(&token) {
            self.finished = Some(FinishReason::Stop);
            return Ok(());
        }
        let (kind, text) = self.parts.push(token)?;
        let stops = self.stop_strings.end_with(token)?;
        let token = Token {
            id: token,
            text: &text,
            kind,
        };
        if on_token(self.index, &token).is_break() {
            self.finished = Some(FinishReason::Cancelled);
        } else if stops {
            self.finished = Some(FinishReason::Stop);
        } else if self.tokens.len() == max_tokens {
            self.finished = Some(FinishReason::Length);
        }
        Ok(())
    }

    pub fn finish(mut self, mut timings: Timings) -> Result<Generation, Gemma4Error> {
        self.parts.finish()?;
        timings.decode_tokens = self.tokens.len().saturating_sub(1);
        Ok(Generation {
            prompt_tokens: self.prompt.tokens,
            tokens: self.tokens,
            text: self.parts.answer,
            thoughts: self.parts.thoughts,
            tool_calls: self.parts.tool_calls,
            logprobs: self.logprobs,
            // A sequence has no finish reason if the loop ended early. Report the sequence as cancelled.
            finish_reason: self.finished.unwrap_or(FinishReason::Cancelled),
            drafts: self.drafts,
            timings,
        })
    }
}
