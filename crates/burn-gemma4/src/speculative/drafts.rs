//! The source of draft tokens, and the counts of proposed and accepted draft tokens.

use serde::Serialize;

/// The maximum number of draft tokens per sequence in one forward pass of the target model.
pub(crate) const MAX_DRAFT_TOKENS: usize = 8;

/// The source of draft tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Drafts {
    /// Disables speculative decoding.
    #[default]
    None,
    /// Prompt lookup: proposes the tokens after an earlier occurrence of the text's last tokens. Prompt lookup helps if
    /// answers repeat parts of their prompts.
    Lookup,
    /// A small model that was trained to predict the target model's tokens: see
    /// [`Gemma4::with_drafter`](crate::gemma::Gemma4::with_drafter).
    Drafter,
}

/// The numbers of forward passes, of draft tokens and of accepted draft tokens in a generated text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DraftCounts {
    /// The number of forward passes of the model after the prefill.
    pub passes: usize,
    /// The number of draft tokens in all forward passes after the prefill.
    pub drafted: usize,
    /// The number of accepted draft tokens in the text. The last generated token of each forward pass does not count,
    /// even if it equals a draft token.
    pub accepted: usize,
}

impl DraftCounts {
    /// Returns the share of draft tokens that were accepted, or 0 without draft tokens.
    pub fn acceptance(&self) -> f64 {
        share(self.accepted, self.drafted)
    }

    /// Returns the mean number of generated tokens per forward pass, or 0 without passes. This mean is one more than
    /// the mean number of accepted draft tokens.
    pub fn tokens_per_pass(&self) -> f64 {
        share(self.passes + self.accepted, self.passes)
    }
}

fn share(part: usize, whole: usize) -> f64 {
    match whole {
        0 => 0.0,
        _ => part as f64 / whole as f64,
    }
}
