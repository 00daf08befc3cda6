//! The memory of images and audio, from their preparation until the prefill of their prompt has ended.

use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError};

/// The number of bytes of one permit. The number of permits in a semaphore's request has 32 bits.
const UNIT: usize = 1 << 10;

/// A limit on the memory of the images and audio of all requests that wait or are prefilled. Clones share the limit.
///
/// ```
/// use gemma4_serve::engine::MediaPool;
///
/// let pool = MediaPool::new(1 << 20);
/// let half = pool.try_reserve(1 << 19).expect("the pool is free");
/// assert!(pool.try_reserve(1 << 20).is_none());
/// drop(half);
/// assert!(pool.try_reserve(1 << 20).is_some());
/// ```
#[derive(Clone, Debug)]
pub struct MediaPool {
    permits: Arc<Semaphore>,
    /// The number of permits of the whole pool.
    count: usize,
}

/// A part of the memory of an [`MediaPool`]. Dropping this value frees the memory.
#[derive(Debug)]
pub struct MediaMemory(OwnedSemaphorePermit);

impl MediaPool {
    /// Creates a pool of `bytes` bytes.
    pub fn new(bytes: usize) -> Self {
        let count = (bytes / UNIT).min(Semaphore::MAX_PERMITS);
        Self {
            permits: Arc::new(Semaphore::new(count)),
            count,
        }
    }

    /// Reserves `bytes` bytes. Returns `None` if less memory is free.
    pub fn try_reserve(&self, bytes: usize) -> Option<MediaMemory> {
        match self.permits.clone().try_acquire_many_owned(permits(bytes)) {
            Ok(permit) => Some(MediaMemory(permit)),
            // The pool never closes its semaphore.
            Err(TryAcquireError::NoPermits | TryAcquireError::Closed) => None,
        }
    }

    /// The number of bytes of the whole pool.
    pub fn bytes(&self) -> usize {
        self.count * UNIT
    }

    /// The number of free bytes.
    pub fn free(&self) -> usize {
        self.permits.available_permits() * UNIT
    }
}

impl MediaMemory {
    /// Joins two parts of one pool.
    ///
    /// # Panics
    /// Panics if the parts belong to different pools.
    pub fn merge(&mut self, other: Self) {
        self.0.merge(other.0);
    }
}

/// Returns the number of bytes that a pool reserves for `bytes` bytes.
pub(crate) fn reserved_bytes(bytes: usize) -> usize {
    permits(bytes) as usize * UNIT
}

/// Returns the number of permits for `bytes` bytes.
pub(crate) fn permits(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX)
}
