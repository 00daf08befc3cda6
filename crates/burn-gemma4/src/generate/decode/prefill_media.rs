//! The images and audio clips of a prefill, whose soft tokens are computed in steps between the chunks of the prompt.

use crate::checkpoint::media::{MediaEncoders, MediumInput, MediumPass};
use crate::error::Gemma4Error;
use crate::generate::encoded::{PlacedMedium, before_media};
use crate::model::soft_tokens::{CallMedia, SoftTokens};
use burn::tensor::Tensor;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// The images and audio clips of a prefill.
#[derive(Debug, Default)]
pub(super) struct PrefillMedia {
    placed: Vec<PlacedMedium>,
    /// The inputs of the last media of `placed`. The input of a medium is dropped when its soft tokens are computed.
    inputs: VecDeque<MediumInput>,
    /// The parts of the model that see images and hear audio, or `None` for a prompt without media.
    encoders: Option<MediaEncoders>,
    /// The pass over the first of the inputs, if it has begun.
    pass: Option<MediumPass>,
    /// The soft tokens of media that the model has not read yet, by the index of the medium.
    soft_tokens: BTreeMap<usize, Computed>,
}

/// The soft tokens of an image or an audio clip.
#[derive(Debug)]
struct Computed {
    /// The soft tokens, `[soft tokens, hidden]`.
    rows: Tensor<2>,
    is_bidirectional: bool,
}

impl PrefillMedia {
    pub fn new(
        placed: Vec<PlacedMedium>,
        inputs: Vec<MediumInput>,
        encoders: MediaEncoders,
    ) -> Self {
        Self {
            placed,
            inputs: inputs.into(),
            encoders: Some(encoders),
            ..Self::default()
        }
    }

    /// True if the prompt has no media.
    pub fn is_empty(&self) -> bool {
        self.placed.is_empty()
    }

    pub fn placed(&self) -> &[PlacedMedium] {
        &self.placed
    }

    pub fn into_placed(self) -> Vec<PlacedMedium> {
        self.placed
    }

    /// The inputs whose soft tokens are not computed yet.
    pub fn inputs(&self) -> impl Iterator<Item = &MediumInput> {
        self.inputs.iter()
    }

    /// Returns the end of a chunk from `start` to `end` that divides no medium. The chunk ends before the medium,
    /// unless the medium is its beginning. A call of the model is then no longer than the chunk or a medium.
    pub fn chunk_end(&self, start: usize, end: usize) -> usize {
        match before_media(&self.placed, end) {
            before if before > start => before,
            _ => {
                let mut media = self.placed.iter();
                let first = media.find(|medium| medium.tokens.contains(&start));
                first.map_or(end, |medium| medium.tokens.end.max(end))
            }
        }
    }

    /// True if the tower of a medium has begun.
    pub fn has_begun(&self) -> bool {
        self.pass.is_some() || self.inputs.len() < self.placed.len()
    }

    /// True if some medium has its placeholders in `range`.
    pub fn any_in(&self, range: &Range<usize>) -> bool {
        self.in_range(range).next().is_some()
    }

    /// Runs up to `rows` rows through one layer of a tower, or a part of this number through several layers, for the
    /// first medium in `range` that has no soft tokens. Runs at least one layer. Returns false if all media in the
    /// range have their soft tokens.
    pub fn advance(&mut self, range: &Range<usize>, rows: usize) -> Result<bool, Gemma4Error> {
        let Some(encoders) = &self.encoders else {
            return Ok(false);
        };
        let missing = self.in_range(range).map(|(index, _)| index);
        let missing = missing.filter(|index| !self.soft_tokens.contains_key(index));
        let Some(index) = missing.min() else {
            return Ok(false);
        };
        // Drop the inputs of earlier media, whose keys and values come from an earlier prompt.
        let skipped = index.checked_sub(self.placed.len() - self.inputs.len());
        let skipped = skipped.ok_or_else(|| Gemma4Error::Argument {
            argument: "prompt",
            reason: "cannot go on, because an earlier call failed; begin the prefill again".into(),
        })?;
        self.inputs.drain(..skipped);
        let input = self.inputs.front();
        let input = input.expect("the medium has no soft tokens yet");
        let layers = (rows / input.rows().max(1)).max(1);
        let pass = match &mut self.pass {
            Some(pass) => pass,
            none => none.insert(encoders.begin(input)?),
        };
        if let Some(rows) = encoders.advance(pass, layers)? {
            let is_bidirectional = encoders.is_bidirectional(input);
            let computed = Computed {
                rows,
                is_bidirectional,
            };
            self.pass = None;
            self.inputs.pop_front();
            self.soft_tokens.insert(index, computed);
        }
        Ok(true)
    }

    /// Takes the soft tokens of the media in `range` for a call of the model over these tokens.
    pub fn take(&mut self, range: &Range<usize>) -> CallMedia {
        let in_call: Vec<_> = self.in_range(range).collect();
        let media = in_call.into_iter().filter_map(|(index, tokens)| {
            let computed = self.soft_tokens.remove(&index)?;
            Some(SoftTokens {
                sequence: 0,
                columns: tokens.start - range.start..tokens.end - range.start,
                rows: computed.rows,
                is_bidirectional: computed.is_bidirectional,
            })
        });
        CallMedia::Each(media.collect())
    }

    /// Returns the index and the placeholders of each medium in `range`.
    fn in_range(&self, range: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        let media = self.placed.iter().map(|medium| medium.tokens.clone());
        let media = media.enumerate();
        media.filter(|(_, tokens)| range.start <= tokens.start && tokens.end <= range.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::media_hash::MediumHash;

    #[test]
    fn chunk_end_divides_no_medium_and_makes_progress() {
        let hash = MediumHash::of("image", [1; 4], &[]);
        let placed = [2..6, 8..9].map(|tokens| PlacedMedium { tokens, hash });
        let media = PrefillMedia {
            placed: placed.into(),
            ..PrefillMedia::default()
        };
        for (start, end, expected) in [
            (0, 1, 1),
            (0, 2, 2),
            (0, 3, 2),
            (0, 5, 2),
            (0, 6, 6),
            (0, 7, 7),
            (2, 3, 6),
            (2, 5, 6),
            (2, 7, 7),
            (6, 9, 9),
            (7, 8, 8),
            (8, 9, 9),
        ] {
            assert_eq!(media.chunk_end(start, end), expected, "{start}..{end}");
        }
    }
}
