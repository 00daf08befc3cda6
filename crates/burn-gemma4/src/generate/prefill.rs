//! Prefill of the prompts in chunks. A column of the KV cache is one token position of every sequence.

use super::options::GenerateOptions;
use super::prompt_graphs::CapturedPrompts;
use super::sequence::Sequence;
use crate::error::Gemma4Error;
use crate::model::cache::Cache;
use crate::model::tokens::Tokens;
use crate::model::{Gemma4Model, Logits};
use burn::tensor::Tensor;

/// The default number of prompt tokens in a prefill chunk on a CPU, summed over the prompts of a batch.
const PROCESSORS_CHUNK: usize = 512;
/// The default number of prompt tokens in a prefill chunk on a CubeCL device, summed over the prompts of a batch.
const ACCELERATORS_CHUNK: usize = 8192;

/// Prefills the prompt tokens that the cache does not hold yet. Returns the hidden state `[batch, 1, hidden]` of each
/// prompt's last token, or `None` if the generation was cancelled. The pass over the tokens of a single prompt may
/// replay one of the `graphs`, which must belong to `model`.
pub(super) fn prefill(
    model: &Gemma4Model,
    graphs: &CapturedPrompts,
    sequences: &[Sequence<'_>],
    cache: &mut Cache,
    options: &GenerateOptions,
) -> Result<Option<Tensor<3>>, Gemma4Error> {
    let prompts: Vec<&[u32]> = sequences.iter().map(|one| &one.prompt[..]).collect();
    let longest = prompts.iter().map(|prompt| prompt.len()).max().unwrap_or(0);
    if let [prompt] = prompts[..]
        && options.graph_capture
        && !options.is_cancelled()
        && let Some(tokens) = prompt.get(cache.len()..)
        && tokens.len() <= chunk(model, 1, options)
        && let Some(hidden) = graphs.read(model, tokens, cache, &mut Vec::new())
    {
        return Ok(Some(hidden));
    }
    read(model, &prompts, longest, Logits::Last(1), cache, options)
}

/// Prefills only the first tokens of a prompt, in chunks. The chunk size is that of a generation with the same options.
pub(crate) fn read_beginning(
    model: &Gemma4Model,
    beginning: &[u32],
    cache: &mut Cache,
    options: &GenerateOptions,
) -> Result<(), Gemma4Error> {
    let end = beginning.len();
    read(model, &[beginning], end, Logits::None, cache, options).map(|_| ())
}

/// Returns the number of tokens of each prompt in one prefill chunk.
fn chunk(model: &Gemma4Model, prompts: usize, options: &GenerateOptions) -> usize {
    options.prefill_chunk.unwrap_or_else(|| {
        let together = match model.is_accelerated() {
            true => ACCELERATORS_CHUNK,
            false => PROCESSORS_CHUNK,
        };
        (together / prompts).max(1)
    })
}

/// Prefills the prompt tokens that the cache does not hold yet, in chunks. `longest` is the length of the longest
/// prompt. `asked` selects positions in the last chunk.
///
/// Returns the hidden states of the selected positions, `[batch, asked, hidden]`. Returns `None` if `asked` is empty or
/// the generation was cancelled.
fn read(
    model: &Gemma4Model,
    prompts: &[&[u32]],
    longest: usize,
    asked: Logits,
    cache: &mut Cache,
    options: &GenerateOptions,
) -> Result<Option<Tensor<3>>, Gemma4Error> {
    let device = model.device();
    let pad = model.config().pad_token;
    let chunk = chunk(model, prompts.len(), options);
    loop {
        if options.is_cancelled() {
            return Ok(None);
        }
        let start = cache.len();
        let end = start.saturating_add(chunk).min(longest);
        let column = |prompt: &[u32], column: usize| {
            (column + prompt.len())
                .checked_sub(longest)
                .map_or(pad, |index| prompt[index])
        };
        let tokens: Vec<u32> = prompts
            .iter()
            .flat_map(|prompt| (start..end).map(|index| column(prompt, index)))
            .collect();
        let tokens = Tokens::upload(tokens, [prompts.len(), end - start], &device);
        if end == longest {
            return model.step_hidden(&tokens, cache, asked);
        }
        model.step_hidden(&tokens, cache, Logits::None)?;
        if options.cancellation.is_some() || model.host_table.is_some() {
            // Wait until the device has processed the chunk. The host cannot cancel queued chunks, and each queued
            // chunk keeps its host copy of embedding rows in memory.
            device
                .sync()
                .map_err(|error| Gemma4Error::Device(error.to_string()))?;
        }
    }
}
