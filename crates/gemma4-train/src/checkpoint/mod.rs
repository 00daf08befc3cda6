//! Checkpoints of a run, resuming from a checkpoint, and stopping with a checkpoint.

pub mod checkpoints;
pub mod resume;
pub mod stop;
