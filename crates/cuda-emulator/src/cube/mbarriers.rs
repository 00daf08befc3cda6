//! Barriers in shared memory, which count arrivals and bytes, phase after phase.

use super::clock::{Clock, join};
use crate::fault::Fault;

pub struct Mbarrier {
    /// Arrivals of a phase.
    expected: u32,
    /// Arrivals that this phase waits for.
    pending: u32,
    /// Bytes that this phase waits for; negative where they came before they were expected.
    bytes: i64,
    /// Phases that are complete.
    phase: u64,
    /// What those that arrived knew.
    times: Vec<u32>,
    /// What those of the last complete phase knew.
    complete: Vec<u32>,
}

/// A cube's barriers, by address.
#[derive(Default)]
pub struct Mbarriers {
    barriers: Vec<(u64, Mbarrier)>,
}

impl Mbarriers {
    pub fn reset(&mut self) {
        self.barriers.clear();
    }

    pub fn init(&mut self, address: u64, arrivals: u32, actors: usize) {
        self.invalidate(address);
        let barrier = Mbarrier {
            expected: arrivals,
            pending: arrivals,
            bytes: 0,
            phase: 0,
            times: vec![0; actors],
            complete: vec![0; actors],
        };
        self.barriers.push((address, barrier));
    }

    pub fn invalidate(&mut self, address: u64) {
        self.barriers.retain(|(at, _)| *at != address);
    }

    /// The barrier there.
    ///
    /// # Errors
    /// There is none.
    pub fn at(&mut self, address: u64) -> Result<&mut Mbarrier, Fault> {
        self.barriers
            .iter_mut()
            .find(|(at, _)| *at == address)
            .map(|(_, barrier)| barrier)
            .ok_or_else(|| Fault::Barrier(format!("there is no mbarrier at {address:#x}")))
    }
}

impl Mbarrier {
    /// One that knows `times` arrives. Returns the phase that it arrived in.
    ///
    /// # Errors
    /// More arrivals than the phase has.
    pub fn arrive(&mut self, arrivals: u32, times: &[u32]) -> Result<u64, Fault> {
        let phase = self.phase;
        if arrivals > self.pending {
            return Err(Fault::Barrier(format!(
                "an mbarrier of {} arrivals gets more",
                self.expected
            )));
        }
        join(&mut self.times, times);
        self.pending -= arrivals;
        self.turn();
        Ok(phase)
    }

    /// The phase waits for an arrival more.
    pub fn expect_arrival(&mut self) {
        self.pending += 1;
    }

    /// The phase waits for bytes more.
    pub fn expect_bytes(&mut self, bytes: u32) {
        self.bytes += i64::from(bytes);
    }

    /// Bytes have come, by the actor of copies at its time.
    pub fn bytes_came(&mut self, bytes: usize, actor: usize, time: u32) {
        self.times[actor] = self.times[actor].max(time);
        self.bytes -= bytes as i64;
        self.turn();
    }

    fn turn(&mut self) {
        if self.pending == 0 && self.bytes == 0 {
            self.phase += 1;
            self.pending = self.expected;
            self.complete.copy_from_slice(&self.times);
        }
    }

    /// Whether the phase that is asked for is complete, by its parity or by what an arrival gave. Who asks learns what those that
    /// arrived knew.
    pub fn is_complete(&self, state: u64, parity: bool, clock: &mut Clock) -> bool {
        let complete = match parity {
            true => self.phase & 1 != state & 1,
            false => self.phase > state,
        };
        if complete {
            clock.learn(&self.complete);
        }
        complete
    }
}
