//! Divides a run into steps, and steps into batches.
//!
//! An interval is the steps between two checkpoints. A step's batches are divided among devices and processes.

use std::ops::Range;

/// The number of steps of a run, and the division of each step into batches.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// The number of steps of the whole run.
    pub steps: usize,
    /// The number of steps that were finished before this process started.
    pub done: usize,
    /// The number of steps between two checkpoints.
    pub interval: usize,
    /// The number of batches that one device accumulates for a step.
    pub accumulation: usize,
    /// The number of devices, including those of other processes.
    pub devices: usize,
    /// The batches of each step are divided into equal parts, one per process. The pair holds the index of this
    /// process's part, and the number of parts.
    pub part: (usize, usize),
    /// The seed of the row order.
    pub seed: u64,
}

impl Schedule {
    /// Returns the number of intervals between checkpoints in the whole run.
    pub fn intervals(&self) -> usize {
        self.steps.div_ceil(self.interval)
    }

    /// Returns the index of the interval between checkpoints that contains the first unfinished step.
    pub fn first_interval(&self) -> usize {
        self.done / self.interval
    }

    /// Returns the unfinished steps of the interval with this index. An interval is the steps between two checkpoints.
    pub fn steps_of(&self, interval: usize) -> Range<usize> {
        let start = interval * self.interval;
        start.max(self.done)..self.steps.min(start + self.interval)
    }

    /// Returns the number of batches per step on all devices together.
    pub fn batches(&self) -> usize {
        self.accumulation * self.devices
    }
}
