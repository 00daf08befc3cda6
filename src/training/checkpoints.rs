//! Checkpoints that a crash leaves whole: a file has its name when it is complete, and the one before is there until then.

use crate::Error;
use burn::{
    lr_scheduler::LrSchedulerRecord,
    optim::OptimizerRecord,
    store::ModuleRecord,
    train::checkpoint::{Checkpoint, Checkpointer, CheckpointerError},
};
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

/// How many checkpoints stay.
pub const KEPT: usize = 2;

/// The records of a checkpoint.
const RECORDS: [&str; 3] = ["model", "optimizer", "schedule"];

/// One of the records of all checkpoints of a run.
pub struct Records {
    folder: PathBuf,
    name: &'static str,
}

impl Records {
    /// Those of the model, the optimizer and the learning rate's schedule, as Burn's learner wants them.
    ///
    /// # Errors
    /// Where the folder cannot be made.
    pub fn all(folder: &Path) -> Result<[Self; 3], Error> {
        fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        Ok(RECORDS.map(|name| Self {
            folder: folder.to_owned(),
            name,
        }))
    }

    fn path(&self, number: usize) -> PathBuf {
        path(&self.folder, self.name, number)
    }
}

fn path(folder: &Path, name: &str, number: usize) -> PathBuf {
    folder.join(format!("{name}-{number}.bpk"))
}

/// The number of the last checkpoint that is complete.
///
/// # Errors
/// Where the folder is there and cannot be read.
pub fn last(folder: &Path) -> Result<Option<usize>, Error> {
    if !folder.exists() {
        return Ok(None);
    }
    let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
    let mut last = None;
    for entry in fs::read_dir(folder).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let number = name
            .to_str()
            .and_then(|name| name.strip_prefix("model-")?.strip_suffix(".bpk"))
            .and_then(|number| number.parse().ok());
        let is_complete = |number: &usize| {
            RECORDS
                .iter()
                .all(|name| path(folder, name, *number).exists())
        };
        last = last.max(number.filter(is_complete));
    }
    Ok(last)
}

impl<R: Checkpoint> Checkpointer<R> for Records {
    fn save(&self, number: usize, record: R) -> Result<(), CheckpointerError> {
        let path = self.path(number);
        // Burn wants the ending.
        let partial = self.folder.join(format!("partial-{}.bpk", self.name));
        record.save(partial.clone())?;
        File::open(&partial)
            .and_then(|file| file.sync_all())
            .and_then(|()| fs::rename(&partial, path))
            .map_err(CheckpointerError::IOError)
    }

    fn delete(&self, number: usize) -> Result<(), CheckpointerError> {
        match fs::remove_file(self.path(number)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(CheckpointerError::IOError(error))
            }
            _ => Ok(()),
        }
    }

    fn restore(&self, number: usize) -> Result<R, CheckpointerError> {
        R::load(self.path(number))
    }
}

/// A checkpoint's parts, read before Burn's learner does, which panics where it cannot.
///
/// # Errors
/// Naming the file that does not hold what it should.
pub fn check(folder: &Path, number: usize) -> Result<(), Error> {
    let named = |name: &str, error: CheckpointerError| {
        format!("{}: {error}", path(folder, name, number).display())
    };
    let [model, optimizer, schedule] = RECORDS.map(|name| (name, path(folder, name, number)));
    ModuleRecord::load(&model.1)
        .map_err(|error| named(model.0, CheckpointerError::Record(error)))?;
    OptimizerRecord::load(&optimizer.1)
        .map_err(|error| named(optimizer.0, CheckpointerError::Record(error)))?;
    LrSchedulerRecord::load(&schedule.1)
        .map_err(|error| named(schedule.0, CheckpointerError::Record(error)))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_complete_checkpoints_count() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path().join("checkpoints");
        assert_eq!(last(&folder).expect("no folder"), None);
        fs::create_dir(&folder).expect("a folder");
        for (name, number) in [
            ("model", 3),
            ("optimizer", 3),
            ("schedule", 3),
            ("model", 4),
        ] {
            fs::write(path(&folder, name, number), []).expect("a file");
        }
        fs::write(folder.join("partial-model.bpk"), []).expect("a file");
        assert_eq!(last(&folder).expect("a folder"), Some(3));
        assert!(check(&folder, 3).is_err());
    }
}
