//! The all-reduce of gradients: among the devices of this process, or among several processes with one device each.
//!
//! Burn's data parallelism has one worker per device, and a server that averages gradients during the backward pass.
//! The server (`DistributedSyncServer` of Burn 0.22.1) deadlocks if a worker begins its next backward pass before all
//! workers have ended the current one. When the last worker ends, the server forgets all parameters that workers have
//! announced to it, including those for the next backward pass.
//!
//! The workers here therefore compute with parameters that Burn's server does not know. After the last backward pass of
//! a step, the workers meet at a barrier. All workers then sum the gradients in buckets, in the same order.

use crate::{
    checkpoint::stop::Stop,
    distributed::{
        ProcessGroup,
        buckets::{BUCKET, sum_in_buckets},
    },
    optim::gradients::leaf,
};
use burn::{
    module::{Module, ModuleMapper, Param},
    optim::GradientsParams,
    tensor::{
        Device, Tensor,
        distributed::{ReduceOperation, all_reduce},
    },
    train::Interrupter,
};
use burn_gemma4::Gemma4Model;
use std::{
    fmt,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::Duration,
};

/// The interval at which a waiting worker checks whether the run was stopped.
const LOOK: Duration = Duration::from_millis(100);

/// The participants of an all-reduce.
#[derive(Clone, Debug)]
pub enum AllReduce {
    /// The devices of this process, with one worker each.
    Workers(Workers),
    /// Several processes with one device each.
    Processes(Processes),
}

/// The workers of a run: their devices, and the barrier that the workers share.
#[derive(Clone)]
pub struct Workers {
    devices: Vec<Device>,
    barrier: Arc<Barrier>,
}

struct Barrier {
    state: Mutex<Arrivals>,
    complete: Condvar,
    interrupter: Interrupter,
}

#[derive(Default)]
struct Arrivals {
    /// The number of workers that wait at the barrier now.
    waiting: usize,
    /// The number of times that all workers have passed the barrier.
    number: usize,
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workers")
            .field("devices", &self.devices)
            .finish_non_exhaustive()
    }
}

impl AllReduce {
    /// Returns the model that computes the gradients of a step. If this process has several workers, the parameters of
    /// the returned model are excluded from Burn's own averaging of gradients.
    pub fn unmarked(&self, model: &Gemma4Model) -> Gemma4Model {
        match self {
            Self::Workers(_) => model.clone().map(&mut Unmarked),
            Self::Processes(_) => model.clone(),
        }
    }

    /// Returns the process group if its processes shard the optimizer's state, and `None` otherwise.
    pub fn in_parts(&self) -> Option<&ProcessGroup> {
        match self {
            Self::Processes(processes) if processes.in_parts => Some(&processes.group),
            _ => None,
        }
    }

    /// Returns the sum of the loss, `[1]`, and the sums of the gradients over all participants. `step` is the number of
    /// the step.
    pub fn sum(
        &self,
        step: usize,
        loss: Tensor<1>,
        gradients: GradientsParams,
        model: &Gemma4Model,
    ) -> (Tensor<1>, GradientsParams) {
        match self {
            Self::Workers(workers) => workers.sum(loss, gradients, model),
            Self::Processes(processes) => processes.sum(step, loss, gradients, model),
        }
    }
}

/// The all-reduce among all processes of a run.
#[derive(Clone, Debug)]
pub struct Processes {
    group: Arc<ProcessGroup>,
    stop: Stop,
    /// True if the optimizer's state is sharded.
    in_parts: bool,
}

impl Processes {
    /// Creates the all-reduce among the processes of `group`. `in_parts` is true if these processes shard the optimizer's
    /// state. If one process receives a stop request, all processes stop after the same step.
    pub fn new(group: Arc<ProcessGroup>, stop: Stop, in_parts: bool) -> Self {
        Self {
            group,
            stop,
            in_parts,
        }
    }

    fn sum(
        &self,
        step: usize,
        loss: Tensor<1>,
        gradients: GradientsParams,
        model: &Gemma4Model,
    ) -> (Tensor<1>, GradientsParams) {
        let asked = f32::from(u8::from(self.stop.is_asked()));
        let asked = Tensor::from_data([asked], (&loss.device(), loss.dtype()));
        let both = Tensor::cat(vec![loss, asked], 0);
        let sum = |bucket| self.group.sum(bucket);
        let (both, gradients) = sum_in_buckets(both, gradients, model, BUCKET, sum);
        if both.clone().narrow(0, 1, 1).into_scalar::<f32>() > 0.0 {
            self.stop.end_before(step + 1);
        }
        (both.narrow(0, 0, 1), gradients)
    }
}

impl Workers {
    /// Creates the shared state of the workers on `devices`, one per device. A worker at the barrier stops waiting if
    /// `interrupter` reports that the run was stopped.
    pub fn new(devices: Vec<Device>, interrupter: Interrupter) -> Self {
        let barrier = Barrier {
            state: Mutex::default(),
            complete: Condvar::new(),
            interrupter,
        };
        Self {
            devices,
            barrier: Arc::new(barrier),
        }
    }

    /// Returns the sums of the loss and the gradients over all workers. If the run is interrupted before all workers reach
    /// the barrier, returns the worker's own loss and gradients. The step is then discarded.
    fn sum(
        &self,
        loss: Tensor<1>,
        gradients: GradientsParams,
        model: &Gemma4Model,
    ) -> (Tensor<1>, GradientsParams) {
        if !self.barrier.is_complete(self.devices.len()) {
            return (loss, gradients);
        }
        let sum = |bucket: Tensor<1>| {
            all_reduce(bucket, ReduceOperation::Sum, self.devices.clone()).resolve()
        };
        sum_in_buckets(loss, gradients, model, BUCKET, sum)
    }
}

impl Barrier {
    /// Waits at the barrier for all workers. Returns false if the run is interrupted first.
    fn is_complete(&self, workers: usize) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.waiting += 1;
        if state.waiting == workers {
            state.waiting = 0;
            state.number += 1;
            self.complete.notify_all();
            return true;
        }
        let number = state.number;
        while state.number == number {
            let waited = self.complete.wait_timeout(state, LOOK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.number == number && self.interrupter.should_stop() {
                state.waiting -= 1;
                return false;
            }
        }
        true
    }
}

/// A module mapper that replaces each parameter by a parameter that is excluded from Burn's gradient averaging.
struct Unmarked;

impl ModuleMapper for Unmarked {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let unmarked = leaf(tensor.clone().inner(), &tensor);
        Param::from_mapped_value(id, unmarked, mapper)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        thread,
    };

    fn barrier() -> Barrier {
        Barrier {
            state: Mutex::default(),
            complete: Condvar::new(),
            interrupter: Interrupter::new(),
        }
    }

    #[test]
    fn barrier_keeps_workers_within_one_step() {
        let (barrier, steps) = (barrier(), [const { AtomicUsize::new(0) }; 3]);
        thread::scope(|scope| {
            for own in &steps {
                scope.spawn(|| {
                    for step in 0..1000 {
                        assert!(barrier.is_complete(steps.len()));
                        own.store(step, Ordering::SeqCst);
                        let all = steps.iter().map(|step| step.load(Ordering::SeqCst));
                        assert!(all.into_iter().all(|other| other + 1 >= step));
                    }
                });
            }
        });
    }

    #[test]
    fn barrier_with_missing_worker_returns_when_the_run_stops() {
        let barrier = barrier();
        thread::scope(|scope| {
            let left = scope.spawn(|| barrier.is_complete(2));
            barrier.interrupter.stop(None);
            assert!(!left.join().expect("no panic"));
        });
        let state = barrier.state.lock().expect("no panic");
        assert_eq!(state.waiting, 0);
    }
}
