//! Reads the text files to train on.

use crate::Error;
use std::{
    fs,
    path::{Path, PathBuf},
};
use walkdir::WalkDir;

/// The file name extensions of text files.
pub const KINDS: [&str; 3] = ["md", "rs", "txt"];

/// The text of a file.
pub struct CorpusFile {
    /// The path of the file.
    pub path: PathBuf,
    /// The text of the file.
    pub text: String,
}

/// Reads the files at `paths`. For a folder, reads all its Markdown, Rust and text files, in the order of their names.
/// Within a folder, hidden files and folders, folders called `target`, and empty files are skipped.
///
/// # Errors
/// Returns an error if a file cannot be read or is not UTF-8, or if the paths contain no text. Also returns an error if
/// one of `paths` is itself an empty file. The error names the file and, for invalid UTF-8, the line.
pub fn read_files(paths: &[PathBuf]) -> Result<Vec<CorpusFile>, Error> {
    let mut documents = Vec::new();
    for path in paths {
        match path.is_dir() {
            true => documents.extend(folder(path)?),
            false => {
                let document = file(path)?;
                if document.text.trim().is_empty() {
                    return Err(format!("{}: is empty", path.display()).into());
                }
                documents.push(document);
            }
        }
    }
    if documents.is_empty() {
        let paths: Vec<_> = paths
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        return Err(format!(
            "{}: no text in .{} files",
            paths.join(", "),
            KINDS.join(", .")
        )
        .into());
    }
    Ok(documents)
}

fn folder(path: &Path) -> Result<Vec<CorpusFile>, Error> {
    let is_source = |entry: &walkdir::DirEntry| {
        let name = entry.file_name().to_string_lossy();
        entry.depth() == 0 || !(name.starts_with('.') || name == "target")
    };
    let mut documents = Vec::new();
    for entry in WalkDir::new(path)
        .sort_by_file_name()
        .into_iter()
        .filter_entry(is_source)
    {
        let entry = entry?;
        let kind = entry.path().extension().and_then(|kind| kind.to_str());
        if entry.file_type().is_file() && kind.is_some_and(|kind| KINDS.contains(&kind)) {
            let document = file(entry.path())?;
            if !document.text.trim().is_empty() {
                documents.push(document);
            }
        }
    }
    Ok(documents)
}

fn file(path: &Path) -> Result<CorpusFile, Error> {
    Ok(CorpusFile {
        path: path.to_owned(),
        text: read_text(path)?,
    })
}

/// Reads the text of a file.
///
/// # Errors
/// The error names the file and, for invalid UTF-8, the line.
pub fn read_text(path: &Path) -> Result<String, Error> {
    let bytes = fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let line = 1 + error.as_bytes()[..valid]
            .iter()
            .filter(|byte| **byte == b'\n')
            .count();
        format!("{}: line {line} is not UTF-8", path.display()).into()
    })
}
