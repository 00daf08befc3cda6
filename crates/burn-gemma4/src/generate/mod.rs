//! From a prompt to text, token by token.

pub(crate) mod cancellation;
pub(crate) mod decode;
pub(crate) mod defaults;
pub(crate) mod draft;
pub(crate) mod logprobs;
pub(crate) mod sampling;

mod sequence;
mod unsupported;

#[cfg(feature = "cube")]
use crate::op;
use crate::{
    Cache, CacheKind, Cancellation, ChatOptions, Decoder, Drafter, Gemma4Config, Gemma4Error,
    Gemma4Model, KvPrecision, Next, Sampling, TextKind, TokenLogprobs, Tokenizer,
    model::{Logits, per_layer::Tokens},
    text::stop,
};
use burn::tensor::Tensor;
use draft::{DraftCounts, Drafts, Guessers, Limits};
use sequence::{Chosen, Sequence, begins, samplers};
use serde::Serialize;
use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};

/// Tokens that a processor reads at once, of all prompts of a batch together, where nobody says otherwise.
const PROCESSORS_CHUNK: usize = 512;
/// The same for other devices, which need more to be busy.
const ACCELERATORS_CHUNK: usize = 8192;

/// How to go on from a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Tokens to generate at most; fewer where the model's positions end.
    pub max_tokens: usize,
    /// Tokens of the prompt and the generated text together at most, of a batch with the longest prompt.
    pub max_length: Option<usize>,
    /// [`stop_tokens`](Self::stop_tokens) are not chosen before so many tokens are generated.
    pub min_new_tokens: Option<usize>,
    /// The same for tokens of the prompt and the generated text together, of a batch with the longest prompt. Without effect beside
    /// [`min_new_tokens`](Self::min_new_tokens).
    pub min_length: Option<usize>,
    /// Tokens that are not chosen as the first one.
    pub begin_suppress_tokens: Vec<u32>,
    /// How a token is chosen.
    pub sampling: Sampling,
    /// Tokens that end the text.
    pub stop_tokens: Vec<u32>,
    /// Goes on after them.
    pub ignore_stop_tokens: bool,
    /// Texts that end the text, wherever tokens begin and end in them. Of the generated text only; special tokens in it count
    /// by their names. As in transformers, the text keeps them, with what else the token that completed them brought.
    pub stop_strings: Vec<String>,
    /// Tells of every token how likely it was, and so many of the likeliest in its place.
    pub logprobs: Option<usize>,
    /// Reads a prompt by this many tokens at a time, so that the memory of what is computed does not grow with it; without, by 8,192, on a
    /// processor by 512, which are shared among the prompts of a batch.
    pub prefill_chunk: Option<usize>,
    /// Ends the generation from another thread, also while the prompt is read.
    pub cancellation: Option<Cancellation>,
    /// Captures a token's launches in a graph once and replays it, where the device can. Programs whose other threads use the same
    /// CUDA device do without: see [`Decoder`](crate::Decoder).
    pub graph_capture: bool,
    /// Keeps less of keys and values, where the model has layers that can: see [`CacheKind::compact_keys`].
    pub compact_keys: bool,
    /// In what keys and values are kept.
    pub kv_precision: KvPrecision,
    /// Who guesses tokens ahead, so that the model reads several in one pass. The text stays the same.
    pub drafts: Drafts,
    /// So many guesses for a pass, from 1 to 8; without, 1 to 7, by how many were right so far. Decoding's kernels take 8 tokens of all
    /// sequences together, which 8 guesses pass: without a number two sequences have up to 3 guesses each, four have 1, and more none.
    pub draft_tokens: Option<usize>,
    /// How a conversation becomes a prompt.
    pub chat: ChatOptions,
}

impl GenerateOptions {
    /// An empty cache for `padding.len()` sequences.
    pub(crate) fn cache(&self, config: &Gemma4Config, padding: Vec<usize>) -> Cache {
        Cache::new(config, padding, self.cache_kind()).forgetting(self.forgettable())
    }

    /// How keys and values are kept.
    pub(crate) fn cache_kind(&self) -> CacheKind {
        CacheKind {
            compact_keys: self.compact_keys,
            precision: self.kv_precision,
        }
    }

    /// Whether a session's cache is of the kind that [`cache`](Self::cache) makes.
    pub(crate) fn fits(&self, cache: &Cache) -> bool {
        cache.kind() == self.cache_kind() && cache.spare() == self.forgettable()
    }

    /// Columns that drafts may have to take back.
    fn forgettable(&self) -> usize {
        match self.drafts {
            Drafts::None => 0,
            _ => draft::MOST_DRAFT_TOKENS,
        }
    }

    /// The fewest tokens to generate before a text may end. `longest` is the token count of the longest prompt.
    fn fewest_tokens(&self, longest: usize) -> usize {
        let by_length = self.min_length.unwrap_or(0).saturating_sub(longest);
        self.min_new_tokens.unwrap_or(by_length)
    }

    /// Whether tokens are drawn, and nothing but their numbers asked for.
    fn draws_all(&self) -> bool {
        !self.sampling.takes_the_largest() && self.logprobs.is_none()
    }

    fn is_cancelled(&self) -> bool {
        self.cancellation
            .as_ref()
            .is_some_and(Cancellation::is_cancelled)
    }
}

/// One generated token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token<'a> {
    /// Its number in the vocabulary.
    pub id: u32,
    /// The text that became complete with it, which may be empty: a character may take several tokens.
    pub text: &'a str,
    /// What that text is.
    pub kind: TextKind,
}

/// What was generated.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// The prompt's tokens.
    pub prompt_tokens: Vec<u32>,
    /// The generated tokens; a token that ended the text is the last.
    pub tokens: Vec<u32>,
    /// The answer's text, without special tokens.
    pub text: String,
    /// The thoughts before it, without special tokens.
    pub thoughts: String,
    /// The tools that the model calls, as it writes them: `call:name{argument:<|"|>text<|"|>}`.
    pub tool_calls: Vec<String>,
    /// How likely each of the tokens was, where [`GenerateOptions::logprobs`] asks for it.
    pub logprobs: Vec<TokenLogprobs>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// How well tokens were guessed, where [`GenerateOptions::drafts`] asks for it.
    pub drafts: DraftCounts,
    /// How long it took.
    pub timings: Timings,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// A token or a text that ends texts.
    Stop,
    /// [`GenerateOptions::max_tokens`] or the model's last position.
    Length,
    /// The callback or [`GenerateOptions::cancellation`] said so.
    Cancelled,
}

/// How long a generation took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timings {
    /// From the prompt to the first token.
    pub prefill: Duration,
    /// Tokens of the prompt that were read, of a batch those of all prompts; those that a session has read before are not.
    pub prefill_tokens: usize,
    /// From the first token to the last.
    pub decode: Duration,
    /// Tokens after the first.
    pub decode_tokens: usize,
}

impl Timings {
    /// Prompt tokens a second; 0 where nothing was read.
    pub fn prefill_rate(&self) -> f64 {
        rate(self.prefill_tokens, self.prefill)
    }

    /// Generated tokens a second after the first; 0 where there is none.
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

/// What texts are generated with.
#[derive(Clone, Copy)]
pub(crate) struct Checkpoint<'a> {
    pub model: &'a Gemma4Model,
    /// Who guesses its tokens, where the options ask for it.
    pub drafter: Option<&'a Drafter>,
    pub tokenizer: &'a Tokenizer,
}

/// Called with the sequence's index and the token.
pub(crate) type OnToken<'a> = dyn FnMut(usize, &Token<'_>) -> ControlFlow<()> + 'a;

/// Refuses what cannot be generated; the number of tokens that can be.
pub(crate) fn check(
    config: &Gemma4Config,
    prompts: &[Vec<u32>],
    drafter: Option<&Drafter>,
    options: &GenerateOptions,
) -> Result<usize, Gemma4Error> {
    let refuse = |argument, reason: String| Err(Gemma4Error::Argument { argument, reason });
    options.sampling.validate()?;
    stop::validate(&options.stop_strings)?;
    draft::check(drafter, options)?;
    options.cache_kind().check(config)?;
    if options.max_tokens == 0 {
        return refuse("max_tokens", "is 0; it should be at least 1".into());
    }
    if options.prefill_chunk == Some(0) {
        return refuse("prefill_chunk", "is 0; it should be at least 1".into());
    }
    for prompt in prompts {
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
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    match config.max_position_embeddings.checked_sub(longest) {
        None | Some(0) => refuse(
            "prompt",
            format!(
                "has {longest} tokens; the model has {} positions, of which one at least is for the answer",
                config.max_position_embeddings
            ),
        ),
        Some(room) => {
            let max_tokens = options.max_tokens.min(room);
            match options
                .max_length
                .map(|most| (most, most.checked_sub(longest)))
            {
                None => Ok(max_tokens),
                Some((most, None | Some(0))) => refuse(
                    "prompt",
                    format!(
                        "has {longest} tokens; max_length is {most}, of which one at least is for the answer"
                    ),
                ),
                Some((_, Some(left))) => Ok(max_tokens.min(left)),
            }
        }
    }
}

/// Generates after each of `prompts`, whose columns from `cache.len()` on are still to be read. Prompts shorter than the
/// longest begin with the cache's padding. The options have been checked with [`check`], which gives `max_tokens`.
///
/// Returns what was generated, and afterwards the cache holds all tokens but the last.
pub(crate) fn run(
    checkpoint: Checkpoint<'_>,
    prompts: Vec<Vec<u32>>,
    cache: &mut Cache,
    options: &GenerateOptions,
    max_tokens: usize,
    on_token: &mut OnToken<'_>,
) -> Result<Vec<Generation>, Gemma4Error> {
    let Checkpoint {
        model,
        drafter,
        tokenizer,
    } = checkpoint;
    let pad = model.config().pad_token;
    let read_before = cache.len();
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let mut timings = Timings::default();
    let mut sequences: Vec<Sequence<'_>> = prompts
        .into_iter()
        .enumerate()
        .map(|(index, prompt)| Sequence::new(index, prompt, longest, tokenizer, options))
        .collect::<Result<_, _>>()?;

    let start = Instant::now();
    let hidden = prefill(model, &sequences, cache, options)?;
    let read = |sequence: &Sequence<'_>| {
        let first = read_before.max(longest - sequence.prompt.len());
        cache.len().saturating_sub(first)
    };
    timings.prefill_tokens = sequences.iter().map(read).sum();
    let Some(hidden) = hidden else {
        timings.prefill = start.elapsed();
        return finish(sequences, timings);
    };
    let mut guessers = Guessers::of(options, &sequences, hidden.clone());
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
        draft::decode(
            &mut sequences,
            &mut decoder,
            &mut guessers,
            options,
            Limits { max_tokens, pad },
            on_token,
        )?;
        timings.decode = decoding.elapsed();
        // One that was cancelled has ended, even where the cancellation is reset meanwhile.
        return finish(sequences, timings);
    }
    while !options.is_cancelled() && sequences.iter().any(|sequence| sequence.finished.is_none()) {
        // Devices draw without regard to a text's beginning.
        if may_draw && !begins(&sequences) {
            decoder = decoder.with_samplers(&samplers(&sequences))?;
            may_draw = false;
        }
        // A sequence that has ended goes along until the others have.
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

/// The next token of each sequence.
fn choose(
    sequences: &mut [Sequence<'_>],
    next: Next<'_>,
    options: &GenerateOptions,
) -> Result<Vec<u32>, Gemma4Error> {
    Chosen::of(next, sequences, options)?.tokens(sequences, options)
}

/// The next token of each sequence after `tokens`, which are read. Where it `goes_on`, the device may read the next ones before they are known here.
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

/// What there is of the sequences.
fn finish(sequences: Vec<Sequence<'_>>, timings: Timings) -> Result<Vec<Generation>, Gemma4Error> {
    sequences
        .into_iter()
        .map(|sequence| sequence.finish(timings))
        .collect()
}

/// Whether work is queued on a device of its own, rather than done by the processor at once.
fn is_accelerated(model: &Gemma4Model) -> bool {
    #[cfg(feature = "cube")]
    return op::runs(&model.device(), model.dtype());
    #[cfg(not(feature = "cube"))]
    {
        let _ = model;
        false
    }
}

/// Reads what is not yet in the cache of all prompts; what the logits after their last tokens are made of, `[batch, 1, hidden]`, nothing
/// where it was cancelled.
fn prefill(
    model: &Gemma4Model,
    sequences: &[Sequence<'_>],
    cache: &mut Cache,
    options: &GenerateOptions,
) -> Result<Option<Tensor<3>>, Gemma4Error> {
    let prompts: Vec<&[u32]> = sequences.iter().map(|one| &one.prompt[..]).collect();
    let longest = prompts.iter().map(|prompt| prompt.len()).max().unwrap_or(0);
    read(model, &prompts, longest, Logits::Last(1), cache, options)
}

/// Reads the beginning of a prompt, up to a column, as a generation would.
pub(crate) fn read_beginning(
    model: &Gemma4Model,
    beginning: &[u32],
    cache: &mut Cache,
    options: &GenerateOptions,
) -> Result<(), Gemma4Error> {
    let end = beginning.len();
    read(model, &[beginning], end, Logits::None, cache, options).map(|_| ())
}

/// Reads prompts by chunks, from the cache's last column up to `longest`, the length of the longest of them. What
/// the logits that are asked for are made of, which are of the last chunk, `[batch, asked, hidden]`; nothing where none are, and where it
/// was cancelled.
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
    let chunk = options.prefill_chunk.unwrap_or_else(|| {
        let together = match is_accelerated(model) {
            true => ACCELERATORS_CHUNK,
            false => PROCESSORS_CHUNK,
        };
        (together / prompts.len()).max(1)
    });
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
            // What is only queued could not be cancelled any more, and holds its rows on the host.
            device
                .sync()
                .map_err(|error| Gemma4Error::Device(error.to_string()))?;
        }
    }
}
