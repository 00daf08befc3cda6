//! The mean of several devices' gradients.
//!
//! Burn's data parallelism has a worker for each device, and averages gradients while the backward runs, through a server that
//! waits forever where one worker begins its next backward before another has reported the end of its last
//! (`DistributedSyncServer` of Burn 0.22.1 forgets what the first one announced). So the workers compute with parameters that
//! the server does not know, meet after the backward, and average their gradients here, all in the same order.

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
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

/// What the workers of a run have in common.
#[derive(Clone)]
pub struct Averaging {
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

impl fmt::Debug for Averaging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Averaging")
            .field("devices", &self.devices)
            .finish_non_exhaustive()
    }
}

impl Averaging {
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

    /// The model to compute gradients with, whose parameters Burn does not average.
    pub fn unmarked(&self, model: &Gemma4Model) -> Gemma4Model {
        model.clone().map(&mut Unmarked)
    }

    /// The means of all workers' gradients. Those of one where the run is interrupted before the others have theirs: its last
    /// step, which nobody keeps.
    pub fn average(&self, mut gradients: GradientsParams, model: &Gemma4Model) -> GradientsParams {
        if self.meeting.is_complete(self.devices.len()) {
            model.visit(&mut Average {
                gradients: &mut gradients,
                devices: &self.devices,
            });
        }
        gradients
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
        let strategy = tensor.gradient_checkpointing_strategy();
        let is_trained = tensor.is_require_grad();
        let tensor = tensor.inner().autodiff();
        let tensor = match strategy {
            Some(strategy) => tensor.with_gradient_checkpointing_strategy(strategy),
            None => tensor,
        };
        Param::from_mapped_value(id, tensor.set_require_grad(is_trained), mapper)
    }
}

struct Average<'a> {
    gradients: &'a mut GradientsParams,
    devices: &'a [Device],
}

impl ModuleVisitor for Average<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(gradient) = self.gradients.remove::<D>(param.id) else {
            return;
        };
        let mean = all_reduce(gradient, ReduceOperation::Mean, self.devices.to_vec());
        self.gradients.register(param.id, mean.resolve());
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
