//! Recognizes files in unsupported formats, so that an error can name the format.

use crate::error::Gemma4Error;
use std::{
    fs::{self, File},
    io::{ErrorKind, Read},
    path::{Path, PathBuf},
};

/// An unsupported weight format, which other programs write.
struct Kind {
    /// The text that describes a file in this format. This text follows the word "is" in the error message.
    what: &'static str,
    /// The first bytes of a file in this format.
    beginning: &'static [u8],
    /// The file extensions of this format.
    extensions: &'static [&'static str],
    /// The text that tells the user what to do instead, for the error message.
    instead: &'static str,
}

const FOLDER: &str =
    "supported are a folder in Hugging Face's layout, with safetensors files, and a GGUF file";

const KINDS: [Kind; 3] = [
    Kind {
        what: "GGUF, llama.cpp's format",
        beginning: b"GGUF",
        extensions: &["gguf"],
        instead: "load it by its own path, not by its folder's",
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

/// Returns an error if the first bytes of a weight file show an unsupported format.
pub(crate) fn refuse_contents(path: &Path, contents: &[u8]) -> Result<(), Gemma4Error> {
    let kind = KINDS
        .iter()
        .find(|kind| contents.starts_with(kind.beginning));
    match kind {
        Some(kind) => Err(unsupported(path, kind)),
        None => Ok(()),
    }
}

/// Returns the error for the file at `path`, which could not be read. If the file is missing and its folder contains weights
/// in an unsupported format, the error names that format.
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

/// Searches a folder for files with an extension of an unsupported format. Returns an error for the first such file in
/// alphabetical order.
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

/// Returns the first bytes of a file, or an empty list if the file cannot be read.
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
