//! Puts images, videos and audio clips in the place of the placeholders in a prompt, without the weights of the model.

use super::encoded::EncodedPrompt;
use super::media_layout::MediaLayout;
use crate::audio::clip::Audio;
use crate::audio::header::AudioHeader;
use crate::audio::prepared::PreparedAudio;
use crate::checkpoint::media::MediaFormats;
use crate::config::placeholders::{AUDIO, IMAGE, Placeholders, VIDEO};
use crate::error::Gemma4Error;
use crate::media_size::MediumSize;
use crate::vision::image::{Image, ImageHeader};
use crate::vision::prepared::PreparedImage;
use crate::vision::prepared_video::{self, PreparedVideo};
use crate::vision::video::Video;

/// Puts images, videos and audio clips in the place of the placeholders in a prompt. The encoder holds no weights, so a thread
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

    /// Checks that the model sees videos.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] with the reason why the model sees no videos.
    pub fn check_video(&self) -> Result<(), Gemma4Error> {
        self.formats.check_video()
    }

    /// Returns the number of frames that the checkpoint's video processor samples from a longer video.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] with the reason why the model sees no videos.
    pub fn video_frames(&self) -> Result<usize, Gemma4Error> {
        Ok(self.formats.vision()?.video()?.frames)
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

    /// Resizes the frames of a video for the model. The result does not keep the original pixels.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the model sees no videos, or if the frames are too narrow. Returns the same
    /// error if [`video_frames`](Self::video_frames) is not 32, and the video has been read without `max_frames`.
    pub fn prepare_video(&self, video: &Video) -> Result<PreparedVideo, Gemma4Error> {
        self.formats.vision()?.prepared_video(video)
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
        self.encode_with_videos(tokens, images, &[], audio)
    }

    /// Encodes tokens like [`encode`](Self::encode), with videos. Tokenize the text that
    /// [`expand_videos`](Self::expand_videos) returns, so that each frame of a video has a placeholder.
    ///
    /// # Errors
    /// Returns the errors of [`encode`](Self::encode). Returns [`Gemma4Error::Argument`] for videos if the model sees
    /// none, and if there is not one placeholder for each frame.
    pub fn encode_with_videos(
        &self,
        tokens: Vec<u32>,
        images: &[PreparedImage],
        videos: &[PreparedVideo],
        audio: &[PreparedAudio],
    ) -> Result<EncodedPrompt, Gemma4Error> {
        let frames = videos.iter().map(PreparedVideo::frames).sum();
        self.check_media(&tokens, images.len(), frames, audio.len())?;
        Ok(EncodedPrompt::expand(
            tokens,
            images,
            videos,
            audio,
            &self.formats,
        ))
    }

    /// Replaces each `<|video|>` in a rendered prompt by the timestamps and placeholders of a video's frames, in order:
    /// `00:00 <|video|> 00:01 <|video|>`. The timestamps are part of the text, so this precedes tokenization.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the model sees no videos, or if there is not one video for each placeholder.
    pub fn expand_videos(
        &self,
        prompt: &str,
        videos: &[PreparedVideo],
    ) -> Result<String, Gemma4Error> {
        self.check_video()?;
        prepared_video::expand(prompt, videos)
    }

    /// Replaces each image placeholder and each audio placeholder in `tokens` by as many placeholders as an image or a
    /// clip has soft tokens, without the images and clips. `images` and `audio` are their numbers of tokens, as
    /// [`PreparedImage::tokens`] and [`PreparedAudio::tokens`] return them.
    ///
    /// # Errors
    /// Returns the errors of [`encode`](Self::encode).
    ///
    /// # Panics
    /// Panics if an image or a clip has fewer than two tokens.
    pub fn layout(
        &self,
        tokens: Vec<u32>,
        images: &[usize],
        audio: &[usize],
    ) -> Result<MediaLayout, Gemma4Error> {
        self.check(&tokens, images.len(), audio.len())?;
        Ok(MediaLayout::new(tokens, images, audio, &self.formats))
    }

    /// Returns the numbers of image placeholders and of audio placeholders in `tokens` that this model reads.
    pub fn count_placeholders(&self, tokens: &[u32]) -> [usize; 2] {
        let MediaFormats { vision, audio } = &self.formats;
        let image = vision.as_ref().ok().map(|format| format.config.image_token);
        let audio = audio.as_ref().ok().map(|format| format.config.audio_token);
        [image, audio].map(|placeholder| {
            let of_kind = tokens.iter().filter(|token| Some(**token) == placeholder);
            of_kind.count()
        })
    }

    /// Checks that there is one of `images` images or `audio` audio clips for each placeholder in `tokens`, before the
    /// images and clips are prepared.
    ///
    /// # Errors
    /// Returns the errors of [`encode`](Self::encode).
    pub fn check(&self, tokens: &[u32], images: usize, audio: usize) -> Result<(), Gemma4Error> {
        self.check_media(tokens, images, 0, audio)
    }

    /// Checks tokens like [`check`](Self::check), with `frames` frames of videos.
    fn check_media(
        &self,
        tokens: &[u32],
        images: usize,
        frames: usize,
        audio: usize,
    ) -> Result<(), Gemma4Error> {
        if images > 0 {
            self.check_vision()?;
        }
        if frames > 0 {
            self.check_video()?;
        }
        if audio > 0 {
            self.check_audio()?;
        }
        let MediaFormats {
            vision,
            audio: hearing,
        } = &self.formats;
        let media = [
            (vision.is_ok(), IMAGE),
            (frames > 0, VIDEO),
            (hearing.is_ok(), AUDIO),
        ];
        let media = media.into_iter().filter(|(is_read, _)| *is_read);
        let media: Vec<&str> = media.map(|(_, medium)| medium).collect();
        self.placeholders.check_except(tokens, &media)?;
        if let Ok(format) = vision {
            let nouns = ["image", "images"];
            check_count(tokens, format.config.image_token, images, nouns)?;
            if frames > 0 {
                let nouns = ["video frame", "frames"];
                check_count(tokens, format.config.video_token, frames, nouns)?;
            }
        }
        match hearing {
            Ok(format) => {
                let nouns = ["audio", "audio clips"];
                check_count(tokens, format.config.audio_token, audio, nouns)
            }
            Err(_) => Ok(()),
        }
    }
}

/// Checks that there are as many placeholders of a kind as media. `nouns` are the words for a placeholder and for the
/// media in messages.
fn check_count(
    tokens: &[u32],
    placeholder: u32,
    media: usize,
    [noun, plural]: [&str; 2],
) -> Result<(), Gemma4Error> {
    let placeholders = tokens.iter().filter(|token| **token == placeholder);
    let placeholders = placeholders.count();
    match placeholders == media {
        true => Ok(()),
        false => Err(Gemma4Error::Argument {
            argument: "prompt",
            reason: format!(
                "has {placeholders} {noun} placeholders, but {media} {plural}; expected one for each placeholder"
            ),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_count_of_other_numbers_names_the_kind() {
        let check = |media| check_count(&[5, 8, 5], 5, media, ["audio", "audio clips"]);
        check(2).expect("the numbers are equal");
        for media in [0, 1, 3] {
            let error = check(media).expect_err("the numbers differ").to_string();
            let words = format!("2 audio placeholders, but {media} audio clips");
            assert!(error.contains(&words), "{error}");
        }
    }
}
