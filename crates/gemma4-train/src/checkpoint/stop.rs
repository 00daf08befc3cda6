//! Stops a run before its last step. The run ends after a whole step, and writes a checkpoint of that step.

use crate::data::schedule::Schedule;
use burn::train::{EarlyStoppingStrategy, metric::store::EventStoreClient};
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

/// A request to stop a run, with the step before which all devices stop. Clones share one request.
#[derive(Clone, Debug)]
pub struct Stop {
    is_asked: Arc<AtomicBool>,
    /// The number of the first step that is not run.
    end: Arc<AtomicUsize>,
    /// True if the run has several processes. A stop request in one process then does not set `end` by itself. Instead,
    /// the processes agree on the last step while they sum gradients.
    is_told: bool,
}

impl Default for Stop {
    fn default() -> Self {
        Self {
            is_asked: Arc::default(),
            end: Arc::new(AtomicUsize::new(usize::MAX)),
            is_told: false,
        }
    }
}

impl Stop {
    /// Returns the stop request for a run with several processes. Only a call of [`end_before`](Self::end_before) sets the
    /// step before which the process stops.
    pub fn among_processes() -> Self {
        Self {
            is_told: true,
            ..Self::default()
        }
    }

    /// Requests that the run stops. Returns `false` if the stop had been requested before.
    pub fn ask(&self) -> bool {
        !self.is_asked.swap(true, Ordering::SeqCst)
    }

    /// True if a stop has been requested.
    pub fn is_asked(&self) -> bool {
        self.is_asked.load(Ordering::SeqCst)
    }

    /// True if the run ends before `step`, which a device is about to begin. After a stop request, a run on a single device
    /// (`is_alone`) ends before `step`. A run on several devices ends after `step`, because another device may have begun
    /// `step` already.
    pub fn is_before(&self, step: usize, is_alone: bool) -> bool {
        if self.is_asked() && !self.is_told {
            self.end_before(step + usize::from(!is_alone));
        }
        step >= self.end()
    }

    /// Makes the run end before `step`. If another device has set an end before, that end stays.
    pub fn end_before(&self, step: usize) {
        let _ = self
            .end
            .compare_exchange(usize::MAX, step, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Returns the number of the first step that is not run, or `usize::MAX` if no end is set.
    pub fn end(&self) -> usize {
        self.end.load(Ordering::SeqCst)
    }
}

/// An early stopping strategy that ends Burn's learner after a stop request. The request may cut short an interval (the
/// steps between two checkpoints). The learner still writes the checkpoint of this interval.
#[derive(Clone)]
pub struct AfterCheckpoint {
    /// The request to stop.
    pub stop: Stop,
    /// The schedule, which gives the steps between two checkpoints.
    pub schedule: Schedule,
}

impl EarlyStoppingStrategy for AfterCheckpoint {
    fn should_stop(&mut self, epoch: usize, _store: &EventStoreClient) -> bool {
        self.stop.end() <= self.schedule.steps_of(epoch - 1).end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_on_several_devices_ends_at_the_same_step() {
        let stop = Stop::default();
        assert!(!stop.is_before(7, false));
        assert!(stop.ask());
        assert!(!stop.ask());
        // At the stop request, another device may have begun step 7 already. The run therefore ends after step 7.
        assert!(!stop.is_before(7, false));
        assert!(!stop.is_before(7, false));
        assert!(stop.is_before(8, false));
        assert_eq!(stop.end(), 8);
    }

    #[test]
    fn stop_among_processes_ends_at_the_first_agreed_step() {
        let stop = Stop::among_processes();
        stop.ask();
        assert!(!stop.is_before(7, true));
        stop.end_before(9);
        stop.end_before(10);
        assert!(!stop.is_before(8, true));
        assert!(stop.is_before(9, true));
    }

    #[test]
    fn stop_on_one_device_ends_at_once() {
        let stop = Stop::default();
        stop.ask();
        assert!(stop.is_before(7, true));
        assert_eq!(stop.end(), 7);
    }
}
