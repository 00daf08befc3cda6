//! An encoded prompt: token ids, and the images whose soft tokens stand in the place of some of them.

use crate::checkpoint::vision::LazyVision;
use crate::error::Gemma4Error;
use crate::model::soft_tokens::{CallImages, SoftTokens};
use crate::vision::image::Image;
use std::ops::Range;

/// An image in a prompt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlacedImage {
    /// The tokens of the prompt in whose place the soft tokens of the image stand.
    pub tokens: Range<usize>,
    pub image: Image,
}

/// A prompt as token ids, with its images in ascending order.
#[derive(Clone, Debug, Default)]
pub(crate) struct EncodedPrompt {
    pub tokens: Vec<u32>,
    pub images: Vec<PlacedImage>,
}

impl From<Vec<u32>> for EncodedPrompt {
    fn from(tokens: Vec<u32>) -> Self {
        Self {
            tokens,
            images: Vec::new(),
        }
    }
}

impl EncodedPrompt {
    /// Expands each image placeholder in `tokens` to the begin token, one placeholder for each soft token, and the end
    /// token.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the numbers of placeholders and images differ. Returns the same error if an
    /// image has no soft tokens, because it is too narrow.
    pub fn expand(
        tokens: Vec<u32>,
        images: &[&Image],
        vision: &LazyVision,
    ) -> Result<Self, Gemma4Error> {
        let config = vision.config();
        let placeholders = tokens.iter().filter(|token| **token == config.image_token);
        let placeholders = placeholders.count();
        if placeholders != images.len() {
            return Err(Gemma4Error::Argument {
                argument: "prompt",
                reason: format!(
                    "has {placeholders} image placeholders, but {} images; expected one image for each placeholder",
                    images.len()
                ),
            });
        }
        let mut images = images.iter();
        let mut expanded = Self::default();
        for token in tokens {
            let image = images
                .as_slice()
                .first()
                .filter(|_| token == config.image_token);
            let Some(image) = image else {
                expanded.tokens.push(token);
                continue;
            };
            let [columns, rows] = vision.processor().soft_tokens(image)?;
            expanded.tokens.push(config.begin_token);
            let start = expanded.tokens.len();
            let end = start + columns * rows;
            expanded.tokens.resize(end, config.image_token);
            expanded.tokens.push(config.end_token);
            expanded.images.push(PlacedImage {
                tokens: start..end,
                image: (*image).clone(),
            });
            images.next();
        }
        Ok(expanded)
    }

    /// Returns the length of the common prefix with the tokens and images of another prompt. The prefix contains each of
    /// its images whole.
    pub fn common(&self, tokens: &[u32], images: &[PlacedImage]) -> usize {
        let pairs = self.tokens.iter().zip(tokens);
        let common = pairs.take_while(|(one, other)| one == other).count();
        let differ = |one: &[PlacedImage], other: &[PlacedImage]| {
            let mut differing = one.iter().filter(|image| !other.contains(image));
            differing.next().map(|image| image.tokens.start)
        };
        let first = [differ(&self.images, images), differ(images, &self.images)];
        let common = first.into_iter().flatten().fold(common, usize::min);
        before_images(&self.images, common)
    }
}

/// Returns `end`, or the beginning of the image that `end` would divide.
pub(crate) fn before_images(images: &[PlacedImage], end: usize) -> usize {
    let divided = images
        .iter()
        .find(|image| image.tokens.start < end && end < image.tokens.end);
    divided.map_or(end, |image| image.tokens.start)
}

/// Returns `end`, or the end of the last image that `end` would divide. `prompts` are the prompts of a batch, which are
/// padded on the left to `longest` columns.
pub(super) fn after_images(prompts: &[&EncodedPrompt], longest: usize, mut end: usize) -> usize {
    loop {
        let divided = columns(prompts, longest)
            .filter(|(_, columns, _)| columns.start < end && end < columns.end)
            .map(|(_, columns, _)| columns.end)
            .max();
        match divided {
            Some(later) => end = later,
            None => return end,
        }
    }
}

/// Computes the soft tokens of the images in the columns `call` of a batch. No image may lie only partly in the call.
pub(super) fn images_in(
    prompts: &[&EncodedPrompt],
    longest: usize,
    call: Range<usize>,
    vision: Option<&LazyVision>,
) -> Result<CallImages, Gemma4Error> {
    let Some(vision) = vision else {
        return Ok(CallImages::default());
    };
    let in_call = columns(prompts, longest)
        .filter(|(_, columns, _)| call.start <= columns.start && columns.end <= call.end);
    let images = in_call.map(|(sequence, columns, image)| {
        Ok(SoftTokens {
            sequence,
            columns: columns.start - call.start..columns.end - call.start,
            rows: vision.soft_tokens(image)?,
        })
    });
    Ok(CallImages {
        images: images.collect::<Result<_, Gemma4Error>>()?,
        is_bidirectional: vision.config().is_bidirectional,
    })
}

/// Returns the sequence, the columns and the image of each image in a batch.
fn columns<'a>(
    prompts: &'a [&EncodedPrompt],
    longest: usize,
) -> impl Iterator<Item = (usize, Range<usize>, &'a Image)> {
    prompts
        .iter()
        .enumerate()
        .flat_map(move |(sequence, prompt)| {
            let padding = longest - prompt.tokens.len();
            let images = prompt.images.iter();
            images.map(move |PlacedImage { tokens, image }| {
                (
                    sequence,
                    tokens.start + padding..tokens.end + padding,
                    image,
                )
            })
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(value: u8) -> Image {
        Image::from_rgb(1, 1, vec![value; 3]).expect("one pixel has three bytes")
    }

    fn prompt(tokens: &[u32], images: &[(Range<usize>, u8)]) -> EncodedPrompt {
        let placed = images.iter().map(|(tokens, value)| PlacedImage {
            tokens: tokens.clone(),
            image: image(*value),
        });
        EncodedPrompt {
            tokens: tokens.to_vec(),
            images: placed.collect(),
        }
    }

    #[test]
    fn common_of_prompts_with_images_ends_before_the_first_other_image() {
        let tokens = [1, 5, 5, 2, 5, 5, 3];
        let one = prompt(&tokens, &[(1..3, 7), (4..6, 8)]);
        for (other, expected) in [
            (prompt(&tokens, &[(1..3, 7), (4..6, 8)]), 7),
            (prompt(&tokens, &[(1..3, 7), (4..6, 9)]), 4),
            (prompt(&tokens, &[(1..3, 9), (4..6, 8)]), 1),
            (prompt(&tokens, &[(1..3, 7)]), 4),
            (prompt(&tokens[..5], &[(1..3, 7)]), 4),
            (prompt(&[1, 5, 2], &[(1..2, 7)]), 1),
            (prompt(&[9], &[]), 0),
        ] {
            assert_eq!(
                one.common(&other.tokens, &other.images),
                expected,
                "{other:?}"
            );
            assert_eq!(
                other.common(&one.tokens, &one.images),
                expected,
                "{other:?}"
            );
        }
    }

    #[test]
    fn after_images_of_batch_divides_no_image() {
        let short = prompt(&[1, 5, 5, 5, 2], &[(1..4, 7)]);
        let long = prompt(&[1, 1, 5, 5, 5, 5, 2], &[(2..6, 8)]);
        let prompts = [&short, &long];
        let found: Vec<usize> = (0..=7).map(|end| after_images(&prompts, 7, end)).collect();
        assert_eq!(found, [0, 1, 2, 6, 6, 6, 6, 7]);
    }
}
