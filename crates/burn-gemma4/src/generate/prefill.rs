//! Prefill of the prompts in chunks. A column of the KV cache is one token position of every sequence.

use super::encoded::{EncodedPrompt, after_media, media_in};
use super::options::GenerateOptions;
use super::prompt_graphs::CapturedPrompts;
use super::sequence::Sequence;
use crate::checkpoint::media::MediaEncoders;
use crate::error::Gemma4Error;
use crate::model::cache::Cache;
use crate::model::tokens::Tokens;
use crate::model::{Gemma4Model, Logits};
use burn::tensor::Tensor;
use std::ops::Range;

/// The default number of prompt tokens in a prefill chunk on a CPU, summed over the prompts of a batch.
const PROCESSORS_CHUNK: usize = 512;
/// The default number of prompt tokens in a prefill chunk on a CubeCL device, summed over the prompts of a batch.
const ACCELERATORS_CHUNK: usize = 8192;

/// Prefills the prompt tokens that the cache does not hold yet. Returns the hidden state `[batch, 1, hidden]` of each
/// prompt's last token, or `None` if the generation was cancelled. The pass over the tokens of a single prompt may
/// replay one of the `graphs`, which must belong to `model`.
pub(super) fn prefill(
    model: &Gemma4Model,
    encoders: &MediaEncoders,
    graphs: &CapturedPrompts,
    sequences: &[Sequence<'_>],
    cache: &mut Cache,
    options: &GenerateOptions,
) -> Result<Option<Tensor<3>>, Gemma4Error> {
    let prompts: Vec<&EncodedPrompt> = sequences.iter().map(|one| &one.prompt).collect();
    let lengths = prompts.iter().map(|prompt| prompt.tokens.len());
    let longest = lengths.max().unwrap_or(0);
    if let [prompt] = prompts[..]
        && options.graph_capture
        && !options.is_cancelled()
        && prompt.media.is_empty()
        && let Some(tokens) = prompt.tokens.get(cache.len()..)
        && tokens.len() <= chunk(model, 1, options)
        && let Some(hidden) = graphs.read(model, tokens, cache, &mut Vec::new())
    {
        return Ok(Some(hidden));
    }
    let prompts = Prompts {
        prompts: &prompts,
        longest,
        encoders,
    };
    read(model, prompts, longest, Logits::Last(1), cache, options)
}

/// Prefills only the first `end` tokens of a prompt, in chunks. The chunk size is that of a generation with the same
/// options. `end` must not divide an image or an audio clip.
pub(crate) fn read_beginning(
    model: &Gemma4Model,
    encoders: &MediaEncoders,
    prompt: &EncodedPrompt,
    end: usize,
    cache: &mut Cache,
    options: &GenerateOptions,
) -> Result<(), Gemma4Error> {
    let prompts = Prompts {
        prompts: &[prompt],
        longest: prompt.tokens.len(),
        encoders,
    };
    read(model, prompts, end, Logits::None, cache, options).map(|_| ())
}

/// Computes the hidden states of the positions of a prompt that `asked` selects, in one call of the model.
pub(crate) fn hidden_of_prompt(
    model: &Gemma4Model,
    encoders: &MediaEncoders,
    prompt: &EncodedPrompt,
    asked: Logits,
) -> Result<Option<Tensor<3>>, Gemma4Error> {
    let end = prompt.tokens.len();
    let prompts = Prompts {
        prompts: &[prompt],
        longest: end,
        encoders,
    };
    let tokens = prompts.tokens(model, 0..end)?;
    model.step_hidden(&tokens, &mut model.cache(vec![0]), asked)
}

/// The prompts of a batch, which are padded on the left to `longest` columns.
#[derive(Clone, Copy)]
struct Prompts<'a> {
    prompts: &'a [&'a EncodedPrompt],
    longest: usize,
    /// The parts of the model that see images and hear audio.
    encoders: &'a MediaEncoders,
}

impl Prompts<'_> {
    /// Uploads the tokens, images and audio clips of some columns. None of them may lie only partly in these columns.
    fn tokens(&self, model: &Gemma4Model, columns: Range<usize>) -> Result<Tokens, Gemma4Error> {
        let pad = model.config().pad_token;
        let token = |prompt: &[u32], column: usize| {
            (column + prompt.len())
                .checked_sub(self.longest)
                .map_or(pad, |index| prompt[index])
        };
        let prompts = self.prompts.iter();
        let tokens =
            prompts.flat_map(|prompt| columns.clone().map(|column| token(&prompt.tokens, column)));
        let tokens: Vec<u32> = tokens.collect();
        let shape = [self.prompts.len(), columns.len()];
        let media = media_in(self.prompts, self.longest, columns, self.encoders)?;
        Ok(Tokens::upload_with_media(
            tokens,
            shape,
            media,
            pad,
            &model.device(),
        ))
    }
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

/// Prefills the columns before `last` that the cache does not hold yet, in chunks. A chunk that would divide an image
/// or an audio clip ends after it. `asked` selects positions in the last chunk.
///
/// Returns the hidden states of the selected positions, `[batch, asked, hidden]`. Returns `None` if `asked` is empty or
/// the generation was cancelled.
fn read(
    model: &Gemma4Model,
    prompts: Prompts<'_>,
    last: usize,
    asked: Logits,
    cache: &mut Cache,
    options: &GenerateOptions,
) -> Result<Option<Tensor<3>>, Gemma4Error> {
    let device = model.device();
    let chunk = chunk(model, prompts.prompts.len(), options);
    loop {
        if options.is_cancelled() {
            return Ok(None);
        }
        let start = cache.len();
        let end = start.saturating_add(chunk).min(last);
        let end = after_media(prompts.prompts, prompts.longest, end).min(last);
        let tokens = prompts.tokens(model, start..end)?;
        if end == last {
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
