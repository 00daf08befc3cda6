//! The order in which the warps and lanes of a thread block run. Each warp runs until it waits. Within a warp, the
//! lanes at the lowest instruction index run first. Pending TMA loads, and mbarrier arrivals after `cp.async`, are
//! completed only when no warp can continue without them.

use super::execute::Next;
use super::warp::{Group, State, Warp, lanes};
use super::{Cube, RACES_TOLD};
use crate::fault::{Fault, LocatedFault};
use crate::ptx::{Instruction, Operation};

/// A round runs each ready warp once. In a round without progress, all warps only poll barriers. The emulator allows
/// this number of successive rounds without progress. After one more such round, it reports a deadlock.
const PATIENCE: usize = 3;

/// The maximum number of warp instructions that one host thread executes in a launch, for all thread blocks that it
/// runs.
const STEPS: u64 = 20_000_000_000;

impl Cube<'_> {
    /// Runs the thread block until all of its warps have exited.
    pub(super) fn go(&mut self, warps: &mut [Warp]) -> Result<(), LocatedFault> {
        let mut idle = 0;
        loop {
            let before = self.events;
            for k in 0..warps.len() {
                if warps[k].state == State::Ready {
                    self.run_warp(&mut warps[k])?;
                    if self.barriers.open(warps) {
                        self.events += 1;
                    }
                }
            }
            if warps.iter().all(|warp| warp.state == State::Done) {
                return Ok(());
            }
            if self.events > before {
                idle = 0;
                continue;
            }
            idle += 1;
            let something_came = match self.arrivals_come(warps) {
                Ok(false) => self.box_comes(),
                outcome => outcome,
            };
            let spins = warps.iter().any(|warp| warp.state == State::Ready);
            match something_came {
                Ok(true) => idle = 0,
                Ok(false) if spins && idle <= PATIENCE => {}
                Ok(false) => {
                    let fault = Fault::Deadlock(self.waiting(warps));
                    return Err(self.locate(None, fault));
                }
                Err(fault) => return Err(self.locate(None, fault)),
            }
        }
    }

    /// Describes the waiting warps for an error message, with the instruction at which each warp waits.
    fn waiting(&self, warps: &[Warp]) -> String {
        let warps = warps.iter().filter(|warp| warp.state != State::Done);
        let lines = warps.map(|warp| {
            let lane = lanes(warp.live).next().unwrap_or(0);
            let text = &self.launch.function.texts[warp.place_of(lane) as usize];
            format!("warp {} ({:?}) before `{text}`", warp.id, warp.state)
        });
        lines.collect::<Vec<_>>().join(", ")
    }

    /// Runs a warp until it waits.
    fn run_warp(&mut self, warp: &mut Warp) -> Result<(), LocatedFault> {
        while warp.live != 0 {
            let Some(group) = warp.next_group() else {
                let places = lanes(warp.live).map(|lane| warp.place_of(lane).to_string());
                let places = places.collect::<Vec<_>>().join(" ");
                let fault = Fault::Deadlock(format!(
                    "lanes of warp {} wait for each other, at the instructions {places}",
                    warp.id
                ));
                return Err(self.locate(None, fault));
            };
            if !self.run_group(warp, group)? {
                return Ok(());
            }
        }
        warp.state = State::Done;
        self.events += 1;
        Ok(())
    }

    /// Runs lanes that are at the same instruction until they diverge, reconverge with other lanes, or wait. Returns
    /// true if the warp can continue.
    fn run_group(&mut self, warp: &mut Warp, group: Group) -> Result<bool, LocatedFault> {
        let function = self.launch.function;
        let Group {
            mut at,
            mask,
            others,
        } = group;
        loop {
            let Some(instruction) = function.instructions.get(at as usize) else {
                warp.live &= !mask;
                return Ok(true);
            };
            self.steps += 1;
            let active = match instruction.guard {
                Some(guard) => mask & warp.holds(guard),
                None => mask,
            };
            match &instruction.operation {
                Operation::Branch(target) => {
                    if active == mask {
                        at = *target;
                    } else {
                        at += 1;
                        if active != 0 {
                            warp.place(active, *target);
                            warp.place(mask & !active, at);
                            return Ok(true);
                        }
                    }
                }
                Operation::Exit => {
                    warp.place(mask, at + 1);
                    warp.live &= !active;
                    if warp.live == 0 {
                        self.all_boxes_go(warp);
                    }
                    return Ok(true);
                }
                _ if active == 0 => at += 1,
                operation => {
                    if !is_complete(warp, operation, mask, active) {
                        warp.place(mask, at);
                        warp.parked |= mask;
                        return Ok(true);
                    }
                    let next = self.step(warp, instruction, at, active)?;
                    at += 1;
                    if next != Next::GoOn {
                        warp.place(mask, at);
                        if next == Next::AskLater {
                            warp.spinning |= mask;
                        }
                        return Ok(false);
                    }
                }
            }
            if at >= others || warp.parked != 0 {
                warp.place(mask, at);
                return Ok(true);
            }
        }
    }

    /// Executes one instruction. If a race or a fault occurs, its report names the instruction.
    fn step(
        &mut self,
        warp: &mut Warp,
        instruction: &Instruction,
        at: u32,
        active: u32,
    ) -> Result<Next, LocatedFault> {
        let place = |warp: &Warp, cube: &Self| {
            let text = &cube.launch.function.texts[at as usize];
            (warp.id, text.clone())
        };
        let outcome = match instruction.operation {
            Operation::Trap => Err(Fault::Trap),
            _ if self.steps > STEPS => Err(Fault::Endless(STEPS)),
            ref operation => self.execute(warp, operation, active),
        };
        for race in std::mem::take(&mut self.shared.races) {
            if self.races.len() >= RACES_TOLD {
                break;
            }
            let (id, text) = place(warp, self);
            let other = if race.other == self.warps {
                "a copy".to_string()
            } else {
                format!("warp {}", race.other)
            };
            self.races.push(format!(
                "{} ({other}'s): warp {id} at byte {} of shared memory, cube {:?} of {}, `{text}`",
                race.what, race.byte, self.position, self.launch.function.name
            ));
        }
        outcome.map_err(|fault| self.locate(Some(place(warp, self)), fault))
    }
}

/// Returns true if all lanes that the instruction requires have reached it.
fn is_complete(warp: &Warp, operation: &Operation, mask: u32, active: u32) -> bool {
    let members = match operation {
        Operation::WarpBarrier { members } | Operation::Elect { members, .. } => *members,
        Operation::Shuffle(shuffle) => shuffle.members,
        Operation::Vote(vote) => vote.members,
        Operation::Match(matching) => matching.members,
        Operation::Reduce(reduce) => reduce.members,
        Operation::Barrier { .. }
        | Operation::LoadMatrix(_)
        | Operation::StoreMatrix(_)
        | Operation::Mma(_)
        | Operation::WmmaLoad(_)
        | Operation::WmmaStore(_)
        | Operation::Wmma(_)
        | Operation::Wgmma(_) => return mask == warp.live,
        _ => return true,
    };
    let wanted = warp.first_word(members, active) & warp.live;
    active & wanted == wanted || mask == warp.live
}
