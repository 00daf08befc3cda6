//! Writes and restores checkpoints that survive a crash. A file has a temporary name until it is complete. An earlier
//! checkpoint is deleted only after the new checkpoint is complete.
//!
//! A checkpoint is a folder with three files: Burn's records of the model, the optimizer and the learning rate schedule.
//! With ZeRO-1, each process writes its shard of the optimizer's record to its own file.

use crate::{Error, checkpoint::stop::Stop, data::schedule::Schedule};
use burn::{
    lr_scheduler::LrSchedulerRecord,
    optim::OptimizerRecord,
    store::ModuleRecord,
    train::checkpoint::{Checkpoint, Checkpointer, CheckpointerError},
};
use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

/// The name of the folder of checkpoints inside a run's folder.
pub const FOLDER: &str = "checkpoints";
/// The number of checkpoints that a run keeps.
pub const KEPT: usize = 2;

/// The names of the three records of a checkpoint.
const RECORDS: [&str; 3] = ["model", OPTIMIZER, "schedule"];
/// The name of the optimizer's record. With ZeRO-1, each process writes its shard of this record.
const OPTIMIZER: &str = "optimizer";

/// Returns the file name for a shard of a record. The first shard has the record's name, without a number.
fn named(record: &str, part: usize) -> String {
    match part {
        0 => record.into(),
        part => format!("{record}-{part}"),
    }
}

/// The reader and writer of one record (model, optimizer or schedule) in all checkpoints of a run. An epoch of Burn's
/// learner consists of the steps between two checkpoints. The learner identifies a record by the number of its epoch.
/// The folders are named by steps instead, because a stopped run ends its epoch early.
pub struct Records {
    folder: PathBuf,
    name: &'static str,
    schedule: Schedule,
    stop: Stop,
    /// The index of this process's shard of the record, and the number of shards. If the record has a single shard, only the
    /// first process writes it.
    part: (usize, usize),
}

impl Records {
    /// Returns three readers and writers, for the records of the model, the optimizer and the schedule. The first
    /// process writes the records. If the optimizer is sharded, each process writes its own shard of the optimizer's
    /// record.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be created, or if incomplete checkpoints cannot be removed.
    pub fn all(
        folder: &Path,
        schedule: Schedule,
        stop: &Stop,
        optimizer_parts: usize,
    ) -> Result<[Self; 3], Error> {
        let process = schedule.part.0;
        if process == 0 {
            fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
            for (step, path) in steps(folder)? {
                // A run resumes at its last complete checkpoint, so checkpoints of later steps are incomplete: a
                // process was killed while they were written. Remove these checkpoints.
                if step > schedule.done {
                    fs::remove_dir_all(&path).map_err(|error| failed(&path, error))?;
                }
            }
        }
        Ok(RECORDS.map(|name| Self {
            folder: folder.to_owned(),
            name,
            schedule,
            stop: stop.clone(),
            part: match name {
                OPTIMIZER => (process, optimizer_parts),
                _ => (process, 1),
            },
        }))
    }

    /// Returns the number of steps that are finished at the end of an epoch.
    fn step(&self, epoch: usize) -> usize {
        let end = self.schedule.steps_of(epoch - 1).end;
        end.min(self.stop.end())
    }

    /// True if this process writes the record.
    fn is_written(&self) -> bool {
        self.part.0 < self.part.1
    }

    /// Returns the path of this process's file of the record, in the checkpoint after `step` steps.
    fn of_step(&self, step: usize) -> PathBuf {
        let part = if self.is_written() { self.part.0 } else { 0 };
        path(&self.folder, &named(self.name, part), step)
    }
}

fn failed(path: &Path, error: io::Error) -> String {
    format!("{}: {error}", path.display())
}

/// The prefix of the name of a checkpoint's folder. The number of finished steps follows the prefix.
const STEP: &str = "step-";

fn path(folder: &Path, name: &str, step: usize) -> PathBuf {
    folder
        .join(format!("{STEP}{step}"))
        .join(name)
        .with_extension("bpk")
}

/// Lists the folders of checkpoints, complete or not, with the number of finished steps of each checkpoint.
fn steps(folder: &Path) -> Result<Vec<(usize, PathBuf)>, Error> {
    let mut steps = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| failed(folder, error))? {
        let entry = entry.map_err(|error| failed(folder, error))?;
        let name = entry.file_name();
        let step = name
            .to_str()
            .and_then(|name| name.strip_prefix(STEP)?.parse().ok());
        steps.extend(step.map(|step| (step, entry.path())));
    }
    steps.sort_unstable();
    Ok(steps)
}

/// Returns the step of the last complete checkpoint whose optimizer record has `optimizer_parts` shards.
///
/// # Errors
/// Returns an error if the folder exists and cannot be read.
pub fn last(folder: &Path, optimizer_parts: usize) -> Result<Option<usize>, Error> {
    if !folder.exists() {
        return Ok(None);
    }
    let is_complete = |step: &usize| {
        let parts = (1..optimizer_parts).map(|part| named(OPTIMIZER, part));
        let mut records = RECORDS.iter().map(|name| name.to_string()).chain(parts);
        records.all(|name| path(folder, &name, *step).exists())
    };
    let steps = steps(folder)?.into_iter().rev();
    Ok(steps.map(|(step, _)| step).find(is_complete))
}

/// A record that is restored from a checkpoint. The record of a model may lack the parameters that the run does not train.
pub trait Restored: Checkpoint {
    /// Returns the record in a form that can be loaded even if the record lacks parameters.
    fn restored(self) -> Self;
}

impl Restored for ModuleRecord {
    fn restored(self) -> Self {
        self.allow_partial(true)
    }
}

impl Restored for OptimizerRecord {
    fn restored(self) -> Self {
        self
    }
}

impl Restored for LrSchedulerRecord {
    fn restored(self) -> Self {
        self
    }
}

impl<R: Restored> Checkpointer<R> for Records {
    fn save(&self, epoch: usize, record: R) -> Result<(), CheckpointerError> {
        if !self.is_written() {
            return Ok(());
        }
        let path = self.of_step(self.step(epoch));
        let folder = path.parent().unwrap_or(&self.folder);
        // The temporary file's name also ends in `.bpk`, because Burn requires this extension.
        let partial = folder.join(format!("partial-{}.bpk", named(self.name, self.part.0)));
        fs::create_dir_all(folder).map_err(CheckpointerError::IOError)?;
        record.save(partial.clone())?;
        File::open(&partial)
            .and_then(|file| file.sync_all())
            .and_then(|()| fs::rename(&partial, &path))
            .map_err(CheckpointerError::IOError)
    }

    /// Deletes this record from the checkpoint of the epoch `epoch` and from all earlier checkpoints. Burn asks only
    /// for this one epoch. A resumed run may also have older checkpoints, which it wrote before it was resumed.
    fn delete(&self, epoch: usize) -> Result<(), CheckpointerError> {
        if !self.is_written() {
            return Ok(());
        }
        let last = self.step(epoch);
        let steps =
            steps(&self.folder).map_err(|error| CheckpointerError::Unknown(error.to_string()))?;
        for (step, folder) in steps.into_iter().filter(|(step, _)| *step <= last) {
            match fs::remove_file(self.of_step(step)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(CheckpointerError::IOError(error));
                }
                _ => (),
            }
            // Ignore the result. `remove_dir` fails while the folder contains a record, and removes the folder once all
            // records are deleted.
            let _ = fs::remove_dir(folder);
        }
        Ok(())
    }

    /// Loads the record of the step from which the run resumes. The epoch is ignored.
    fn restore(&self, _epoch: usize) -> Result<R, CheckpointerError> {
        Ok(R::load(self.of_step(self.schedule.done))?.restored())
    }
}

/// Checks that a process can read the records that it restores: the model, its shard of the optimizer, and the
/// schedule. Without this check, Burn's learner would panic on a broken record.
///
/// # Errors
/// The error names the file that is missing or broken.
pub fn check(folder: &Path, number: usize, optimizer_part: usize) -> Result<(), Error> {
    let failed = |path: &Path, error| {
        let error = CheckpointerError::Record(error);
        format!("{}: {error}", path.display())
    };
    let [model, optimizer, schedule] = RECORDS.map(|record| {
        let part = if record == OPTIMIZER {
            optimizer_part
        } else {
            0
        };
        path(folder, &named(record, part), number)
    });
    ModuleRecord::load(&model).map_err(|error| failed(&model, error))?;
    OptimizerRecord::load(&optimizer).map_err(|error| failed(&optimizer, error))?;
    LrSchedulerRecord::load(&schedule).map_err(|error| failed(&schedule, error))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_with_incomplete_checkpoints_skips_them() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path().join("checkpoints");
        assert_eq!(last(&folder, 1).expect("no folder"), None);
        for (name, step) in [
            ("model", 3),
            ("optimizer", 3),
            ("schedule", 3),
            ("partial-model", 4),
            ("optimizer", 4),
            ("schedule", 4),
        ] {
            let path = path(&folder, name, step);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, []).expect("a file");
        }
        assert_eq!(last(&folder, 1).expect("a folder"), Some(3));
        // With two optimizer shards, the checkpoint is incomplete: the second shard's file is missing, as if a process was
        // killed.
        assert_eq!(last(&folder, 2).expect("a folder"), None);
        assert!(check(&folder, 3, 0).is_err());

        let schedule = Schedule {
            steps: 9,
            done: 3,
            interval: 3,
            accumulation: 1,
            devices: 1,
            part: (0, 1),
            seed: 0,
        };
        let stop = Stop::default();
        let [model, ..] = Records::all(&folder, schedule, &stop, 1).expect("records");
        let left: Vec<usize> = steps(&folder)
            .expect("a folder")
            .into_iter()
            .map(|(step, _)| step)
            .collect();
        assert_eq!(left, [3]);
        assert_eq!(model.step(2), 6);
        stop.ask();
        assert!(stop.is_before(5, true));
        assert_eq!(model.step(2), 5);
    }
}
