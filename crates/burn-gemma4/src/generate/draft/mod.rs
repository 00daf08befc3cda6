//! Drafts: tokens that are guessed before the model has read what comes before them, so that it reads several in one pass.
//!
//! The model's token after each is chosen as without drafts, from the same logits and by the same random numbers, and as long as it is
//! the one that was drafted, the pass has also read what comes next. So the text is the one that it would be without drafts: a draft is
//! accepted with the probability that the model gives it, and what comes in a wrong one's place is drawn from the others. Only how
//! logits are rounded may depend on how many tokens a pass reads.

mod lookup;
mod pace;

use super::{
    GenerateOptions, OnToken,
    decode::Streams,
    sequence::{Chosen, Sequence},
};
use crate::{Decoder, Drafter, Gemma4Error, GuessedTokens, Next, op::flat_rows};
use burn::tensor::Tensor;
use lookup::Lookup;
use pace::{Cost, Pace};
use serde::Serialize;

/// Tokens that are drafted for one pass at most.
pub(crate) const MOST_DRAFT_TOKENS: usize = 8;

/// Who guesses tokens ahead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Drafts {
    /// Nobody.
    #[default]
    None,
    /// The text itself: what came after its last tokens where they were before. That helps where answers repeat their prompts.
    Lookup,
    /// A small model that was made for it: see [`Gemma4::with_drafter`](crate::Gemma4::with_drafter).
    Drafter,
}

/// How well tokens were guessed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DraftCounts {
    /// Passes through the model after the prompt.
    pub passes: usize,
    /// Tokens that were guessed for them.
    pub drafted: usize,
    /// Those that the model would have taken, too, and that are in the text, but for one that ended it: the last token of a pass counts as
    /// the model's own.
    pub accepted: usize,
}

impl DraftCounts {
    /// The share of guesses that were right; 0 where there are none.
    pub fn acceptance(&self) -> f64 {
        share(self.accepted, self.drafted)
    }

    /// Tokens that a pass gave: the guesses that were right, and one more; 0 where there was none.
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

/// Refuses numbers of drafts that there are not, and those of a drafter where there is none.
pub(super) fn check(
    drafter: Option<&Drafter>,
    options: &GenerateOptions,
) -> Result<(), Gemma4Error> {
    let refuse = |argument, reason| Err(Gemma4Error::Argument { argument, reason });
    match options.draft_tokens {
        Some(count) if !(1..=MOST_DRAFT_TOKENS).contains(&count) => {
            let reason = format!("is {count}; it should be from 1 to {MOST_DRAFT_TOKENS}");
            return refuse("draft_tokens", reason);
        }
        _ => (),
    }
    match (options.drafts, drafter) {
        (Drafts::Drafter, None) => refuse(
            "drafts",
            "are a drafter's, but none was loaded: Gemma4::with_drafter does".into(),
        ),
        _ => Ok(()),
    }
}

/// Who guesses for sequences.
pub(super) struct Guessers {
    /// One a sequence; none where it is nobody.
    of_sequences: Vec<Guesser>,
    /// What the sequences' last tokens were chosen by.
    streams: Streams,
}

/// Who guesses for a sequence.
struct Guesser {
    source: Source,
    pace: Pace,
}

enum Source {
    Lookup {
        lookup: Lookup,
        /// Tokens of the sequence's text that it knows.
        known: usize,
    },
    /// The decoder's drafter.
    Drafter,
}

impl Guessers {
    /// Whom the options ask for, after prompts whose last positions left `hidden`, `[batch, 1, hidden]`.
    pub fn of(options: &GenerateOptions, sequences: &[Sequence<'_>], hidden: Tensor<3>) -> Self {
        let of_sequence = |sequence: &Sequence<'_>| {
            let (source, cost) = match options.drafts {
                Drafts::None => return None,
                Drafts::Lookup => {
                    let mut lookup = Lookup::default();
                    lookup.read(&sequence.prompt);
                    (Source::Lookup { lookup, known: 0 }, Cost::LOOKUP)
                }
                Drafts::Drafter => (Source::Drafter, Cost::DRAFTER),
            };
            Some(Guesser {
                source,
                pace: Pace::new(options.draft_tokens, cost, sequences.len()),
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

    /// Whether nobody guesses.
    pub fn is_empty(&self) -> bool {
        self.of_sequences.is_empty()
    }

    /// Has what may come after each sequence's last token guessed, which the cache does not hold yet, and reads both: the guesses, and what comes after each token
    /// that was read, as many of each sequence.
    fn guess_and_read<'a>(
        &mut self,
        sequences: &[Sequence<'_>],
        decoder: &'a mut Decoder<'_>,
        limits: Limits,
    ) -> Result<(Guessed, Next<'a>), Gemma4Error> {
        let both = sequences.iter().zip(&self.of_sequences);
        let counts: Vec<usize> = both
            .map(|(sequence, guesser)| match sequence.finished {
                // The pass gives one token more than are drafted.
                None => {
                    let most = limits.max_tokens - sequence.tokens.len() - 1;
                    guesser.pace.next().min(most)
                }
                Some(_) => 0,
            })
            .collect();
        let most = counts.iter().copied().max().unwrap_or(0);
        let last: Vec<u32> = sequences.iter().map(|one| last(one, limits)).collect();
        let by_drafter = |guesser: &Guesser| matches!(guesser.source, Source::Drafter);
        if most > 0 && self.of_sequences.iter().all(by_drafter) {
            // A drafter guesses for all sequences at once.
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

    /// Takes note of a pass that gave a sequence `taken` tokens for so many guesses, from row `first` on.
    fn learn(&mut self, sequence: usize, drafted: usize, taken: usize, first: usize) {
        self.of_sequences[sequence].pace.learn(drafted, taken - 1);
        self.streams.of[sequence] = first + taken - 1;
    }
}

impl Guesser {
    /// What the text itself says of the next tokens, if it is asked.
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

/// Guesses that are being read.
enum Guessed {
    LookedUp {
        drafts: Vec<Vec<u32>>,
        /// Tokens that are read of each sequence.
        count: usize,
    },
    ByDrafter {
        tokens: GuessedTokens,
        /// Of each sequence, how many count of those that were guessed for all.
        counts: Vec<usize>,
        most: usize,
    },
}

impl Guessed {
    /// Tokens that are read of each sequence.
    fn read(&self) -> usize {
        match self {
            Self::LookedUp { count, .. } => *count,
            Self::ByDrafter { most, .. } => 1 + most,
        }
    }

    /// Those of each sequence.
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

/// The token that a sequence reads next. One that has ended goes along until the others have.
fn last(sequence: &Sequence<'_>, limits: Limits) -> u32 {
    match (sequence.finished, sequence.tokens.last()) {
        (None, Some(last)) => *last,
        _ => limits.pad,
    }
}

/// How far sequences go, and what fills those up that have ended.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub max_tokens: usize,
    pub pad: u32,
}

/// Goes on with the sequences, whose last tokens have not been read yet, until they end. A pass reads as many tokens of each, whoever has fewer guesses; each takes
/// its own number of them.
pub(super) fn decode(
    sequences: &mut [Sequence<'_>],
    decoder: &mut Decoder<'_>,
    guessers: &mut Guessers,
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
        // They are there before what was chosen after them is.
        let drafts = guessed.of_sequences()?;
        let mut forgotten = vec![count - 1; sequences.len()];
        for (index, (sequence, drafts)) in sequences.iter_mut().zip(&drafts).enumerate() {
            let first = index * count;
            if sequence.finished.is_some() {
                // What is guessed for it does not count, but must be made of something.
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
            // The last token taken is still to be read.
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
