//! The arguments for images in prompts.

use crate::{Error, terminal::WrongArgument};
use burn_gemma4::{Content, Image, MessagePart};
use std::path::{Path, PathBuf};

/// The argument for the size of images.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Prompt")]
pub struct ImageSize {
    /// Largest number of tokens for each image: 70, 140, 280, 560 or 1120. More tokens show more detail [default: the
    /// checkpoint's, usually 280].
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true)]
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
    /// Passes on the errors of [`Image::open`]. Returns [`WrongArgument`] if `--image-tokens` has a wrong value.
    pub fn open(&self, path: &Path) -> Result<Image, Error> {
        let image = Image::open(path)?;
        match self.image_tokens {
            Some(count) => image.with_max_soft_tokens(count).map_err(|_| {
                let reason =
                    format!("--image-tokens: is {count}; expected 70, 140, 280, 560 or 1120");
                WrongArgument(reason).into()
            }),
            None => Ok(image),
        }
    }
}

impl ImageArguments {
    /// True if there are no images.
    pub fn is_empty(&self) -> bool {
        self.images.is_empty()
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

/// Returns the content of a message with images before its text.
pub fn content(images: Vec<Image>, text: String) -> Content {
    if images.is_empty() {
        return text.into();
    }
    let images = images.into_iter().map(MessagePart::Image);
    Content::Parts(images.chain([MessagePart::Text(text)]).collect())
}
