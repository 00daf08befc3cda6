//! Helper functions for unit tests.

use crate::engine::AnswerOptions;
#[cfg(feature = "flex")]
use burn_gemma4::Gemma4;
use burn_gemma4::Sampling;

/// Returns the small model that `burn-gemma4` embeds, on the CPU.
#[cfg(feature = "flex")]
pub fn gemma() -> Gemma4 {
    let device = burn::tensor::Device::flex();
    Gemma4::embedded(&device, burn_gemma4::LoadOptions::new()).expect("the model loads")
}

/// Returns the options of a greedy answer of at most 8 tokens.
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
