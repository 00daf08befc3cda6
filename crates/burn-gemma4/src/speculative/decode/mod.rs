//! Decoding with draft tokens, which are proposals for the next tokens. One forward pass of the model (below: a pass)
//! evaluates several draft tokens.
//!
//! At each position the model chooses its own token exactly as without drafts, from the same logits and random numbers.
//! A draft token is accepted if it equals the model's token at its position. The model's token replaces the first
//! rejected draft token, and the later draft tokens are dropped.
//!
//! The generated text therefore equals the text without drafts. Only the rounding of logits may depend on the number of
//! tokens in a pass.

mod draft_length;
mod lookup;

use crate::error::Gemma4Error;
use crate::generate::decode::Streams;
use crate::generate::decode::{Decoder, DraftTokens, Next};
use crate::generate::sequence::{Chosen, Sequence};
use crate::generate::{GenerateOptions, OnToken};
use crate::op::flat_rows;
use crate::speculative::drafter::Drafter;
use crate::speculative::drafts::{Drafts, MAX_DRAFT_TOKENS};
use burn::tensor::Tensor;
use draft_length::{Cost, DraftLength};
use lookup::Lookup;

/// Checks the options: the number of draft tokens is valid, and a drafter is loaded if the options select one.
pub(crate) fn check(
    drafter: Option<&Drafter>,
    options: &GenerateOptions,
) -> Result<(), Gemma4Error> {
    let refuse = |argument, reason| Err(Gemma4Error::Argument { argument, reason });
    match options.draft_tokens {
        Some(count) if !(1..=MAX_DRAFT_TOKENS).contains(&count) => {
            let reason = format!("is {count}; it should be from 1 to {MAX_DRAFT_TOKENS}");
            return refuse("draft_tokens", reason);
        }
        _ => (),
    }
    match (options.drafts, drafter) {
        (Drafts::Drafter, None) => refuse(
            "drafts",
            "are a drafter's, but none was loaded: load one with Gemma4::with_drafter".into(),
        ),
        _ => Ok(()),
    }
}

/// The sources of draft tokens for all sequences.
pub(crate) struct DraftSources {
    /// One source per sequence. The list is empty without speculative decoding.
    of_sequences: Vec<DraftSource>,
    /// The hidden states from which the model chose the last token of each sequence.
    streams: Streams,
}

/// The source of draft tokens for one sequence, and the adaptive number of draft tokens.
struct DraftSource {
    source: Source,
    pace: DraftLength,
}

enum Source {
    Lookup {
        lookup: Lookup,
        /// The number of generated tokens that `lookup` already contains.
        known: usize,
    },
    /// The drafter that the decoder holds.
    Drafter,
}

impl DraftSources {
    /// Creates the sources of draft tokens that the options select. `hidden`, `[batch, 1, hidden]`, is the hidden state
    /// at each prompt's last position.
    pub fn of(options: &GenerateOptions, sequences: &[Sequence<'_>], hidden: Tensor<3>) -> Self {
        let of_sequence = |sequence: &Sequence<'_>| {
            let (source, cost) = match options.drafts {
                Drafts::None => return None,
                Drafts::Lookup => {
                    let mut lookup = Lookup::default();
                    lookup.read(&sequence.prompt.tokens);
                    (Source::Lookup { lookup, known: 0 }, Cost::LOOKUP)
                }
                Drafts::Drafter => (Source::Drafter, Cost::DRAFTER),
            };
            Some(DraftSource {
                source,
                pace: DraftLength::new(options.draft_tokens, cost, sequences.len()),
            })
        };
        Self {
            of_sequences: sequences.iter().filter_map(of_sequence).collect(),
            streams: Streams {
                rows: flat_rows(hidden),
                of: (0..sequences.len()).collect(),
            },
        }
    }

    /// True if there is no source of draft tokens, because the options disable speculative decoding.
    pub fn is_empty(&self) -> bool {
        self.of_sequences.is_empty()
    }

    /// Proposes draft tokens, and evaluates each sequence's last token and the draft tokens in one forward pass. The
    /// keys and values of the last token are not in the cache yet. Returns the draft tokens, and the logits after each
    /// evaluated token.
    fn guess_and_read<'a>(
        &mut self,
        sequences: &[Sequence<'_>],
        decoder: &'a mut Decoder<'_>,
        limits: Limits,
    ) -> Result<(Guessed, Next<'a>), Gemma4Error> {
        let both = sequences.iter().zip(&self.of_sequences);
        let counts: Vec<usize> = both
            .map(|(sequence, guesser)| match sequence.finished {
                // Limit the number of draft tokens so that the text does not become too long. A forward pass generates
                // all accepted draft tokens and one more token.
                None => {
                    let most = limits.max_tokens - sequence.tokens.len() - 1;
                    guesser.pace.next().min(most)
                }
                Some(_) => 0,
            })
            .collect();
        let most = counts.iter().copied().max().unwrap_or(0);
        let last: Vec<u32> = sequences.iter().map(|one| last(one, limits)).collect();
        let by_drafter = |guesser: &DraftSource| matches!(guesser.source, Source::Drafter);
        if most > 0 && self.of_sequences.iter().all(by_drafter) {
            // Run the drafter once for all sequences, not once per sequence.
            let (tokens, next) = decoder.guess_and_read_each(&last, &self.streams, most)?;
            let guessed = Guessed::ByDrafter {
                tokens,
                counts,
                most,
            };
            return Ok((guessed, next));
        }
        let both = sequences.iter().zip(&mut self.of_sequences).zip(counts);
        let drafts: Vec<Vec<u32>> = both
            .map(|((sequence, guesser), count)| guesser.look_up(sequence, count))
            .collect();
        let count = 1 + drafts.iter().map(Vec::len).max().unwrap_or(0);
        let mut read = Vec::with_capacity(count * sequences.len());
        for (last, drafts) in last.into_iter().zip(&drafts) {
            let end = read.len() + count;
            read.push(last);
            read.extend(drafts);
            read.resize(end, limits.pad);
        }
        let next = decoder.read_each(&read)?;
        Ok((Guessed::LookedUp { drafts, count }, next))
    }

    /// Records the result of a forward pass for one sequence: `drafted` draft tokens were evaluated, and `taken` tokens
    /// were generated. `first` is the index of the sequence's first row among the hidden states of the pass.
    fn learn(&mut self, sequence: usize, drafted: usize, taken: usize, first: usize) {
        self.of_sequences[sequence].pace.learn(drafted, taken - 1);
        self.streams.of[sequence] = first + taken - 1;
    }
}

impl DraftSource {
    /// Returns up to `count` draft tokens from prompt lookup, or none if the source is the drafter.
    fn look_up(&mut self, sequence: &Sequence<'_>, count: usize) -> Vec<u32> {
        match &mut self.source {
            Source::Lookup { lookup, known } => {
                lookup.read(&sequence.tokens[*known..]);
                *known = sequence.tokens.len();
                lookup.draft(count)
            }
            Source::Drafter => Vec::new(),
        }
    }
}

/// The draft tokens of the current forward pass, by their source.
enum Guessed {
    LookedUp {
        drafts: Vec<Vec<u32>>,
        /// The number of tokens per sequence that the forward pass evaluates.
        count: usize,
    },
    ByDrafter {
        tokens: DraftTokens,
        /// The number of draft tokens that each sequence uses. The drafter proposes `most` draft tokens for every
        /// sequence, and a sequence ignores the surplus.
        counts: Vec<usize>,
        most: usize,
    },
}

impl Guessed {
    /// Returns the number of tokens per sequence that the forward pass evaluates.
    fn read(&self) -> usize {
        match self {
            Self::LookedUp { count, .. } => *count,
            Self::ByDrafter { most, .. } => 1 + most,
        }
    }

    /// Returns the draft tokens of each sequence.
    fn of_sequences(self) -> Result<Vec<Vec<u32>>, Gemma4Error> {
        let (tokens, counts) = match self {
            Self::LookedUp { drafts, .. } => return Ok(drafts),
            Self::ByDrafter { tokens, counts, .. } => (tokens.tokens()?, counts),
        };
        let rows = counts.iter().enumerate();
        Ok(rows
            .map(|(row, count)| {
                let of_row = tokens[row..].iter().step_by(counts.len());
                of_row.take(*count).copied().collect()
            })
            .collect())
    }
}

/// Returns the first token that the next forward pass evaluates for a sequence: its last token, or the padding token if
/// the sequence has finished.
fn last(sequence: &Sequence<'_>, limits: Limits) -> u32 {
    match (sequence.finished, sequence.tokens.last()) {
        (None, Some(last)) => *last,
        _ => limits.pad,
    }
}

/// The maximum number of tokens to generate, and the padding token that stands in for the tokens of finished sequences.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    pub max_tokens: usize,
    pub pad: u32,
}

/// Generates tokens until all sequences have finished. At the start the cache holds all tokens of each sequence except
/// the last.
///
/// A forward pass evaluates equally many tokens of every sequence. After the pass, the keys and values of rejected
/// tokens are removed from the cache.
pub(crate) fn decode(
    sequences: &mut [Sequence<'_>],
    decoder: &mut Decoder<'_>,
    guessers: &mut DraftSources,
    options: &GenerateOptions,
    limits: Limits,
    on_token: &mut OnToken<'_>,
) -> Result<(), Gemma4Error> {
    while !options.is_cancelled() && sequences.iter().any(|one| one.finished.is_none()) {
        let (guessed, next) = guessers.guess_and_read(sequences, decoder, limits)?;
        let count = guessed.read();
        if let Some(hidden) = next.hidden() {
            guessers.streams.rows = hidden;
        }
        let chosen = Chosen::of(next, sequences, options)?;
        // `of_sequences` does not wait for the device here, because `Chosen::of` has already waited for the model's
        // choices. The device copies the draft tokens to the host before these choices.
        let drafts = guessed.of_sequences()?;
        let mut forgotten = vec![count - 1; sequences.len()];
        for (index, (sequence, drafts)) in sequences.iter_mut().zip(&drafts).enumerate() {
            let first = index * count;
            if sequence.finished.is_some() {
                // Ignore the drafter's tokens for a finished sequence. Select an arbitrary hidden state of the
                // sequence, because the drafter needs a valid row for every sequence.
                guessers.streams.of[index] = first;
                continue;
            }
            let mut taken = 0;
            for (row, drafted) in drafts.iter().map(Some).chain([None]).enumerate() {
                let token = chosen.token(first + row, sequence, options)?;
                sequence.take(token, limits.max_tokens, options, on_token)?;
                taken += 1;
                if sequence.finished.is_some() || drafted != Some(&token) {
                    break;
                }
            }
            // Keep the keys and values of the first `taken` tokens of the forward pass: the token before the draft
            // tokens, and all generated tokens except the last. The next pass evaluates the last generated token.
            forgotten[index] = count - taken;
            sequence.drafts.passes += 1;
            sequence.drafts.drafted += drafts.len();
            sequence.drafts.accepted += taken - 1;
            guessers.learn(index, drafts.len(), taken, first);
        }
        decoder.forget_each(&forgotten)?;
    }
    Ok(())
}
