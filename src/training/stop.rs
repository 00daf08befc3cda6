//! A run that somebody stops: it ends after a whole step, and its last checkpoint is of that step.

use super::loader::Schedule;
use burn::train::{EarlyStoppingStrategy, metric::store::EventStoreClient};
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

/// Whether a run is to stop, and after which step: the same one for all devices.
#[derive(Clone, Debug)]
pub struct Stop {
    is_asked: Arc<AtomicBool>,
    /// The first step that nobody does.
    end: Arc<AtomicUsize>,
    /// Processes say where the end is when they exchange gradients.
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
    /// Of one of several processes, which ends where [`end_before`](Self::end_before) says, and not where it is asked to.
    pub fn among_processes() -> Self {
        Self {
            is_told: true,
            ..Self::default()
        }
    }

    /// Asks for the end. It is `false` where somebody has asked before.
    pub fn ask(&self) -> bool {
        !self.is_asked.swap(true, Ordering::SeqCst)
    }

    /// Whether somebody has asked.
    pub fn is_asked(&self) -> bool {
        self.is_asked.load(Ordering::SeqCst)
    }

    /// Whether the run ends before `step`, which a device is about to begin. Of several devices, others may have begun it, and
    /// none the one after: they exchange gradients at the end of each.
    pub fn is_before(&self, step: usize, is_alone: bool) -> bool {
        if self.is_asked() && !self.is_told {
            self.end_before(step + usize::from(!is_alone));
        }
        step >= self.end()
    }

    /// Ends the run before `step`, if it has no end yet: another device may have said where it is.
    pub fn end_before(&self, step: usize) {
        let _ = self
            .end
            .compare_exchange(usize::MAX, step, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// The first step that is not done, where the run was stopped.
    pub fn end(&self) -> usize {
        self.end.load(Ordering::SeqCst)
    }
}

/// Ends Burn's learner behind the checkpoint of the interval that was cut short.
#[derive(Clone)]
pub struct AfterCheckpoint {
    /// What ends it.
    pub stop: Stop,
    /// Which steps an interval has.
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
    fn the_end_is_the_same_for_all_devices() {
        let stop = Stop::default();
        assert!(!stop.is_before(7, false));
        assert!(stop.ask());
        assert!(!stop.ask());
        // The first one may have begun step 7 already.
        assert!(!stop.is_before(7, false));
        assert!(!stop.is_before(7, false));
        assert!(stop.is_before(8, false));
        assert_eq!(stop.end(), 8);
    }

    #[test]
    fn processes_end_where_they_are_told() {
        let stop = Stop::among_processes();
        stop.ask();
        assert!(!stop.is_before(7, true));
        stop.end_before(9);
        stop.end_before(10);
        assert!(!stop.is_before(8, true));
        assert!(stop.is_before(9, true));
    }

    #[test]
    fn a_device_alone_ends_at_once() {
        let stop = Stop::default();
        stop.ask();
        assert!(stop.is_before(7, true));
        assert_eq!(stop.end(), 7);
    }
}
