//! MPI, where there is no NCCL: numbers go through the processor's memory.

use super::{exchange::Exchange, link::Link, place::Place};
use crate::{Error, terminal::fault};
use burn::tensor::{DType, Tensor, TensorData};
use mpi::{
    Count, Threading,
    collective::SystemOperation,
    datatype::PartitionMut,
    environment::Universe,
    topology::SimpleCommunicator,
    traits::{Communicator, CommunicatorCollectives},
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Numbers of one call, whose count is an `i32`.
const AT_ONCE: usize = 1 << 28;

/// All processes that MPI has started. One thread at a time calls it.
#[derive(Clone)]
pub struct Mpi(Arc<Mutex<Option<Universe>>>);

impl Mpi {
    /// Of the process that MPI says this is, too.
    ///
    /// # Errors
    /// Where MPI does not start, or says otherwise.
    pub fn join(place: Place) -> Result<Self, Error> {
        let (universe, threading) = mpi::initialize_with_threading(Threading::Serialized)
            .ok_or("MPI was started before")?;
        if threading < Threading::Serialized {
            return Err("this MPI is for programs with one thread".into());
        }
        let world = universe.world();
        let said = [world.rank() as usize, world.size() as usize];
        if said != [place.rank, place.size] {
            return Err(format!(
                "MPI says that this is process {} of {}, and the environment {} of {}: is it another MPI's mpirun?",
                said[0], said[1], place.rank, place.size
            )
            .into());
        }
        Ok(Self(Arc::new(Mutex::new(Some(universe)))))
    }

    fn universe(&self) -> MutexGuard<'_, Option<Universe>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call<O>(&self, work: impl FnOnce(&SimpleCommunicator) -> O) -> Result<O, Error> {
        let universe = self.universe();
        let universe = universe.as_ref().ok_or("MPI has ended")?;
        Ok(work(&universe.world()))
    }
}

impl Link for Mpi {
    fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let count = Count::try_from(own.len()).map_err(|_| "too much to send at once")?;
        self.call(|world| {
            let mut counts = vec![0 as Count; world.size() as usize];
            world.all_gather_into(&count, &mut counts[..]);
            let total = counts
                .iter()
                .try_fold(0 as Count, |sum, count| sum.checked_add(*count));
            let total = total.ok_or("too much to send at once")?;
            let mut starts = Vec::with_capacity(counts.len());
            let mut start = 0;
            for count in &counts {
                starts.push(start);
                start += count;
            }
            let mut all = vec![0u8; total as usize];
            let mut parts = PartitionMut::new(&mut all[..], &counts[..], &starts[..]);
            world.all_gather_varcount_into(own, &mut parts);
            let part = |(start, count): (&Count, &Count)| {
                all[*start as usize..(start + count) as usize].to_vec()
            };
            Ok(starts.iter().zip(&counts).map(part).collect())
        })?
    }

    /// MPI ends all processes, this one among them.
    fn fail(&self, message: &str, code: i32) {
        fault(message);
        // Another thread may wait within MPI for a process that will not answer.
        SimpleCommunicator::world().abort(code);
    }

    fn end(&self) {
        drop(self.universe().take());
    }
}

impl Exchange for Mpi {
    fn sum(&self, numbers: Tensor<1>) -> Result<Tensor<1>, Error> {
        let (dtype, device) = (numbers.dtype(), numbers.device());
        let own: Vec<f32> = numbers.cast(DType::F32).into_data().iter().collect();
        let mut sum = vec![0.0f32; own.len()];
        self.call(|world| {
            for (own, sum) in own.chunks(AT_ONCE).zip(sum.chunks_mut(AT_ONCE)) {
                world.all_reduce_into(own, sum, SystemOperation::sum());
            }
        })?;
        let shape = [sum.len()];
        let sum: Tensor<1> = Tensor::from_data(TensorData::new(sum, shape), (&device, DType::F32));
        Ok(sum.cast(dtype))
    }
}
