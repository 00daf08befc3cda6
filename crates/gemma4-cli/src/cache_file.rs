//! The file that `--cache` names. The file contains the KV cache of a session and the messages of a conversation.

use crate::{
    Error,
    terminal::{WrongArgument, note},
};
use burn_gemma4::{Gemma4, Message, SavedSession, Session};
use std::{
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant, SystemTime},
};

/// The largest number of symbolic links to follow. A longer chain is treated as a cycle.
const MOST_LINKS: usize = 40;

/// The longest wait for another program's lock. A program holds the lock while it writes a session, which may be some
/// gigabytes.
const LONGEST_LOCK: Duration = Duration::from_secs(60);

/// The interval between two attempts to lock.
const LOCK_INTERVAL: Duration = Duration::from_millis(20);

/// The file of `--cache`. The program reads the file once, and writes the file each time the session has changed.
pub struct CacheFile {
    /// The path of the file that is read and written. If `--cache` names a symbolic link, this path is the path of the
    /// link's target.
    path: PathBuf,
    /// The identity of the file when this program last read or wrote the file. `None` if the file did not exist.
    seen: Option<Identity>,
    /// The path that `--cache` names, if another program has changed the file at this path. The session is then stored
    /// in a new file. Otherwise `None`, and the session is stored in the file that `--cache` names.
    taken: Option<PathBuf>,
    lock: FolderLock,
}

/// A lock on the file's folder, for which each write waits.
struct FolderLock {
    /// The longest wait for another program.
    longest: Duration,
    /// True if the last wait was in vain. The next writes do not wait again, so that a program that hangs delays a chat
    /// once.
    is_stuck: bool,
}

/// The identity of one version of a file. Each write replaces the file, so each version has a different identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    /// The device and the inode number.
    #[cfg(unix)]
    file: [u64; 2],
    bytes: u64,
    modified: Option<SystemTime>,
}

impl Identity {
    fn of(path: &Path) -> io::Result<Option<Self>> {
        let metadata = match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            metadata => metadata?,
        };
        Ok(Some(Self {
            #[cfg(unix)]
            file: {
                use std::os::unix::fs::MetadataExt;
                [metadata.dev(), metadata.ino()]
            },
            bytes: metadata.len(),
            modified: metadata.modified().ok(),
        }))
    }
}

impl CacheFile {
    /// Opens the file at a path. The file may not exist yet. Writes through a symbolic link change the link's target.
    ///
    /// # Errors
    /// Returns [`WrongArgument`] if the path is a folder, or if the file's folder is not writable.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let refuse = |path: &Path, reason: String| -> Error {
            WrongArgument(format!("--cache: {}: {reason}", path.display())).into()
        };
        let path = followed(path).map_err(|error| refuse(path, error.to_string()))?;
        if path.is_dir() {
            return Err(refuse(&path, "is a folder; expected a file".into()));
        }
        // Create a temporary file, to check that the folder is writable. Each write of the session creates a new file there.
        tempfile::Builder::new()
            .prefix("partial-")
            .tempfile_in(folder_of(&path))
            .map_err(|error| refuse(&path, format!("cannot be written: {error}")))?;
        let seen = Identity::of(&path).map_err(|error| refuse(&path, error.to_string()))?;
        Ok(Self {
            path,
            seen,
            taken: None,
            lock: FolderLock {
                longest: LONGEST_LOCK,
                is_stuck: false,
            },
        })
    }

    /// Reads the session and the conversation from the file, or returns new ones if there is no file.
    ///
    /// # Errors
    /// Passes on the errors of [`SavedSession::read`].
    pub fn read<'a>(&mut self, gemma: &'a Gemma4) -> Result<(Session<'a>, Vec<Message>), Error> {
        // The identity of the file is read again, because the file may have been created or deleted while the model was loaded.
        self.seen = Identity::of(&self.path)?;
        if self.seen.is_none() {
            return Ok((gemma.session(), Vec::new()));
        }
        let mut saved = SavedSession::read(gemma.model(), &self.path)?;
        note(format_args!(
            "resuming {}: {} tokens, {} messages",
            self.path.display(),
            saved.tokens().len(),
            saved.messages.len(),
        ));
        let messages = std::mem::take(&mut saved.messages);
        Ok((gemma.resume(saved), messages))
    }

    /// Replaces the file. If another program has changed the file since this program read it, the function writes a new
    /// file in the same folder instead. The function then prints a note that names the new file.
    ///
    /// A lock on the folder keeps other programs from writing between the comparison of the file and its replacement.
    ///
    /// # Errors
    /// Passes on the errors of [`Session::save`].
    pub fn write(&mut self, session: &Session<'_>, messages: &[Message]) -> Result<(), Error> {
        let _locked = self.lock.acquire(folder_of(&self.path));
        if Identity::of(&self.path)? != self.seen {
            let beside = self.beside()?;
            note(format_args!(
                "error: --cache: {}: another program has written the file since it was read; this session goes to {}",
                self.path.display(),
                beside.display()
            ));
            self.taken = Some(std::mem::replace(&mut self.path, beside));
        }
        session.save(&self.path, messages)?;
        self.seen = Identity::of(&self.path)?;
        Ok(())
    }

    /// Checks at the end of a program whether the session is in the file that `--cache` names.
    ///
    /// # Errors
    /// Returns an error if the session is in another file.
    pub fn finish(&self) -> Result<(), Error> {
        match &self.taken {
            Some(taken) => Err(format!(
                "--cache: {}: another program has written the file; this session is in {}",
                taken.display(),
                self.path.display()
            )
            .into()),
            None => Ok(()),
        }
    }

    /// Returns an unused file name in the file's folder.
    fn beside(&self) -> Result<PathBuf, Error> {
        let name = self.path.file_name().unwrap_or_default().to_os_string();
        for number in 2..1000 {
            let mut other = name.clone();
            other.push(format!("-{number}"));
            let other = self.path.with_file_name(other);
            if fs::symlink_metadata(&other).is_err() {
                return Ok(other);
            }
        }
        Err(format!(
            "--cache: {}: 1000 files of other sessions are in the same folder",
            self.path.display()
        )
        .into())
    }
}

impl FolderLock {
    /// Waits for the lock on a folder, which lasts until the result is dropped. Returns `None` if the system cannot
    /// lock folders, such as Windows and some network file systems. Returns `None` if another program keeps the lock,
    /// with a note after the first wait. Two writes at the same time may then lose one of them.
    fn acquire(&mut self, folder: &Path) -> Option<File> {
        let file = File::open(folder).ok()?;
        let start = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => {
                    self.is_stuck = false;
                    return Some(file);
                }
                Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Interrupted => (),
                Err(TryLockError::Error(_)) => return None,
                Err(TryLockError::WouldBlock) if self.is_stuck => return None,
                Err(TryLockError::WouldBlock) if start.elapsed() < self.longest => {
                    sleep(LOCK_INTERVAL);
                }
                Err(TryLockError::WouldBlock) => {
                    note(format_args!(
                        "--cache: another program has locked {} for {} s; this session is written without the lock, and \
                         the next writes do not wait",
                        folder.display(),
                        self.longest.as_secs()
                    ));
                    self.is_stuck = true;
                    return None;
                }
            }
        }
    }
}

/// Follows symbolic links to the final path. The final path may not exist.
fn followed(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        match fs::read_link(&path) {
            Ok(target) => path = folder_of(&path).join(target),
            // The path does not exist, or it is not a symbolic link.
            Err(_) => return Ok(path),
        }
    }
    Err(io::Error::other("the symbolic links form a cycle"))
}

/// Returns the folder that contains a path.
fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// Waits for the lock as a new writer does.
    fn locked(folder: &Path, longest: Duration) -> Option<File> {
        lock(longest).acquire(folder)
    }

    fn lock(longest: Duration) -> FolderLock {
        FolderLock {
            longest,
            is_stuck: false,
        }
    }

    #[test]
    fn locked_folder_is_locked_once_at_a_time() {
        let folder = tempfile::tempdir().expect("a folder");
        let first = locked(folder.path(), LONGEST_LOCK).expect("the folder can be locked");
        let (sender, receiver) = mpsc::channel();
        let path = folder.path().to_path_buf();
        let second = std::thread::spawn(move || {
            let locked = locked(&path, LONGEST_LOCK);
            sender.send(()).expect("the test waits");
            locked.is_some()
        });
        let early = receiver.recv_timeout(Duration::from_millis(50));
        assert!(early.is_err(), "the second lock waits for the first");
        drop(first);
        receiver.recv().expect("the second lock follows");
        assert!(second.join().expect("no panic"));
    }

    #[test]
    fn locked_folder_of_a_program_that_hangs_is_given_up() {
        let folder = tempfile::tempdir().expect("a folder");
        let first = locked(folder.path(), Duration::ZERO).expect("the folder can be locked");
        assert!(locked(folder.path(), Duration::from_millis(50)).is_none());
        drop(first);
        assert!(locked(folder.path(), Duration::ZERO).is_some());
    }

    /// If the second call waited, the test would hang.
    #[test]
    fn lock_of_a_program_that_hangs_is_waited_for_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let first = locked(folder.path(), Duration::ZERO).expect("the folder can be locked");
        let mut second = lock(Duration::ZERO);
        assert!(second.acquire(folder.path()).is_none());
        second.longest = Duration::MAX;
        assert!(second.acquire(folder.path()).is_none());
        drop(first);
        assert!(second.acquire(folder.path()).is_some());
        assert!(!second.is_stuck);
    }
}
