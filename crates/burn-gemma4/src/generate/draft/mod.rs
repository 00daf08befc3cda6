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
use std::slice;

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

/// Refuses numbers of drafts that there are not, drafts for several sequences, and those of a drafter where there is none.
pub(super) fn check(
    sequences: usize,
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
        (Drafts::None, _) => Ok(()),
        _ if sequences > 1 => {
            // Each would accept another number of them, but all sequences of a cache are at the same column.
            let reason = format!("are for one sequence at a time, but there are {sequences}");
            refuse("drafts", reason)
        }
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
    /// Whom the options ask for, after a prompt whose last position left `hidden`; `None` where it is nobody.
    pub fn new(
        options: &GenerateOptions,
        sequences: &[Sequence<'_>],
        hidden: Tensor<3>,
    ) -> Option<Self> {
        let (source, cost) = match (options.drafts, sequences) {
            (Drafts::Lookup, [sequence]) => {
                let mut lookup = Lookup::default();
                lookup.read(&sequence.prompt);
                (Source::Lookup { lookup, known: 0 }, Cost::LOOKUP)
            }
            (Drafts::Drafter, [_]) => (Source::Drafter(flat_rows(hidden)), Cost::DRAFTER),
            _ => return None,
        };
        Some(Self {
            source,
            pace: Pace::new(options.draft_tokens, cost),
        })
    }

    /// Up to `most` tokens that may come after the sequence's last one, `last`, which the cache does not hold yet.
    fn guess(
        &mut self,
        sequence: &Sequence<'_>,
        last: u32,
        decoder: &mut Decoder<'_>,
        most: usize,
    ) -> Result<Vec<u32>, Gemma4Error> {
        let count = self.pace.next().min(most);
        match &mut self.source {
            Source::Lookup { lookup, known } => {
                lookup.read(&sequence.tokens[*known..]);
                *known = sequence.tokens.len();
                Ok(lookup.draft(count))
            }
            Source::Drafter(_) if count == 0 => Ok(Vec::new()),
            Source::Drafter(hidden) => decoder.guess(last, hidden.clone(), count)?.tokens(),
        }
    }

    /// Takes note of a pass that gave `taken` tokens for so many guesses, and of what its logits were made of.
    fn learn(&mut self, drafted: usize, taken: usize, found: Option<Tensor<2>>) {
        self.pace.learn(drafted, taken - 1);
        if let (Source::Drafter(hidden), Some(found)) = (&mut self.source, found) {
            *hidden = found.narrow(0, taken - 1, 1);
        }
    }
}

/// Goes on with the only sequence, whose last token has not been read yet, until it ends.
pub(super) fn decode(
    sequence: &mut Sequence<'_>,
    decoder: &mut Decoder<'_>,
    guesser: &mut Guesser,
    options: &GenerateOptions,
    max_tokens: usize,
    on_token: &mut OnToken<'_>,
) -> Result<DraftCounts, Gemma4Error> {
    let mut counts = DraftCounts::default();
    while let Some(&last) = sequence.tokens.last()
        && sequence.finished.is_none()
        && !options.is_cancelled()
    {
        // The pass gives one token more than are drafted.
        let most = max_tokens - sequence.tokens.len() - 1;
        let drafts = guesser.guess(sequence, last, decoder, most)?;
        let read = [&[last], &drafts[..]].concat();
        let next = decoder.read(&read)?;
        let hidden = next.hidden();
        let chosen = Chosen::of(next, slice::from_ref(sequence), options)?;
        let mut taken = 0;
        for (row, drafted) in drafts.iter().map(Some).chain([None]).enumerate() {
            let token = chosen.token(row, sequence, options)?;
            sequence.take(token, max_tokens, options, on_token)?;
            taken += 1;
            if sequence.finished.is_some() || drafted != Some(&token) {
                break;
            }
        }
        // The last token taken is still to be read.
        decoder.forget(read.len() - taken)?;
        counts.passes += 1;
        counts.drafted += drafts.len();
        counts.accepted += taken - 1;
        guesser.learn(drafts.len(), taken, hidden);
    }
    Ok(counts)
}
