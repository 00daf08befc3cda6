//! Image and audio files in the folder that the server's owner has named.

use crate::error::RequestError;
use cap_std::ambient_authority;
#[cfg(unix)]
use cap_std::fs::OpenOptionsExt;
use cap_std::fs::{Dir, OpenOptions};
use std::borrow::Cow;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Reads a file in the folder `root`. `path` is relative to the folder, or an absolute path inside it. The operating
/// system resolves the path, and refuses symbolic links and `..` that lead out of the folder. `reserve` reserves memory
/// for the file, before the file is read.
///
/// # Errors
/// Returns an error that names `field` if the path leads out of the folder, or if it does not name a readable file of
/// at most `max_bytes` bytes. Devices, pipes and folders are refused. Returns the errors of `reserve`.
pub(super) fn read<M>(
    field: &str,
    root: &Path,
    path: &str,
    max_bytes: usize,
    reserve: impl FnOnce(usize) -> Result<M, RequestError>,
) -> Result<(Vec<u8>, M), RequestError> {
    let refuse = |reason: String| RequestError::field(field, reason);
    let missing = || refuse("names a file that cannot be read in the folder of media".into());
    let relative = relative(root, path).ok_or_else(missing)?;
    let folder = Dir::open_ambient_dir(root, ambient_authority())
        .map_err(|error| refuse(format!("the folder of media cannot be opened: {error}")))?;
    // Check the kind before the file is opened, because the opening of a device may have effects.
    let metadata = folder.metadata(&relative).map_err(|_| missing())?;
    if !metadata.is_file() {
        return Err(missing());
    }
    let mut options = OpenOptions::new();
    options.read(true);
    // The file may have become a pipe. Without this flag, the opening of a pipe waits for a writer.
    #[cfg(unix)]
    options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32);
    let file = folder
        .open_with(&relative, &options)
        .map_err(|_| missing())?;
    let metadata = file.metadata().map_err(|_| missing())?;
    if !metadata.is_file() {
        return Err(missing());
    }
    let length = usize::try_from(metadata.len()).unwrap_or(usize::MAX);
    if length > max_bytes {
        return Err(refuse(format!(
            "names a file of {length} bytes; expected at most {max_bytes}"
        )));
    }
    let memory = reserve(length)?;
    let mut bytes = Vec::with_capacity(length);
    file.take(length as u64)
        .read_to_end(&mut bytes)
        .map_err(|_| missing())?;
    Ok((bytes, memory))
}

/// Returns `path` relative to `root`, or `None` if it is an absolute path outside of `root`. The path is not resolved.
fn relative(root: &Path, path: &str) -> Option<PathBuf> {
    let path = Path::new(path);
    if !path.is_absolute() {
        return Some(path.into());
    }
    let roots = [
        Some(Cow::Borrowed(root)),
        root.canonicalize().ok().map(Cow::Owned),
    ];
    let mut relative = roots.iter().flatten().map(|root| path.strip_prefix(root));
    relative.find_map(Result::ok).map(Path::to_path_buf)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::process::Command;

    fn read(path: &Path, name: &str, max_bytes: usize) -> Result<Vec<u8>, RequestError> {
        let found = super::read("f", path, name, max_bytes, Ok);
        found.map(|(bytes, reserved)| {
            assert_eq!(reserved, bytes.len());
            bytes
        })
    }

    #[test]
    fn read_without_memory_is_refused_before_the_file_is_read() {
        let root = tempfile::tempdir().expect("a folder");
        fs::write(root.path().join("one"), "inside").expect("a file");
        let full = |_| Err::<(), _>(RequestError::field("f", "no memory"));
        let error = super::read("f", root.path(), "one", 6, full).expect_err("no memory");
        assert_eq!(error.message, "f: no memory");
    }

    #[test]
    fn read_of_paths_stays_inside_the_folder() {
        let all = tempfile::tempdir().expect("a folder");
        let all = all.path().canonicalize().expect("the folder exists");
        let (root, outside) = (all.join("root"), all.join("outside"));
        fs::create_dir_all(root.join("sub")).expect("a folder");
        fs::create_dir(&outside).expect("a folder");
        fs::write(root.join("sub/one"), "inside").expect("a file");
        fs::write(outside.join("two"), "outside").expect("a file");
        symlink("sub/one", root.join("link")).expect("a link");
        symlink("../outside/two", root.join("escape")).expect("a link");
        symlink(outside.join("two"), root.join("absolute")).expect("a link");
        symlink("../outside", root.join("folder")).expect("a link");
        symlink("/dev/zero", root.join("device")).expect("a link");
        let made = Command::new("mkfifo").arg(root.join("pipe")).status();
        assert!(made.expect("mkfifo is a program").success());
        let inside = format!("{}/sub/one", root.display());
        for path in ["sub/one", "./sub/one", "sub/../sub/one", "link", &inside] {
            let found = read(&root, path, 6).unwrap_or_else(|error| panic!("{path}: {error}"));
            assert_eq!(found, b"inside", "{path}");
        }
        let absolute = format!("{}/two", outside.display());
        let through = format!("{}/../outside/two", root.display());
        for path in [
            "../outside/two",
            "sub/../../outside/two",
            "escape",
            "absolute",
            "folder/two",
            "device",
            "pipe",
            "sub",
            "",
            ".",
            "missing",
            "sub/one/more",
            "a\0b",
            &absolute,
            &through,
            "/etc/passwd",
            "/dev/zero",
            "/proc/self/environ",
        ] {
            let error = read(&root, path, 6).expect_err(path);
            let expected = "f: names a file that cannot be read in the folder of media";
            assert_eq!(error.message, expected, "{path}");
        }
        let error = read(&root, "link", 5).expect_err("the file is too large");
        assert!(
            error
                .message
                .contains("a file of 6 bytes; expected at most 5"),
            "{error}"
        );
    }
}
