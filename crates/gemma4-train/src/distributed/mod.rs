//! Trains one model by several processes, on one or more machines. Each process has a device and computes a part of every
//! step.
//!
//! A launcher starts the processes and gives each its [`Rank`]. TCP or MPI sends control messages (`control_plane`), and
//! NCCL or MPI sums gradients (`collective`). Rank 0 validates and writes checkpoints. If one process fails, all other
//! processes end.
//!
//! ```no_run
//! use gemma4_train::distributed::{Ending, ProcessGroup, Rank};
//!
//! # fn main() -> Result<(), gemma4_train::Error> {
//! let group = ProcessGroup::join(Rank::of_process()?)?;
//! group.run(
//!     |group| {
//!         println!("process {} of {}", group.rank().global, group.rank().size);
//!         Ok(())
//!     },
//!     |_error| Ending::Failed(1),
//! )
//! # }
//! ```

pub mod all_reduce;
mod buckets;
mod collective;
mod control_plane;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "cuda")]
mod nccl;
mod rank;
mod sync_model;
mod tcp;
mod zero1;

use crate::{Error, report::fatal};
use burn::tensor::{Device, Tensor};
use burn_gemma4::catch_panic;
use collective::Collective;
use control_plane::{ControlPlane, SingleProcess};
pub use rank::Rank;
use serde_json::Value;
use std::{
    fmt, process,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

/// The longest time for which a failed process may continue to run before it is killed.
const LAST: Duration = Duration::from_secs(10);

/// The collective, which sums tensors over all processes of a group. [`ProcessGroup::connect`] sets it.
type SharedCollective = Arc<OnceLock<Box<dyn Collective>>>;

/// True if this process is already ending because of an error. Any error after the first is not reported.
type EndingFlag = Arc<AtomicBool>;

/// The group of all processes of a run, from the view of one process.
pub struct ProcessGroup {
    rank: Rank,
    control: Box<dyn ControlPlane>,
    collective: SharedCollective,
    ending: EndingFlag,
    #[cfg(feature = "mpi")]
    mpi: Option<mpi::Mpi>,
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ProcessGroup").field(&self.rank).finish()
    }
}

/// The way in which the program of a process ends. The process reports its ending to the other processes.
pub enum Ending {
    /// The program was stopped. All processes have agreed to stop after the same step, so the other processes continue until
    /// that step.
    Stopped,
    /// The program has failed with this exit code. The other processes end and report the error of this program.
    Failed(i32),
}

impl ProcessGroup {
    /// Returns the group of a run with a single process.
    pub fn single() -> Self {
        Self::new(rank::SINGLE_PROCESS, Box::new(SingleProcess))
    }

    /// Connects this process, of rank `rank`, to the other processes that the launcher started. Waits up to five minutes for
    /// all processes.
    ///
    /// # Errors
    /// Returns an error if a process is missing, or belongs to another run.
    pub fn join(rank: Rank) -> Result<Self, Error> {
        if rank.size == 1 {
            return Ok(Self::single());
        }
        #[cfg(feature = "mpi")]
        if rank::is_of_mpi() {
            let mpi = mpi::Mpi::join(rank)?;
            return Ok(Self {
                mpi: Some(mpi.clone()),
                ..Self::new(rank, Box::new(mpi))
            });
        }
        let (collective, ending) = (SharedCollective::default(), EndingFlag::default());
        let (known, ended) = (collective.clone(), ending.clone());
        let end = Arc::new(move |message: &str| {
            if ended.swap(true, Ordering::SeqCst) {
                return;
            }
            fatal(message);
            give_up(&known);
            process::exit(1);
        });
        let control = Box::new(tcp::Tcp::join(rank, end)?);
        Ok(Self {
            collective,
            ending,
            ..Self::new(rank, control)
        })
    }

    fn new(rank: Rank, control: Box<dyn ControlPlane>) -> Self {
        Self {
            rank,
            control,
            collective: SharedCollective::default(),
            ending: EndingFlag::default(),
            #[cfg(feature = "mpi")]
            mpi: None,
        }
    }

    /// Calls `program`, the work of this process, and then tells the other processes how the call ended. `ending`
    /// classifies an error or a panic of `program`.
    ///
    /// # Errors
    /// Returns the error of `program`.
    pub fn run(
        self,
        program: impl FnOnce(&Arc<Self>) -> Result<(), Error>,
        ending: impl FnOnce(&Error) -> Ending,
    ) -> Result<(), Error> {
        let group = Arc::new(self);
        let outcome = catch_panic(|| program(&group)).unwrap_or_else(|panic| Err(panic.into()));
        match outcome.as_ref().map_err(ending) {
            Ok(()) | Err(Ending::Stopped) => group.control.end(),
            Err(Ending::Failed(code)) => {
                group.end_with_own_error();
                if let Err(error) = &outcome {
                    group.control.fail(&error.to_string(), code);
                }
                if group.has_others() {
                    give_up(&group.collective);
                }
            }
        }
        outcome
    }

    /// Marks this process as ending with its own error. If this process has already received another process's error,
    /// this call does not return. The thread that received the error ends the process instead.
    fn end_with_own_error(&self) {
        if self.ending.swap(true, Ordering::SeqCst) {
            loop {
                thread::park();
            }
        }
    }

    /// Returns the rank of this process.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// True if the run has more than one process.
    pub fn has_others(&self) -> bool {
        self.rank.size > 1
    }

    /// Returns the same text in every process. The first process creates the text by `make`, and broadcasts the text.
    ///
    /// # Errors
    /// Passes on the errors of `make` in the first process. Returns an error in every process if another process is gone.
    pub fn broadcast_text(
        &self,
        make: impl FnOnce() -> Result<String, Error>,
    ) -> Result<String, Error> {
        let bytes = self.broadcast(|| Ok(make()?.into_bytes()))?;
        Ok(String::from_utf8(bytes)?)
    }

    fn broadcast(&self, make: impl FnOnce() -> Result<Vec<u8>, Error>) -> Result<Vec<u8>, Error> {
        let own = match self.rank.is_first() {
            true => make()?,
            false => Vec::new(),
        };
        Ok(self.control.all_gather(&own)?.swap_remove(0))
    }

    /// Checks that all processes have the same `settings`.
    ///
    /// # Errors
    /// The error names a setting whose value differs between this run's first process and another process.
    pub fn check_same_settings(&self, settings: &Value) -> Result<(), Error> {
        let all = self.control.all_gather(&serde_json::to_vec(settings)?)?;
        let parsed: Result<Vec<Value>, _> =
            all.iter().map(|one| serde_json::from_slice(one)).collect();
        match difference(&parsed?) {
            Some(difference) => Err(difference.into()),
            None => Ok(()),
        }
    }

    /// A barrier: returns when every process has called this method.
    ///
    /// # Errors
    /// Returns an error if another process is gone.
    pub fn wait_for_all(&self) -> Result<(), Error> {
        // Every process sends one byte, because MPI refuses to gather zero bytes.
        self.control.all_gather(&[0]).map(|_| ())
    }

    /// Chooses and connects the collective that sums tensors of `device`.
    ///
    /// # Errors
    /// Returns an error if neither NCCL nor MPI connects devices of this kind.
    pub fn connect(&self, device: &Device) -> Result<(), Error> {
        if !self.has_others() {
            return Ok(());
        }
        // Remove autodiff from the device, because the collective works on plain tensors, and because autodiff hides
        // the device's kind.
        let collective = self.collective_for(&device.clone().without_autodiff())?;
        // Ignore the failure of `set`: if an earlier call has set a collective, that collective stays in use.
        let _ = self.collective.set(collective);
        Ok(())
    }

    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    fn collective_for(&self, device: &Device) -> Result<Box<dyn Collective>, Error> {
        #[cfg(feature = "cuda")]
        if has_nccl(device) {
            let identifier = self.broadcast(nccl::identifier)?;
            let nccl = nccl::Nccl::join(self.rank, device, &identifier)?;
            return Ok(Box::new(nccl));
        }
        #[cfg(feature = "mpi")]
        if let Some(mpi) = &self.mpi {
            return Ok(Box::new(mpi.clone()));
        }
        Err("several processes need NCCL on CUDA devices, or MPI: build with --features mpi, and start the processes with mpirun".into())
    }

    /// Returns the elementwise sums of `numbers`, `[count]`, over all processes. If the sum fails, this process ends.
    pub fn sum(&self, numbers: Tensor<1>) -> Tensor<1> {
        let collective = self
            .collective
            .get()
            .expect("the group is connected before the first step");
        collective.sum(numbers).unwrap_or_else(|error| {
            self.end_with_own_error();
            let message = error.to_string();
            self.control.fail(&message, 1);
            fatal(&message);
            give_up(&self.collective);
            process::exit(1);
        })
    }
}

/// Aborts the collective, and kills this failed process after [`LAST`]. Otherwise NCCL's kernels could wait for
/// processes that are gone, the driver would wait for the kernels, and this process would never end.
fn give_up(collective: &SharedCollective) {
    thread::spawn(|| {
        thread::sleep(LAST);
        process::abort();
    });
    if let Some(collective) = collective.get() {
        collective.abort();
    }
}

#[cfg(feature = "cuda")]
fn has_nccl(device: &Device) -> bool {
    use burn::backend::{CubeDevice, DispatchDevice};
    match device.as_dispatch() {
        DispatchDevice::Cube(device @ CubeDevice::Cuda(_)) => {
            device.client().has_device_transport()
        }
        _ => false,
    }
}

/// Describes the first setting that differs between a process and the first process. Returns `None` if all settings are
/// equal.
fn difference(all: &[Value]) -> Option<String> {
    let (first, others) = all.split_first()?;
    let (rank, other) = others
        .iter()
        .enumerate()
        .find(|(_, other)| *other != first)?;
    let fields = |value: &Value| value.as_object().cloned().unwrap_or_default();
    let (first, other) = (fields(first), fields(other));
    let names = first.keys().chain(other.keys());
    let missing = Value::Null;
    let name = names
        .into_iter()
        .find(|name| first.get(*name) != other.get(*name))?;
    let [found, expected] = [&other, &first].map(|of| of.get(name).unwrap_or(&missing));
    Some(format!(
        "{name} is {found} in process {}, and {expected} in the first",
        rank + 1
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn difference_of_settings_names_the_setting() {
        let settings = json!({"steps": 3, "data": "a"});
        assert_eq!(difference(&[settings.clone(), settings.clone()]), None);
        let other = json!({"steps": 4, "data": "a"});
        let found = difference(&[settings.clone(), settings.clone(), other]);
        let expected = "steps is 4 in process 2, and 3 in the first";
        assert_eq!(found.as_deref(), Some(expected));
        let found = difference(&[settings, json!({"steps": 3})]);
        let expected = "data is null in process 1, and \"a\" in the first";
        assert_eq!(found.as_deref(), Some(expected));
    }

    #[test]
    fn group_of_a_single_process_works_without_messages() {
        let group = ProcessGroup::single();
        assert!(!group.has_others());
        let made = group.broadcast_text(|| Ok("text".into()));
        assert_eq!(made.expect("no others"), "text");
        group
            .check_same_settings(&json!({"steps": 3}))
            .expect("no others");
        assert!(group.rank().is_first());
    }
}
