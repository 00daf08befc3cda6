//! `cp.async`, an asynchronous copy to shared memory that a lane starts. The emulator writes the copied bytes as late
//! as possible: when the lane waits for the copy, or when no warp can continue without the bytes.

use std::collections::VecDeque;

use super::Cube;
use super::memory::{check_aligned, host_bytes};
use super::warp::{LANES, Warp, lanes};
use crate::fault::Fault;
use crate::ptx::CopyAsync;

struct Copy {
    target: usize,
    source: u64,
    read: usize,
    bytes: usize,
    group: usize,
}

#[derive(Default)]
struct Lane {
    copies: VecDeque<Copy>,
    /// The number of `cp.async` groups that the lane has committed.
    groups: usize,
}

/// The pending copies of a warp, and the mbarrier arrivals that wait for these copies.
pub struct Copies {
    lanes: [Lane; LANES],
    arrivals: VecDeque<(u64, usize)>,
}

impl Default for Copies {
    fn default() -> Self {
        Self {
            lanes: std::array::from_fn(|_| Lane::default()),
            arrivals: VecDeque::new(),
        }
    }
}

impl Copies {
    pub fn clear(&mut self) {
        for lane in &mut self.lanes {
            lane.copies.clear();
            lane.groups = 0;
        }
        self.arrivals.clear();
    }

    /// Commits the copies that the lanes in `mask` have started since their last commit. The copies of each lane form
    /// one group.
    pub fn commit(&mut self, mask: u32) {
        for lane in lanes(mask) {
            self.lanes[lane].groups += 1;
        }
    }

    /// Records that a lane arrives at an mbarrier once all copies that the lane has started are complete.
    pub fn arrive_later(&mut self, barrier: u64, lane: usize) {
        self.arrivals.push_back((barrier, lane));
    }
}

impl Cube<'_> {
    pub(super) fn copy_async(
        &mut self,
        warp: &mut Warp,
        copy: &CopyAsync,
        mask: u32,
    ) -> Result<(), Fault> {
        let targets = warp.shared_addresses(copy.target);
        let sources = warp.addresses(copy.source);
        for lane in lanes(mask) {
            let (target, source, bytes) = (targets[lane], sources[lane], copy.bytes);
            let read = match copy.read {
                Some(row) => warp.words[row as usize][lane] as usize,
                None => bytes,
            };
            if read > bytes {
                return Err(Fault::Argument(format!(
                    "a copy of {bytes} bytes reads {read}"
                )));
            }
            check_aligned(target, bytes)?;
            // The source address must be aligned even if the copy reads no bytes.
            check_aligned(source, bytes)?;
            if read > 0 {
                self.launch.check_global(source, read)?;
            }
            let target = self.shared.offset(target, bytes)?;
            self.shared.copy_starts(&warp.clock, target, bytes);
            let queue = &mut warp.copies.lanes[lane];
            queue.copies.push_back(Copy {
                target,
                source,
                read,
                bytes,
                group: queue.groups,
            });
        }
        Ok(())
    }

    /// Completes the oldest copies of a lane until at most `left` committed groups are pending.
    pub(super) fn copies_come(&mut self, warp: &mut Warp, lane: usize, left: usize) {
        let queue = &mut warp.copies.lanes[lane];
        while let Some(copy) = queue.copies.front()
            && copy.group + left < queue.groups
        {
            // SAFETY: `copy_async` has found these bytes in an allocation, and no allocation is freed while a kernel
            // runs.
            let data = unsafe { host_bytes(copy.source, copy.read) };
            let (owner, now) = (warp.clock.owner(), warp.clock.now());
            self.shared
                .copy_ends(owner, now, copy.target, copy.bytes, data);
            queue.copies.pop_front();
        }
    }

    /// Completes all copies of a lane, including those that are not committed.
    pub(super) fn all_copies_come(&mut self, warp: &mut Warp, lane: usize) {
        warp.copies.lanes[lane].groups += 1;
        self.copies_come(warp, lane, 0);
    }

    /// Completes pending mbarrier arrivals of one warp at one mbarrier: the oldest arrival of each lane. Each of these
    /// arrivals waits for the lane's `cp.async` copies, so the function first completes all copies of the lane. Returns
    /// false if no warp has a pending arrival.
    pub(super) fn arrivals_come(&mut self, warps: &mut [Warp]) -> Result<bool, Fault> {
        let Some(warp) = warps
            .iter_mut()
            .find(|warp| !warp.copies.arrivals.is_empty())
        else {
            return Ok(false);
        };
        let barrier = warp.copies.arrivals[0].0;
        let mut arrived = 0u32;
        let mut later = VecDeque::new();
        for (address, lane) in std::mem::take(&mut warp.copies.arrivals) {
            if address != barrier || arrived >> lane & 1 != 0 {
                later.push_back((address, lane));
                continue;
            }
            arrived |= 1 << lane;
            self.all_copies_come(warp, lane);
            self.mbarriers.at(address)?.arrive(1, warp.clock.times())?;
        }
        warp.copies.arrivals = later;
        warp.clock.tick();
        Ok(true)
    }
}
