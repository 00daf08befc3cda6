//! Decodes the images of requests within limits on memory.

use super::super::client_state::ClientState;
use super::options::ImageOptions;
use super::source::{ImageSource, shown};
use crate::engine::{ImageMemory, ImagePool, permits};
use crate::error::{ErrorKind, RequestError};
use crate::text::TextModel;
use burn_gemma4::{Gemma4Error, Image, ImageHeader, PreparedImage};
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::available_parallelism;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, SemaphorePermit};

/// The largest number of images that wait for memory. A waiting image occupies a thread for blocking work. Tokio has 512
/// such threads.
const MOST_WAITING: usize = 64;

/// The number of soft tokens of an image with the detail `low`, which is the smallest number that models support.
const LOW: usize = 70;

/// The number of soft tokens of an image with the detail `high`, which is the largest number that models support.
const HIGH: usize = 1120;

/// The limits and the memory of the images of all requests.
#[derive(Debug)]
pub(crate) struct ImageStore {
    options: ImageOptions,
    /// The number of further images that may be read at the same time. Half of the processors stay free for answers.
    /// This number also limits the memory for reading headers, which is not in `decoding`.
    turns: Semaphore,
    /// The free memory for decoding, in units of [`permits`].
    decoding: Semaphore,
    /// The number of images that wait for their turn, or for memory to be decoded.
    waiting: AtomicUsize,
    /// The memory of resized images.
    pool: ImagePool,
}

/// The images of one request.
pub(crate) struct RequestImages<'a> {
    store: &'a ImageStore,
    text: &'a TextModel,
    client: &'a ClientState,
    count: usize,
    memory: Option<ImageMemory>,
}

impl ImageStore {
    pub fn new(options: ImageOptions) -> Self {
        let processors = available_parallelism().map_or(1, NonZero::get);
        Self {
            turns: Semaphore::new((processors / 2).max(1)),
            decoding: Semaphore::new(permits(options.memory) as usize),
            waiting: AtomicUsize::new(0),
            pool: ImagePool::new(options.memory),
            options,
        }
    }

    /// Begins to read the images of a request for the model of `text`. No further image is read after the client has
    /// left.
    pub fn request<'a>(
        &'a self,
        text: &'a TextModel,
        client: &'a ClientState,
    ) -> RequestImages<'a> {
        RequestImages {
            store: self,
            text,
            client,
            count: 0,
            memory: None,
        }
    }

    /// Waits until there is memory for decoding an image, and reserves it. The call blocks, so it must run on a thread
    /// for blocking work.
    fn reserve(
        &self,
        field: &str,
        header: ImageHeader,
    ) -> Result<SemaphorePermit<'_>, RequestError> {
        let needed = usize::try_from(header.decoding_bytes).unwrap_or(usize::MAX);
        if needed > self.options.memory {
            let reason = format!(
                "needs {} MiB to be decoded; expected at most {} MiB",
                needed.div_ceil(1 << 20),
                self.options.memory >> 20
            );
            return Err(RequestError::field(field, reason));
        }
        self.wait(&self.decoding, permits(needed))
    }

    /// Waits for permits of `semaphore`, unless too many images wait already. The call blocks.
    fn wait<'a>(
        &self,
        semaphore: &'a Semaphore,
        count: u32,
    ) -> Result<SemaphorePermit<'a>, RequestError> {
        let busy = || {
            let message = "too many images wait to be decoded; try again later";
            RequestError::new(ErrorKind::Busy, message)
        };
        if self.waiting.fetch_add(1, Ordering::SeqCst) >= MOST_WAITING {
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            return Err(busy());
        }
        let permit = Handle::current().block_on(semaphore.acquire_many(count));
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        // The semaphores are never closed.
        permit.map_err(|_| busy())
    }
}

impl RequestImages<'_> {
    /// Reads, decodes and resizes an image. `field` is the field of the request with the image, and `soft_tokens` is its
    /// largest number of soft tokens, if this number is not the checkpoint's. The call blocks.
    ///
    /// # Errors
    /// Returns an error that names the field if the image is malformed or exceeds a limit, or if the model sees no
    /// images. Returns [`ErrorKind::Busy`] if there is no memory for the image. Also returns an
    /// error if the client has left; nobody reads this error.
    pub fn read(
        &mut self,
        field: &str,
        source: ImageSource,
        soft_tokens: Option<usize>,
    ) -> Result<PreparedImage, RequestError> {
        let options = &self.store.options;
        let refuse = |reason: String| Err(RequestError::field(field, reason));
        self.text.check_vision(field)?;
        self.count += 1;
        if self.count > options.max_count {
            return refuse(format!(
                "is image {} of the request; expected at most {} images",
                self.count, options.max_count
            ));
        }
        let _turn = self.store.wait(&self.store.turns, 1)?;
        self.client.check()?;
        let bytes = source.into_bytes(field, options)?;
        let of_image = |error| match error {
            Gemma4Error::Argument { reason, .. } => RequestError::field(field, reason),
            error => error.into(),
        };
        let header = Image::header(&bytes).map_err(of_image)?;
        let pixels = header.width.saturating_mul(header.height);
        if pixels > options.max_pixels {
            return refuse(format!(
                "has {} x {} pixels; expected at most {} pixels",
                header.width, header.height, options.max_pixels
            ));
        }
        let decoding = self.store.reserve(field, header)?;
        self.client.check()?;
        let mut image = Image::from_bytes(&bytes).map_err(of_image)?;
        drop(bytes);
        if let Some(count) = soft_tokens {
            image = image.with_max_soft_tokens(count).map_err(of_image)?;
        }
        let prepared = self.text.prepare(field, &image)?;
        drop((image, decoding));
        let Some(memory) = self.store.pool.try_reserve(prepared.bytes()) else {
            let message = "the images of waiting requests take all memory; try again later";
            return Err(RequestError::new(ErrorKind::Busy, message));
        };
        match &mut self.memory {
            Some(all) => all.merge(memory),
            none => *none = Some(memory),
        }
        Ok(prepared)
    }

    /// Returns the reserved memory of the images that have been read.
    pub fn into_memory(self) -> Option<ImageMemory> {
        self.memory
    }
}

/// Returns the largest number of soft tokens of an image with a value of OpenAI's option `detail`, which is in the
/// field `field`. `None` is the checkpoint's number.
pub(crate) fn soft_tokens(
    field: &str,
    detail: Option<&str>,
) -> Result<Option<usize>, RequestError> {
    match detail {
        None | Some("auto") => Ok(None),
        Some("low") => Ok(Some(LOW)),
        Some("high") => Ok(Some(HIGH)),
        Some(detail) => {
            let reason = format!(
                "is {:?}; expected \"auto\", \"low\" or \"high\"",
                shown(detail)
            );
            Err(RequestError::field(field, reason))
        }
    }
}
