//! Puts images in the place of the placeholders in a prompt, without the weights of the model.

use super::encoded::EncodedPrompt;
use crate::checkpoint::vision::ImageFormat;
use crate::config::placeholders::Placeholders;
use crate::error::Gemma4Error;
use crate::vision::image::Image;
use crate::vision::prepared::PreparedImage;

/// Puts images in the place of the placeholders in a prompt. The encoder holds no weights, so a thread that does not
/// own the model can encode prompts. [`Gemma4::prompt_encoder`](crate::Gemma4::prompt_encoder) returns it.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use burn_gemma4::{Gemma4, LoadOptions};
///
/// let gemma = Gemma4::embedded(&Device::flex(), LoadOptions::new())?;
/// let encoder = gemma.prompt_encoder();
/// assert_eq!(encoder.encode(vec![2, 30], &[])?.len(), 2);
/// // The embedded model sees no images.
/// assert!(encoder.check_vision().is_err());
/// # }
/// # Ok::<(), burn_gemma4::Gemma4Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PromptEncoder {
    /// The form of images, or the reason why the model sees none.
    format: Result<ImageFormat, String>,
    placeholders: Placeholders,
}

impl PromptEncoder {
    pub(crate) fn new(format: Result<ImageFormat, String>, placeholders: Placeholders) -> Self {
        Self {
            format,
            placeholders,
        }
    }

    /// Checks that the model sees images.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] with the reason why the model sees no images.
    pub fn check_vision(&self) -> Result<(), Gemma4Error> {
        self.format().map(|_| ())
    }

    fn format(&self) -> Result<&ImageFormat, Gemma4Error> {
        let format = self.format.as_ref();
        format.map_err(|reason| Gemma4Error::Argument {
            argument: "image",
            reason: format!("this model sees no images: {reason}"),
        })
    }

    /// Resizes an image for the model. The result does not keep the original pixels.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the model sees no images, or if the image is too narrow.
    pub fn prepare(&self, image: &Image) -> Result<PreparedImage, Gemma4Error> {
        self.format()?.prepared(image)
    }

    /// Replaces each image placeholder in `tokens` by the tokens of an image, in order. The images must come from an
    /// encoder of the same checkpoint.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if there is not one image for each placeholder, or if the model sees no
    /// images. Returns the same error for placeholders of audio and video.
    pub fn encode(
        &self,
        tokens: Vec<u32>,
        images: &[PreparedImage],
    ) -> Result<EncodedPrompt, Gemma4Error> {
        if !images.is_empty() {
            self.check_vision()?;
        }
        match &self.format {
            Ok(format) => {
                self.placeholders.check_except_images(&tokens)?;
                EncodedPrompt::expand(tokens, images, &format.config)
            }
            Err(_) => {
                self.placeholders.check(&tokens)?;
                Ok(tokens.into())
            }
        }
    }
}
