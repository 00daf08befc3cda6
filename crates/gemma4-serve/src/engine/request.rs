//! Requests to the engine, and the events that the engine sends back.

use super::adapters::ServedAdapter;
use super::constraint::Constraint;
use super::media_memory::MediaMemory;
use crate::error::RequestError;
use burn_gemma4::{EncodedPrompt, Sampling, TextKind};
use std::sync::Arc;

/// A prompt, and the options of its answers.
#[derive(Debug)]
pub struct Request {
    /// The tokens, images and audio of the prompt.
    pub prompt: EncodedPrompt,
    /// The number of answers. Answer `i` adds `i` to the seed in `options`.
    pub choices: usize,
    /// The options of each answer.
    pub options: AnswerOptions,
    /// The grammar that the answers follow.
    pub constraint: Option<Constraint>,
    /// The adapter with which the model answers, or `None` for the model alone.
    pub adapter: Option<ServedAdapter>,
    /// The reserved memory of the prompt's images and audio, which the engine frees after the prefill.
    pub media_memory: Option<MediaMemory>,
}

/// The options of each answer to a prompt.
#[derive(Clone, Debug)]
pub struct AnswerOptions {
    /// The largest number of tokens in the answer.
    pub max_tokens: usize,
    /// The number of tokens that an answer must have before a stop token is allowed.
    pub min_tokens: usize,
    /// The settings of the sampler. Answer `i` of a request adds `i` to the seed.
    pub sampling: Sampling,
    /// The number that is subtracted from the logit of each token that the answer already contains.
    pub presence_penalty: f32,
    /// The number that is subtracted from a token's logit for each occurrence of the token in the answer.
    pub frequency_penalty: f32,
    /// Pairs of a token id and the number that is added to the token's logit.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens that must not be the first token of the answer.
    pub begin_suppress_tokens: Vec<u32>,
    /// Tokens that end the answer.
    pub stop_tokens: Vec<u32>,
    /// True if stop tokens do not end the answer.
    pub ignore_stop_tokens: bool,
    /// Strings that end the answer. The client does not receive the stop string.
    pub stop_strings: Vec<String>,
    /// The number of most likely tokens that are reported for each token of the answer. `None` reports no log-probabilities.
    pub logprobs: Option<usize>,
    /// True if thoughts and tool calls are sent as events of their own kinds, and not as text of the answer.
    pub has_parts: bool,
    /// The largest number of tokens in a thought. When a thought has this many tokens, the engine forces the token that ends
    /// the thought.
    pub max_thinking_tokens: Option<usize>,
    /// True if the answer ends after its first tool call.
    pub single_tool_call: bool,
}

impl AnswerOptions {
    /// Checks that an answer can have as many tokens as it must have.
    pub(crate) fn check_min_tokens(&self) -> Result<(), RequestError> {
        match self.min_tokens > self.max_tokens {
            true => {
                let reason = format!(
                    "is {}; expected at most max_tokens, {}",
                    self.min_tokens, self.max_tokens
                );
                Err(RequestError::field("min_tokens", reason))
            }
            false => Ok(()),
        }
    }
}

/// An event of a request's answers.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A part of an answer's text.
    Text {
        /// The index of the answer.
        choice: usize,
        /// The kind of the text: answer or thought.
        kind: TextKind,
        /// The decoded text. It may be empty, for example because the tokens so far end within a multi-byte character.
        text: String,
        /// The log-probabilities of the tokens, if the request asks for them.
        logprobs: Vec<TokenProbability>,
    },
    /// A tool call, in the syntax that the model writes.
    ToolCall {
        /// The index of the answer.
        choice: usize,
        /// The text between the two tokens that begin and end a tool call.
        text: String,
    },
    /// The end of an answer.
    End {
        /// The index of the answer.
        choice: usize,
        /// The reason why the answer ended.
        reason: EndReason,
        /// The numbers of tokens in the answer.
        usage: AnswerUsage,
    },
    /// The request failed. This event is the last one.
    Failed(RequestError),
}

/// The log-probability of a token: the natural logarithm of its probability under the model, before penalties, bias and
/// sampling.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenProbability {
    /// The id of the token.
    pub token: u32,
    /// The log-probability of the token.
    pub logprob: f32,
    /// The most likely tokens with their log-probabilities, in descending order.
    pub top: Vec<(u32, f32)>,
}

/// The reason why an answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// The model chose a stop token, the grammar was complete, or the answer ended after its first tool call.
    Stop,
    /// The text contained this stop string, which the client does not receive.
    StopString(Arc<str>),
    /// The answer reached `max_tokens`.
    Length,
}

/// The numbers of tokens in an answer and its prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerUsage {
    /// The number of prompt tokens whose keys and values came from an earlier prompt. If a prompt has several answers,
    /// only the first answer counts these tokens. The sum over all answers then counts each prompt once.
    pub cached_tokens: usize,
    /// The number of generated tokens, including the stop token.
    pub tokens: usize,
    /// The number of generated tokens in thoughts.
    pub thinking_tokens: usize,
}

impl AnswerUsage {
    /// Adds the tokens of another answer.
    pub(crate) fn add(&mut self, other: Self) {
        self.cached_tokens += other.cached_tokens;
        self.tokens += other.tokens;
        self.thinking_tokens += other.thinking_tokens;
    }
}

impl std::iter::Sum for AnswerUsage {
    fn sum<I: Iterator<Item = Self>>(usages: I) -> Self {
        usages.fold(Self::default(), |mut sum, usage| {
            sum.add(usage);
            sum
        })
    }
}
