//! Barriers in shared memory (mbarriers). In each phase, an mbarrier counts the arrivals of threads and the bytes of
//! asynchronous copies.

use super::clock::{Clock, join};
use crate::fault::Fault;

pub struct Mbarrier {
    /// The number of arrivals that complete a phase.
    expected: u32,
    /// The number of arrivals that the current phase still waits for.
    pending: u32,
    /// The number of bytes that the current phase still waits for. The number is negative if bytes were copied before
    /// the kernel announced them.
    bytes: i64,
    /// The number of completed phases.
    phase: u64,
    /// The elementwise maximum of the vector clocks of all warps and TMA loads that have arrived so far, in all phases.
    times: Vec<u32>,
    /// The value of `times` at the end of the last completed phase.
    complete: Vec<u32>,
}

/// The mbarriers of a thread block, each with its address in shared memory.
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

    /// Returns the mbarrier at an address.
    ///
    /// # Errors
    /// Returns an error if the program initialized no mbarrier at the address.
    pub fn at(&mut self, address: u64) -> Result<&mut Mbarrier, Fault> {
        self.barriers
            .iter_mut()
            .find(|(at, _)| *at == address)
            .map(|(_, barrier)| barrier)
            .ok_or_else(|| Fault::Barrier(format!("there is no mbarrier at {address:#x}")))
    }
}

impl Mbarrier {
    /// Counts `arrivals` arrivals by a warp whose vector clock is `times`. Returns the phase in which the arrivals
    /// count.
    ///
    /// # Errors
    /// Returns an error if `arrivals` is larger than the number of arrivals that the phase still waits for.
    pub fn arrive(&mut self, arrivals: u32, times: &[u32]) -> Result<u64, Fault> {
        let phase = self.phase;
        if arrivals > self.pending {
            return Err(Fault::Barrier(format!(
                "more arrivals than the {} of an mbarrier",
                self.expected
            )));
        }
        join(&mut self.times, times);
        self.pending -= arrivals;
        self.turn();
        Ok(phase)
    }

    /// Increments the number of arrivals that the current phase waits for.
    pub fn expect_arrival(&mut self) {
        self.pending += 1;
    }

    /// Adds `bytes` to the number of bytes that the current phase waits for.
    pub fn expect_bytes(&mut self, bytes: u32) {
        self.bytes += i64::from(bytes);
    }

    /// Counts bytes that a TMA load has written. `actor` is the actor that stands for all TMA loads, and `time` is this
    /// actor's time.
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

    /// Returns true if the phase that `state` identifies is complete. If `parity` is true, `state` is the parity of the
    /// phase. Otherwise, `state` is the phase that an arrival returned. If the phase is complete, the clocks of all
    /// arrivals are joined into `clock`, the clock of the waiting warp.
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
