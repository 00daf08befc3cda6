//! Helper functions for unit tests.

use crate::engine::AnswerOptions;
use burn_gemma4::Sampling;

/// Returns the options of an answer with greedy decoding and at most 8 tokens.
pub fn answer_options() -> AnswerOptions {
    AnswerOptions {
        max_tokens: 8,
        min_tokens: 0,
        sampling: Sampling::greedy(),
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: Vec::new(),
        begin_suppress_tokens: Vec::new(),
        stop_tokens: Vec::new(),
        ignore_stop_tokens: false,
        stop_strings: Vec::new(),
        logprobs: None,
        has_parts: true,
        max_thinking_tokens: None,
        single_tool_call: false,
    }
}
