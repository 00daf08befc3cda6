//! The result of a generation, and the tokens that a callback receives.

use crate::generate::logprobs::TokenLogprobs;
use crate::speculative::drafts::DraftCounts;
use crate::text::parts::TextKind;
use serde::Serialize;
use std::{ops::ControlFlow, time::Duration};

/// One generated token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token<'a> {
    /// The token id.
    pub id: u32,
    /// The text that this token completes. The text is empty if the token ends inside a character.
    pub text: &'a str,
    /// The kind of the text: answer, thought or tool call.
    pub kind: TextKind,
}

/// The result of a generation.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// The prompt's tokens.
    pub prompt_tokens: Vec<u32>,
    /// The generated tokens. If a stop token ended the text, that stop token is the last element.
    pub tokens: Vec<u32>,
    /// The answer's text, without special tokens.
    pub text: String,
    /// The thoughts before the answer, without special tokens.
    pub thoughts: String,
    /// The tool calls as the model writes them: `call:name{argument:<|"|>text<|"|>}`.
    pub tool_calls: Vec<String>,
    /// The log-probabilities of the tokens, if [`GenerateOptions::logprobs`](super::GenerateOptions::logprobs) is set.
    pub logprobs: Vec<TokenLogprobs>,
    /// The reason why the text ended.
    pub finish_reason: FinishReason,
    /// The numbers of proposed and accepted draft tokens, if [`GenerateOptions::drafts`](super::GenerateOptions::drafts)
    /// is set.
    pub drafts: DraftCounts,
    /// The durations of prefill and decoding.
    pub timings: Timings,
}

/// The reason why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// The model generated a stop token or completed a stop string.
    Stop,
    /// The text reached [`GenerateOptions::max_tokens`](super::GenerateOptions::max_tokens) or the model's last position.
    Length,
    /// The callback or [`GenerateOptions::cancellation`](super::GenerateOptions::cancellation) cancelled the generation.
    Cancelled,
}

/// The durations and token counts of a generation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timings {
    /// The duration of the prefill, including the choice of the first token.
    pub prefill: Duration,
    /// The number of prefilled prompt tokens, summed over a batch. Tokens that a session's KV cache already held do not count.
    pub prefill_tokens: usize,
    /// The duration from the first generated token to the last.
    pub decode: Duration,
    /// The number of generated tokens, not counting the first.
    pub decode_tokens: usize,
}

impl Timings {
    /// The number of prefilled tokens per second, or 0 if no token was prefilled.
    pub fn prefill_rate(&self) -> f64 {
        rate(self.prefill_tokens, self.prefill)
    }

    /// The number of generated tokens per second, or 0 if only one token was generated. The first token does not count.
    pub fn decode_rate(&self) -> f64 {
        rate(self.decode_tokens, self.decode)
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    match time.is_zero() {
        true => 0.0,
        false => tokens as f64 / time.as_secs_f64(),
    }
}

/// A callback for each generated token, which receives the index of a sequence and the sequence's new token.
pub(crate) type OnToken<'a> = dyn FnMut(usize, &Token<'_>) -> ControlFlow<()> + 'a;
