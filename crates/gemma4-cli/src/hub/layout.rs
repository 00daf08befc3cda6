//! The files of a model's folder in the Hub's cache: links, locks and temporary files.

use super::repository::RemoteFile;
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

/// Opens the file that processes lock while they download `blob`, where `huggingface_hub` has its locks.
pub(super) fn lock_of(blob: &Path) -> std::io::Result<File> {
    let model = blob.parent().and_then(Path::parent).unwrap_or(blob);
    let cache = model.parent().unwrap_or(model);
    let folder = cache
        .join(".locks")
        .join(model.file_name().unwrap_or_default());
    fs::create_dir_all(&folder)?;
    let name = blob.with_extension("lock");
    File::create(folder.join(name.file_name().unwrap_or_default()))
}

/// Makes `path` a link to the contents of a file.
pub(super) fn link(folder: &Path, file: &RemoteFile, path: &Path) -> std::io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    if path.exists() {
        return Ok(());
    }
    // Rename a link with a name of its own, because several processes may download one model. A link may also be there
    // whose contents are gone.
    let own = unique(path);
    #[cfg(unix)]
    {
        let _ = folder;
        let up = "../".repeat(2 + file.path.matches('/').count());
        std::os::unix::fs::symlink(format!("{up}blobs/{}", file.etag), &own)?;
    }
    #[cfg(not(unix))]
    {
        // A link needs a privilege on Windows.
        let blob = folder.join("blobs").join(&file.etag);
        fs::hard_link(&blob, &own).or_else(|_| fs::copy(&blob, &own).map(drop))?;
    }
    fs::rename(&own, path)
}

/// Returns the path of a temporary file beside `path`, which no other thread and no other process uses.
pub(super) fn unique(path: &Path) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    path.with_added_extension(format!("{}-{number}", std::process::id()))
}
