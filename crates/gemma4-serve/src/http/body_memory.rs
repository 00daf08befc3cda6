//! The memory of the bodies of all requests. A body takes memory as its bytes arrive, so that clients which send slowly
//! hold no more memory than they have filled.

use crate::engine::{permits, reserved_bytes};
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The number of bytes from which a body and its parsed form count as memory. Ordinary requests have less.
pub(super) const LONG_BODY: usize = 1 << 18;

/// The part of the pool that is for one body alone, in multiples of the largest body.
const LAST_SHARE: usize = 4;

/// The memory of a JSON object in its parsed form besides its values, in bytes. A list that grows has up to three
/// copies of an element, and serde buffers the fields of some values. The most that was measured is 1,190 bytes, for
/// short messages of a chat (x86-64, 2026-11-30, `cargo test -p gemma4-serve --test body_memory`).
const OBJECT_BYTES: usize = 1536;

/// The memory of any other JSON value in its parsed form, in bytes. The most that was measured is 149 bytes, for
/// numbers with names, where the name counts as a value (as above).
const VALUE_BYTES: usize = 160;

/// A limit on the memory of the bodies of all requests. One body after the other may use the last part, so that a body
/// can always be finished, even if all others wait for memory.
#[derive(Debug)]
pub(crate) struct BodyPool {
    /// The memory that bodies share, in units of [`permits`].
    shared: Arc<Semaphore>,
    /// The permit to use the last part.
    last: Arc<Semaphore>,
    /// The largest number of units of a body: those of the last part.
    largest: u32,
}

/// The memory of a body, until the request has been prepared. Clones share the memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct BodyMemory {
    _permits: Option<Arc<[OwnedSemaphorePermit]>>,
}

/// The memory of a body that is arriving.
#[derive(Debug, Default)]
pub(crate) struct GrowingMemory {
    units: u32,
    shared: Option<OwnedSemaphorePermit>,
    last: Option<OwnedSemaphorePermit>,
}

impl BodyPool {
    /// Creates a pool of `bytes` bytes for bodies of at most `max_body` bytes.
    pub fn new(bytes: usize, max_body: usize) -> Self {
        let all = permits(bytes);
        let largest = permits(max_body.saturating_mul(LAST_SHARE)).min(all);
        Self {
            shared: Arc::new(Semaphore::new((all - largest) as usize)),
            last: Arc::new(Semaphore::new(1)),
            largest,
        }
    }

    /// True if a body may take `bytes` bytes together with its parsed form.
    pub(super) fn fits(&self, bytes: usize) -> bool {
        permits(bytes) <= self.largest
    }

    /// The largest number of bytes of a body and its parsed form.
    pub(super) fn largest(&self) -> usize {
        self.largest as usize * reserved_bytes(1)
    }
}

impl GrowingMemory {
    /// Waits until the body has `bytes` bytes of memory, which must [fit](BodyPool::fits) the pool.
    pub async fn grow(&mut self, pool: &BodyPool, bytes: usize) {
        let more = permits(bytes).saturating_sub(self.units);
        if more > 0 && self.last.is_none() {
            tokio::select! {
                biased;
                // The semaphores are never closed.
                Ok(permit) = pool.shared.clone().acquire_many_owned(more) => match &mut self.shared {
                    Some(shared) => shared.merge(permit),
                    none => *none = Some(permit),
                },
                Ok(permit) = pool.last.clone().acquire_owned() => self.last = Some(permit),
                else => {}
            }
        }
        self.units += more;
    }

    /// The number of bytes that the body has.
    pub fn bytes(&self) -> usize {
        self.units as usize * reserved_bytes(1)
    }

    /// True if the body uses the last part of the pool, for which other bodies wait.
    pub fn has_last(&self) -> bool {
        self.last.is_some()
    }

    /// Returns the memory for the rest of the request.
    pub fn finish(self) -> BodyMemory {
        let permits: Vec<_> = self.shared.into_iter().chain(self.last).collect();
        BodyMemory {
            _permits: (!permits.is_empty()).then(|| permits.into()),
        }
    }
}

/// The numbers of objects and values of a JSON text, which arrives in chunks.
#[derive(Debug, Default)]
pub(super) struct JsonCount {
    objects: usize,
    /// The number of values, without the outermost one.
    values: usize,
    length: usize,
    is_text: bool,
    is_escaped: bool,
}

impl JsonCount {
    /// Counts the next chunk of the text.
    pub fn add(&mut self, chunk: &[u8]) {
        self.length += chunk.len();
        for byte in chunk {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' => self.is_escaped = self.is_text,
                b'"' => self.is_text = !self.is_text,
                b'{' if !self.is_text => self.objects += 1,
                b'[' | b',' | b':' if !self.is_text => self.values += 1,
                _ => {}
            }
        }
    }

    /// Returns an upper bound of the memory of the parsed form of the text, besides the text itself.
    pub fn parsed_bytes(&self) -> usize {
        let values = self.values.saturating_add(1);
        let structure = self
            .objects
            .saturating_mul(OBJECT_BYTES)
            .saturating_add(values.saturating_mul(VALUE_BYTES));
        structure.saturating_add(self.length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::timeout;

    const MIB: usize = 1 << 20;

    /// Returns memory of `bytes` bytes, or `None` if other bodies have it.
    async fn grown(
        mut memory: GrowingMemory,
        pool: &BodyPool,
        bytes: usize,
    ) -> Option<GrowingMemory> {
        let grown = timeout(Duration::from_millis(20), memory.grow(pool, bytes)).await;
        grown.ok().map(|()| memory)
    }

    #[tokio::test]
    async fn memory_of_a_body_that_has_not_arrived_is_free_for_others() {
        let pool = BodyPool::new(8 * MIB, MIB);
        let mut slow = Vec::new();
        for _ in 0..8 {
            let memory = grown(GrowingMemory::default(), &pool, LONG_BODY).await;
            slow.push(memory.expect("the memory is free"));
        }
        let whole = grown(GrowingMemory::default(), &pool, 2 * MIB).await;
        assert!(whole.is_some());
    }

    #[tokio::test]
    async fn last_part_finishes_one_body_after_the_other() {
        let pool = BodyPool::new(8 * MIB, MIB);
        let mut all = Vec::new();
        for _ in 0..4 {
            let memory = grown(GrowingMemory::default(), &pool, MIB).await;
            all.push(memory.expect("the memory is free"));
        }
        let first = all.pop().expect("there are bodies");
        let first = grown(first, &pool, 4 * MIB)
            .await
            .expect("the last part is free");
        let second = all.pop().expect("there are bodies");
        let mut second = second;
        let waits = timeout(Duration::from_millis(20), second.grow(&pool, 3 * MIB)).await;
        assert!(waits.is_err());
        drop(first.finish());
        let second = grown(second, &pool, 3 * MIB).await;
        assert!(second.is_some());
        drop((all, second));
        assert_eq!(pool.shared.available_permits(), 4 << 10);
        assert_eq!(pool.last.available_permits(), 1);
    }

    /// Counts a text in chunks of one byte, and in one chunk.
    fn parsed_bytes(json: &[u8]) -> usize {
        let (mut bytewise, mut whole) = (JsonCount::default(), JsonCount::default());
        json.chunks(1).for_each(|chunk| bytewise.add(chunk));
        whole.add(json);
        assert_eq!(bytewise.parsed_bytes(), whole.parsed_bytes());
        whole.parsed_bytes()
    }

    #[test]
    fn parsed_bytes_counts_structure_outside_of_texts() {
        let texts = parsed_bytes(br#"{"a": "{[,:\"{", "b": "\\"}"#);
        assert_eq!(texts, OBJECT_BYTES + 4 * VALUE_BYTES + 27);
        assert_eq!(
            parsed_bytes(b"[1, [2], {}]"),
            OBJECT_BYTES + 5 * VALUE_BYTES + 12
        );
        assert_eq!(parsed_bytes(b""), VALUE_BYTES);
    }
}
