//! The generation loop: prefill of the prompts, then decode steps until all texts have ended.

use super::decode::{Decoder, Next};
use super::encoded::EncodedPrompt;
use super::generation::{Generation, OnToken, Timings};
use super::options::GenerateOptions;
use super::prefill::prefill;
use super::prompt_graphs::CapturedPrompts;
use super::sequence::{Chosen, Sequence, begins, samplers};
use crate::checkpoint::media::MediaEncoders;
use crate::config::Gemma4Config;
use crate::error::Gemma4Error;
use crate::model::Gemma4Model;
use crate::model::cache::Cache;
use crate::speculative::decode::{DraftSources, Limits};
use crate::speculative::drafter::Drafter;
use crate::speculative::drafts::Drafts;
use crate::text::tokenizer::Tokenizer;
use std::time::Instant;

/// The model, drafter and tokenizer that generate a text.
#[derive(Clone, Copy)]
pub(crate) struct Checkpoint<'a> {
    pub model: &'a Gemma4Model,
    /// The parts of the model that see images and hear audio.
    pub encoders: &'a MediaEncoders,
    /// The drafter, which a generation uses if its options select it.
    pub drafter: Option<&'a Drafter>,
    pub tokenizer: &'a Tokenizer,
    /// The CUDA graphs of the model's forward passes over prompts.
    pub graphs: &'a CapturedPrompts,
}

/// Checks prompts and options, and returns the maximum number of tokens to generate.
pub(crate) fn check(
    config: &Gemma4Config,
    prompts: &[EncodedPrompt],
    drafter: Option<&Drafter>,
    options: &GenerateOptions,
) -> Result<usize, Gemma4Error> {
    let refuse = |argument, reason: String| Err(Gemma4Error::Argument { argument, reason });
    options.sampling.validate()?;
    crate::config::generation::validate_stop_strings(&options.stop_strings)?;
    crate::speculative::decode::check(drafter, options)?;
    options.cache_kind().check(config)?;
    if options.max_tokens == 0 {
        return refuse("max_tokens", "is 0; it should be at least 1".into());
    }
    if options.prefill_chunk == Some(0) {
        return refuse("prefill_chunk", "is 0; it should be at least 1".into());
    }
    let longest = check_prompts(config, prompts)?;
    match config.max_position_embeddings - longest {
        0 => refuse(
            "prompt",
            format!(
                "has {longest} tokens, but the model has {} positions; at least one position must be left for the answer",
                config.max_position_embeddings
            ),
        ),
        room => {
            let max_tokens = options.max_tokens.min(room);
            match options
                .max_length
                .map(|most| (most, most.checked_sub(longest)))
            {
                None => Ok(max_tokens),
                Some((most, None | Some(0))) => refuse(
                    "prompt",
                    format!(
                        "has {longest} tokens, but max_length is {most}; at least one token must be left for the answer"
                    ),
                ),
                Some((_, Some(left))) => Ok(max_tokens.min(left)),
            }
        }
    }
}

/// Checks that each prompt has tokens, that these are in the vocabulary, and that the model has positions for them.
/// Returns the length of the longest prompt.
pub(crate) fn check_prompts(
    config: &Gemma4Config,
    prompts: &[EncodedPrompt],
) -> Result<usize, Gemma4Error> {
    let refuse = |argument, reason: String| Err(Gemma4Error::Argument { argument, reason });
    for EncodedPrompt { tokens: prompt, .. } in prompts {
        if prompt.is_empty() {
            return refuse("prompt", "has no tokens; it should have at least 1".into());
        }
        if let Some(token) = prompt
            .iter()
            .find(|token| **token as usize >= config.vocab_size)
        {
            return refuse(
                "prompt",
                format!(
                    "has the token {token}, but the vocabulary has {} tokens",
                    config.vocab_size
                ),
            );
        }
    }
    let lengths = prompts.iter().map(|prompt| prompt.tokens.len());
    let longest = lengths.max().unwrap_or(0);
    match longest > config.max_position_embeddings {
        true => refuse(
            "prompt",
            format!(
                "has {longest} tokens, but the model has {} positions",
                config.max_position_embeddings
            ),
        ),
        false => Ok(longest),
    }
}

/// Generates a continuation of each prompt. Prompts are padded on the left, and `cache` already holds the first
/// `cache.len()` positions of the padded prompts. `max_tokens` is the result of [`check`] for the same options.
///
/// Afterwards the cache holds all tokens of the prompts and all generated tokens, except the last token of each sequence.
pub(crate) fn run(
    checkpoint: Checkpoint<'_>,
    prompts: Vec<EncodedPrompt>,
    cache: &mut Cache,
    options: &GenerateOptions,
    max_tokens: usize,
    on_token: &mut OnToken<'_>,
) -> Result<Vec<Generation>, Gemma4Error> {
    let Checkpoint {
        model,
        encoders,
        drafter,
        tokenizer,
        graphs,
    } = checkpoint;
    let pad = model.config().pad_token;
    let read_before = cache.len();
    let lengths = prompts.iter().map(|prompt| prompt.tokens.len());
    let longest = lengths.max().unwrap_or(0);
    let mut timings = Timings::default();
    let mut sequences: Vec<Sequence<'_>> = prompts
        .into_iter()
        .enumerate()
        .map(|(index, prompt)| Sequence::new(index, prompt, longest, tokenizer, options))
        .collect::<Result<_, _>>()?;

    let start = Instant::now();
    let hidden = prefill(model, encoders, graphs, &sequences, cache, options)?;
    let read = |sequence: &Sequence<'_>| {
        let first = read_before.max(longest - sequence.prompt.tokens.len());
        cache.len().saturating_sub(first)
    };
    timings.prefill_tokens = sequences.iter().map(read).sum();
    let Some(hidden) = hidden else {
        timings.prefill = start.elapsed();
        return finish(sequences, timings);
    };
    let mut guessers = DraftSources::of(options, &sequences, hidden.clone());
    let mut next = choose(&mut sequences, Next::of_hidden(model, hidden), options)?;
    timings.prefill = start.elapsed();

    let decoding = Instant::now();
    let mut decoder = model.decoder(cache);
    if !options.graph_capture {
        decoder = decoder.without_graph_capture();
    }
    if let (Drafts::Drafter, Some(drafter)) = (options.drafts, drafter) {
        decoder = decoder.with_drafter(drafter)?;
    }
    let mut may_draw = guessers.is_empty() && options.draws_all();
    for (sequence, token) in sequences.iter_mut().zip(&next) {
        sequence.take(*token, max_tokens, options, on_token)?;
    }
    if !guessers.is_empty() {
        crate::speculative::decode::decode(
            &mut sequences,
            &mut decoder,
            &mut guessers,
            options,
            Limits { max_tokens, pad },
            on_token,
        )?;
        timings.decode = decoding.elapsed();
        // Return before the decode loop below, which would continue cancelled sequences if the caller has reset the
        // cancellation flag in the meantime.
        return finish(sequences, timings);
    }
    while !options.is_cancelled() && sequences.iter().any(|sequence| sequence.finished.is_none()) {
        // Sample on the host while some tokens are still forbidden because a text is too short. Device samplers cannot
        // forbid tokens only at the beginning of a text.
        if may_draw && !begins(&sequences) {
            decoder = decoder.with_samplers(&samplers(&sequences))?;
            may_draw = false;
        }
        // Queue the following step only if an unfinished sequence may still get a token after the current step.
        let goes_on = sequences
            .iter()
            .any(|sequence| sequence.finished.is_none() && sequence.tokens.len() + 1 < max_tokens);
        next = read_and_choose(&mut sequences, &mut decoder, &next, goes_on, options)?;
        for (sequence, token) in sequences.iter_mut().zip(&next) {
            sequence.take(*token, max_tokens, options, on_token)?;
        }
    }
    timings.decode = decoding.elapsed();
    finish(sequences, timings)
}

/// Chooses the next token of each sequence from its logits.
fn choose(
    sequences: &mut [Sequence<'_>],
    next: Next<'_>,
    options: &GenerateOptions,
) -> Result<Vec<u32>, Gemma4Error> {
    Chosen::of(next, sequences, options)?.tokens(sequences, options)
}

/// Runs a decode step over `tokens` and chooses the next token of each sequence. If `goes_on` is true, the device may
/// start the following step before the host receives the chosen tokens.
fn read_and_choose(
    sequences: &mut [Sequence<'_>],
    decoder: &mut Decoder<'_>,
    tokens: &[u32],
    goes_on: bool,
    options: &GenerateOptions,
) -> Result<Vec<u32>, Gemma4Error> {
    let is_read = options.logprobs.is_some() || begins(sequences);
    let followed = match is_read {
        false => decoder.follow(tokens, goes_on)?,
        true => None,
    };
    match followed {
        Some(followed) => {
            let vocabulary = decoder.vocabulary();
            Chosen::Tokens(followed, vocabulary).tokens(sequences, options)
        }
        None => choose(sequences, decoder.step(tokens)?, options),
    }
}

/// Converts the sequences to their [`Generation`]s.
fn finish(sequences: Vec<Sequence<'_>>, timings: Timings) -> Result<Vec<Generation>, Gemma4Error> {
    sequences
        .into_iter()
        .map(|sequence| sequence.finish(timings))
        .collect()
}
