//! The files of a model's folder in the Hub's cache: links, locks and temporary files.

use super::repository::RemoteFile;
use crate::terminal::note;
use std::{
    fs::{self, File},
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    sync::{
        Once,
        atomic::{AtomicU64, Ordering},
    },
};

/// Waits for the lock of processes that download `blob`. The lock's file is where `huggingface_hub` has it. Returns
/// `None`, with a note, if the file system has no locks.
pub(super) fn lock(blob: &Path) -> io::Result<Option<File>> {
    let model = blob.parent().and_then(Path::parent).unwrap_or(blob);
    let cache = model.parent().unwrap_or(model);
    let folder = cache
        .join(".locks")
        .join(model.file_name().unwrap_or_default());
    fs::create_dir_all(&folder)?;
    let name = blob.with_extension("lock");
    let file = File::create(folder.join(name.file_name().unwrap_or_default()))?;
    match file.lock() {
        Ok(()) => Ok(Some(file)),
        Err(error) if has_no_locks(&error) => {
            static NOTE: Once = Once::new();
            NOTE.call_once(|| {
                note(format_args!(
                    "note: {}: the file system has no locks ({error}); download with one process at a time",
                    folder.display()
                ));
            });
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// True if a file system does not support locks: `ENOSYS`, `ENOTSUP` and `ENOLCK` on Unix.
fn has_no_locks(error: &io::Error) -> bool {
    #[cfg(unix)]
    if error.raw_os_error() == Some(libc::ENOLCK) {
        return true;
    }
    error.kind() == ErrorKind::Unsupported
}

/// Makes `path` a link to the contents of a file, or a copy if the file system has no links.
pub(super) fn link(folder: &Path, file: &RemoteFile, path: &Path) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    if path.exists() {
        return Ok(());
    }
    let blob = folder.join("blobs").join(&file.etag);
    let symbolic = |own: &Path| symbolic_link(file, own);
    let hard = |own: &Path| fs::hard_link(&blob, own);
    let copy = |own: &Path| copy(&blob, own);
    // Rename a link with a name of its own, because several processes may download one model. A link may also be there
    // whose contents are gone.
    let own = create_beside(path, |own| first_success(own, &[&symbolic, &hard, &copy]))?;
    let renamed = fs::rename(&own, path);
    // A hard link is not renamed to another one of the same file.
    let _ = fs::remove_file(&own);
    renamed
}

#[cfg(unix)]
fn symbolic_link(file: &RemoteFile, own: &Path) -> io::Result<()> {
    let up = "../".repeat(2 + file.path.matches('/').count());
    std::os::unix::fs::symlink(format!("{up}blobs/{}", file.etag), own)
}

/// Fails, because a link needs a privilege on Windows.
#[cfg(not(unix))]
fn symbolic_link(_: &RemoteFile, _: &Path) -> io::Result<()> {
    Err(ErrorKind::Unsupported.into())
}

fn copy(blob: &Path, own: &Path) -> io::Result<()> {
    let copied = io::copy(&mut File::open(blob)?, &mut File::create_new(own)?);
    if copied.is_err() {
        let _ = fs::remove_file(own);
    }
    copied.map(drop)
}

/// A method that creates the file with the given path, and fails if it exists.
type Creation<'a> = dyn Fn(&Path) -> io::Result<()> + 'a;

/// Creates `own` by the first method that succeeds. A file that exists ends the attempts, because `own` needs another
/// name.
fn first_success(own: &Path, methods: &[&Creation<'_>]) -> io::Result<()> {
    let mut outcome = Err(ErrorKind::Unsupported.into());
    for method in methods {
        outcome = method(own);
        match &outcome {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {}
            _ => break,
        }
    }
    outcome
}

/// Creates a temporary file beside `path`, which no other thread and no other process uses. `create` must refuse a path
/// that exists. Processes of two containers may have the same id, so that such a path is tried again with another
/// number.
pub(super) fn create_beside(
    path: &Path,
    create: impl Fn(&Path) -> io::Result<()>,
) -> io::Result<PathBuf> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let own = path.with_added_extension(format!("{}-{number}", std::process::id()));
        match create(&own) {
            Ok(()) => return Ok(own),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn create_beside_takes_another_name_if_one_exists() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("main");
        let tried = RefCell::new(Vec::new());
        let own = create_beside(&path, |own| {
            // Another process creates the first two paths.
            if tried.borrow().len() < 2 {
                fs::write(own, "other")?;
            }
            tried.borrow_mut().push(own.to_owned());
            File::create_new(own).map(drop)
        });
        let own = own.expect("a name is free");
        let tried = tried.into_inner();
        assert_eq!(tried.len(), 3);
        assert_eq!(tried[2], own);
        assert_eq!(fs::read(&tried[0]).expect("the file is there"), b"other");
        let refused = create_beside(&path, |_| Err(ErrorKind::PermissionDenied.into()));
        let error = refused.expect_err("no file can be created");
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    }

    #[test]
    fn first_success_copies_where_there_are_no_links() {
        let folder = tempfile::tempdir().expect("a folder");
        let [blob, own] = ["blob", "own"].map(|name| folder.path().join(name));
        fs::write(&blob, "contents").expect("a file");
        let none = |_: &Path| Err(ErrorKind::Unsupported.into());
        let copy = |own: &Path| copy(&blob, own);
        first_success(&own, &[&none, &none, &copy]).expect("the file is copied");
        assert_eq!(fs::read(&own).expect("the file is there"), b"contents");
        // A path that exists is neither changed nor tried by the other methods.
        let taken = |own: &Path| File::create_new(own).map(drop);
        let error = first_success(&own, &[&none, &taken, &|_| Ok(())]).expect_err("it exists");
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        assert!(copy(&own).is_err());
        assert_eq!(fs::read(&own).expect("the file is there"), b"contents");
    }

    #[test]
    #[cfg(unix)]
    fn link_replaces_a_link_without_contents() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = RemoteFile {
            path: "1_Pooling/config.json".into(),
            bytes: 2,
            etag: "0123".into(),
            is_large: false,
        };
        let path = folder.path().join("snapshots/4567").join(&file.path);
        link(folder.path(), &file, &path).expect("a link without contents");
        assert!(!path.exists());
        fs::create_dir(folder.path().join("blobs")).expect("a folder");
        fs::write(folder.path().join("blobs/0123"), "{}").expect("a file");
        fs::remove_file(&path).expect("a link");
        std::os::unix::fs::symlink("gone", &path).expect("a link");
        link(folder.path(), &file, &path).expect("the link is replaced");
        assert_eq!(fs::read(&path).expect("the contents are there"), b"{}");
        let left = fs::read_dir(path.parent().expect("a folder")).expect("a folder");
        assert_eq!(left.count(), 1);
    }

    #[test]
    #[cfg(unix)]
    fn has_no_locks_is_true_for_errors_of_file_systems_without_locks() {
        for code in [libc::ENOSYS, libc::ENOTSUP, libc::EOPNOTSUPP, libc::ENOLCK] {
            assert!(has_no_locks(&io::Error::from_raw_os_error(code)), "{code}");
        }
        for code in [libc::EACCES, libc::EIO] {
            assert!(!has_no_locks(&io::Error::from_raw_os_error(code)), "{code}");
        }
    }
}
