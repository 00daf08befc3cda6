//! The limits of images in requests.

use std::path::PathBuf;

/// The limits of images in requests, and the folder from which requests can name files.
#[derive(Clone, Debug)]
pub struct ImageOptions {
    /// The folder whose image files requests can name. `None` refuses names of files.
    pub root: Option<PathBuf>,
    /// The largest number of images in a request. 0 refuses images.
    pub max_count: usize,
    /// The largest size of an image file in bytes.
    pub max_bytes: usize,
    /// The largest number of pixels of an image. A smaller limit of [`Image`](burn_gemma4::Image) takes precedence.
    pub max_pixels: usize,
    /// The memory for decoding images at the same time, in bytes. Further images wait. As much memory again holds the
    /// resized images of requests that wait for their prefill. Further requests with images are refused.
    pub memory: usize,
}

impl Default for ImageOptions {
    fn default() -> Self {
        Self {
            root: None,
            max_count: 16,
            max_bytes: 20 << 20,
            max_pixels: 1 << 26,
            memory: 2 << 30,
        }
    }
}
