//! The limits on memory and processors for the images and audio of all requests.

use super::super::client_state::ClientState;
use super::options::MediaOptions;
use super::request::RequestMedia;
use crate::engine::{MediaMemory, MediaPool, permits, reserved_bytes};
use crate::error::{ErrorKind, RequestError};
use crate::text::TextModel;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::available_parallelism;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, SemaphorePermit};

/// The largest number of media that wait for memory. A waiting medium occupies a thread for blocking work. Tokio has
/// 512 such threads.
const MOST_WAITING: usize = 64;

/// The limits and the memory of the images and audio of all requests.
#[derive(Debug)]
pub(crate) struct MediaStore {
    pub(super) options: MediaOptions,
    /// The number of further media that may be read at the same time. Half of the processors stay free for answers.
    /// This number also limits the memory for reading headers, which is not in `decoding`.
    processors: Semaphore,
    /// The free memory for decoding, in units of [`permits`].
    decoding: Semaphore,
    /// The number of media that wait for a processor, or for memory to be decoded.
    waiting: AtomicUsize,
    /// The memory of files, resized images and features.
    pool: MediaPool,
}

impl MediaStore {
    pub fn new(options: MediaOptions) -> Self {
        let processors = available_parallelism().map_or(1, NonZero::get);
        Self {
            processors: Semaphore::new((processors / 2).max(1)),
            decoding: Semaphore::new(permits(options.memory) as usize),
            waiting: AtomicUsize::new(0),
            pool: MediaPool::new(options.memory),
            options,
        }
    }

    /// Begins to read the media of a request for the model of `text`. No further medium is read after the client has
    /// left.
    pub fn request<'a>(&'a self, text: &'a TextModel, client: &'a ClientState) -> RequestMedia<'a> {
        RequestMedia::new(self, text, client)
    }

    /// Reserves memory of a file, a resized image or features. `taken` is the number of bytes that the request has
    /// already, to which the call adds. The call does not wait, because the memory may be that of requests which wait
    /// themselves.
    ///
    /// # Errors
    /// Returns an error that names `field` if the request alone exceeds the memory. Otherwise returns
    /// [`ErrorKind::Busy`].
    pub(super) fn reserve(
        &self,
        field: &str,
        taken: &mut usize,
        bytes: usize,
    ) -> Result<MediaMemory, RequestError> {
        *taken = taken.saturating_add(reserved_bytes(bytes));
        if *taken > self.pool.bytes() {
            let reason = format!(
                "needs {} MiB of memory, with the images and audio of the request before it; expected at most {} MiB, so \
                 send fewer of them",
                taken.div_ceil(1 << 20),
                self.pool.bytes() >> 20
            );
            return Err(RequestError::field(field, reason));
        }
        self.pool.try_reserve(bytes).ok_or_else(|| {
            let message =
                "the images and audio of waiting requests take all memory; try again later";
            RequestError::new(ErrorKind::Busy, message)
        })
    }

    /// Waits for a processor. The call blocks, so it must run on a thread for blocking work.
    pub(super) fn wait_for_processor(&self) -> Result<SemaphorePermit<'_>, RequestError> {
        self.wait(&self.processors, 1)
    }

    /// Waits until there is memory for decoding, and reserves it. The call blocks, so it must run on a thread for
    /// blocking work.
    pub(super) fn wait_for_memory(
        &self,
        bytes: usize,
    ) -> Result<SemaphorePermit<'_>, RequestError> {
        self.wait(&self.decoding, permits(bytes))
    }

    /// Waits for permits of `semaphore`, unless too many media wait already.
    fn wait<'a>(
        &self,
        semaphore: &'a Semaphore,
        count: u32,
    ) -> Result<SemaphorePermit<'a>, RequestError> {
        let busy = || {
            let message = "too many images and audio clips wait to be decoded; try again later";
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
