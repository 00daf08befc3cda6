//! Control messages and sums by MPI, for devices without NCCL. Tensors are copied through host memory.

use crate::{
    Error,
    distributed::{collective::Collective, control_plane::ControlPlane, rank::Rank},
    report::fatal,
};
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

/// The largest number of elements per MPI call. MPI stores the count as an `i32`.
const AT_ONCE: usize = 1 << 28;

/// The connection to all processes that MPI has started. The lock lets only one thread at a time call MPI.
#[derive(Clone)]
pub struct Mpi(Arc<Mutex<Option<Universe>>>);

impl Mpi {
    /// Initializes MPI in the process with this rank.
    ///
    /// # Errors
    /// Returns an error if MPI does not start, or if MPI reports another rank or size than `rank`.
    pub fn join(rank: Rank) -> Result<Self, Error> {
        let (universe, threading) = mpi::initialize_with_threading(Threading::Serialized)
            .ok_or("MPI is already initialized in this process")?;
        if threading < Threading::Serialized {
            return Err("this MPI library supports programs with one thread only; expected support for serialized threads".into());
        }
        let world = universe.world();
        let said = [world.rank() as usize, world.size() as usize];
        if said != [rank.global, rank.size] {
            return Err(format!(
                "MPI: the library reports process {} of {}, and the environment {} of {}; expected the mpirun of the same MPI library",
                said[0], said[1], rank.global, rank.size
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

impl ControlPlane for Mpi {
    fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let count =
            Count::try_from(own.len()).map_err(|_| "the message is too large for one MPI call")?;
        self.call(|world| {
            let mut counts = vec![0 as Count; world.size() as usize];
            world.all_gather_into(&count, &mut counts[..]);
            let total = counts
                .iter()
                .try_fold(0 as Count, |sum, count| sum.checked_add(*count));
            let total = total.ok_or("the messages are too large for one MPI call")?;
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

    /// Prints the error. Afterwards MPI ends all processes, including this one.
    fn fail(&self, message: &str, code: i32) {
        fatal(message);
        // Do not take the lock here. Another thread may hold the lock while it waits within MPI for a process that will
        // never answer.
        SimpleCommunicator::world().abort(code);
    }

    fn end(&self) {
        drop(self.universe().take());
    }
}

impl Collective for Mpi {
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
