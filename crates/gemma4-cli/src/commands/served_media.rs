//! The arguments for images and audio in the requests of a server.

use crate::{Error, generation::positive, terminal::WrongArgument};
use gemma4_serve::{AudioOptions, ImageOptions, MediaOptions};
use std::path::{Path, PathBuf};

/// The arguments for images and audio in requests.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Images and audio")]
pub struct ServedMedia {
    /// Folder whose image and audio files requests can name, by a path or a file: URL. vLLM's name of this argument is
    /// --allowed-local-media-path [default: requests cannot name files].
    #[arg(long, value_name = "DIR")]
    media_root: Option<PathBuf>,
    /// Memory for decoding images and audio at the same time, in MiB. As much again holds the files that requests name,
    /// and the resized images and features of waiting requests.
    #[arg(long, value_name = "MIB", default_value_t = MediaOptions::default().memory >> 20, value_parser = positive)]
    media_memory: usize,
    /// Largest number of images in a request. 0 refuses images.
    #[arg(long, value_name = "COUNT", default_value_t = ImageOptions::default().max_count)]
    max_images: usize,
    /// Largest size of an image file in bytes.
    #[arg(long, value_name = "BYTES", default_value_t = ImageOptions::default().max_bytes, value_parser = positive)]
    max_image_bytes: usize,
    /// Largest number of pixels of an image.
    #[arg(long, value_name = "COUNT", default_value_t = ImageOptions::default().max_pixels, value_parser = positive)]
    max_image_pixels: usize,
    /// Largest number of audio clips in a request, of up to 30 seconds each. 0 refuses audio.
    #[arg(long, value_name = "COUNT", default_value_t = AudioOptions::default().max_count)]
    max_audio: usize,
    /// Largest size of an audio file in bytes.
    #[arg(long, value_name = "BYTES", default_value_t = AudioOptions::default().max_bytes, value_parser = positive)]
    max_audio_bytes: usize,
}

impl ServedMedia {
    /// Returns the limits of images and audio in requests.
    ///
    /// # Errors
    /// Returns [`WrongArgument`] if `--media-root` is not a folder.
    pub fn options(&self) -> Result<MediaOptions, Error> {
        Ok(MediaOptions {
            root: folder(self.media_root.as_deref())?,
            memory: self.media_memory.saturating_mul(1 << 20),
            images: ImageOptions {
                max_count: self.max_images,
                max_bytes: self.max_image_bytes,
                max_pixels: self.max_image_pixels,
            },
            audio: AudioOptions {
                max_count: self.max_audio,
                max_bytes: self.max_audio_bytes,
            },
        })
    }
}

/// Checks the value of `--media-root`.
///
/// # Errors
/// Returns [`WrongArgument`] if the value is not a folder.
pub fn folder(root: Option<&Path>) -> Result<Option<PathBuf>, Error> {
    match root {
        Some(root) if !root.is_dir() => {
            let reason = format!("--media-root: {} is not a folder", root.display());
            Err(WrongArgument(reason).into())
        }
        root => Ok(root.map(Path::to_path_buf)),
    }
}
