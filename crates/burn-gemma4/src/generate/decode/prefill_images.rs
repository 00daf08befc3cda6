//! The images of a prefill, whose soft tokens are computed in steps between the chunks of the prompt.

use crate::checkpoint::vision::{ImagePass, LazyVision};
use crate::error::Gemma4Error;
use crate::generate::encoded::{PlacedImage, before_images};
use crate::model::soft_tokens::{CallImages, SoftTokens};
use crate::vision::patches::Patches;
use burn::tensor::Tensor;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

/// The images of a prefill.
#[derive(Debug, Default)]
pub(super) struct PrefillImages {
    placed: Vec<PlacedImage>,
    /// The patches of the last images of `placed`. An image's patches are dropped when its soft tokens are computed.
    patches: VecDeque<Arc<Patches>>,
    /// The part of the model that sees images, or `None` for a prompt without images.
    vision: Option<LazyVision>,
    /// The pass over the image of the first patches, if it has begun.
    pass: Option<ImagePass>,
    /// The soft tokens of images that the model has not read yet, by the image's index.
    soft_tokens: BTreeMap<usize, Tensor<2>>,
}

impl PrefillImages {
    pub fn new(placed: Vec<PlacedImage>, patches: Vec<Arc<Patches>>, vision: LazyVision) -> Self {
        Self {
            placed,
            patches: patches.into(),
            vision: Some(vision),
            ..Self::default()
        }
    }

    /// True if the prompt has no images.
    pub fn is_empty(&self) -> bool {
        self.placed.is_empty()
    }

    pub fn placed(&self) -> &[PlacedImage] {
        &self.placed
    }

    pub fn into_placed(self) -> Vec<PlacedImage> {
        self.placed
    }

    /// Returns the end of a chunk from `start` to `end` that divides no image. The chunk ends before the image, unless
    /// the image is its beginning. A call of the model is then no longer than the chunk or an image.
    pub fn chunk_end(&self, start: usize, end: usize) -> usize {
        match before_images(&self.placed, end) {
            before if before > start => before,
            _ => {
                let mut images = self.placed.iter();
                let first = images.find(|image| image.tokens.contains(&start));
                first.map_or(end, |image| image.tokens.end.max(end))
            }
        }
    }

    /// True if some image has its placeholders in `range`.
    pub fn any_in(&self, range: &Range<usize>) -> bool {
        self.in_range(range).next().is_some()
    }

    /// Runs up to `rows` patches through one layer of the vision, or a part of this number through several layers, for
    /// the first image in `range` that has no soft tokens. Runs at least one layer. Returns false if all images in the
    /// range have their soft tokens.
    pub fn advance(&mut self, range: &Range<usize>, rows: usize) -> Result<bool, Gemma4Error> {
        let Some(vision) = self.vision.clone() else {
            return Ok(false);
        };
        let missing = self.in_range(range).map(|(index, _)| index);
        let missing = missing.filter(|index| !self.soft_tokens.contains_key(index));
        let Some(index) = missing.min() else {
            return Ok(false);
        };
        // Drop the patches of earlier images, whose keys and values come from an earlier prompt.
        let skipped = index - (self.placed.len() - self.patches.len());
        self.patches.drain(..skipped);
        let patches = self
            .patches
            .front()
            .expect("the image has no soft tokens yet");
        let count = patches.columns * patches.rows;
        let pass = match &mut self.pass {
            Some(pass) => pass,
            none => none.insert(vision.begin(patches)?),
        };
        if let Some(rows) = vision.advance(pass, (rows / count).max(1))? {
            self.pass = None;
            self.patches.pop_front();
            self.soft_tokens.insert(index, rows);
        }
        Ok(true)
    }

    /// Takes the soft tokens of the images in `range` for a call of the model over these tokens.
    pub fn take(&mut self, range: &Range<usize>) -> CallImages {
        let Some(vision) = &self.vision else {
            return CallImages::default();
        };
        let is_bidirectional = vision.config().is_bidirectional;
        let in_call: Vec<_> = self.in_range(range).collect();
        let images = in_call.into_iter().filter_map(|(index, tokens)| {
            Some(SoftTokens {
                sequence: 0,
                columns: tokens.start - range.start..tokens.end - range.start,
                rows: self.soft_tokens.remove(&index)?,
            })
        });
        CallImages {
            images: images.collect(),
            is_bidirectional,
        }
    }

    /// Returns the index and the placeholders of each image in `range`.
    fn in_range(&self, range: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        let images = self.placed.iter().map(|image| image.tokens.clone());
        let images = images.enumerate();
        images.filter(|(_, tokens)| range.start <= tokens.start && tokens.end <= range.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vision::{image::Image, patches::ImageProcessor};

    #[test]
    fn chunk_end_divides_no_image_and_makes_progress() {
        let image = Image::from_rgb(1, 1, vec![7; 3]).expect("one pixel has three bytes");
        let prepared = image.prepared(ImageProcessor::new(16, 3));
        let hash = prepared.expect("the image has soft tokens").hash;
        let placed = [2..6, 8..9].map(|tokens| PlacedImage { tokens, hash });
        let images = PrefillImages {
            placed: placed.into(),
            ..PrefillImages::default()
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
            assert_eq!(images.chunk_end(start, end), expected, "{start}..{end}");
        }
    }
}
