//! Memory that is used again: fresh pages cost more than what is written into them, up to ten times as much in a virtual machine.

use burn::tensor::{AllocationProperty, Bytes};
use std::sync::{Arc, Mutex, PoisonError};

/// How many are kept for another time: one is filled while a device reads the other.
const KEPT: usize = 2;

/// Buffers that nobody uses. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Spare {
    buffers: Arc<Mutex<Vec<Vec<u8>>>>,
}

/// Bytes in a buffer that goes back when they are no longer needed.
struct Lent {
    bytes: Vec<u8>,
    spare: Spare,
}

impl Spare {
    /// So many bytes, which `fill` writes, all of them.
    pub fn filled(&self, length: usize, fill: impl FnOnce(&mut [u8])) -> Bytes {
        let mut bytes = self.locked(Vec::pop).unwrap_or_default();
        bytes.resize(length, 0);
        fill(&mut bytes);
        let spare = self.clone();
        let lent = bytes::Bytes::from_owner(Lent { bytes, spare });
        Bytes::from_shared(lent, AllocationProperty::Native)
    }

    fn locked<T>(&self, work: impl FnOnce(&mut Vec<Vec<u8>>) -> T) -> T {
        // Whoever panicked left buffers that are whole.
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        work(&mut buffers)
    }
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        self.spare.locked(|buffers| {
            if buffers.len() < KEPT {
                buffers.push(bytes);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back() {
        let spare = Spare::default();
        let first = spare.filled(100, |bytes| bytes.fill(1));
        let second = spare.filled(50, |bytes| bytes.fill(2));
        let place = first.as_ptr();
        assert!(first.iter().all(|byte| *byte == 1));
        drop(first);
        let third = spare.filled(70, |bytes| bytes.fill(3));
        assert_eq!(third.as_ptr(), place);
        assert_eq!((third.len(), second.len()), (70, 50));
        assert!(third.iter().all(|byte| *byte == 3) && second.iter().all(|byte| *byte == 2));
    }
}
