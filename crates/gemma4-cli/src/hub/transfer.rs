//! The download of one file of the Hub, in several attempts. The contents are checked by their hash.

use super::download::Hub;
use super::layout::lock;
use super::repository::RemoteFile;
use crate::terminal::note;
use indicatif::ProgressBar;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, Write},
    path::Path,
    thread,
};
use ureq::http::Response;

/// The number of attempts in a row that may give almost nothing of a file.
const ATTEMPTS: u32 = 5;

/// The number of bytes that are read and hashed at once.
const PIECE: usize = 1 << 20;

/// The share of a small file that an attempt must give to count as successful, as a divisor.
const USEFUL_SHARE: u64 = 64;

/// The download of one file of a model.
pub(super) struct Transfer<'a> {
    pub hub: &'a Hub,
    /// The name of the model.
    pub model: &'a str,
    pub commit: &'a str,
    pub file: &'a RemoteFile,
    pub bar: &'a ProgressBar,
}

/// The result of one attempt to get a file.
enum Attempt {
    /// The file has all its bytes.
    Complete,
    /// The connection ended early, or the Hub is busy. Another attempt may give the other bytes.
    Interrupted(String),
    /// The Hub does not give the bytes that follow those of the file.
    OutOfRange,
    /// Another attempt would fail, too.
    Refused(String),
}

/// The hash by which the Hub names the contents of a file.
enum Checksum {
    Sha256(Sha256),
    /// The SHA-1 of Git's header and the contents.
    Git(Sha1),
}

/// The part of a file that has been downloaded.
struct Partial {
    contents: File,
    checksum: Checksum,
    /// The number of bytes.
    bytes: u64,
}

impl Checksum {
    fn new(file: &RemoteFile) -> Self {
        match file.is_large {
            true => Self::Sha256(Sha256::new()),
            false => {
                let header = format!("blob {}\0", file.bytes);
                Self::Git(Sha1::new_with_prefix(header))
            }
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hash) => hash.update(bytes),
            Self::Git(hash) => hash.update(bytes),
        }
    }

    /// Returns the name of the hash, and its value as a hexadecimal number.
    fn finish(self) -> (&'static str, String) {
        match self {
            Self::Sha256(hash) => ("SHA-256", format!("{:x}", hash.finalize())),
            Self::Git(hash) => ("Git id", format!("{:x}", hash.finalize())),
        }
    }
}

impl Partial {
    /// Opens the part that an earlier download left at `path`. A small file begins again, and so does a part that is
    /// longer than the file.
    fn open(path: &Path, file: &RemoteFile) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        // A file that is opened for appending cannot be cut on Windows.
        let options = options.read(true).write(true).create(true).truncate(false);
        let contents = options.open(path)?;
        let is_usable = file.is_large && contents.metadata()?.len() <= file.bytes;
        let mut partial = Self {
            contents,
            checksum: Checksum::new(file),
            bytes: 0,
        };
        match is_usable {
            true => partial.hash_contents()?,
            false => partial.clear(file)?,
        }
        Ok(partial)
    }

    /// Hashes and counts the bytes that the file has already. Later bytes follow them.
    fn hash_contents(&mut self) -> io::Result<()> {
        let mut piece = vec![0; PIECE];
        loop {
            match self.contents.read(&mut piece)? {
                0 => return Ok(()),
                read => {
                    self.checksum.update(&piece[..read]);
                    self.bytes += read as u64;
                }
            }
        }
    }

    /// Hashes and counts all bytes of the file, whatever has been hashed.
    fn hash_again(&mut self, file: &RemoteFile) -> io::Result<()> {
        self.contents.rewind()?;
        (self.checksum, self.bytes) = (Checksum::new(file), 0);
        self.hash_contents()
    }

    /// Removes all bytes.
    fn clear(&mut self, file: &RemoteFile) -> io::Result<()> {
        self.contents.set_len(0)?;
        self.contents.rewind()?;
        (self.checksum, self.bytes) = (Checksum::new(file), 0);
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.contents.write_all(bytes)?;
        self.checksum.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }
}

impl Transfer<'_> {
    /// Downloads the file to `blob`, unless the file is there. While the download lasts, the file's bytes are in
    /// `blob.incomplete`, as those of `huggingface_hub` are.
    ///
    /// # Errors
    /// Returns the reason, without the file's path.
    pub fn run(&self, blob: &Path) -> Result<(), String> {
        let text = |error: io::Error| error.to_string();
        // Another process may download the same file. It has the lock until the file is complete.
        let lock = lock(blob).map_err(text)?;
        if fs::metadata(blob).is_ok_and(|found| found.len() == self.file.bytes) {
            return Ok(());
        }
        let path = blob.with_extension("incomplete");
        let mut partial = Partial::open(&path, self.file).map_err(text)?;
        if let Err((reason, is_kept)) = self.get_all(&mut partial) {
            if !is_kept {
                // No later call may go on with these bytes.
                fs::remove_file(&path).map_err(text)?;
            }
            return Err(reason);
        }
        if lock.is_none() {
            // Another process may have written to the file.
            partial.hash_again(self.file).map_err(text)?;
        }
        let remove = |reason: String| -> Result<(), String> {
            fs::remove_file(&path).map_err(text)?;
            Err(format!(
                "{reason}. The bytes were removed; download the file again"
            ))
        };
        let Partial {
            contents, checksum, ..
        } = partial;
        let ((kind, found), expected) = (checksum.finish(), &self.file.etag);
        if !found.eq_ignore_ascii_case(expected) {
            return remove(format!("its {kind} is {found}; the Hub gives {expected}"));
        }
        // A program may have written to the file without the lock.
        let length = contents.metadata().map_err(text)?.len();
        if length != self.file.bytes {
            return remove(format!(
                "it has {length} bytes instead of {}",
                self.file.bytes
            ));
        }
        contents.sync_all().map_err(text)?;
        drop(contents);
        fs::rename(&path, blob).map_err(text)
    }

    /// Repeats attempts until all bytes are there. The error has the reason, and is true if a later call may go on with
    /// the bytes.
    fn get_all(&self, partial: &mut Partial) -> Result<(), (String, bool)> {
        let text = |error: io::Error| (error.to_string(), true);
        let (file, done) = (self.file, self.bar.position());
        // An attempt that gives less does not count as successful. A server that closes each connection after a few
        // bytes, or begins again each time, would otherwise be asked for ever.
        let useful = (file.bytes / USEFUL_SHARE).clamp(1, PIECE as u64);
        let (mut most, mut failed, mut is_restarted) = (partial.bytes, 0, false);
        loop {
            self.bar.set_position(done + partial.bytes);
            if partial.bytes == file.bytes {
                return Ok(());
            }
            let progress = |bytes| self.bar.set_position(done + bytes);
            let reason = match self.attempt(partial, progress).map_err(text)? {
                Attempt::Complete => return Ok(()),
                Attempt::Refused(reason) => return Err((reason, partial.bytes <= file.bytes)),
                Attempt::OutOfRange if is_restarted || partial.bytes == 0 => {
                    let reason = format!(
                        "has fewer than the {} bytes that the Hub gives for it",
                        file.bytes
                    );
                    return Err((reason, false));
                }
                Attempt::OutOfRange => {
                    let reason = format!("the Hub gives no bytes after {}", partial.bytes);
                    is_restarted = true;
                    partial.clear(file).map_err(text)?;
                    reason
                }
                Attempt::Interrupted(reason) => reason,
            };
            failed = match partial.bytes >= most.saturating_add(useful) {
                true => 0,
                false => failed + 1,
            };
            most = most.max(partial.bytes);
            if failed >= ATTEMPTS {
                let reason = format!(
                    "{reason}; {} of {} bytes are there",
                    partial.bytes, file.bytes
                );
                return Err(match file.is_large {
                    true => (
                        format!("{reason}, the same command goes on from there"),
                        true,
                    ),
                    false => (format!("{reason}, the same command begins again"), false),
                });
            }
            if !file.is_large {
                partial.clear(file).map_err(text)?;
            }
            note(format_args!("note: {}: {reason}; trying again", file.path));
            thread::sleep(self.hub.pause * (failed + 1));
        }
    }

    /// Requests the bytes that follow those of the file, and appends them.
    fn attempt(&self, partial: &mut Partial, progress: impl Fn(u64)) -> io::Result<Attempt> {
        let path: Vec<String> = self.file.path.split('/').map(escaped).collect();
        let url = format!("{}/resolve/{}/{}", self.model, self.commit, path.join("/"));
        let response = match self.hub.get(&url, partial.bytes) {
            Ok(response) => response,
            Err(reason) => return Ok(Attempt::Interrupted(reason)),
        };
        match response.status().as_u16() {
            206 if starts_at(&response, partial.bytes) => {}
            // The server gives the whole file, whatever range was asked for.
            200 => partial.clear(self.file)?,
            416 => return Ok(Attempt::OutOfRange),
            status @ (206 | 408 | 429 | 500..600) => {
                return Ok(Attempt::Interrupted(format!("the Hub answers {status}")));
            }
            status => {
                let refused = self.hub.refuse(&response, self.model).err();
                let reason = refused.unwrap_or_else(|| format!("the Hub answers {status}"));
                return Ok(Attempt::Refused(reason));
            }
        }
        let mut reader = response.into_body().into_reader();
        let mut piece = vec![0; PIECE];
        loop {
            let read = match reader.read(&mut piece) {
                Ok(0) if partial.bytes < self.file.bytes => {
                    return Ok(Attempt::Interrupted("the connection ended early".into()));
                }
                Ok(0) => return Ok(Attempt::Complete),
                Ok(read) => read,
                Err(error) => {
                    return Ok(Attempt::Interrupted(format!(
                        "the connection was cut: {error}"
                    )));
                }
            };
            partial.append(&piece[..read])?;
            progress(partial.bytes);
            if partial.bytes > self.file.bytes {
                let reason = format!(
                    "has more than the {} bytes that the Hub gives for it",
                    self.file.bytes
                );
                return Ok(Attempt::Refused(reason));
            }
        }
    }
}

/// True if the answer's bytes begin at `first`.
fn starts_at<T>(response: &Response<T>, first: u64) -> bool {
    let range = response.headers().get("content-range");
    let range = range.and_then(|range| range.to_str().ok()?.strip_prefix("bytes "));
    range.is_some_and(|range| range.split('-').next() == Some(&first.to_string()))
}

/// Escapes a part of a path for a URL.
fn escaped(part: &str) -> String {
    let escaped = part.bytes().map(|byte| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
            char::from(byte).to_string()
        }
        other => format!("%{other:02X}"),
    });
    escaped.collect()
}
