//! An image in the form in which a model reads it: resized, and identified by a hash of its pixels.

use super::image::Image;
use super::patches::{ImageProcessor, Patches};
use crate::error::Gemma4Error;
use crate::media_hash::MediumHash;
use std::fmt;
use std::sync::Arc;

/// An image in the size in which a model sees it, without its original pixels, which may take 192 MiB. Two prepared
/// images are equal if their hashes are. Clones share the pixels.
#[derive(Clone)]
pub struct PreparedImage {
    pub(crate) hash: MediumHash,
    pub(crate) patches: Arc<Patches>,
    /// The number of columns and rows of soft tokens.
    soft_tokens: [usize; 2],
}

impl PreparedImage {
    /// Resizes an image, and hashes its original pixels.
    ///
    /// # Errors
    /// Returns the errors of [`ImageProcessor::soft_tokens`].
    pub(super) fn new(image: &Image, processor: ImageProcessor) -> Result<Self, Gemma4Error> {
        let size = [image.width(), image.height()];
        let soft_tokens = processor.soft_tokens(size, image.max_soft_tokens())?;
        let pixels = image.pixels();
        let [columns, rows] = soft_tokens;
        let sizes = [pixels.width, pixels.height, columns, rows];
        Ok(Self {
            hash: MediumHash::of("image", sizes, &pixels.rgb),
            patches: Arc::new(processor.patches(image)?),
            soft_tokens,
        })
    }

    /// The number of soft tokens.
    pub(crate) fn count(&self) -> usize {
        self.soft_tokens.into_iter().product()
    }

    /// The number of tokens that the image takes in a prompt: its soft tokens, a begin token and an end token.
    pub fn tokens(&self) -> usize {
        self.count() + 2
    }

    /// The size of the resized pixels in memory, in bytes.
    pub fn bytes(&self) -> usize {
        self.patches.rgb.len()
    }
}

impl PartialEq for PreparedImage {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash
    }
}

impl Eq for PreparedImage {}

impl fmt::Debug for PreparedImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedImage")
            .field("hash", &self.hash)
            .field("soft_tokens", &self.soft_tokens)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prepared(image: &Image, max_soft_tokens: usize) -> PreparedImage {
        let processor = ImageProcessor {
            max_soft_tokens,
            ..ImageProcessor::new(16, 3)
        };
        let prepared = image.prepared(processor);
        prepared.expect("the image has soft tokens")
    }

    fn image(width: usize, height: usize, changed: usize) -> Image {
        let mut rgb = vec![7; 3 * width * height];
        rgb[changed] ^= 1;
        Image::from_rgb(width, height, rgb).expect("the number of bytes is right")
    }

    #[test]
    fn hash_depends_on_each_channel_and_on_the_sizes() {
        let first = image(40, 30, 0);
        let same = prepared(&image(40, 30, 0), 280);
        assert_eq!(prepared(&first, 280), same);
        for other in [image(40, 30, 1), image(40, 30, 3599), image(30, 40, 0)] {
            assert_ne!(prepared(&other, 280), same);
        }
        assert_ne!(prepared(&first, 560), same);
    }

    #[test]
    fn prepared_image_of_another_processor_is_not_reused() {
        let image = image(40, 30, 0);
        let found = [280, 70, 280].map(|most| prepared(&image, most).soft_tokens);
        assert_eq!(found, [[19, 14], [9, 7], [19, 14]]);
        assert_eq!(prepared(&image, 70).tokens(), 65);
        assert_eq!(prepared(&image, 70).bytes(), 63 * 48 * 48 * 3);
    }
}
