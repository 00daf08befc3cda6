//! Text files to train on.

use crate::Error;
use std::{
    fs,
    path::{Path, PathBuf},
};
use walkdir::WalkDir;

/// The kinds of files that are texts, by the ends of their names.
pub const KINDS: [&str; 3] = ["md", "rs", "txt"];

/// A text.
pub struct Document {
    /// Its file.
    pub path: PathBuf,
    /// What the file holds.
    pub text: String,
}

/// The texts of files, and of all Markdown, Rust and text files in folders, in the order of their names. Folders that are
/// hidden or called `target` are passed over, and so are empty files in folders.
///
/// # Errors
/// Naming the file, where it cannot be read, is not UTF-8 (with the line) or empty; where there is no text at all.
pub fn read(paths: &[PathBuf]) -> Result<Vec<Document>, Error> {
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

fn folder(path: &Path) -> Result<Vec<Document>, Error> {
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

fn file(path: &Path) -> Result<Document, Error> {
    Ok(Document {
        path: path.to_owned(),
        text: read_text(path)?,
    })
}

/// The text of a file.
///
/// # Errors
/// Naming the file, and the line that is not UTF-8.
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
