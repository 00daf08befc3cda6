//! An encoded prompt: token ids, and the images whose soft tokens stand in the place of some of them.

use crate::checkpoint::vision::LazyVision;
use crate::config::vision::VisionConfig;
use crate::error::Gemma4Error;
use crate::model::soft_tokens::{CallImages, SoftTokens};
use crate::vision::patches::Patches;
use crate::vision::prepared::{ImageHash, PreparedImage};
use std::ops::Range;
use std::sync::Arc;

/// An image in a prompt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlacedImage {
    /// The tokens of the prompt in whose place the soft tokens of the image stand.
    pub tokens: Range<usize>,
    pub hash: ImageHash,
}

/// A prompt as token ids, with its images. [`PromptEncoder::encode`](crate::PromptEncoder::encode) makes one from
/// tokens and images, and [`Gemma4::prefill`](crate::Gemma4::prefill) reads it.
///
/// ```
/// use burn_gemma4::EncodedPrompt;
///
/// let prompt = EncodedPrompt::from(vec![2, 30, 31]);
/// assert_eq!((prompt.tokens(), prompt.images().count()), (&[2, 30, 31][..], 0));
/// ```
#[derive(Clone, Debug, Default)]
pub struct EncodedPrompt {
    pub(crate) tokens: Vec<u32>,
    /// The images in ascending order.
    pub(crate) images: Vec<PlacedImage>,
    /// The patches of each image.
    pub(crate) patches: Vec<Arc<Patches>>,
}

impl From<Vec<u32>> for EncodedPrompt {
    fn from(tokens: Vec<u32>) -> Self {
        Self {
            tokens,
            ..Self::default()
        }
    }
}

impl EncodedPrompt {
    /// The token ids. An image is a begin token, one placeholder for each soft token, and an end token.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The number of tokens, including those of images.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// True if the prompt has no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The images in ascending order: the placeholders of each image, and its hash. Two prompts with the same tokens
    /// have the same meaning only if their images have the same hashes.
    pub fn images(&self) -> impl Iterator<Item = (Range<usize>, ImageHash)> {
        let images = self.images.iter();
        images.map(|image| (image.tokens.clone(), image.hash))
    }

    /// The size of the resized pixels of all images in memory, in bytes.
    pub fn image_bytes(&self) -> usize {
        self.patches.iter().map(|patches| patches.rgb.len()).sum()
    }

    /// Expands each image placeholder in `tokens` to the begin token, one placeholder for each soft token, and the end
    /// token.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the numbers of placeholders and images differ.
    pub(crate) fn expand(
        tokens: Vec<u32>,
        images: &[PreparedImage],
        config: &VisionConfig,
    ) -> Result<Self, Gemma4Error> {
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
            expanded.tokens.push(config.begin_token);
            let start = expanded.tokens.len();
            let end = start + image.count();
            expanded.tokens.resize(end, config.image_token);
            expanded.tokens.push(config.end_token);
            expanded.images.push(PlacedImage {
                tokens: start..end,
                hash: image.hash,
            });
            expanded.patches.push(image.patches.clone());
            images.next();
        }
        Ok(expanded)
    }

    /// Returns the length of the common prefix with the tokens and images of another prompt. The prefix contains each of
    /// its images whole.
    pub(crate) fn common(&self, tokens: &[u32], images: &[PlacedImage]) -> usize {
        common_prefix((&self.tokens, &self.images), (tokens, images))
    }
}

/// Returns the length of the common prefix of the tokens and images of two prompts. The prefix contains each of its
/// images whole.
pub(crate) fn common_prefix(
    (tokens, images): (&[u32], &[PlacedImage]),
    (other_tokens, other_images): (&[u32], &[PlacedImage]),
) -> usize {
    let pairs = tokens.iter().zip(other_tokens);
    let common = pairs.take_while(|(one, other)| one == other).count();
    let differ = |one: &[PlacedImage], other: &[PlacedImage]| {
        let mut differing = one.iter().filter(|image| !other.contains(image));
        differing.next().map(|image| image.tokens.start)
    };
    let first = [differ(images, other_images), differ(other_images, images)];
    let common = first.into_iter().flatten().fold(common, usize::min);
    before_images(images, common)
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
    let images = in_call.map(|(sequence, columns, patches)| {
        Ok(SoftTokens {
            sequence,
            columns: columns.start - call.start..columns.end - call.start,
            rows: vision.soft_tokens(patches)?,
        })
    });
    Ok(CallImages {
        images: images.collect::<Result<_, Gemma4Error>>()?,
        is_bidirectional: vision.config().is_bidirectional,
    })
}

/// Returns the sequence, the columns and the patches of each image in a batch.
fn columns<'a>(
    prompts: &'a [&EncodedPrompt],
    longest: usize,
) -> impl Iterator<Item = (usize, Range<usize>, &'a Patches)> {
    prompts
        .iter()
        .enumerate()
        .flat_map(move |(sequence, prompt)| {
            let padding = longest - prompt.tokens.len();
            let images = prompt.images.iter().zip(&prompt.patches);
            images.map(move |(PlacedImage { tokens, .. }, patches)| {
                (
                    sequence,
                    tokens.start + padding..tokens.end + padding,
                    patches.as_ref(),
                )
            })
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vision::image::Image;
    use crate::vision::patches::ImageProcessor;

    fn image(value: u8) -> PreparedImage {
        let image = Image::from_rgb(1, 1, vec![value; 3]).expect("one pixel has three bytes");
        image
            .prepared(ImageProcessor::new(16, 3))
            .expect("the image has soft tokens")
    }

    fn prompt(tokens: &[u32], images: &[(Range<usize>, u8)]) -> EncodedPrompt {
        let placed = images.iter().map(|(tokens, value)| PlacedImage {
            tokens: tokens.clone(),
            hash: image(*value).hash,
        });
        EncodedPrompt {
            tokens: tokens.to_vec(),
            images: placed.collect(),
            patches: images
                .iter()
                .map(|(_, value)| image(*value).patches)
                .collect(),
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
