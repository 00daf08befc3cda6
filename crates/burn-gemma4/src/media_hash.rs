//! The hash of an image or an audio clip in a prompt.

use sha2::{Digest, Sha256};
use std::fmt;

/// The SHA-256 hash of an image or an audio clip in a prompt. Media with equal hashes are of the same kind, and have
/// the same soft tokens: the same pixels or features, and the same numbers of soft tokens.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct MediumHash([u8; 32]);

impl MediumHash {
    /// Hashes a medium. `kind` is the noun of its kind, `sizes` are the sizes and settings that `bytes` do not show.
    pub(crate) fn of(kind: &str, sizes: [usize; 4], bytes: &[u8]) -> Self {
        let mut hasher = Sha256::new();
        hasher.update((kind.len() as u64).to_le_bytes());
        hasher.update(kind);
        for size in sizes {
            hasher.update((size as u64).to_le_bytes());
        }
        hasher.update(bytes);
        Self(hasher.finalize().into())
    }
}

impl fmt::Debug for MediumHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = self.0.first_chunk().expect("a hash has 32 bytes");
        write!(f, "MediumHash({:016x})", u64::from_be_bytes(*first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_depends_on_kind_sizes_and_bytes() {
        let first = MediumHash::of("image", [1, 2, 3, 4], b"bytes");
        assert_eq!(first, MediumHash::of("image", [1, 2, 3, 4], b"bytes"));
        for other in [
            MediumHash::of("audio", [1, 2, 3, 4], b"bytes"),
            MediumHash::of("image", [1, 2, 4, 3], b"bytes"),
            MediumHash::of("image", [1, 2, 3, 4], b"byte"),
        ] {
            assert_ne!(first, other);
        }
    }
}
