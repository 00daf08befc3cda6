//! Reads the files of images and audio within a limit on their size.

use crate::error::Gemma4Error;
use std::{fs::File, io::Read, path::Path};

/// The largest size of a file in bytes.
pub(crate) const MOST_BYTES: u64 = 64 << 20;

/// Reads a file and decodes its contents. `medium` is the noun of the contents for messages, such as `an image`.
///
/// # Errors
/// Returns [`Gemma4Error::Io`] if the file cannot be read. Returns [`Gemma4Error::Malformed`] if the file is too
/// large, or with the reason that `decode` returns.
pub(crate) fn open<T>(
    path: &Path,
    medium: &str,
    decode: impl FnOnce(&[u8]) -> Result<T, String>,
) -> Result<T, Gemma4Error> {
    let io = |source| Gemma4Error::Io {
        path: path.into(),
        source,
    };
    let malformed = |reason| Gemma4Error::Malformed {
        path: path.into(),
        reason,
    };
    // Check the size before the file is read into memory. A device or a pipe has no size, and may have no end.
    let file = File::open(path).map_err(io)?;
    check_size(file.metadata().map_err(io)?.len(), medium).map_err(malformed)?;
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(io)?;
    check_size(bytes.len() as u64, medium).map_err(malformed)?;
    decode(&bytes).map_err(malformed)
}

/// Refuses contents of more than [`MOST_BYTES`].
pub(crate) fn check_size(bytes: u64, medium: &str) -> Result<(), String> {
    match bytes > MOST_BYTES {
        true => Err(format!(
            "has {bytes} bytes; expected at most {MOST_BYTES} for {medium}"
        )),
        false => Ok(()),
    }
}
