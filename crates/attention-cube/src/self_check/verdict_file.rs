//! The file that keeps the verdicts of the self-check on one device.
//!
//! The file is `attention-cube/cmma-NAME.json` in the user's cache folder. It holds the identity of the device and its
//! driver. Verdicts for another identity are dropped. A file beside it with the ending `lock` is locked while a process
//! checks, so processes check one after another. The operating system releases the lock of a process that is gone.
//! An entry "running" that a process finds under the lock therefore belongs to a check that never ended.

#[cfg(test)]
mod tests;

use super::driver::Identity;
use crate::types::fragment_verdict::{FragmentVerdict, TileCheck};
use crate::types::request::Pass;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, TryLockError};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The version of the check. A change of the check or of this file's format increments it.
const CHECK_VERSION: u32 = 1;

/// The time for which a process waits for the check of another process.
const WAIT: Duration = Duration::from_secs(60);

/// The file of verdicts on one device.
pub(super) struct VerdictFile {
    identity: Identity,
    /// The path, or `None` if the system names no cache folder with an absolute path.
    path: Option<PathBuf>,
    wait: Duration,
}

#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Contents {
    check_version: u32,
    identity: Identity,
    verdicts: Vec<Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    pass: String,
    dtype: String,
    tiles: String,
    state: State,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum State {
    Running,
    Passed { speed_percent: Option<u32> },
    Refused { reason: String },
}

impl VerdictFile {
    /// Returns the file for a device.
    pub fn of(identity: &Identity) -> Self {
        let folder = match etcetera::choose_base_strategy() {
            Ok(strategy) => Some(etcetera::BaseStrategy::cache_dir(&strategy)),
            Err(error) => {
                log::debug!("attention: verdicts of cmma are not kept: {error}");
                None
            }
        };
        Self::in_folder(identity, folder, WAIT)
    }

    fn in_folder(identity: &Identity, folder: Option<PathBuf>, wait: Duration) -> Self {
        let name = format!("{} {}", identity.runtime, identity.device);
        let is_plain = |c: char| c.is_ascii_alphanumeric();
        let parts = name.split(|c| !is_plain(c));
        let parts: Vec<_> = parts.filter(|part| !part.is_empty()).collect();
        let file = format!("cmma-{}.json", parts.join("-").to_lowercase());
        // A relative folder, as of an empty `HOME`, would lie in the working directory.
        let folder = folder.filter(|folder| folder.is_absolute());
        Self {
            identity: identity.clone(),
            path: folder.map(|folder| folder.join("attention-cube").join(file)),
            wait,
        }
    }

    /// Returns the verdict on some tiles from the file. If the file has none, runs `check` and keeps its verdict. Also
    /// returns the path of the file if the file has the verdict.
    ///
    /// A file in a folder that is not writable still gives its verdicts. New verdicts then hold for this process alone.
    pub fn verdict(
        &self,
        tiles: &TileCheck,
        check: impl FnOnce() -> FragmentVerdict,
    ) -> (FragmentVerdict, Option<PathBuf>) {
        let Some(path) = &self.path else {
            return (check(), None);
        };
        let _lock = match self.lock(path) {
            Ok(Some(lock)) => lock,
            Ok(None) => {
                let reason = format!(
                    "another process has checked its matrix units for {} s; this process does not use them",
                    self.wait.as_secs()
                );
                return (FragmentVerdict::Refused(reason), None);
            }
            Err(error) => {
                return match self.kept(tiles) {
                    Some((verdict, path)) => (verdict, Some(path)),
                    None => (unkept(path, &error, check), None),
                };
            }
        };
        let mut contents = self.read(path);
        let is_wanted = |entry: &Entry| *entry == Entry::new(tiles, entry.state.clone());
        let place = contents.verdicts.iter().position(is_wanted);
        if let Some(place) = place {
            let verdict = contents.verdicts[place].state.verdict(path);
            return (verdict, Some(path.clone()));
        }
        contents.verdicts.push(Entry::new(tiles, State::Running));
        if let Err(error) = write(path, &contents) {
            return (unkept(path, &error, check), None);
        }
        let verdict = check();
        contents.verdicts.pop();
        let state = State::of(&verdict);
        contents.verdicts.push(Entry::new(tiles, state));
        if let Err(error) = write(path, &contents) {
            // The old file names the check as running. A full disk still lets it be removed.
            if fs::remove_file(path).is_err() {
                log::warn!(
                    "attention: {}: {error}; delete the file, because it names a check that has ended as running",
                    path.display()
                );
            }
            return (verdict, None);
        }
        (verdict, Some(path.clone()))
    }

    /// Returns the verdict on some tiles from the file, and the path of the file. Returns `None` if the file has no
    /// verdict, or if the check is running.
    pub fn kept(&self, tiles: &TileCheck) -> Option<(FragmentVerdict, PathBuf)> {
        let path = self.path.as_ref()?;
        let contents = self.read(path);
        let mut states = contents.verdicts.into_iter();
        let state = states.find_map(|entry| {
            let is_wanted = entry == Entry::new(tiles, entry.state.clone());
            (is_wanted && entry.state != State::Running).then_some(entry.state)
        })?;
        Some((state.verdict(path), path.clone()))
    }

    /// Locks the file against other processes. Returns `None` if another process has had the lock for too long.
    fn lock(&self, path: &Path) -> io::Result<Option<File>> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let lock = File::create(path.with_extension("lock"))?;
        let start = Instant::now();
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(Some(lock)),
                Err(TryLockError::Error(error)) => return Err(error),
                Err(TryLockError::WouldBlock) if start.elapsed() > self.wait => return Ok(None),
                Err(TryLockError::WouldBlock) => sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Reads the verdicts. A file that is missing, damaged, or of another identity has none.
    fn read(&self, path: &Path) -> Contents {
        let empty = || Contents {
            check_version: CHECK_VERSION,
            identity: self.identity.clone(),
            verdicts: Vec::new(),
        };
        let Ok(text) = fs::read_to_string(path) else {
            return empty();
        };
        match serde_json::from_str::<Contents>(&text) {
            Ok(contents)
                if contents.identity == self.identity
                    && contents.check_version == CHECK_VERSION =>
            {
                contents
            }
            Ok(_) => empty(),
            Err(error) => {
                log::debug!("attention: {} is replaced: {error}", path.display());
                empty()
            }
        }
    }
}

/// Runs a check whose verdict cannot be kept.
fn unkept(
    path: &Path,
    error: &io::Error,
    check: impl FnOnce() -> FragmentVerdict,
) -> FragmentVerdict {
    log::debug!(
        "attention: the verdict on cmma is not kept in {}: {error}",
        path.display()
    );
    check()
}

/// Writes the verdicts to a temporary file, and renames the file, so that readers never see a part.
///
/// The text is on the disk before the file is renamed. A driver that takes the whole system down must leave "running".
fn write(path: &Path, contents: &Contents) -> io::Result<()> {
    let text = serde_json::to_string_pretty(contents)?;
    let temporary = path.with_extension("tmp");
    let mut file = File::create(&temporary)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    drop(file);
    fs::rename(&temporary, path)?;
    // The new name is in the folder. Systems that cannot open folders, such as Windows, write names on their own.
    if let Some(Ok(folder)) = path.parent().map(File::open) {
        let _ = folder.sync_all();
    }
    Ok(())
}

impl Entry {
    fn new(tiles: &TileCheck, state: State) -> Self {
        Self {
            pass: match tiles.pass {
                Pass::Forward => "forward".into(),
                Pass::Backward => "backward".into(),
            },
            dtype: format!("{:?}", tiles.dtype),
            tiles: tiles.tiles.clone(),
            state,
        }
    }
}

impl State {
    fn of(verdict: &FragmentVerdict) -> Self {
        match verdict.clone() {
            FragmentVerdict::Passed { speed_percent } => Self::Passed { speed_percent },
            FragmentVerdict::Refused(reason) => Self::Refused { reason },
        }
    }

    /// Returns the verdict of an entry. The process has the lock, so no other process is still running a check.
    fn verdict(&self, path: &Path) -> FragmentVerdict {
        match self.clone() {
            Self::Passed { speed_percent } => FragmentVerdict::Passed { speed_percent },
            Self::Refused { reason } => FragmentVerdict::Refused(reason),
            Self::Running => FragmentVerdict::Refused(format!(
                "an earlier process ended or was killed while it checked its matrix units; if the driver is not the \
                 cause, delete {} to check again",
                path.display()
            )),
        }
    }
}
