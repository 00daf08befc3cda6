//! Checkpoints that a crash leaves whole: a file has its name when it is complete, and the one before is there until then.

use super::{loader::Schedule, stop::Stop};
use crate::Error;
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

/// The checkpoints' folder, in that of a run.
pub const FOLDER: &str = "checkpoints";
/// How many checkpoints stay.
pub const KEPT: usize = 2;

/// The records of a checkpoint.
const RECORDS: [&str; 3] = ["model", OPTIMIZER, "schedule"];
/// The one that several processes may have in parts.
const OPTIMIZER: &str = "optimizer";

/// The name of a part of a record; the first one has the record's.
fn named(record: &str, part: usize) -> String {
    match part {
        0 => record.into(),
        part => format!("{record}-{part}"),
    }
}

/// One of the records of all checkpoints of a run. Burn's learner numbers them by its epochs, and the folders by the steps
/// that were done, since a run that is stopped ends its epoch early.
pub struct Records {
    folder: PathBuf,
    name: &'static str,
    schedule: Schedule,
    stop: Stop,
    /// Which part of the record is this process's, of how many; the first process writes records that have no parts.
    part: (usize, usize),
}

impl Records {
    /// Those of the model, the optimizer and the learning rate's schedule, as Burn's learner wants them. Of several processes
    /// the first one writes, and every one its part of an optimizer in parts.
    ///
    /// # Errors
    /// Where the folder cannot be made, or what a killed run has left there cannot be removed.
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
                // Parts of a checkpoint that was never complete.
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

    /// The steps that are done at the end of an epoch.
    fn step(&self, epoch: usize) -> usize {
        let end = self.schedule.steps_of(epoch - 1).end;
        end.min(self.stop.end())
    }

    /// Whether this process writes it.
    fn is_written(&self) -> bool {
        self.part.0 < self.part.1
    }

    /// What this process writes, or else reads.
    fn of_step(&self, step: usize) -> PathBuf {
        let part = if self.is_written() { self.part.0 } else { 0 };
        path(&self.folder, &named(self.name, part), step)
    }
}

fn failed(path: &Path, error: io::Error) -> String {
    format!("{}: {error}", path.display())
}

/// Before the number of steps in the name of a checkpoint's folder.
const STEP: &str = "step-";

fn path(folder: &Path, name: &str, step: usize) -> PathBuf {
    folder
        .join(format!("{STEP}{step}"))
        .join(name)
        .with_extension("bpk")
}

/// The folders of checkpoints, complete or not, by their steps.
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

/// The steps of the last checkpoint that is complete, with as many parts of the optimizer.
///
/// # Errors
/// Where the folder is there and cannot be read.
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

/// A checkpoint that may lack what its run does not train.
pub trait Restored: Checkpoint {
    /// As a model takes it.
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
        // Burn wants the ending.
        let partial = folder.join(format!("partial-{}.bpk", named(self.name, self.part.0)));
        fs::create_dir_all(folder).map_err(CheckpointerError::IOError)?;
        record.save(partial.clone())?;
        File::open(&partial)
            .and_then(|file| file.sync_all())
            .and_then(|()| fs::rename(&partial, &path))
            .map_err(CheckpointerError::IOError)
    }

    /// Of the epoch, and what earlier runs have left before it.
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
            // The last of the three records takes the folder along: the others find it not empty.
            let _ = fs::remove_dir(folder);
        }
        Ok(())
    }

    /// The record of the steps that the run goes on from.
    fn restore(&self, _epoch: usize) -> Result<R, CheckpointerError> {
        Ok(R::load(self.of_step(self.schedule.done))?.restored())
    }
}

/// What a process reads of a checkpoint, with one part of the optimizer, before Burn's learner does, which panics where it cannot.
///
/// # Errors
/// Naming the file that does not hold what it should.
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
    fn only_complete_checkpoints_count() {
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
        // Of two processes, one was killed before it had written.
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
