//! A video of a prompt: frames that have been sampled from an animation or from a list of images.

use super::animation::{self, Animation};
use super::frame_files::{files_in, frames};
use super::image::{Image, SOFT_TOKENS};
use super::sampling::{DEFAULT_FRAMES, MOST_SAMPLED, check_pixels_of_frames, sampled_indices};
use super::unsupported_video::check_supported;
use crate::error::Gemma4Error;
use crate::media_file;
use std::{
    fmt, fs,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The noun of a video file in messages.
const MEDIUM: &str = "a video";

/// The valid numbers of frames in a second.
const FPS: std::ops::RangeInclusive<f64> = 0.001..=1000.0;

/// The latest second at which a frame may begin, 99 hours 59 minutes 59 seconds.
const LATEST_SECOND: f64 = 359_999.0;

/// The settings with which [`Video`] reads frames.
///
/// ```
/// use burn_gemma4::VideoOptions;
///
/// let options = VideoOptions { fps: Some(2.0), max_frames: Some(16), ..VideoOptions::default() };
/// assert_eq!(options.max_soft_tokens, None);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct VideoOptions {
    /// The number of frames in a second, from 0.001 to 1,000. Image files need it, because they have no times.
    /// Animations must not have it.
    pub fps: Option<f64>,
    /// The largest number of frames that the model sees, from 1 to 1,024. The default is 32, the number of Gemma 4's
    /// video processor. [`PromptEncoder::video_frames`](crate::PromptEncoder::video_frames) returns a checkpoint's.
    pub max_frames: Option<usize>,
    /// The largest number of soft tokens of each frame: 70, 140, 280, 560 or 1,120. The default is the number of the
    /// checkpoint's video processor, usually 70.
    pub max_soft_tokens: Option<usize>,
}

/// A video for a prompt: frames at equal distances, with the times at which they begin. Only sampled frames are in
/// memory. Clones share the pixels.
///
/// ```no_run
/// use burn_gemma4::{Message, Video, VideoOptions};
///
/// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
/// let options = VideoOptions { fps: Some(1.0), ..VideoOptions::default() };
/// let video = Video::open("frames", &options)?; // A folder with frame-001.jpg, frame-002.jpg and so on.
/// let message = Message::user(vec![video.into(), "What happens here?".into()]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Video {
    frames: Arc<[VideoFrame]>,
    /// The number of frames that the caller allowed, or `None` for the default.
    max_frames: Option<usize>,
    /// The number of frames before sampling.
    total: usize,
}

/// A frame of a video.
#[derive(PartialEq, Eq)]
pub(crate) struct VideoFrame {
    /// The second at which the frame begins, rounded down.
    pub second: u64,
    pub image: Image,
}

impl Video {
    /// Reads an animated GIF, PNG or WebP file, or the PNG, JPEG and WebP files in a folder. The files are the frames in
    /// the order of their names, in which numbers are compared as numbers. Hidden files are ignored.
    ///
    /// A frame of an animation that is shown for at most 10 ms counts as 100 ms, as in browsers. Transparency is
    /// dropped.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Io`] if a file cannot be read. Returns [`Gemma4Error::Malformed`] if a file is malformed,
    /// truncated, too large or in another format, such as MP4. Returns [`Gemma4Error::Argument`] if an option is
    /// invalid, or if the frames differ in size.
    pub fn open(path: impl AsRef<Path>, options: &VideoOptions) -> Result<Self, Gemma4Error> {
        let path = path.as_ref();
        options.check()?;
        let io = |source| Gemma4Error::Io {
            path: path.into(),
            source,
        };
        let metadata = fs::metadata(path).map_err(io)?;
        if metadata.is_dir() {
            return Self::from_files(&files_in(path)?, options);
        }
        options.check_no_fps()?;
        let decode = |bytes: &[u8]| animation::decode(bytes, options.most_frames());
        media_file::open_checked(path, MEDIUM, check_supported, decode)
            .and_then(|frames| Self::of_animation(frames, options))
    }

    /// Decodes the contents of an animated GIF, PNG or WebP file, as [`open`](Self::open) does.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] in the cases in which [`open`](Self::open) fails.
    ///
    /// ```
    /// use burn_gemma4::{Video, VideoOptions};
    ///
    /// let mp4 = b"\0\0\0\x18ftypmp42";
    /// let error = Video::from_bytes(mp4, &VideoOptions::default()).unwrap_err();
    /// assert!(error.to_string().contains("ffmpeg"));
    /// ```
    pub fn from_bytes(bytes: &[u8], options: &VideoOptions) -> Result<Self, Gemma4Error> {
        options.check()?;
        options.check_no_fps()?;
        let frames = media_file::check_size(bytes.len() as u64, MEDIUM)
            .and_then(|()| check_supported(bytes))
            .and_then(|()| animation::decode(bytes, options.most_frames()))
            .map_err(refused)?;
        Self::of_animation(frames, options)
    }

    /// Reads PNG, JPEG and WebP files, which are the frames in order. Only sampled files are read.
    ///
    /// # Errors
    /// Returns the errors of [`open`](Self::open).
    pub fn from_files(paths: &[PathBuf], options: &VideoOptions) -> Result<Self, Gemma4Error> {
        options.check()?;
        let fps = options.fps.ok_or_else(|| Gemma4Error::Argument {
            argument: "fps",
            reason: "is missing; expected the number of frames in a second, because image files have no times".into(),
        })?;
        let sampled = sampled_indices(paths.len(), options.most_frames());
        let seconds = sampled.iter().map(|index| *index as f64 / fps);
        let seconds: Vec<u64> = seconds.map(second).collect::<Result<_, _>>()?;
        let files = sampled.iter().map(|index| &*paths[*index]);
        let images = frames(files)?;
        let frames = seconds.into_iter().zip(images).collect();
        Self::new(frames, paths.len(), options)
    }

    /// Creates a video from decoded frames and the times in seconds at which they begin.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if there are no frames, if they differ in size, or if a time is before the one
    /// of the frame before. Returns the same error for `fps` among the options, and for an invalid option.
    ///
    /// ```
    /// use burn_gemma4::{Image, Video, VideoOptions};
    ///
    /// let frame = |value| Image::from_rgb(2, 1, vec![value; 6]);
    /// let frames = vec![(0.0, frame(10)?), (0.5, frame(20)?), (61.0, frame(30)?)];
    /// let video = Video::from_frames(frames, &VideoOptions::default())?;
    /// assert_eq!(video.timestamps().collect::<Vec<_>>(), ["00:00", "00:00", "01:01"]);
    /// # Ok::<(), burn_gemma4::Gemma4Error>(())
    /// ```
    pub fn from_frames(
        frames: Vec<(f64, Image)>,
        options: &VideoOptions,
    ) -> Result<Self, Gemma4Error> {
        options.check()?;
        options.check_no_fps()?;
        let times = frames.iter().map(|(time, _)| *time);
        if !times.is_sorted() {
            return Err(refused("has times that do not ascend".into()));
        }
        let total = frames.len();
        let sampled = sampled_indices(total, options.most_frames());
        let mut next = sampled.into_iter().peekable();
        let sampled = frames.into_iter().enumerate();
        let sampled = sampled.filter(|(index, _)| next.next_if_eq(index).is_some());
        let sampled = sampled.map(|(_, (time, image))| Ok((second(time)?, image)));
        Self::new(sampled.collect::<Result<_, Gemma4Error>>()?, total, options)
    }

    fn of_animation(animation: Animation, options: &VideoOptions) -> Result<Self, Gemma4Error> {
        let frames = animation.sampled.into_iter();
        let frames = frames.map(|(second, pixels)| (second, Image::of(pixels)));
        Self::new(frames.collect(), animation.total, options)
    }

    /// Creates a video from sampled frames. `total` is their number before sampling.
    fn new(
        frames: Vec<(u64, Image)>,
        total: usize,
        options: &VideoOptions,
    ) -> Result<Self, Gemma4Error> {
        let size = |image: &Image| [image.width(), image.height()];
        let Some((_, first)) = frames.first() else {
            return Err(refused("has no frames".into()));
        };
        let first = size(first);
        check_pixels_of_frames(first, frames.len()).map_err(refused)?;
        if let Some([width, height]) = frames
            .iter()
            .map(|(_, image)| size(image))
            .find(|found| *found != first)
        {
            return Err(refused(format!(
                "has frames of {} x {} and of {width} x {height} pixels; expected frames of one size",
                first[0], first[1]
            )));
        }
        let frames = frames.into_iter().map(|(second, image)| {
            let image = match options.max_soft_tokens {
                Some(count) => image.with_max_soft_tokens(count)?,
                None => image,
            };
            Ok(VideoFrame { second, image })
        });
        Ok(Self {
            frames: frames.collect::<Result<_, Gemma4Error>>()?,
            max_frames: options.max_frames,
            total,
        })
    }

    /// The times at which the sampled frames begin, as minutes and seconds. The prompt has each of them before its
    /// frame.
    pub fn timestamps(&self) -> impl Iterator<Item = String> {
        let seconds = self.frames.iter().map(|frame| frame.second);
        seconds.map(timestamp)
    }

    /// The width of the frames in pixels.
    pub fn width(&self) -> usize {
        self.frames[0].image.width()
    }

    /// The height of the frames in pixels.
    pub fn height(&self) -> usize {
        self.frames[0].image.height()
    }

    pub(crate) fn frames(&self) -> &[VideoFrame] {
        &self.frames
    }

    /// True if a video processor that samples `frames` frames would sample the frames that this video has. A video with
    /// few frames has all of them for every processor. A caller who has set `max_frames` has chosen the frames.
    ///
    /// ```
    /// use burn_gemma4::{Image, Video, VideoOptions};
    ///
    /// let frame = Image::from_rgb(2, 1, vec![7; 6])?;
    /// let frames = (0..40).map(|second| (f64::from(second), frame.clone()));
    /// let video = Video::from_frames(frames.collect(), &VideoOptions::default())?;
    /// assert!(video.is_sampled_for(32) && !video.is_sampled_for(64));
    /// # Ok::<(), burn_gemma4::Gemma4Error>(())
    /// ```
    pub fn is_sampled_for(&self, frames: usize) -> bool {
        self.max_frames.is_some()
            || frames == DEFAULT_FRAMES
            || self.total <= frames.min(DEFAULT_FRAMES)
    }

    /// Checks that a checkpoint whose processor samples `default` frames sees the frames that this video has.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the video has been sampled for another default.
    pub(crate) fn check_sampling(&self, default: usize) -> Result<(), Gemma4Error> {
        match self.is_sampled_for(default) {
            true => Ok(()),
            false => Err(refused(format!(
                "is sampled to {DEFAULT_FRAMES} frames, but the checkpoint's video processor samples {default}; choose the number of frames, which is max_frames in VideoOptions"
            ))),
        }
    }
}

impl VideoOptions {
    fn most_frames(&self) -> usize {
        self.max_frames.unwrap_or(DEFAULT_FRAMES)
    }

    fn check(&self) -> Result<(), Gemma4Error> {
        let wrong = |argument, reason| Err(Gemma4Error::Argument { argument, reason });
        if let Some(fps) = self.fps.filter(|fps| !FPS.contains(fps)) {
            let reason = format!("is {fps}; expected from {} to {}", FPS.start(), FPS.end());
            return wrong("fps", reason);
        }
        let is_valid = |count: &usize| (1..=MOST_SAMPLED).contains(count);
        if let Some(count) = self.max_frames.filter(|count| !is_valid(count)) {
            let reason = format!("is {count}; expected from 1 to {MOST_SAMPLED} frames");
            return wrong("max_frames", reason);
        }
        match self.max_soft_tokens {
            Some(count) if !SOFT_TOKENS.contains(&count) => {
                let reason = format!("is {count}; expected one of {SOFT_TOKENS:?}");
                wrong("max_soft_tokens", reason)
            }
            _ => Ok(()),
        }
    }

    /// Refuses a rate of frames for a video that has times.
    fn check_no_fps(&self) -> Result<(), Gemma4Error> {
        match self.fps {
            None => Ok(()),
            Some(fps) => Err(Gemma4Error::Argument {
                argument: "fps",
                reason: format!(
                    "is {fps}, but the frames have times; expected it for image files only"
                ),
            }),
        }
    }
}

/// Rounds a time in seconds down.
fn second(time: f64) -> Result<u64, Gemma4Error> {
    match (0.0..=LATEST_SECOND).contains(&time) {
        true => Ok(time as u64),
        false => Err(refused(format!(
            "has a frame at {time} seconds; expected from 0 to {LATEST_SECOND}"
        ))),
    }
}

/// Writes a second as minutes and seconds, as Hugging Face Transformers does. Hours are minutes.
fn timestamp(second: u64) -> String {
    format!("{:02}:{:02}", second / 60, second % 60)
}

pub(super) fn refused(reason: String) -> Gemma4Error {
    Gemma4Error::Argument {
        argument: "video",
        reason,
    }
}

impl fmt::Debug for Video {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Video")
            .field("width", &self.width())
            .field("height", &self.height())
            .field("frames", &self.frames.len())
            .finish_non_exhaustive()
    }
}
