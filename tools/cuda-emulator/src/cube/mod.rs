//! A kernel launch: its thread blocks (named `Cube` in this code), their warps, and the state that the warps of a block
//! share.

mod barriers;
mod clock;
mod collective;
mod copies;
mod execute;
mod lines;
mod mbarriers;
mod memory;
mod numbers;
mod schedule;
mod shared;
mod tensor;
mod warp;

#[cfg(test)]
mod tests;

pub use memory::check_aligned;
pub use tensor::{DIMENSIONS, MAP_BYTES, PIECE, TensorMap, swizzled};
pub use warp::{ALL, LANES, Warp, WordRow};

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use barriers::Barriers;
use mbarriers::Mbarriers;
use shared::SharedMemory;
use tensor::Arrival;

use crate::fault::{Fault, LocatedFault};
use crate::ptx::Function;

/// The maximum number of data races that are reported for a thread block. If a host thread runs several thread blocks,
/// this is also the maximum for all of these blocks together.
const RACES_TOLD: usize = 20;

/// A range of global memory that kernels may access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    pub start: u64,
    pub bytes: u64,
}

/// A kernel launch.
pub struct Launch<'a> {
    pub function: &'a Function,
    /// The number of thread blocks in each dimension.
    pub grid: [u32; 3],
    /// The number of threads of a block in each dimension.
    pub cube_size: [u32; 3],
    /// The size of dynamic shared memory in bytes.
    pub dynamic_shared: usize,
    /// The bytes of all arguments. Each argument is at the offset that the kernel expects.
    pub arguments: &'a [u8],
    /// The allocations of global memory, sorted by address.
    pub allocations: &'a [Allocation],
}

impl Launch<'_> {
    pub fn threads(&self) -> usize {
        self.cube_size.iter().map(|size| *size as usize).product()
    }

    pub fn warps(&self) -> usize {
        self.threads().div_ceil(LANES)
    }

    fn cubes(&self) -> u64 {
        self.grid.iter().map(|size| u64::from(*size)).product()
    }

    fn cube(&self, index: u64) -> [u32; 3] {
        let [x, y, _] = self.grid.map(u64::from);
        [index % x, index / x % y, index / x / y].map(|at| at as u32)
    }

    /// Runs all thread blocks. Several host threads share the blocks if the order of the blocks cannot affect the
    /// results.
    ///
    /// # Errors
    /// Returns the first fault of a thread block.
    pub fn run(&self, threads: usize) -> Result<Outcome, LocatedFault> {
        let next = AtomicU64::new(0);
        let threads = if self.function.has_atomics {
            1
        } else {
            threads
        };
        let threads = (threads as u64).min(self.cubes()).max(1);
        let outcomes: Vec<_> = thread::scope(|scope| {
            let others: Vec<_> = (1..threads)
                .map(|_| scope.spawn(|| self.run_some(&next)))
                .collect();
            let own = self.run_some(&next);
            let others = others.into_iter().map(|other| {
                other
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            std::iter::once(own).chain(others).collect()
        });
        let mut all = Outcome::default();
        for outcome in outcomes {
            let outcome = outcome?;
            all.steps += outcome.steps;
            all.races.extend(outcome.races);
        }
        Ok(all)
    }

    /// Runs thread blocks until none is left to start. All host threads share `next`, the index of the next thread block to
    /// start.
    fn run_some(&self, next: &AtomicU64) -> Result<Outcome, LocatedFault> {
        let mut cube = Cube::new(self);
        let mut warps: Vec<_> = (0..self.warps()).map(|id| Warp::new(id, self)).collect();
        let mut outcome = Outcome::default();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= self.cubes() {
                break;
            }
            let result = cube.run(self.cube(index), &mut warps);
            let room = RACES_TOLD.saturating_sub(outcome.races.len());
            outcome.races.extend(cube.races.drain(..).take(room));
            // Moving `next` past the last block makes the other host threads stop, too.
            result.inspect_err(|_| next.store(self.cubes(), Ordering::Relaxed))?;
        }
        outcome.steps = cube.steps;
        Ok(outcome)
    }
}

/// The result of a kernel launch.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The number of warp instructions that were executed.
    pub steps: u64,
    /// The descriptions of data races: accesses to shared memory that no barrier orders.
    pub races: Vec<String>,
}

/// A thread block that is being run, with the state that its warps share.
pub struct Cube<'a> {
    pub launch: &'a Launch<'a>,
    pub position: [u32; 3],
    pub shared: SharedMemory,
    barriers: Barriers,
    mbarriers: Mbarriers,
    /// The pending TMA loads. Each one loads a single box of a tensor.
    arrivals: VecDeque<Arrival>,
    /// The number of completed TMA loads, which is the time of the actor that stands for all TMA loads (see `clock`).
    copy_time: u32,
    warps: usize,
    /// The number of warp instructions executed so far, in all thread blocks that this `Cube` has run.
    steps: u64,
    /// The number of events so far that may let a waiting warp continue, such as an arrival at a barrier.
    pub events: u64,
    races: Vec<String>,
}

impl<'a> Cube<'a> {
    fn new(launch: &'a Launch<'a>) -> Self {
        let bytes = launch.function.static_shared + launch.dynamic_shared;
        let warps = launch.warps();
        Self {
            launch,
            position: [0; 3],
            shared: SharedMemory::new(bytes, warps + 1),
            barriers: Barriers::new(),
            mbarriers: Mbarriers::default(),
            arrivals: VecDeque::new(),
            copy_time: 0,
            warps,
            steps: 0,
            events: 0,
            races: Vec::new(),
        }
    }

    fn run(&mut self, position: [u32; 3], warps: &mut [Warp]) -> Result<(), LocatedFault> {
        self.position = position;
        self.shared.reset();
        self.barriers.reset();
        self.mbarriers.reset();
        self.arrivals.clear();
        self.copy_time = 0;
        for warp in warps.iter_mut() {
            warp.start(self.launch, position);
        }
        self.go(warps)
    }

    fn locate(&self, place: Option<(usize, String)>, fault: Fault) -> LocatedFault {
        LocatedFault {
            kernel: self.launch.function.name.clone(),
            cube: self.position,
            place,
            fault,
        }
    }
}
