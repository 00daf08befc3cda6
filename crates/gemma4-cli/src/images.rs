//! The arguments for images in prompts.

use crate::{Error, terminal::WrongArgument};
use burn_gemma4::{Content, Image, MessagePart};
use std::path::{Path, PathBuf};

/// The values of `--image-tokens`, which are those of [`Image::with_max_soft_tokens`].
const IMAGE_TOKENS: [usize; 5] = [70, 140, 280, 560, 1120];

/// The argument for the size of images.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Prompt")]
pub struct ImageSize {
    /// Largest number of tokens for each image: 70, 140, 280, 560 or 1120. More tokens show more detail [default: the
    /// checkpoint's, usually 280].
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true, value_parser = image_tokens)]
    image_tokens: Option<usize>,
}

/// The arguments for images before a message.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Prompt")]
pub struct ImageArguments {
    /// Image to show before the text: a PNG, JPEG or WebP file. The option may be repeated, and implies --chat.
    #[arg(long = "image", value_name = "FILE", conflicts_with_all = ["prompt_tokens", "cache"])]
    images: Vec<PathBuf>,
    #[command(flatten)]
    size: ImageSize,
}

impl ImageSize {
    /// Reads an image file.
    ///
    /// # Errors
    /// Passes on the errors of [`Image::open`].
    pub fn open(&self, path: &Path) -> Result<Image, Error> {
        let image = Image::open(path)?;
        Ok(match self.image_tokens {
            Some(count) => image.with_max_soft_tokens(count)?,
            None => image,
        })
    }
}

impl ImageArguments {
    /// True if there are no images.
    pub fn is_empty(&self) -> bool {
        self.images.is_empty()
    }

    /// Checks that the size of images comes with an image.
    ///
    /// # Errors
    /// Returns [`WrongArgument`] for `--image-tokens` without `--image`.
    pub fn check(&self) -> Result<(), Error> {
        match self.size.image_tokens {
            Some(count) if self.is_empty() => {
                let reason =
                    format!("--image-tokens: is {count} without an image; expected --image");
                Err(WrongArgument(reason).into())
            }
            _ => Ok(()),
        }
    }

    /// Reads the image files.
    ///
    /// # Errors
    /// Passes on the errors of [`ImageSize::open`].
    pub fn open(&self) -> Result<Vec<Image>, Error> {
        let images = self.images.iter();
        images.map(|path| self.size.open(path)).collect()
    }
}

/// Parses the value of `--image-tokens`.
fn image_tokens(value: &str) -> Result<usize, String> {
    let count = value.parse().ok();
    count
        .filter(|count| IMAGE_TOKENS.contains(count))
        .ok_or_else(|| "expected 70, 140, 280, 560 or 1120".to_owned())
}

/// Returns the content of a message with images before its text.
pub fn content(images: Vec<Image>, text: String) -> Content {
    if images.is_empty() {
        return text.into();
    }
    let images = images.into_iter().map(MessagePart::Image);
    Content::Parts(images.chain([MessagePart::Text(text)]).collect())
}
