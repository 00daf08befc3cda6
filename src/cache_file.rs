//! The file of `--cache`: what a session has read, and a conversation.

use crate::{
    Error,
    terminal::{WrongArgument, note},
};
use burn_gemma4::{Gemma4, Message, SavedSession, Session};
use std::{
    fs, io,
    path::{Path, PathBuf},
    time::SystemTime,
};

/// A symbolic link that leads to more links than this leads in a circle.
const MOST_LINKS: usize = 40;

/// A file that a program reads once and writes as often as there is something new.
pub struct CacheFile {
    /// The file itself, where `--cache` is a symbolic link to it.
    path: PathBuf,
    /// The file as this program has read or written it; nothing where there was none.
    seen: Option<Identity>,
    /// The file that another program has written meanwhile.
    taken: Option<PathBuf>,
}

/// One version of a file: writing replaces the file, so that another version is another file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    /// The device and the number on it.
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
    /// The file at a path, which may be none yet. A symbolic link stays, and what it leads to is the file.
    ///
    /// # Errors
    /// [`WrongArgument`] where the path is a folder, or where the folder that the file is in cannot be written to.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let refuse = |path: &Path, reason: String| -> Error {
            WrongArgument(format!("--cache: {}: {reason}", path.display())).into()
        };
        let path = followed(path).map_err(|error| refuse(path, error.to_string()))?;
        if path.is_dir() {
            return Err(refuse(&path, "is a folder; expected a file".into()));
        }
        // A file that is written is a new one in the same folder.
        tempfile::Builder::new()
            .prefix("partial-")
            .tempfile_in(folder_of(&path))
            .map_err(|error| refuse(&path, format!("cannot be written: {error}")))?;
        let seen = Identity::of(&path).map_err(|error| refuse(&path, error.to_string()))?;
        Ok(Self {
            path,
            seen,
            taken: None,
        })
    }

    /// The session in the file and its conversation; a new one where there is no file.
    ///
    /// # Errors
    /// As [`SavedSession::read`].
    pub fn read<'a>(&mut self, gemma: &'a Gemma4) -> Result<(Session<'a>, Vec<Message>), Error> {
        // The file may have come or gone while the model was loaded.
        self.seen = Identity::of(&self.path)?;
        if self.seen.is_none() {
            return Ok((gemma.session(), Vec::new()));
        }
        let mut saved = SavedSession::read(gemma.model(), &self.path)?;
        note(format_args!(
            "goes on with {}: {} tokens, {} messages",
            self.path.display(),
            saved.tokens().len(),
            saved.messages.len(),
        ));
        let messages = std::mem::take(&mut saved.messages);
        Ok((gemma.resume(saved), messages))
    }

    /// Replaces the file. A file that another program has written since is left as it is, and the session goes to another name
    /// beside it, which a note tells.
    ///
    /// # Errors
    /// As [`Session::save`].
    pub fn write(&mut self, session: &Session<'_>, messages: &[Message]) -> Result<(), Error> {
        if Identity::of(&self.path)? != self.seen {
            let beside = self.beside()?;
            note(format_args!(
                "error: --cache: {}: another program has written it since it was read; this session goes to {}",
                self.path.display(),
                beside.display()
            ));
            self.taken = Some(std::mem::replace(&mut self.path, beside));
        }
        session.save(&self.path, messages)?;
        self.seen = Identity::of(&self.path)?;
        Ok(())
    }

    /// The end of a program that has written the file.
    ///
    /// # Errors
    /// An error if the session is in another file than `--cache` names.
    pub fn finish(&self) -> Result<(), Error> {
        match &self.taken {
            Some(taken) => Err(format!(
                "--cache: {}: another program has written it; this session is in {}",
                taken.display(),
                self.path.display()
            )
            .into()),
            None => Ok(()),
        }
    }

    /// A name beside the file that no file has.
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
            "--cache: {}: 1000 files of other sessions are beside it",
            self.path.display()
        )
        .into())
    }
}

/// The path that a symbolic link leads to in the end, where the file may be missing.
fn followed(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        match fs::read_link(&path) {
            Ok(target) => path = folder_of(&path).join(target),
            // Not a link, or not there.
            Err(_) => return Ok(path),
        }
    }
    Err(io::Error::other("the symbolic links lead in a circle"))
}

/// The folder that a path is in.
fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}
