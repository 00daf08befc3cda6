//! Computes the cross entropy of documents. Every token to train on is scored exactly once.
//!
//! A long document is evaluated in several windows. Each window begins with the first token of the document, because Gemma's
//! predictions are wrong without this token. The window continues with some tokens of the previous window as context, and
//! ends with the tokens that it scores.

use crate::{
    Error, InvalidArgument,
    data::{
        documents::Document,
        loader::Data,
        packing::{Example, Row, bin_pack},
    },
};
use burn_gemma4::{Gemma4, Gemma4Config, Gemma4Model, MediaTowers, PromptEncoder};
use indicatif::ProgressBar;
use serde::Serialize;
use std::{cmp::Reverse, ops::Range, sync::Arc};

/// The length and the stride of the windows. A document that is longer than one window is evaluated in several windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// The number of tokens per window, at least 2.
    pub length: usize,
    /// The number of tokens that each window scores, from 1 to `length - 1`. The first window of a document is an
    /// exception. It scores all tokens after the document's first token.
    pub stride: usize,
}

/// The command line arguments for windows.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct WindowArguments {
    /// Tokens per window [default: 2048, or the model's context length if it is shorter]. A longer document is evaluated in
    /// several windows. Each window begins with the first token of the document.
    #[arg(long, value_name = "TOKENS")]
    pub length: Option<usize>,
    /// Tokens that a window scores. These are the last tokens of the window, and the tokens before them are context. Only the
    /// first window scores all of its tokens after the first [default: half of the length].
    #[arg(long, value_name = "TOKENS")]
    pub stride: Option<usize>,
}

impl WindowArguments {
    /// Returns the windows for a model with this configuration.
    ///
    /// # Errors
    /// Returns an error if a window has fewer than 2 tokens or more than the model's context length, or if the stride is not
    /// from 1 to `length - 1`.
    pub fn windows(&self, config: &Gemma4Config) -> Result<Windows, InvalidArgument> {
        /// The default number of tokens per window.
        const LENGTH: usize = 2048;
        let most = config.max_position_embeddings;
        let length = self.length.unwrap_or(LENGTH.min(most));
        if !(2..=most).contains(&length) {
            return Err(InvalidArgument(format!(
                "--length is {length}; windows have 2 tokens to the {most} that the model was made for"
            )));
        }
        let stride = self.stride.unwrap_or(length / 2);
        match (1..length).contains(&stride) {
            true => Ok(Windows { length, stride }),
            false => Err(InvalidArgument(format!(
                "--stride is {stride}; with --length {length} it is 1 to {}",
                length - 1
            ))),
        }
    }
}

/// The summed cross entropy of the scored tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// The number of scored tokens.
    pub tokens: usize,
    /// The sum of the cross entropies of all scored tokens, in nats.
    pub nats: f64,
}

/// A [`Cost`] as means per token, for terminal output and reports.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CostSummary {
    /// The number of scored tokens.
    pub tokens: usize,
    /// The mean cross entropy, in nats per token.
    pub cross_entropy: f64,
    /// The exponential of the cross entropy.
    pub perplexity: f64,
}

impl Cost {
    /// Returns the means per token, or `None` if no token was scored.
    pub fn summary(self) -> Option<CostSummary> {
        let cross_entropy = self.nats / self.tokens as f64;
        (self.tokens > 0).then_some(CostSummary {
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

impl std::fmt::Display for CostSummary {
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

/// A window of an example. The window consists of the example's first token, and of the tokens at the positions in
/// `part`.
struct Window {
    document: usize,
    example: usize,
    part: Range<usize>,
    /// The first position that the window scores.
    counted: usize,
}

impl Window {
    /// Returns the windows of an example of `length` tokens.
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
        // The first token of an example is never scored, because no token precedes it.
        let counted = self.counted.max(1)..self.part.end.max(1);
        example.learned[counted].contains(&true)
    }

    /// Returns the tokens of the window as an example. Only the tokens that the window scores are marked as tokens to train on.
    fn example(&self, whole: &Example) -> Example {
        let before = (self.part.start > 0).then_some(0);
        let positions = before.into_iter().chain(self.part.clone());
        let (tokens, learned) = positions
            .map(|position| {
                let is_counted = position >= self.counted && whole.learned[position];
                (whole.tokens[position], is_counted)
            })
            .unzip();
        Example {
            tokens,
            learned,
            // A window of an example with images or clips is the whole example.
            media: whole.media.clone(),
        }
    }
}

/// Computes the cost of each document. `on_progress` is called with two numbers: the tokens of the windows that are
/// evaluated so far, and the tokens of all windows.
///
/// # Errors
/// Returns an error if the device fails. Returns [`InvalidArgument`] if a document with images or audio clips is longer
/// than a window. Returns an error if an image or a clip cannot be decoded.
///
/// # Panics
/// Panics if windows have fewer than two tokens, or if the stride is not from 1 to `length - 1`.
pub fn evaluate(
    gemma: &Gemma4,
    documents: &[Document],
    windows: Windows,
    mut on_progress: impl FnMut(usize, usize),
) -> Result<Vec<Cost>, Error> {
    assert!((1..windows.length).contains(&windows.stride), "{windows:?}");
    refuse_long_media(documents, windows.length)?;
    let media = Media::load(gemma, documents)?;
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
    for indices in bin_pack(&lengths, windows.length) {
        let of_row: Vec<&Window> = indices.into_iter().map(|index| &pieces[index]).collect();
        let examples = of_row.iter().map(|window| window.example(whole(window)));
        let row = Row::of(&examples.collect::<Vec<_>>());
        let (targets, read) = (row.targets.clone(), row.tokens.len());
        let losses = losses(gemma.model(), media.as_ref(), row, windows.length)?;
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

/// Returns a callback that shows the progress of [`evaluate`] as a bar on standard error, if standard error is a terminal.
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

/// Refuses a document with images or audio clips that needs several windows. A window could not begin within an image, and
/// the images before a window would be missing.
fn refuse_long_media(documents: &[Document], length: usize) -> Result<(), InvalidArgument> {
    for document in documents {
        let mut examples = document.examples.iter();
        let is_long =
            |example: &&Example| !example.media.is_empty() && example.tokens.len() > length;
        if let Some(example) = examples.find(is_long) {
            return Err(InvalidArgument(format!(
                "line {}: has images or audio and {} tokens, more than --length {length}; expected one window for such a document, so raise --length",
                document.line,
                example.tokens.len()
            )));
        }
    }
    Ok(())
}

/// The parts of a model that compute the soft tokens of images and audio clips.
struct Media {
    encoder: Arc<PromptEncoder>,
    towers: MediaTowers,
}

impl Media {
    /// Loads the towers for the kinds of media in the documents. Returns `None` if there are no images and no clips.
    fn load(gemma: &Gemma4, documents: &[Document]) -> Result<Option<Self>, Error> {
        let kinds = Document::media_kinds(documents);
        if !kinds.any() {
            return Ok(None);
        }
        Ok(Some(Self {
            encoder: Arc::new(gemma.prompt_encoder()),
            towers: gemma.media_towers(kinds)?,
        }))
    }
}

/// Returns the loss at each position of a row, in nats.
fn losses(
    model: &Gemma4Model,
    media: Option<&Media>,
    row: Row,
    longest: usize,
) -> Result<Vec<f32>, Error> {
    let data = Data {
        // The row is padded to the next power of two, but at most to `longest`. Fewer shapes mean fewer kernels to compile.
        positions: row.tokens.len().next_power_of_two().min(longest),
        rows: vec![row],
        batch: 1,
        padding: model.config().pad_token,
        encoder: media.map(|media| media.encoder.clone()),
    };
    let batch = data.batch(&[0], &model.device())?;
    let hidden = match (media, &batch.media) {
        (Some(media), Some(inputs)) => {
            let placed = media.towers.place(inputs, model, batch.tokens.dims())?;
            model.hidden_packed_with_media(batch.tokens, &batch.packing, &placed)?
        }
        _ => model.hidden_packed(batch.tokens, &batch.packing)?,
    };
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
    fn windows_score_every_token_once() {
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
                media: Vec::new(),
            };
            let mut counted = vec![0; length];
            for window in Window::of(0, 0, length, windows) {
                let Example {
                    tokens, learned, ..
                } = window.example(&whole);
                assert_eq!(tokens.len(), window.len());
                assert!(tokens.len() <= windows.length);
                assert_eq!(tokens[0], 0);
                // A window may skip tokens of the document only between the window's first and second token.
                assert!(tokens[1..].windows(2).all(|pair| pair[1] == pair[0] + 1));
                for (token, learned) in tokens.into_iter().zip(learned) {
                    counted[token as usize] += usize::from(learned);
                }
            }
            assert_eq!(counted, vec![1; length], "{windows:?} of {length}");
        }
    }
}
