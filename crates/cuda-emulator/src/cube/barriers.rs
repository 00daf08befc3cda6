//! The cube's named barriers.

use super::clock::join;
use super::warp::{LANES, State, Warp};
use crate::fault::Fault;

/// As many as a cube has.
const COUNT: usize = 16;

#[derive(Clone, Default)]
struct Barrier {
    /// Threads that have arrived.
    arrived: u32,
    /// Threads that it opens for; all that are left where nobody said how many.
    expected: Option<u32>,
    /// What those that arrived knew.
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

    /// A warp arrives, and waits if it is said so.
    ///
    /// # Errors
    /// A barrier that does not exist, or counts that are not a barrier's.
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
            .ok_or_else(|| wrong(format!("there are {COUNT}")))?;
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
            return Err(wrong("more threads arrive than it expects".to_string()));
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

    /// Opens the barriers at which all have arrived. Returns whether one was.
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
