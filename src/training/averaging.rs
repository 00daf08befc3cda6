//! The sum of several devices' gradients: those of this process, or one of each of several processes.
//!
//! Burn's data parallelism has a worker for each device, and averages gradients while the backward runs, through a server that
//! waits forever where one worker begins its next backward before another has reported the end of its last
//! (`DistributedSyncServer` of Burn 0.22.1 forgets what the first one announced). So the workers compute with parameters that
//! the server does not know, meet after a step's last backward, and add up their gradients here, all in the same order, in
//! [`buckets`](super::buckets).

use super::{
    buckets::{BUCKET, exchange},
    gradients::leaf,
    stop::Stop,
    world::World,
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

/// How long a worker waits for the others before it looks whether the run was stopped.
const LOOK: Duration = Duration::from_millis(100);

/// Who adds up gradients.
#[derive(Clone, Debug)]
pub enum Averaging {
    /// Devices of this process, each with a worker.
    Workers(Workers),
    /// Processes with a device each.
    Processes(Processes),
}

/// What the workers of a run have in common.
#[derive(Clone)]
pub struct Workers {
    devices: Vec<Device>,
    meeting: Arc<Meeting>,
}

struct Meeting {
    state: Mutex<Arrivals>,
    complete: Condvar,
    interrupter: Interrupter,
}

#[derive(Default)]
struct Arrivals {
    waiting: usize,
    /// Meetings that were complete.
    number: usize,
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workers")
            .field("devices", &self.devices)
            .finish_non_exhaustive()
    }
}

impl Averaging {
    /// The model to compute gradients with, whose parameters Burn does not average.
    pub fn unmarked(&self, model: &Gemma4Model) -> Gemma4Model {
        match self {
            Self::Workers(_) => model.clone().map(&mut Unmarked),
            Self::Processes(_) => model.clone(),
        }
    }

    /// Where each process has a part of the optimizer's state, all of them.
    pub fn in_parts(&self) -> Option<&World> {
        match self {
            Self::Processes(processes) if processes.in_parts => Some(&processes.world),
            _ => None,
        }
    }

    /// The sums of all losses `[1]` and gradients of the step with this number.
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

/// All processes of a run.
#[derive(Clone, Debug)]
pub struct Processes {
    world: Arc<World>,
    stop: Stop,
    /// Each has a part of the optimizer's state.
    in_parts: bool,
}

impl Processes {
    /// Of `world`, each with a part of the optimizer's state or all of it. Where one of them is asked to stop, all end with the
    /// same step.
    pub fn new(world: Arc<World>, stop: Stop, in_parts: bool) -> Self {
        Self {
            world,
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
        let sum = |bucket| self.world.sum(bucket);
        let (both, gradients) = exchange(both, gradients, model, BUCKET, sum);
        if both.clone().narrow(0, 1, 1).into_scalar::<f32>() > 0.0 {
            self.stop.end_before(step + 1);
        }
        (both.narrow(0, 0, 1), gradients)
    }
}

impl Workers {
    /// Among `devices`, each with a worker of its own, until the run is interrupted.
    pub fn new(devices: Vec<Device>, interrupter: Interrupter) -> Self {
        let meeting = Meeting {
            state: Mutex::default(),
            complete: Condvar::new(),
            interrupter,
        };
        Self {
            devices,
            meeting: Arc::new(meeting),
        }
    }

    /// Those of one where the run is interrupted before the others have theirs: its last step, which nobody keeps.
    fn sum(
        &self,
        loss: Tensor<1>,
        gradients: GradientsParams,
        model: &Gemma4Model,
    ) -> (Tensor<1>, GradientsParams) {
        if !self.meeting.is_complete(self.devices.len()) {
            return (loss, gradients);
        }
        let sum = |bucket: Tensor<1>| {
            all_reduce(bucket, ReduceOperation::Sum, self.devices.clone()).resolve()
        };
        exchange(loss, gradients, model, BUCKET, sum)
    }
}

impl Meeting {
    /// Waits for all workers, or for the end of the run.
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

/// Takes the mark off parameters by which a backward averages gradients.
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

    fn meeting() -> Meeting {
        Meeting {
            state: Mutex::default(),
            complete: Condvar::new(),
            interrupter: Interrupter::new(),
        }
    }

    #[test]
    fn nobody_is_two_steps_ahead() {
        let (meeting, steps) = (meeting(), [const { AtomicUsize::new(0) }; 3]);
        thread::scope(|scope| {
            for own in &steps {
                scope.spawn(|| {
                    for step in 0..1000 {
                        assert!(meeting.is_complete(steps.len()));
                        own.store(step, Ordering::SeqCst);
                        let all = steps.iter().map(|step| step.load(Ordering::SeqCst));
                        assert!(all.into_iter().all(|other| other + 1 >= step));
                    }
                });
            }
        });
    }

    #[test]
    fn who_is_left_alone_goes_on_when_the_run_is_stopped() {
        let meeting = meeting();
        thread::scope(|scope| {
            let left = scope.spawn(|| meeting.is_complete(2));
            meeting.interrupter.stop(None);
            assert!(!left.join().expect("no panic"));
        });
        let state = meeting.state.lock().expect("no panic");
        assert_eq!(state.waiting, 0);
    }
}
