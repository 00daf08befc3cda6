//! The arguments for images and audio in prompts.

use crate::{Error, terminal::WrongArgument};
use burn_gemma4::{Audio, Content, Gemma4, Image, MessagePart};
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

/// The arguments for images and audio before a message.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Prompt")]
pub struct MediaArguments {
    /// Image to show before the text: a PNG, JPEG or WebP file. The option may be repeated, and implies --chat.
    #[arg(long = "image", value_name = "FILE", conflicts_with_all = ["prompt_tokens", "cache"])]
    images: Vec<PathBuf>,
    /// Audio to play before the text and after the images: a WAV, FLAC, MP3 or Ogg Vorbis file of up to 30 seconds. The
    /// option may be repeated, and implies --chat.
    #[arg(long = "audio", value_name = "FILE", conflicts_with_all = ["prompt_tokens", "cache"])]
    audio: Vec<PathBuf>,
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

impl MediaArguments {
    /// True if there are no images and no audio.
    pub fn is_empty(&self) -> bool {
        self.images.is_empty() && self.audio.is_empty()
    }

    /// Checks that the size of images comes with an image.
    ///
    /// # Errors
    /// Returns [`WrongArgument`] for `--image-tokens` without `--image`.
    pub fn check(&self) -> Result<(), Error> {
        match self.size.image_tokens {
            Some(count) if self.images.is_empty() => {
                let reason =
                    format!("--image-tokens: is {count} without an image; expected --image");
                Err(WrongArgument(reason).into())
            }
            _ => Ok(()),
        }
    }

    /// Checks that a model sees images and hears audio, if there are any.
    ///
    /// # Errors
    /// Passes on the errors of [`Gemma4::check_vision`] and [`Gemma4::check_audio`].
    pub fn check_model(&self, gemma: &Gemma4) -> Result<(), Error> {
        if !self.images.is_empty() {
            gemma.check_vision()?;
        }
        if !self.audio.is_empty() {
            gemma.check_audio()?;
        }
        Ok(())
    }

    /// Reads the files, images first.
    ///
    /// # Errors
    /// Passes on the errors of [`ImageSize::open`] and [`Audio::open`].
    pub fn open(&self) -> Result<Vec<MessagePart>, Error> {
        let images = self.images.iter();
        let images = images.map(|path| Ok(MessagePart::Image(self.size.open(path)?)));
        let audio = self.audio.iter();
        let audio = audio.map(|path| Ok(MessagePart::Audio(Audio::open(path)?)));
        images.chain(audio).collect()
    }
}

/// Parses the value of `--image-tokens`.
fn image_tokens(value: &str) -> Result<usize, String> {
    let count = value.parse().ok();
    count
        .filter(|count| IMAGE_TOKENS.contains(count))
        .ok_or_else(|| "expected 70, 140, 280, 560 or 1120".to_owned())
}

/// Returns the content of a message with images and audio before its text.
pub fn content(media: Vec<MessagePart>, text: String) -> Content {
    match media.is_empty() {
        true => text.into(),
        false => Content::Parts(media.into_iter().chain([MessagePart::Text(text)]).collect()),
    }
}
