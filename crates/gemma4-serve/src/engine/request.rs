//! The requests that the engine takes, and the events with which it answers.

use super::constraint::Constraint;
use crate::error::RequestError;
use burn_gemma4::{Sampling, TextKind};
use std::sync::Arc;

/// A prompt with the options of its answers.
#[derive(Debug)]
pub struct Request {
    /// The tokens of the prompt.
    pub prompt: Vec<u32>,
    /// The number of answers. Each answer has its own seed.
    pub choices: usize,
    /// The options of each answer.
    pub options: AnswerOptions,
    /// The grammar that the answers follow.
    pub constraint: Option<Constraint>,
}

/// The options of an answer.
#[derive(Clone, Debug)]
pub struct AnswerOptions {
    /// The largest number of tokens.
    pub max_tokens: usize,
    /// The smallest number of tokens before a stop token may be chosen.
    pub min_tokens: usize,
    /// The settings of the sampler. The answer with the index `i` has the seed plus `i`.
    pub sampling: Sampling,
    /// A number that is added to the logits of each token that the answer contains already.
    pub presence_penalty: f32,
    /// A number that is added for each occurrence of a token in the answer.
    pub frequency_penalty: f32,
    /// Numbers that are added to the logits of single tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens that are forbidden as the first token.
    pub begin_suppress_tokens: Vec<u32>,
    /// Tokens that end the answer.
    pub stop_tokens: Vec<u32>,
    /// True if the answer continues after a stop token.
    pub ignore_stop_tokens: bool,
    /// Strings that end the answer. The answer does not contain them.
    pub stop_strings: Vec<String>,
    /// The number of most likely tokens that are reported with each token, or `None` to report no probabilities.
    pub logprobs: Option<usize>,
    /// True if thoughts and tool calls are told apart from the answer.
    pub has_parts: bool,
    /// The largest number of tokens of a thought. The engine then ends the thought.
    pub max_thinking_tokens: Option<usize>,
    /// True if the answer ends after its first tool call.
    pub single_tool_call: bool,
}

/// An event of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A part of an answer's text.
    Text {
        /// The index of the answer.
        choice: usize,
        /// The kind of the text: answer or thought.
        kind: TextKind,
        /// The text, which may be empty if the tokens complete no character yet.
        text: String,
        /// The probabilities of the tokens, if the request asks for them.
        logprobs: Vec<TokenProbability>,
    },
    /// A complete tool call, as the model writes it.
    ToolCall {
        /// The index of the answer.
        choice: usize,
        /// The text between the marks of the call.
        text: String,
    },
    /// The end of an answer.
    End {
        /// The index of the answer.
        choice: usize,
        /// The reason for the end.
        reason: EndReason,
        /// The counts of the answer's tokens.
        usage: AnswerUsage,
    },
    /// The request failed. No event follows.
    Failed(RequestError),
}

/// The log-probabilities of a token: natural logarithms of the model's own probabilities, before any sampling option.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenProbability {
    /// The token.
    pub token: u32,
    /// The log-probability of the token.
    pub logprob: f32,
    /// The most likely tokens, in descending order.
    pub top: Vec<(u32, f32)>,
}

/// The reason why an answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// The model chose a stop token, or the grammar was complete.
    Stop,
    /// The text contained this stop string.
    StopString(Arc<str>),
    /// The answer reached its largest number of tokens.
    Length,
}

/// The counts of an answer's tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerUsage {
    /// All generated tokens, with the stop token.
    pub tokens: usize,
    /// The tokens of thoughts.
    pub thinking_tokens: usize,
}
