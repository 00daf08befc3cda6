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
    sequence::{Chosen, Sequence},
};
use crate::{Decoder, Drafter, Gemma4Error, op::flat_rows};
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

/// Who guesses for a sequence.
pub(super) struct Guesser {
    source: Source,
    pace: Pace,
}

enum Source {
    Lookup {
        lookup: Lookup,
        /// Tokens of the sequence's text that it knows.
        known: usize,
    },
    /// The decoder's drafter, with what the last token's logits were made of, `[1, hidden]`.
    Drafter(Tensor<2>),
}

impl Guesser {
    /// Whom the options ask for, one a sequence, after prompts whose last positions left `hidden`, `[batch, 1, hidden]`; none where it is
    /// nobody.
    pub fn of(
        options: &GenerateOptions,
        sequences: &[Sequence<'_>],
        hidden: Tensor<3>,
    ) -> Vec<Self> {
        let hidden = flat_rows(hidden);
        let of_sequence = |(row, sequence): (usize, &Sequence<'_>)| {
            let (source, cost) = match options.drafts {
                Drafts::None => return None,
                Drafts::Lookup => {
                    let mut lookup = Lookup::default();
                    lookup.read(&sequence.prompt);
                    (Source::Lookup { lookup, known: 0 }, Cost::LOOKUP)
                }
                Drafts::Drafter => {
                    let hidden = hidden.clone().narrow(0, row, 1);
                    (Source::Drafter(hidden), Cost::DRAFTER)
                }
            };
            Some(Self {
                source,
                pace: Pace::new(options.draft_tokens, cost, sequences.len()),
            })
        };
        sequences
            .iter()
            .enumerate()
            .filter_map(of_sequence)
            .collect()
    }

    /// Takes note of a pass that gave `taken` tokens for so many guesses, and of what its logits were made of, from row `first` on.
    fn learn(&mut self, drafted: usize, taken: usize, found: Option<&Tensor<2>>, first: usize) {
        self.pace.learn(drafted, taken - 1);
        if let (Source::Drafter(hidden), Some(found)) = (&mut self.source, found) {
            *hidden = found.clone().narrow(0, first + taken - 1, 1);
        }
    }
}

/// What may come after each sequence's last token, which the cache does not hold yet.
fn guesses(
    sequences: &[Sequence<'_>],
    decoder: &mut Decoder<'_>,
    guessers: &mut [Guesser],
    limits: Limits,
) -> Result<Vec<Vec<u32>>, Gemma4Error> {
    let both = sequences.iter().zip(guessers.iter());
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
    let (mut drafts, mut hidden) = (Vec::new(), Vec::new());
    for ((sequence, guesser), count) in sequences.iter().zip(guessers).zip(&counts) {
        match &mut guesser.source {
            Source::Lookup { lookup, known } => {
                lookup.read(&sequence.tokens[*known..]);
                *known = sequence.tokens.len();
                drafts.push(lookup.draft(*count));
            }
            Source::Drafter(of_sequence) => hidden.push(of_sequence.clone()),
        }
    }
    let most = counts.iter().copied().max().unwrap_or(0);
    if hidden.is_empty() || most == 0 {
        drafts.resize(sequences.len(), Vec::new());
        return Ok(drafts);
    }
    // A drafter guesses for all sequences at once.
    let last: Vec<u32> = sequences.iter().map(|one| last(one, limits)).collect();
    let hidden = match hidden.len() {
        1 => hidden.remove(0),
        _ => Tensor::cat(hidden, 0),
    };
    let found = decoder.guess_each(&last, hidden, most)?.tokens()?;
    let rows = counts.iter().enumerate();
    Ok(rows
        .map(|(row, count)| {
            let of_row = found[row..].iter().step_by(sequences.len());
            of_row.take(*count).copied().collect()
        })
        .collect())
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

/// Goes on with the sequences, whose last tokens have not been read yet, until they end. A pass reads as many tokens of each, those that have
/// fewer guesses filled up; each takes its own number of them.
pub(super) fn decode(
    sequences: &mut [Sequence<'_>],
    decoder: &mut Decoder<'_>,
    guessers: &mut [Guesser],
    options: &GenerateOptions,
    limits: Limits,
    on_token: &mut OnToken<'_>,
) -> Result<(), Gemma4Error> {
    while !options.is_cancelled() && sequences.iter().any(|one| one.finished.is_none()) {
        let drafts = guesses(sequences, decoder, guessers, limits)?;
        let count = 1 + drafts.iter().map(Vec::len).max().unwrap_or(0);
        let mut read = Vec::with_capacity(count * sequences.len());
        for (sequence, drafts) in sequences.iter().zip(&drafts) {
            let end = read.len() + count;
            read.push(last(sequence, limits));
            read.extend(drafts);
            read.resize(end, limits.pad);
        }
        let next = decoder.read_each(&read)?;
        let hidden = next.hidden();
        let chosen = Chosen::of(next, sequences, options)?;
        let mut forgotten = vec![count - 1; sequences.len()];
        let going = sequences.iter_mut().zip(guessers.iter_mut()).enumerate();
        for (index, (sequence, guesser)) in going.filter(|(_, (one, _))| one.finished.is_none()) {
            let (first, drafts) = (index * count, &drafts[index]);
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
            guesser.learn(drafts.len(), taken, hidden.as_ref(), first);
        }
        decoder.forget_each(&forgotten)?;
    }
    Ok(())
}
