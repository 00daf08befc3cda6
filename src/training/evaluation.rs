//! What documents cost a model: the cross entropy of every token that is to be learned, each counted once.
//!
//! A document longer than a window is read in several, each of which begins with the document's first token, without which Gemma
//! loses its way. A window counts what the one before has not, and reads what comes before that again.

use super::{
    documents::Document,
    loader::Data,
    rows::{Example, Row, places},
};
use crate::{Error, terminal::WrongArgument};
use burn_gemma4::{Gemma4Config, Gemma4Model};
use indicatif::ProgressBar;
use serde::Serialize;
use std::{cmp::Reverse, ops::Range};

/// How documents that are longer than a window are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Tokens of a window, at least 2.
    pub length: usize,
    /// Tokens that every window but the first of a document counts, from 1 to one less than the window has.
    pub stride: usize,
}

/// How to read documents, as programs are told.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct WindowArguments {
    /// Tokens that are read at once [default: 2048, or as many as the model was made for]. A longer document is read in windows of
    /// so many, each of which begins with the document's first token.
    #[arg(long, value_name = "TOKENS")]
    pub length: Option<usize>,
    /// Tokens that such a window counts, but for the first one, which counts all: the last ones, which have the others before them
    /// [default: half of the length].
    #[arg(long, value_name = "TOKENS")]
    pub stride: Option<usize>,
}

impl WindowArguments {
    /// The windows for a model of this shape.
    ///
    /// # Errors
    /// Where a window has less than 2 tokens or more than the model was made for, and where the stride is not within it.
    pub fn windows(&self, config: &Gemma4Config) -> Result<Windows, WrongArgument> {
        /// Where nobody says otherwise.
        const LENGTH: usize = 2048;
        let most = config.max_position_embeddings;
        let length = self.length.unwrap_or(LENGTH.min(most));
        if !(2..=most).contains(&length) {
            return Err(WrongArgument(format!(
                "--length is {length}; windows have 2 tokens to the {most} that the model was made for"
            )));
        }
        let stride = self.stride.unwrap_or(length / 2);
        match (1..length).contains(&stride) {
            true => Ok(Windows { length, stride }),
            false => Err(WrongArgument(format!(
                "--stride is {stride}; with --length {length} it is 1 to {}",
                length - 1
            ))),
        }
    }
}

/// What some tokens cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Tokens that count.
    pub tokens: usize,
    /// The sum of their cross entropies.
    pub nats: f64,
}

/// [`Cost`] as it is told.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Told {
    /// Tokens that count.
    pub tokens: usize,
    /// Nats a token.
    pub cross_entropy: f64,
    /// Its exponential.
    pub perplexity: f64,
}

impl Cost {
    /// By token; nothing where none counts.
    pub fn told(self) -> Option<Told> {
        let cross_entropy = self.nats / self.tokens as f64;
        (self.tokens > 0).then_some(Told {
            tokens: self.tokens,
            cross_entropy,
            perplexity: cross_entropy.exp(),
        })
    }
}

impl std::iter::Sum for Cost {
    fn sum<I: Iterator<Item = Self>>(costs: I) -> Self {
        costs.fold(Self::default(), |sum, cost| Self {
            tokens: sum.tokens + cost.tokens,
            nats: sum.nats + cost.nats,
        })
    }
}

impl std::fmt::Display for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            tokens,
            cross_entropy,
            perplexity,
        } = self;
        write!(
            f,
            "{cross_entropy:.4} nats a token, perplexity {perplexity:.4}, {tokens} tokens"
        )
    }
}

/// A window of a document: its first token, if the window does not begin with that itself, and a part of it.
struct Window {
    document: usize,
    example: usize,
    part: Range<usize>,
    /// Where what it counts begins.
    counted: usize,
}

impl Window {
    /// Those of an example.
    fn of(document: usize, example: usize, length: usize, windows: Windows) -> Vec<Self> {
        let mut made = Vec::new();
        let mut counted = 0;
        while counted < length {
            let part = match counted {
                0 => 0..length.min(windows.length),
                _ => {
                    let end = length.min(counted + windows.stride);
                    end - (windows.length - 1)..end
                }
            };
            let next = part.end;
            made.push(Self {
                document,
                example,
                part,
                counted,
            });
            counted = next;
        }
        made
    }

    fn len(&self) -> usize {
        usize::from(self.part.start > 0) + self.part.len()
    }

    fn counts(&self, example: &Example) -> bool {
        // Nothing predicts the first token.
        let counted = self.counted.max(1)..self.part.end.max(1);
        example.learned[counted].contains(&true)
    }

    /// What it reads of the example, and learns.
    fn example(&self, whole: &Example) -> Example {
        let before = (self.part.start > 0).then_some(0);
        let places = before.into_iter().chain(self.part.clone());
        let (tokens, learned) = places
            .map(|place| {
                let is_counted = place >= self.counted && whole.learned[place];
                (whole.tokens[place], is_counted)
            })
            .unzip();
        Example { tokens, learned }
    }
}

/// What each document costs. Short ones share a row with others, none of which sees another. `on_progress` gets the tokens that
/// have been read, and how many there are to read.
///
/// # Errors
/// Where the device fails.
///
/// # Panics
/// Where windows have no two tokens, or a stride that is not within them.
pub fn evaluate(
    model: &Gemma4Model,
    documents: &[Document],
    windows: Windows,
    mut on_progress: impl FnMut(usize, usize),
) -> Result<Vec<Cost>, Error> {
    assert!((1..windows.length).contains(&windows.stride), "{windows:?}");
    let whole = |window: &Window| &documents[window.document].examples[window.example];
    let mut pieces: Vec<Window> = Vec::new();
    for (number, document) in documents.iter().enumerate() {
        for (index, example) in document.examples.iter().enumerate() {
            let made = Window::of(number, index, example.tokens.len(), windows);
            let counts = made.into_iter().filter(|window| window.counts(example));
            pieces.extend(counts);
        }
    }
    pieces.sort_by_key(|window| Reverse(window.len()));
    let lengths: Vec<usize> = pieces.iter().map(Window::len).collect();
    let (mut done, total) = (0, lengths.iter().sum());

    let mut costs = vec![Cost::default(); documents.len()];
    for places in places(&lengths, windows.length) {
        let of_row: Vec<&Window> = places.into_iter().map(|place| &pieces[place]).collect();
        let examples = of_row.iter().map(|window| window.example(whole(window)));
        let row = Row::of(&examples.collect::<Vec<_>>());
        let (targets, read) = (row.targets.clone(), row.tokens.len());
        let losses = losses(model, row, windows.length)?;
        let mut start = 0;
        for window in of_row {
            let range = start..start + window.len();
            start = range.end;
            let cost = &mut costs[window.document];
            cost.tokens += targets[range.clone()]
                .iter()
                .filter(|target| **target >= 0)
                .count();
            cost.nats += losses[range].iter().copied().map(f64::from).sum::<f64>();
        }
        done += read;
        on_progress(done, total);
    }
    Ok(costs)
}

/// Shows [`evaluate`]'s progress in a bar on standard error, if that is a terminal.
pub fn progress() -> impl FnMut(usize, usize) {
    let bar = ProgressBar::new(0);
    move |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
        if done == total {
            bar.finish_and_clear();
        }
    }
}

/// The loss at each position of a row.
fn losses(model: &Gemma4Model, row: Row, longest: usize) -> Result<Vec<f32>, Error> {
    let data = Data {
        // A device meets few shapes so.
        positions: row.tokens.len().next_power_of_two().min(longest),
        rows: vec![row],
        batch: 1,
        padding: model.config().pad_token,
    };
    let batch = data.batch(&[0], &model.device())?;
    let hidden = model.hidden_packed(batch.tokens, &batch.packing)?;
    let losses = model.token_losses(hidden, batch.targets)?;
    let losses = losses
        .try_into_data()
        .map_err(|error| format!("the losses could not be read: {error}"))?;
    Ok(losses.iter::<f32>().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_count_every_token_once() {
        for (length, windows) in [
            (1, [4, 2]),
            (4, [4, 2]),
            (5, [4, 3]),
            (5, [4, 1]),
            (12, [4, 1]),
            (37, [8, 5]),
        ] {
            let windows = Windows {
                length: windows[0],
                stride: windows[1],
            };
            let whole = Example {
                tokens: (0..length as u32).collect(),
                learned: vec![true; length],
            };
            let mut counted = vec![0; length];
            for window in Window::of(0, 0, length, windows) {
                let Example { tokens, learned } = window.example(&whole);
                assert_eq!(tokens.len(), window.len());
                assert!(tokens.len() <= windows.length);
                assert_eq!(tokens[0], 0);
                // One after the other but for the first token.
                assert!(tokens[1..].windows(2).all(|pair| pair[1] == pair[0] + 1));
                for (token, learned) in tokens.into_iter().zip(learned) {
                    counted[token as usize] += usize::from(learned);
                }
            }
            assert_eq!(counted, vec![1; length], "{windows:?} of {length}");
        }
    }
}
