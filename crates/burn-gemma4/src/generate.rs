//! From a prompt to text, token by token.

use crate::{
    Cache, ChatOptions, Gemma4Config, Gemma4Error, Gemma4Model, Next, Sampler, Sampling,
    TextStream, Tokenizer, model::Logits,
};
use burn::tensor::{Device, Int, Tensor, TensorData};
use serde::Serialize;
use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};

/// How to go on from a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Tokens to generate at most; fewer where the model's positions end.
    pub max_tokens: usize,
    /// How a token is chosen.
    pub sampling: Sampling,
    /// Tokens that end the text.
    pub stop_tokens: Vec<u32>,
    /// Goes on after them.
    pub ignore_stop_tokens: bool,
    /// Reads the prompt by this many tokens at a time, which bounds the memory that takes; at once without.
    pub prefill_chunk: Option<usize>,
    /// Records a token's launches once and replays them, where the device can. Programs whose other threads use the same
    /// CUDA device do without: see [`Decoder`](crate::Decoder).
    pub records: bool,
    /// Keeps less of keys and values, where the model has layers that can: see
    /// [`Gemma4Model::compact_cache`](crate::Gemma4Model::compact_cache).
    pub compact_keys: bool,
    /// How a conversation becomes a prompt.
    pub chat: ChatOptions,
}

/// One generated token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token<'a> {
    /// Its number in the vocabulary.
    pub id: u32,
    /// The text that became complete with it, which may be empty: a character may take several tokens.
    pub text: &'a str,
}

/// What was generated.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// The prompt's tokens.
    pub prompt_tokens: Vec<u32>,
    /// The generated tokens; a token that ended the text is the last.
    pub tokens: Vec<u32>,
    /// Their text, without special tokens.
    pub text: String,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// How long it took.
    pub timings: Timings,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// A token that ends texts.
    Stop,
    /// [`GenerateOptions::max_tokens`] or the model's last position.
    Length,
    /// The callback said so.
    Cancelled,
}

/// How long a generation took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timings {
    /// From the prompt to the first token.
    pub prefill: Duration,
    /// Tokens of the prompt that were read; those that a session has read before are not.
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

/// Called with the sequence's index and the token.
pub(crate) type OnToken<'a> = dyn FnMut(usize, &Token<'_>) -> ControlFlow<()> + 'a;

/// Refuses what cannot be generated; the number of tokens that can be.
pub(crate) fn check(
    config: &Gemma4Config,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
) -> Result<usize, Gemma4Error> {
    let refuse = |argument, reason: String| Err(Gemma4Error::Argument { argument, reason });
    options.sampling.validate()?;
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
        Some(room) => Ok(options.max_tokens.min(room)),
    }
}

/// Generates after each of `prompts`, whose columns from `cache.len()` on are still to be read. Prompts shorter than the
/// longest begin with the cache's padding. The options have been checked with [`check`], which gives `max_tokens`.
///
/// Returns what was generated, and afterwards the cache holds all tokens but the last.
pub(crate) fn run(
    model: &Gemma4Model,
    tokenizer: &Tokenizer,
    prompts: Vec<Vec<u32>>,
    cache: &mut Cache,
    options: &GenerateOptions,
    max_tokens: usize,
    on_token: &mut OnToken<'_>,
) -> Result<Vec<Generation>, Gemma4Error> {
    let device = model.device();
    let pad = model.config().pad_token;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let mut timings = Timings {
        prefill_tokens: (longest - cache.len()) * prompts.len(),
        ..Timings::default()
    };
    let mut sequences: Vec<Sequence<'_>> = prompts
        .into_iter()
        .enumerate()
        .map(|(index, prompt)| Sequence::new(index, prompt, tokenizer, options))
        .collect();

    let start = Instant::now();
    let logits = prefill(model, &sequences, longest, cache, options, &device)?;
    let mut next = choose(&mut sequences, Next::of(logits))?;
    timings.prefill = start.elapsed();

    let decoding = Instant::now();
    let mut decoder = model.decoder(cache);
    if !options.records {
        decoder = decoder.without_recording();
    }
    loop {
        for (sequence, token) in sequences.iter_mut().zip(&next) {
            sequence.take(*token, max_tokens, options, on_token)?;
        }
        if sequences.iter().all(|sequence| sequence.finished.is_some()) {
            break;
        }
        // A sequence that has ended goes along until the others have.
        let column: Vec<u32> = sequences
            .iter()
            .zip(&next)
            .map(|(sequence, token)| match sequence.finished {
                Some(_) => pad,
                None => *token,
            })
            .collect();
        next = choose(&mut sequences, decoder.step(&column)?)?;
    }
    timings.decode = decoding.elapsed();

    sequences
        .into_iter()
        .map(|sequence| sequence.finish(timings))
        .collect()
}

/// Reads what is not yet in the cache of all prompts; the logits after their last tokens.
fn prefill(
    model: &Gemma4Model,
    sequences: &[Sequence<'_>],
    longest: usize,
    cache: &mut Cache,
    options: &GenerateOptions,
    device: &Device,
) -> Result<Tensor<3>, Gemma4Error> {
    let pad = model.config().pad_token;
    let chunk = options.prefill_chunk.unwrap_or(longest);
    loop {
        let start = cache.len();
        let end = (start + chunk).min(longest);
        let column = |prompt: &[u32], column: usize| {
            (column + prompt.len())
                .checked_sub(longest)
                .map_or(pad, |index| prompt[index])
        };
        let tokens: Vec<u32> = sequences
            .iter()
            .flat_map(|sequence| (start..end).map(|index| column(&sequence.prompt, index)))
            .collect();
        let tokens = upload(tokens, [sequences.len(), end - start], device);
        let asked = match end == longest {
            true => Logits::Last(1),
            false => Logits::None,
        };
        if let Some(logits) = model.step_within(tokens, cache, asked)? {
            return Ok(logits);
        }
    }
}

fn upload(tokens: Vec<u32>, shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    let tokens: Vec<i32> = tokens.into_iter().map(|token| token as i32).collect();
    Tensor::from_data(TensorData::new(tokens, shape), device)
}

/// The next token of each sequence. Only what is needed leaves the device: numbers of tokens where all are greedy.
fn choose(sequences: &mut [Sequence<'_>], next: Next<'_>) -> Result<Vec<u32>, Gemma4Error> {
    if sequences.iter().all(|sequence| sequence.greedy) {
        return next.likeliest();
    }
    let logits = next.logits()?;
    let vocabulary = logits.len() / sequences.len();
    sequences
        .iter_mut()
        .zip(logits.chunks(vocabulary))
        .map(|(sequence, logits)| match sequence.finished {
            Some(_) => Ok(0),
            None => sequence.sampler.sample(logits),
        })
        .collect()
}

/// One sequence on its way.
struct Sequence<'a> {
    index: usize,
    prompt: Vec<u32>,
    greedy: bool,
    sampler: Sampler,
    tokens: Vec<u32>,
    stream: TextStream<'a>,
    text: String,
    finished: Option<FinishReason>,
}

impl<'a> Sequence<'a> {
    fn new(
        index: usize,
        prompt: Vec<u32>,
        tokenizer: &'a Tokenizer,
        options: &GenerateOptions,
    ) -> Self {
        Self {
            index,
            prompt,
            greedy: options.sampling.is_greedy(),
            sampler: Sampler::new(&options.sampling),
            tokens: Vec::new(),
            stream: tokenizer.stream(),
            text: String::new(),
            finished: None,
        }
    }

    fn take(
        &mut self,
        token: u32,
        max_tokens: usize,
        options: &GenerateOptions,
        on_token: &mut OnToken<'_>,
    ) -> Result<(), Gemma4Error> {
        if self.finished.is_some() {
            return Ok(());
        }
        self.tokens.push(token);
        if !options.ignore_stop_tokens && options.stop_tokens.contains(&token) {
            self.finished = Some(FinishReason::Stop);
            return Ok(());
        }
        let text = self.stream.push(token)?;
        self.text += &text;
        let token = Token {
            id: token,
            text: &text,
        };
        if on_token(self.index, &token).is_break() {
            self.finished = Some(FinishReason::Cancelled);
        } else if self.tokens.len() == max_tokens {
            self.finished = Some(FinishReason::Length);
        }
        Ok(())
    }

    fn finish(mut self, mut timings: Timings) -> Result<Generation, Gemma4Error> {
        self.text += &self.stream.finish()?;
        timings.decode_tokens = self.tokens.len().saturating_sub(1);
        Ok(Generation {
            prompt_tokens: self.prompt,
            tokens: self.tokens,
            text: self.text,
            finish_reason: self.finished.unwrap_or(FinishReason::Length),
            timings,
        })
    }
}
