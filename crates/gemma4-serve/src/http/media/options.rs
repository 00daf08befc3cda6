//! The limits of images and audio in requests.

use std::path::PathBuf;

/// The limits of images and audio in requests, and the folder from which requests can name files.
#[derive(Clone, Debug)]
pub struct MediaOptions {
    /// The folder whose image and audio files requests can name. `None` refuses names of files.
    pub root: Option<PathBuf>,
    /// The memory for decoding images and audio at the same time, in bytes. It covers the decoder, the resizing of
    /// images and the features of audio. Further images and clips wait. As much memory again holds the files that
    /// requests name, and the resized images and features of requests that wait for their prefill. A request beyond it
    /// is refused.
    pub memory: usize,
    /// The limits of images.
    pub images: ImageOptions,
    /// The limits of audio.
    pub audio: AudioOptions,
}

/// The limits of images in requests.
#[derive(Clone, Debug)]
pub struct ImageOptions {
    /// The largest number of images in a request. 0 refuses images.
    pub max_count: usize,
    /// The largest size of an image file in bytes.
    pub max_bytes: usize,
    /// The largest number of pixels of an image. A smaller limit of [`Image`](burn_gemma4::Image) takes precedence.
    pub max_pixels: usize,
}

/// The limits of audio in requests. A clip has at most 30 seconds, which is the limit of
/// [`Audio`](burn_gemma4::Audio).
#[derive(Clone, Debug)]
pub struct AudioOptions {
    /// The largest number of audio clips in a request. 0 refuses audio.
    pub max_count: usize,
    /// The largest size of an audio file in bytes.
    pub max_bytes: usize,
}

impl Default for MediaOptions {
    fn default() -> Self {
        Self {
            root: None,
            memory: 2 << 30,
            images: ImageOptions::default(),
            audio: AudioOptions::default(),
        }
    }
}

impl Default for ImageOptions {
    fn default() -> Self {
        Self {
            max_count: 16,
            max_bytes: 20 << 20,
            max_pixels: 1 << 26,
        }
    }
}

impl Default for AudioOptions {
    fn default() -> Self {
        Self {
            max_count: 16,
            max_bytes: 20 << 20,
        }
    }
}
