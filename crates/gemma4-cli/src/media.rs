//! The arguments for images, videos and audio in prompts.

use crate::{Error, terminal::WrongArgument};
use burn_gemma4::{Audio, Content, Gemma4, Image, MessagePart, Prompt, Video, VideoOptions};
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

/// The arguments for the frames of videos.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Prompt")]
pub struct VideoSampling {
    /// Frames in a second of a video that is a folder of images, from 0.001 to 1000.
    #[arg(long, value_name = "RATE", allow_negative_numbers = true, value_parser = rate)]
    fps: Option<f64>,
    /// Largest number of frames to show of each video, from 1 to 1024, at equal distances [default: 32, as Gemma 4's
    /// processor].
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true, value_parser = video_frames)]
    video_frames: Option<usize>,
}

/// The arguments for images, videos and audio before a message.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Prompt")]
pub struct MediaArguments {
    /// Image to show before the text: a PNG, JPEG or WebP file. The option may be repeated, and implies --chat.
    #[arg(long = "image", value_name = "FILE", conflicts_with_all = ["prompt_tokens", "cache"])]
    images: Vec<PathBuf>,
    /// Video to show before the text and after the images: an animated GIF, PNG or WebP file, or a folder of PNG, JPEG
    /// and WebP files with --fps. The option may be repeated, and implies --chat.
    #[arg(long = "video", value_name = "PATH", conflicts_with_all = ["prompt_tokens", "cache"])]
    videos: Vec<PathBuf>,
    /// Audio to play before the text and after the images and videos: a WAV, FLAC, MP3 or Ogg Vorbis file of up to 30 seconds. The
    /// option may be repeated, and implies --chat.
    #[arg(long = "audio", value_name = "FILE", conflicts_with_all = ["prompt_tokens", "cache"])]
    audio: Vec<PathBuf>,
    #[command(flatten)]
    size: ImageSize,
    #[command(flatten)]
    sampling: VideoSampling,
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

impl VideoSampling {
    /// Reads an animation, or a folder of frames. The rate is for folders, and animations have times.
    ///
    /// # Errors
    /// Returns [`WrongArgument`] for a folder without `--fps`. Passes on the errors of [`Video::open`].
    pub fn open(&self, path: &Path) -> Result<Video, Error> {
        let is_folder = path.is_dir();
        if is_folder && self.fps.is_none() {
            let path = path.display();
            let reason = format!("--fps: is missing for the frames in {path}; expected their rate");
            return Err(WrongArgument(reason).into());
        }
        let options = VideoOptions {
            fps: self.fps.filter(|_| is_folder),
            max_frames: self.video_frames,
            max_soft_tokens: None,
        };
        Ok(Video::open(path, &options)?)
    }
}

impl MediaArguments {
    /// True if there are no images, no videos and no audio.
    pub fn is_empty(&self) -> bool {
        self.images.is_empty() && self.videos.is_empty() && self.audio.is_empty()
    }

    /// Checks that the size of images comes with an image, the number of frames with a video, and the rate of frames
    /// with a folder.
    ///
    /// # Errors
    /// Returns [`WrongArgument`] for `--image-tokens` without `--image`, for `--video-frames` without `--video`, and for
    /// `--fps` without a folder.
    pub fn check(&self) -> Result<(), Error> {
        let wrong = |reason| Err(WrongArgument(reason).into());
        let missing = self.videos.iter().find(|path| !path.exists());
        match (&self.size.image_tokens, &self.sampling) {
            (Some(count), _) if self.images.is_empty() => wrong(format!(
                "--image-tokens: is {count} without an image; expected --image"
            )),
            (
                _,
                VideoSampling {
                    video_frames: Some(count),
                    ..
                },
            ) if self.videos.is_empty() => wrong(format!(
                "--video-frames: is {count} without a video; expected --video"
            )),
            (_, VideoSampling { fps: Some(_), .. }) if missing.is_some() => {
                let path = missing.map(|path| path.display().to_string());
                wrong(format!(
                    "--video: {} does not exist; expected a file or a folder",
                    path.unwrap_or_default()
                ))
            }
            (_, VideoSampling { fps: Some(fps), .. })
                if !self.videos.iter().any(|path| path.is_dir()) =>
            {
                wrong(format!(
                    "--fps: is {fps} without a folder of frames; expected --video with a folder"
                ))
            }
            _ => Ok(()),
        }
    }

    /// Checks that a model sees images and videos, and hears audio, if there are any in the prompt.
    ///
    /// # Errors
    /// Passes on the errors of [`Gemma4::check_vision`], [`Gemma4::check_video`] and [`Gemma4::check_audio`]. Returns
    /// [`WrongArgument`] if the checkpoint samples another number of frames than the videos have.
    pub fn check_model(&self, gemma: &Gemma4, prompt: &Prompt) -> Result<(), Error> {
        if !self.images.is_empty() {
            gemma.check_vision()?;
        }
        if !self.videos.is_empty() {
            gemma.check_video()?;
            if let Prompt::Chat(messages) = prompt {
                let videos = messages.iter().flat_map(|message| message.content.videos());
                check_sampling(gemma, videos)?;
            }
        }
        if !self.audio.is_empty() {
            gemma.check_audio()?;
        }
        Ok(())
    }

    /// Reads the files, first the images and then the videos.
    ///
    /// # Errors
    /// Passes on the errors of [`ImageSize::open`], [`VideoSampling::open`] and [`Audio::open`].
    pub fn open(&self) -> Result<Vec<MessagePart>, Error> {
        let images = self.images.iter();
        let images = images.map(|path| Ok(MessagePart::Image(self.size.open(path)?)));
        let videos = self.videos.iter();
        let videos = videos.map(|path| Ok(self.sampling.open(path)?.into()));
        let audio = self.audio.iter();
        let audio = audio.map(|path| Ok(MessagePart::Audio(Audio::open(path)?)));
        images.chain(videos).chain(audio).collect()
    }
}

/// Checks that videos have the frames that the checkpoint's video processor samples, or those of `--video-frames`.
///
/// # Errors
/// Returns [`WrongArgument`] for a video that has other frames.
pub fn check_sampling<'a>(
    gemma: &Gemma4,
    videos: impl IntoIterator<Item = &'a Video>,
) -> Result<(), Error> {
    let frames = gemma.prompt_encoder().video_frames()?;
    match videos.into_iter().all(|video| video.is_sampled_for(frames)) {
        true => Ok(()),
        false => Err(WrongArgument(format!(
            "--video-frames: is missing; expected a number, because this checkpoint samples {frames} frames instead of 32"
        ))
        .into()),
    }
}

/// Parses the value of `--image-tokens`.
fn image_tokens(value: &str) -> Result<usize, String> {
    let count = value.parse().ok();
    count
        .filter(|count| IMAGE_TOKENS.contains(count))
        .ok_or_else(|| "expected 70, 140, 280, 560 or 1120".to_owned())
}

/// Parses the value of `--fps`.
fn rate(value: &str) -> Result<f64, String> {
    let rate = value.parse().ok();
    rate.filter(|rate| (0.001..=1000.0).contains(rate))
        .ok_or_else(|| "expected a number from 0.001 to 1000".to_owned())
}

/// Parses the value of `--video-frames`.
fn video_frames(value: &str) -> Result<usize, String> {
    let count = value.parse().ok();
    count
        .filter(|count| (1..=1024).contains(count))
        .ok_or_else(|| "expected a number from 1 to 1024".to_owned())
}

/// Returns the content of a message with images, videos and audio before its text.
pub fn content(media: Vec<MessagePart>, text: String) -> Content {
    match media.is_empty() {
        true => text.into(),
        false => Content::Parts(media.into_iter().chain([MessagePart::Text(text)]).collect()),
    }
}
