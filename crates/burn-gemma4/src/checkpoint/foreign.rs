//! Checkpoints that are not ours to load, told by their files: what a person has, rather than what is missing in it.

use crate::Gemma4Error;
use std::{
    fs::{self, File},
    io::{ErrorKind, Read},
    path::{Path, PathBuf},
};

/// What other programs keep weights in.
struct Kind {
    /// What such a file is, after "is".
    what: &'static str,
    /// What it begins with.
    beginning: &'static [u8],
    /// How its name ends.
    extensions: &'static [&'static str],
    /// What to do about it.
    instead: &'static str,
}

const FOLDER: &str =
    "what is loaded is a folder as Hugging Face has it, with safetensors, or a GGUF file";

const KINDS: [Kind; 3] = [
    Kind {
        what: "GGUF, llama.cpp's format",
        beginning: b"GGUF",
        extensions: &["gguf"],
        instead: "it is loaded by its own path, not by its folder's",
    },
    Kind {
        what: "a pointer of Git LFS, which `git lfs pull` turns into the file",
        beginning: b"version https://git-lfs.github.com/spec/",
        extensions: &[],
        instead: FOLDER,
    },
    Kind {
        what: "PyTorch's format",
        beginning: b"PK\x03\x04",
        extensions: &["bin", "pt", "pth", "ckpt"],
        instead: FOLDER,
    },
];

/// A file of weights of another kind, by what it begins with.
pub(super) fn refuse_contents(path: &Path, contents: &[u8]) -> Result<(), Gemma4Error> {
    let kind = KINDS
        .iter()
        .find(|kind| contents.starts_with(kind.beginning));
    match kind {
        Some(kind) => Err(unsupported(path, kind)),
        None => Ok(()),
    }
}

/// The error for a file that could not be read. Where the folder is a file of another kind, or has one instead, that is named.
pub(crate) fn missing(path: PathBuf, source: std::io::Error) -> Gemma4Error {
    let is_missing = matches!(
        source.kind(),
        ErrorKind::NotFound | ErrorKind::NotADirectory
    );
    let folder = path.parent().filter(|_| is_missing);
    let instead = folder.and_then(|folder| match folder.is_file() {
        true => refuse_contents(folder, &beginning(folder)).err(),
        false => other_weights(folder),
    });
    instead.unwrap_or(Gemma4Error::Io { path, source })
}

/// The first file of a folder, by its name, that another program keeps weights in.
fn other_weights(folder: &Path) -> Option<Gemma4Error> {
    let mut paths: Vec<PathBuf> = fs::read_dir(folder)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    paths.sort();
    paths.into_iter().find_map(|path| {
        let extension = path.extension()?.to_str()?;
        let kind = KINDS.iter().find(|kind| {
            let mut known = kind.extensions.iter();
            known.any(|known| extension.eq_ignore_ascii_case(known))
        })?;
        Some(unsupported(&path, kind))
    })
}

fn unsupported(path: &Path, kind: &Kind) -> Gemma4Error {
    Gemma4Error::Unsupported {
        path: path.into(),
        reason: format!("is {}; {}", kind.what, kind.instead),
    }
}

/// As much of a file as tells its kind; nothing where it cannot be read.
fn beginning(path: &Path) -> Vec<u8> {
    let longest = KINDS.iter().map(|kind| kind.beginning.len()).max();
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| {
        file.take(longest.unwrap_or(0) as u64)
            .read_to_end(&mut bytes)
    });
    match read {
        Ok(_) => bytes,
        Err(_) => Vec::new(),
    }
}
