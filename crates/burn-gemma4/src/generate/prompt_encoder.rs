//! Puts images and audio clips in the place of the placeholders in a prompt, without the weights of the model.

use super::encoded::EncodedPrompt;
use crate::audio::clip::Audio;
use crate::audio::header::AudioHeader;
use crate::audio::prepared::PreparedAudio;
use crate::checkpoint::media::MediaFormats;
use crate::config::placeholders::{AUDIO, IMAGE, Placeholders};
use crate::error::Gemma4Error;
use crate::media_size::MediumSize;
use crate::vision::image::{Image, ImageHeader};
use crate::vision::prepared::PreparedImage;

/// Puts images and audio clips in the place of the placeholders in a prompt. The encoder holds no weights, so a thread
/// that does not own the model can encode prompts. [`Gemma4::prompt_encoder`](crate::Gemma4::prompt_encoder) returns
/// it.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use burn_gemma4::{Gemma4, LoadOptions};
///
/// let gemma = Gemma4::embedded(&Device::flex(), LoadOptions::new())?;
/// let encoder = gemma.prompt_encoder();
/// assert_eq!(encoder.encode(vec![2, 30], &[], &[])?.len(), 2);
/// // The embedded model sees no images, and hears no audio.
/// assert!(encoder.check_vision().is_err() && encoder.check_audio().is_err());
/// # }
/// # Ok::<(), burn_gemma4::Gemma4Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PromptEncoder {
    /// The forms of images and audio, or the reasons why the model reads none.
    formats: MediaFormats,
    placeholders: Placeholders,
}

impl PromptEncoder {
    pub(crate) fn new(formats: MediaFormats, placeholders: Placeholders) -> Self {
        Self {
            formats,
            placeholders,
        }
    }

    /// Checks that the model sees images.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] with the reason why the model sees no images.
    pub fn check_vision(&self) -> Result<(), Gemma4Error> {
        self.formats.vision().map(|_| ())
    }

    /// Checks that the model hears audio.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] with the reason why the model hears no audio.
    pub fn check_audio(&self) -> Result<(), Gemma4Error> {
        self.formats.audio().map(|_| ())
    }

    /// Resizes an image for the model. The result does not keep the original pixels.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the model sees no images, or if the image is too narrow.
    pub fn prepare(&self, image: &Image) -> Result<PreparedImage, Gemma4Error> {
        self.formats.vision()?.prepared(image)
    }

    /// Computes the features of an audio clip for the model. The result does not keep the samples.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the model hears no audio, or if the clip is too short.
    pub fn prepare_audio(&self, audio: &Audio) -> Result<PreparedAudio, Gemma4Error> {
        self.formats.audio()?.prepared(audio)
    }

    /// Returns the size that an image will have, from the header of its file. `max_soft_tokens` is the number for
    /// [`Image::with_max_soft_tokens`], or `None` for the checkpoint's number.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] in the cases in which [`prepare`](Self::prepare) fails.
    pub fn image_size(
        &self,
        header: &ImageHeader,
        max_soft_tokens: Option<usize>,
    ) -> Result<MediumSize, Gemma4Error> {
        self.formats.vision()?.size(header, max_soft_tokens)
    }

    /// Returns the size that an audio clip will have, from the header of its file. The number of tokens is a lower
    /// bound, because not every header has the exact length. The numbers of bytes are upper bounds.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the model hears no audio.
    pub fn audio_size(&self, header: &AudioHeader) -> Result<MediumSize, Gemma4Error> {
        Ok(self.formats.audio()?.size(header))
    }

    /// Replaces each image placeholder in `tokens` by the tokens of an image, and each audio placeholder by those of an
    /// audio clip, both in order. The images and clips must come from an encoder of the same checkpoint.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if there is not one image or clip for each placeholder. Returns the same error
    /// for images if the model sees none, for clips if the model hears none, and for placeholders of video.
    pub fn encode(
        &self,
        tokens: Vec<u32>,
        images: &[PreparedImage],
        audio: &[PreparedAudio],
    ) -> Result<EncodedPrompt, Gemma4Error> {
        if !images.is_empty() {
            self.check_vision()?;
        }
        if !audio.is_empty() {
            self.check_audio()?;
        }
        let MediaFormats {
            vision,
            audio: hearing,
        } = &self.formats;
        let media = [(vision.is_ok(), IMAGE), (hearing.is_ok(), AUDIO)];
        let media = media.into_iter().filter(|(is_read, _)| *is_read);
        let media: Vec<&str> = media.map(|(_, medium)| medium).collect();
        self.placeholders.check_except(&tokens, &media)?;
        EncodedPrompt::expand(tokens, images, audio, &self.formats)
    }
}
