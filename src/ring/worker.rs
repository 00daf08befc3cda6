//! Threads that run jobs one after the other.
//!
//! A thread that lives as long as the ring keeps one stream per device, and with the stream the stream's pool of memory.

use crate::Error;
use std::sync::mpsc::{Sender, channel};
use std::{fmt, thread};

type Job = Box<dyn FnOnce() + Send>;

/// A thread that runs jobs one after the other. The thread ends when all clones of the worker are dropped.
#[derive(Clone)]
pub struct Worker {
    jobs: Sender<Job>,
}

impl Worker {
    /// Starts the thread.
    ///
    /// # Errors
    /// Returns an error if the operating system starts no further thread.
    pub fn spawn(name: String) -> Result<Self, Error> {
        let (jobs, queue) = channel::<Job>();
        thread::Builder::new()
            .name(name)
            .spawn(move || queue.into_iter().for_each(|job| job()))?;
        Ok(Self { jobs })
    }

    /// Appends a job to the thread's queue.
    ///
    /// # Errors
    /// Returns [`Stopped`] if an earlier job panicked.
    pub fn submit(&self, job: impl FnOnce() + Send + 'static) -> Result<(), Stopped> {
        self.jobs.send(Box::new(job)).map_err(|_| Stopped)
    }
}

/// The error of a rank that waits for a rank or a thread that has stopped. The stopped rank reports the cause.
#[derive(Debug)]
pub struct Stopped;

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a thread of the ring panicked; the panic's message is above")
    }
}

impl std::error::Error for Stopped {}
