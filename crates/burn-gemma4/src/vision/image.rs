//! An image of a prompt.

use super::decode::{decode, header};
use super::patches::ImageProcessor;
use super::prepared::PreparedImage;
use crate::error::Gemma4Error;
use crate::media_file;
use std::sync::{Arc, OnceLock};
use std::{fmt, path::Path};

/// The numbers of soft tokens to which an image may be limited, as in Hugging Face Transformers.
pub(crate) const SOFT_TOKENS: [usize; 5] = [70, 140, 280, 560, 1120];

/// The noun of an image file in messages.
pub(super) const MEDIUM: &str = "an image";

/// The largest number of pixels of an image. An image of this size takes 192 MiB in memory.
pub(super) const MOST_PIXELS: usize = 1 << 26;

/// The largest width or height of an image in pixels. Without this limit, resizing a very narrow image could take
/// gigabytes, because its rows become wider before its columns become shorter.
const LONGEST_SIDE: usize = 65_535;

/// An image for a prompt: pixels in RGB with 8 bits per channel. Clones share the pixels.
///
/// ```no_run
/// use burn_gemma4::{Image, Message, MessagePart};
///
/// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
/// let image = Image::open("cat.jpg")?.with_max_soft_tokens(560)?;
/// let message = Message::user(vec![MessagePart::Image(image), "What is this?".into()]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Image {
    pixels: Arc<Pixels>,
    max_soft_tokens: Option<usize>,
    /// The image in the form in which a model reads it, for the first processor that has asked. A session encodes the
    /// same images again at each turn.
    prepared: Arc<OnceLock<(ImageProcessor, PreparedImage)>>,
}

/// The size of an image file's pixels, which its header promises.
///
/// ```
/// use burn_gemma4::Image;
///
/// let error = Image::header(b"GIF89a").unwrap_err();
/// assert!(error.to_string().contains("PNG, JPEG or WebP"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageHeader {
    /// The width in pixels, before the image is turned upright.
    pub width: usize,
    /// The height in pixels, before the image is turned upright.
    pub height: usize,
    /// True if the image is turned by a quarter, so that its width becomes its height.
    pub is_turned: bool,
    /// An upper bound of the memory that [`Image::from_bytes`] needs for this image, in bytes. The file itself does not
    /// count.
    pub decoding_bytes: u64,
}

/// Pixels, `[height, width, 3]`.
#[derive(PartialEq, Eq)]
pub(crate) struct Pixels {
    pub width: usize,
    pub height: usize,
    pub rgb: Vec<u8>,
}

impl Image {
    /// Reads a PNG, JPEG or WebP file. The image is turned upright if the file has an orientation (EXIF). Transparency is
    /// dropped, and of an animation only the first frame is read. Channels of 16 bits become their high byte.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Io`] if the file cannot be read. Returns [`Gemma4Error::Malformed`] in the cases in which
    /// [`from_bytes`](Self::from_bytes) fails.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        media_file::open(path.as_ref(), MEDIUM, decode).map(Self::of)
    }

    /// Decodes the contents of a PNG, JPEG or WebP file, as [`open`](Self::open) does.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the contents are malformed, truncated or in another format. Returns the same
    /// error for more than 64 MiB, more than 67,108,864 pixels, or a side of more than 65,535 pixels.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Gemma4Error> {
        let argument = "image";
        let pixels = media_file::check_size(bytes.len() as u64, MEDIUM)
            .and_then(|()| decode(bytes))
            .map_err(|reason| Gemma4Error::Argument { argument, reason })?;
        Ok(Self::of(pixels))
    }

    /// Reads the header of a PNG, JPEG or WebP file, without decoding the pixels. A program can check limits before
    /// [`from_bytes`](Self::from_bytes) allocates memory. The file must be whole.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the contents have another format or are truncated, or if the header is
    /// malformed. Returns the same error if the size exceeds the limits of [`from_bytes`](Self::from_bytes).
    pub fn header(bytes: &[u8]) -> Result<ImageHeader, Gemma4Error> {
        let argument = "image";
        media_file::check_size(bytes.len() as u64, MEDIUM)
            .and_then(|()| header(bytes))
            .map_err(|reason| Gemma4Error::Argument { argument, reason })
    }

    /// Creates an image from pixels.
    ///
    /// # Shapes
    /// `rgb` is `[height, width, 3]`, row by row.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the number of bytes is wrong, or if the image has no pixels or more than
    /// [`from_bytes`](Self::from_bytes) accepts.
    ///
    /// ```
    /// use burn_gemma4::Image;
    ///
    /// let red = Image::from_rgb(2, 1, vec![255, 0, 0, 255, 0, 0])?;
    /// assert_eq!((red.width(), red.height()), (2, 1));
    /// # Ok::<(), burn_gemma4::Gemma4Error>(())
    /// ```
    pub fn from_rgb(width: usize, height: usize, rgb: Vec<u8>) -> Result<Self, Gemma4Error> {
        let refuse = |reason| {
            let argument = "image";
            Err(Gemma4Error::Argument { argument, reason })
        };
        if let Err(reason) = check_pixels(width, height) {
            return refuse(reason);
        }
        if rgb.len() != 3 * width * height {
            return refuse(format!(
                "has {} bytes; expected {} for {width} x {height} pixels",
                rgb.len(),
                3 * width * height
            ));
        }
        Ok(Self::of(Pixels { width, height, rgb }))
    }

    pub(super) fn of(pixels: Pixels) -> Self {
        Self {
            pixels: Arc::new(pixels),
            max_soft_tokens: None,
            prepared: Arc::default(),
        }
    }

    /// Sets the largest number of soft tokens that represent the image in a prompt: 70, 140, 280, 560 or 1,120. More
    /// tokens show more detail. The default is the number of the checkpoint's image processor, usually 280.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] for all other numbers.
    pub fn with_max_soft_tokens(self, count: usize) -> Result<Self, Gemma4Error> {
        match SOFT_TOKENS.contains(&count) {
            true => Ok(Self {
                max_soft_tokens: Some(count),
                prepared: Arc::default(),
                ..self
            }),
            false => Err(Gemma4Error::Argument {
                argument: "max_soft_tokens",
                reason: format!("is {count}; expected one of {SOFT_TOKENS:?}"),
            }),
        }
    }

    /// The width in pixels.
    pub fn width(&self) -> usize {
        self.pixels.width
    }

    /// The height in pixels.
    pub fn height(&self) -> usize {
        self.pixels.height
    }

    /// The largest number of soft tokens that [`with_max_soft_tokens`](Self::with_max_soft_tokens) set.
    pub(crate) fn max_soft_tokens(&self) -> Option<usize> {
        self.max_soft_tokens
    }

    pub(crate) fn pixels(&self) -> &Pixels {
        &self.pixels
    }

    /// Resizes the image for a model.
    ///
    /// # Errors
    /// Returns the errors of [`ImageProcessor::soft_tokens`].
    pub(crate) fn prepared(&self, processor: ImageProcessor) -> Result<PreparedImage, Gemma4Error> {
        if let Some((_, prepared)) = self.prepared.get().filter(|(of, _)| *of == processor) {
            return Ok(prepared.clone());
        }
        let prepared = PreparedImage::new(self, processor)?;
        // Another thread may have been faster, with the same result or for another processor.
        let _ = self.prepared.set((processor, prepared.clone()));
        Ok(prepared)
    }
}

impl PartialEq for Image {
    fn eq(&self, other: &Self) -> bool {
        self.pixels == other.pixels && self.max_soft_tokens == other.max_soft_tokens
    }
}

impl Eq for Image {}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Image")
            .field("width", &self.width())
            .field("height", &self.height())
            .field("max_soft_tokens", &self.max_soft_tokens)
            .finish_non_exhaustive()
    }
}

/// Refuses an image without pixels, or with too many of them.
pub(super) fn check_pixels(width: usize, height: usize) -> Result<(), String> {
    match width.checked_mul(height) {
        Some(1..=MOST_PIXELS) if width.max(height) <= LONGEST_SIDE => Ok(()),
        _ => Err(format!(
            "has {width} x {height} pixels; expected from 1 to {MOST_PIXELS} pixels, and up to {LONGEST_SIDE} on each side"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn open_of_device_without_end_is_refused() {
        let error = Image::open("/dev/zero").expect_err("the device has no end");
        assert!(error.to_string().contains("at most"), "{error}");
    }
}
