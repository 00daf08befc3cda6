//! Several processes that train one model, on one machine or more: each has a device and a part of every step.
//!
//! A launcher starts them and says which is which (`place`). What they tell one another goes through MPI or TCP (`link`),
//! and gradients through NCCL or MPI (`exchange`). The first process validates and writes; one that fails ends all.

mod exchange;
mod link;
mod model;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "cuda")]
mod nccl;
mod place;
mod shards;
mod tcp;

use crate::{
    Error, guarded,
    signals::{self, Stopped},
    terminal,
};
use burn::tensor::{Device, Tensor};
use exchange::Exchange;
use link::{Alone, Link};
pub use place::Place;
use serde_json::Value;
use std::{
    fmt,
    process::{self, ExitCode},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

/// How long a process that fails may take to end.
const LAST: Duration = Duration::from_secs(10);

/// How numbers are added up, once that is known.
type Way = Arc<OnceLock<Box<dyn Exchange>>>;

/// Whether a process is ending with an error already: its own, or another's that it heard of. It says one alone, and others that
/// fail at the same time tell it theirs.
type Ending = Arc<AtomicBool>;

/// All processes of a run, as one of them sees them.
pub struct World {
    place: Place,
    link: Box<dyn Link>,
    exchange: Way,
    ending: Ending,
    #[cfg(feature = "mpi")]
    mpi: Option<mpi::Mpi>,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("World").field(&self.place).finish()
    }
}

/// Runs a program that may be one of several processes, to its exit code: [`terminal::exit_code`]. The others end with the
/// error of one.
pub fn exit_code(program: impl FnOnce(&Arc<World>) -> Result<(), Error>) -> ExitCode {
    terminal::exit_code(|| {
        let world = Arc::new(World::join()?);
        let outcome = guarded(|| program(&world)).unwrap_or_else(|panic| Err(panic.into()));
        match &outcome {
            Ok(()) => world.link.end(),
            // All processes have ended with the same step.
            Err(error) if error.is::<Stopped>() => world.link.end(),
            Err(error) => {
                world.end_with_own_error();
                let code = terminal::code_of(error);
                world.link.fail(&error.to_string(), code.into());
                if world.has_others() {
                    give_up(&world.exchange);
                }
            }
        }
        outcome
    })
}

impl World {
    /// With the processes that were started with this one.
    ///
    /// # Errors
    /// Where they do not come together.
    pub fn join() -> Result<Self, Error> {
        let place = Place::of_process()?;
        if place.size == 1 {
            return Ok(Self::new(place, Box::new(Alone)));
        }
        terminal::speak_as(place.rank);
        #[cfg(feature = "mpi")]
        if place::is_of_mpi() {
            let mpi = mpi::Mpi::join(place)?;
            return Ok(Self {
                mpi: Some(mpi.clone()),
                ..Self::new(place, Box::new(mpi))
            });
        }
        let (exchange, ending) = (Way::default(), Ending::default());
        let (known, ended) = (exchange.clone(), ending.clone());
        let end = Arc::new(move |message: &str| {
            if ended.swap(true, Ordering::SeqCst) {
                return;
            }
            terminal::fault(message);
            give_up(&known);
            process::exit(1);
        });
        let link = Box::new(tcp::Tcp::join(place, end)?);
        Ok(Self {
            exchange,
            ending,
            ..Self::new(place, link)
        })
    }

    fn new(place: Place, link: Box<dyn Link>) -> Self {
        Self {
            place,
            link,
            exchange: Way::default(),
            ending: Ending::default(),
            #[cfg(feature = "mpi")]
            mpi: None,
        }
    }

    /// Claims the end for an error of this process. Where another's came first, the thread that heard of it ends the process.
    fn end_with_own_error(&self) {
        if self.ending.swap(true, Ordering::SeqCst) {
            loop {
                thread::park();
            }
        }
    }

    /// Which of them this is.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Whether there are others.
    pub fn has_others(&self) -> bool {
        self.place.size > 1
    }

    /// The text that the first process makes.
    ///
    /// # Errors
    /// Those of `make`, in the first process; where another is gone.
    pub fn text_of_first(
        &self,
        make: impl FnOnce() -> Result<String, Error>,
    ) -> Result<String, Error> {
        let bytes = self.of_first(|| Ok(make()?.into_bytes()))?;
        Ok(String::from_utf8(bytes)?)
    }

    fn of_first(&self, make: impl FnOnce() -> Result<Vec<u8>, Error>) -> Result<Vec<u8>, Error> {
        let own = match self.place.is_first() {
            true => make()?,
            false => Vec::new(),
        };
        Ok(self.link.all_gather(&own)?.swap_remove(0))
    }

    /// Makes sure that all processes have the same `settings`.
    ///
    /// # Errors
    /// Naming a setting that differs from the first process's.
    pub fn agree(&self, settings: &Value) -> Result<(), Error> {
        let all = self.link.all_gather(&serde_json::to_vec(settings)?)?;
        let parsed: Result<Vec<Value>, _> =
            all.iter().map(|one| serde_json::from_slice(one)).collect();
        match difference(&parsed?) {
            Some(difference) => Err(difference.into()),
            None => Ok(()),
        }
    }

    /// The end of a run that was stopped: [`signals::end_of_stopped`], once every process has saved what it had to. A launcher may
    /// kill the others as soon as one ends with a signal's exit code.
    ///
    /// # Errors
    /// [`Stopped`] where this process had the signal; where another process is gone.
    pub fn end_of_stopped(&self) -> Result<(), Error> {
        self.wait_for_all()?;
        signals::end_of_stopped()
    }

    /// Returns when every process has called it.
    ///
    /// # Errors
    /// An error if another process is gone.
    pub fn wait_for_all(&self) -> Result<(), Error> {
        // MPI refuses to gather nothing at all.
        self.link.all_gather(&[0]).map(|_| ())
    }

    /// Brings the processes together to add up numbers of `device`.
    ///
    /// # Errors
    /// Where there is no way between such devices.
    pub fn connect(&self, device: &Device) -> Result<(), Error> {
        if !self.has_others() {
            return Ok(());
        }
        // Numbers that are exchanged are no part of a graph, and a device with autodiff does not say which it is.
        let exchange = self.way(&device.clone().without_autodiff())?;
        // Nobody connects twice.
        let _ = self.exchange.set(exchange);
        Ok(())
    }

    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    fn way(&self, device: &Device) -> Result<Box<dyn Exchange>, Error> {
        #[cfg(feature = "cuda")]
        if has_nccl(device) {
            let identifier = self.of_first(nccl::identifier)?;
            let group = nccl::Nccl::join(self.place, device, &identifier)?;
            return Ok(Box::new(group));
        }
        #[cfg(feature = "mpi")]
        if let Some(mpi) = &self.mpi {
            return Ok(Box::new(mpi.clone()));
        }
        Err("processes add up their gradients through NCCL, on CUDA, or else through MPI: build with --features mpi, and start them with mpirun".into())
    }

    /// The sums of `[count]` numbers of all processes. Where that fails the process ends: the others could not go on either.
    pub fn sum(&self, numbers: Tensor<1>) -> Tensor<1> {
        let exchange = self
            .exchange
            .get()
            .expect("connected before the first step");
        exchange.sum(numbers).unwrap_or_else(|error| {
            self.end_with_own_error();
            let message = error.to_string();
            self.link.fail(&message, 1);
            terminal::fault(&message);
            give_up(&self.exchange);
            process::exit(1);
        })
    }
}

/// Sees to it that this process, which has failed, comes to its end. NCCL's kernels wait for those of other processes, which may be gone, and the
/// driver waits for kernels.
fn give_up(exchange: &Way) {
    thread::spawn(|| {
        thread::sleep(LAST);
        process::abort();
    });
    if let Some(exchange) = exchange.get() {
        exchange.abort();
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

/// Where settings of processes differ from the first one's.
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
    fn what_differs_is_named() {
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
    fn alone() {
        let world = World::new(place::ALONE, Box::new(Alone));
        assert!(!world.has_others());
        let made = world.text_of_first(|| Ok("text".into()));
        assert_eq!(made.expect("no others"), "text");
        world.agree(&json!({"steps": 3})).expect("no others");
        assert!(world.place().is_first());
    }
}
