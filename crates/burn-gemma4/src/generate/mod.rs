//! Text generation: prefill of the prompts, then the decode loop.

#[cfg(feature = "cube")]
mod captured_prompts;
pub(crate) mod decode;
pub(crate) mod encoded;
mod generation;
pub(crate) mod logprobs;
pub(crate) mod media_layout;
mod options;
mod prefill;
mod prompt_encoder;
mod prompt_graphs;
mod run;
pub(crate) mod sampling;
pub(crate) mod sequence;

pub(crate) use generation::OnToken;
pub use generation::{FinishReason, Generation, Timings, Token};
pub use options::GenerateOptions;
pub(crate) use prefill::{hidden_of_prompt, read_beginning};
pub use prompt_encoder::PromptEncoder;
pub use prompt_graphs::PromptGraphs;
pub(crate) use prompt_graphs::{CapturedPrompts, Size};
pub(crate) use run::{Checkpoint, check, check_prompts, run};
