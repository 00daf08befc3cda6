//! The named barriers (`bar.sync`, `bar.arrive`) of a thread block.

use super::clock::join;
use super::warp::{LANES, State, Warp};
use crate::fault::Fault;

/// The number of named barriers per thread block.
const COUNT: usize = 16;

#[derive(Clone, Default)]
struct Barrier {
    /// The number of threads that have arrived.
    arrived: u32,
    /// The barrier opens when this number of threads has arrived. `None` means all threads that have not exited.
    expected: Option<u32>,
    /// The elementwise maximum of the vector clocks of the warps that have arrived.
    times: Vec<u32>,
    waiting: Vec<usize>,
}

pub struct Barriers {
    barriers: Vec<Barrier>,
}

impl Barriers {
    pub fn new() -> Self {
        Self {
            barriers: vec![Barrier::default(); COUNT],
        }
    }

    pub fn reset(&mut self) {
        self.barriers.fill_with(Barrier::default);
    }

    /// Records that a warp arrives at a barrier. The warp waits there if `waits` is true.
    ///
    /// # Errors
    /// Returns an error if the barrier does not exist, or if the number of threads is invalid or differs between warps.
    pub fn arrive(
        &mut self,
        warp: &mut Warp,
        id: u32,
        threads: Option<u32>,
        waits: bool,
    ) -> Result<(), Fault> {
        let wrong = |what: String| Fault::Barrier(format!("barrier {id}: {what}"));
        let barrier = self
            .barriers
            .get_mut(id as usize)
            .ok_or_else(|| wrong(format!("only {COUNT} exist")))?;
        if let Some(threads) = threads
            && (threads == 0 || threads % LANES as u32 != 0)
        {
            return Err(wrong(format!("{threads} threads are not whole warps")));
        }
        if barrier.arrived > 0 && barrier.expected != threads {
            return Err(wrong(format!(
                "one warp expects {:?} threads, another {threads:?}",
                barrier.expected
            )));
        }
        barrier.expected = threads;
        barrier.arrived += LANES as u32;
        if threads.is_some_and(|threads| barrier.arrived > threads) {
            return Err(wrong("more threads arrive than expected".to_string()));
        }
        barrier.times.resize(warp.clock.times().len(), 0);
        join(&mut barrier.times, warp.clock.times());
        if waits {
            barrier.waiting.push(warp.id);
            warp.state = State::AtBarrier(id);
        } else {
            warp.clock.tick();
        }
        Ok(())
    }

    /// Opens the barriers at which all expected threads have arrived. Returns true if at least one barrier opened.
    pub fn open(&mut self, warps: &mut [Warp]) -> bool {
        let left = warps
            .iter()
            .filter(|warp| warp.state != State::Done)
            .count();
        let mut opened = false;
        for barrier in &mut self.barriers {
            let expected = barrier.expected.unwrap_or((left * LANES) as u32);
            if barrier.arrived == 0 || barrier.arrived < expected {
                continue;
            }
            opened = true;
            let barrier = std::mem::take(barrier);
            for id in barrier.waiting {
                let warp = &mut warps[id];
                warp.state = State::Ready;
                warp.clock.learn(&barrier.times);
                warp.clock.tick();
            }
        }
        opened
    }
}
