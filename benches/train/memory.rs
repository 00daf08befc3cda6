//! Polls the memory use of a device while other work runs.

use burn::tensor::Device;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// The time between two polls.
const INTERVAL: Duration = Duration::from_millis(5);

/// A thread that polls the memory use of a device until it is stopped.
pub struct Watch {
    peak: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Watch {
    pub fn start(device: &Device) -> Self {
        let (peak, is_over) = (
            Arc::new(AtomicU64::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let (device, watched, ends) = (device.clone(), peak.clone(), is_over.clone());
        let thread = thread::spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                let Some(usage) = device.memory_pool_usage() else {
                    return;
                };
                watched.fetch_max(usage.bytes_in_use, Ordering::Relaxed);
                thread::sleep(INTERVAL);
            }
        });
        Self {
            peak,
            is_over,
            thread,
        }
    }

    /// Stops the thread, and returns the peak of the bytes in use, or `None` if the device does not report its memory.
    pub fn stop(self) -> Option<u64> {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.join().ok()?;
        let peak = self.peak.load(Ordering::Relaxed);
        (peak > 0).then_some(peak)
    }
}
