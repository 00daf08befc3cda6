//! The arguments for images in the requests of a server.

use crate::{Error, terminal::WrongArgument};
use gemma4_serve::ImageOptions;
use std::path::{Path, PathBuf};

/// The arguments for images in requests.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Images")]
pub struct ServedImages {
    /// Folder whose image files requests can name, by a path or a file: URL. vLLM's name of this argument is
    /// --allowed-local-media-path [default: requests cannot name files].
    #[arg(long, value_name = "DIR")]
    image_root: Option<PathBuf>,
    /// Largest number of images in a request. 0 refuses images.
    #[arg(long, value_name = "COUNT", default_value_t = ImageOptions::default().max_count)]
    max_images: usize,
    /// Largest size of an image file in bytes.
    #[arg(long, value_name = "BYTES", default_value_t = ImageOptions::default().max_bytes, value_parser = crate::model::positive)]
    max_image_bytes: usize,
    /// Largest number of pixels of an image.
    #[arg(long, value_name = "COUNT", default_value_t = ImageOptions::default().max_pixels, value_parser = crate::model::positive)]
    max_image_pixels: usize,
    /// Memory for decoding images at the same time, in MiB. As much again holds the resized images of waiting requests.
    #[arg(long, value_name = "MIB", default_value_t = ImageOptions::default().memory >> 20, value_parser = crate::model::positive)]
    image_memory: usize,
}

impl ServedImages {
    /// Returns the limits of images in requests.
    ///
    /// # Errors
    /// Returns [`WrongArgument`] if `--image-root` is not a folder.
    pub fn options(&self) -> Result<ImageOptions, Error> {
        Ok(ImageOptions {
            root: folder(self.image_root.as_deref())?,
            max_count: self.max_images,
            max_bytes: self.max_image_bytes,
            max_pixels: self.max_image_pixels,
            memory: self.image_memory.saturating_mul(1 << 20),
        })
    }
}

/// Checks the value of `--image-root`.
///
/// # Errors
/// Returns [`WrongArgument`] if the value is not a folder.
pub fn folder(root: Option<&Path>) -> Result<Option<PathBuf>, Error> {
    match root {
        Some(root) if !root.is_dir() => {
            let reason = format!("--image-root: {} is not a folder", root.display());
            Err(WrongArgument(reason).into())
        }
        root => Ok(root.map(Path::to_path_buf)),
    }
}
