//! A video in the form in which a model reads it: resized frames, with their times.

use super::prepared::PreparedImage;
use crate::error::Gemma4Error;
use std::fmt::Write;

/// The text with which a chat template stands for a video. Each frame has its token too.
pub(crate) const PLACEHOLDER: &str = "<|video|>";

/// The frames of a video in the size in which a model sees them, with their timestamps. Clones share the pixels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreparedVideo {
    /// The frames and their timestamps.
    pub(crate) frames: Vec<(String, PreparedImage)>,
}

impl PreparedVideo {
    /// The number of frames.
    pub fn frames(&self) -> usize {
        self.frames.len()
    }

    /// The size of the resized pixels in memory, in bytes.
    pub fn bytes(&self) -> usize {
        self.frames.iter().map(|(_, frame)| frame.bytes()).sum()
    }

    /// The text of a prompt that stands for the video: the timestamp and the placeholder of each frame.
    fn text(&self) -> String {
        let mut text = String::new();
        for (index, (timestamp, _)) in self.frames.iter().enumerate() {
            let separator = if index == 0 { "" } else { " " };
            write!(text, "{separator}{timestamp} {PLACEHOLDER}").expect("a text takes every text");
        }
        text
    }
}

/// Replaces the placeholder of each video in a rendered prompt by the timestamps and placeholders of the video's
/// frames, in order.
///
/// # Errors
/// Returns [`Gemma4Error::Argument`] if there is not one video for each placeholder.
pub(crate) fn expand(prompt: &str, videos: &[PreparedVideo]) -> Result<String, Gemma4Error> {
    let found = prompt.matches(PLACEHOLDER).count();
    if found != videos.len() {
        return Err(Gemma4Error::Argument {
            argument: "prompt",
            reason: format!(
                "has {found} video placeholders, but {} videos; expected one for each placeholder",
                videos.len()
            ),
        });
    }
    let mut parts = prompt.split(PLACEHOLDER);
    let mut expanded = parts.next().unwrap_or_default().to_owned();
    for (video, part) in videos.iter().zip(parts) {
        expanded += &video.text();
        expanded += part;
    }
    Ok(expanded)
}

#[cfg(test)]
mod tests {
    use crate::vision::image::Image;
    use crate::vision::patches::tests::crc32;
    use crate::vision::video::{Video, VideoOptions};
    use crate::vision::video_processor::VideoProcessor;
    use serde::Deserialize;
    use std::path::PathBuf;

    #[derive(Deserialize)]
    struct Processed {
        sampling: Vec<Sampling>,
        soft_tokens: Vec<usize>,
        resized: Vec<u32>,
    }

    #[derive(Deserialize)]
    struct Sampling {
        frames: usize,
        fps: f64,
        max_frames: usize,
        indices: Vec<usize>,
        timestamps: Vec<String>,
    }

    fn folder() -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/videos")
    }

    fn processed() -> Processed {
        let text = std::fs::read_to_string(folder().join("processed.json"));
        serde_json::from_str(&text.expect("the fixture is readable")).expect("the fixture parses")
    }

    #[test]
    fn resized_frames_equal_transformers() {
        let Processed {
            soft_tokens,
            resized,
            ..
        } = processed();
        let options = VideoOptions {
            fps: Some(0.1),
            max_frames: Some(2),
            ..VideoOptions::default()
        };
        let video = Video::open(folder().join("frames"), &options);
        let video = video.expect("the frames are decodable");
        let processor = VideoProcessor::new(16, 3).frame;
        let frames = video.frames().iter();
        let frames: Vec<_> = frames
            .map(|frame| frame.image.prepared(processor).expect("a valid size"))
            .collect();
        let found: Vec<u32> = frames
            .iter()
            .map(|frame| crc32(&frame.patches.rgb))
            .collect();
        assert_eq!(found, resized);
        assert!(
            frames
                .iter()
                .all(|frame| [frame.count()] == soft_tokens[..])
        );
    }

    /// A frame's color is its index, so that the sampled frames are known.
    #[test]
    fn sampled_frames_and_timestamps_equal_transformers() {
        for case in processed().sampling {
            let image = |index: usize| {
                let rgb = vec![(index % 256) as u8, (index / 256) as u8, 0];
                Image::from_rgb(1, 1, rgb).expect("one pixel has three bytes")
            };
            let frames = (0..case.frames).map(|index| (index as f64 / case.fps, image(index)));
            let options = VideoOptions {
                max_frames: Some(case.max_frames),
                ..VideoOptions::default()
            };
            let video = Video::from_frames(frames.collect(), &options).expect("valid frames");
            assert_eq!(video.timestamps().collect::<Vec<_>>(), case.timestamps);
            let found = video.frames().iter().map(|frame| {
                let rgb = &frame.image.pixels().rgb;
                usize::from(rgb[0]) + 256 * usize::from(rgb[1])
            });
            assert_eq!(found.collect::<Vec<_>>(), case.indices);
        }
    }
}
