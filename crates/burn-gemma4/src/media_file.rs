//! Reads the files of images and audio within a limit on their size.

use crate::error::Gemma4Error;
use std::{fs::File, io::Read, path::Path};

/// The largest size of a file in bytes.
pub(crate) const MOST_BYTES: u64 = 64 << 20;

/// The number of bytes at the beginning of a file that show its format.
const SIGNATURE_BYTES: u64 = 64;

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
    open_checked(path, medium, |_| Ok(()), decode)
}

/// Reads a file as [`open`] does, but calls `check` with its first bytes before the check of its size. A pipe can be
/// read only once.
///
/// # Errors
/// Returns the errors of [`open`], and [`Gemma4Error::Malformed`] with the reason that `check` returns.
pub(crate) fn open_checked<T>(
    path: &Path,
    medium: &str,
    check: impl FnOnce(&[u8]) -> Result<(), String>,
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
    let mut file = File::open(path).map_err(io)?;
    let size = file.metadata().map_err(io)?.len();
    let mut bytes = Vec::new();
    file.by_ref()
        .take(SIGNATURE_BYTES)
        .read_to_end(&mut bytes)
        .map_err(io)?;
    check(&bytes).map_err(malformed)?;
    // Check the size before the file is read into memory. A device or a pipe has no size, and may have no end.
    check_size(size, medium).map_err(malformed)?;
    file.take(MOST_BYTES + 1 - bytes.len() as u64)
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
