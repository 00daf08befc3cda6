//! Executes one instruction for the active lanes of a warp.

use super::Cube;
use super::warp::{Warp, lanes};
use crate::fault::Fault;
use crate::ptx::{MbarrierArrive, MbarrierWait, Operation, Register, Space};

/// The warp's next action after an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    GoOn,
    /// The warp waits at a barrier.
    Wait,
    /// The lanes continue only after other lanes and warps have run. The executed instruction was either a sleep, or a
    /// poll of an mbarrier phase that is not yet complete.
    AskLater,
}

impl Cube<'_> {
    /// Executes an instruction that does not change the control flow.
    pub(super) fn execute(
        &mut self,
        warp: &mut Warp,
        operation: &Operation,
        mask: u32,
    ) -> Result<Next, Fault> {
        match operation {
            // `bar.warp.sync` needs no action here, because the scheduler has already waited for the lanes that the
            // instruction names.
            Operation::Nothing | Operation::WarpBarrier { .. } => {}
            Operation::Words {
                operation,
                to,
                from,
            } => warp.compute_words(*operation, *to, *from, mask),
            Operation::Doubles {
                operation,
                to,
                from,
            } => warp.compute_doubles(*operation, *to, *from, mask),
            Operation::Narrow { to, from } => warp.narrow(*to, *from, mask),
            Operation::CompareWords {
                comparison,
                to,
                from,
            } => warp.compare_words(*comparison, *to, *from, mask),
            Operation::SelectWords {
                to,
                from,
                condition,
            } => warp.select_words(*to, *from, *condition, mask),
            Operation::Predicates { logic, to, from } => warp.combine(*logic, *to, *from, mask),
            Operation::Load(access) => self.load(warp, access, mask)?,
            Operation::Store(access) => self.store(warp, access, mask)?,
            Operation::LoadMatrix(access) => self.load_matrix(warp, access, mask)?,
            Operation::Mma(mma) => warp.mma(mma, mask)?,
            Operation::WmmaLoad(access) => self.wmma_load(warp, access, mask)?,
            Operation::WmmaStore(access) => self.wmma_store(warp, access, mask)?,
            Operation::Wmma(wmma) => warp.wmma(wmma, mask)?,
            Operation::Arithmetic {
                arithmetic,
                to,
                from,
            } => warp.compute(*arithmetic, *to, *from, mask)?,
            Operation::Compare(compared) => warp.compare_and_combine(compared, mask),
            Operation::SetWord { compare, truth, to } => warp.set_word(compare, *truth, *to, mask),
            Operation::SetHalves {
                comparison,
                number,
                truth,
                to,
                from,
            } => warp.set_halves(*comparison, *number, *truth, *to, *from, mask),
            Operation::Select {
                to,
                from,
                condition,
            } => warp.select(*to, *from, *condition, mask),
            Operation::Convert {
                conversion,
                to,
                from,
            } => warp.convert(*conversion, *to, *from, mask),
            Operation::Pack { to, from } => warp.pack(*to, from, mask),
            Operation::Unpack { to, from } => warp.unpack(to, *from, mask),
            Operation::Clock(to) => {
                for lane in lanes(mask) {
                    warp.set(*to, lane, self.steps);
                }
            }
            Operation::ShiftAddress { to, from, offset } => {
                warp.shift_address(*to, *from, *offset, mask);
            }
            Operation::IsSpace { space, to, from } => {
                for lane in lanes(mask) {
                    let (own, _) = Space::of_generic(warp.doubles[*from as usize][lane]);
                    warp.set(Register::Predicate(*to), lane, (own == *space).into());
                }
            }
            Operation::Atomic(atomic) => self.atomic(warp, atomic, mask)?,
            Operation::Shuffle(shuffle) => warp.shuffle(shuffle, mask),
            Operation::Vote(vote) => warp.vote(vote, mask),
            Operation::Match(matching) => warp.match_lanes(matching, mask),
            Operation::Reduce(reduce) => warp.reduce(reduce, mask)?,
            Operation::ActiveLanes(to) => {
                for lane in lanes(mask) {
                    warp.words[*to as usize][lane] = mask;
                }
            }
            Operation::Elect { to, elected, .. } => {
                for lane in lanes(mask) {
                    warp.words[*to as usize][lane] = mask.trailing_zeros();
                }
                warp.put_predicate(*elected, mask & mask.wrapping_neg(), mask);
            }
            operation => return self.execute_late(warp, operation, mask),
        }
        Ok(Next::GoOn)
    }

    /// Executes one of the remaining instructions: asynchronous copies, asynchronous matrix multiplication (`wgmma`),
    /// `stmatrix`, proxy fences, barriers and sleep.
    fn execute_late(
        &mut self,
        warp: &mut Warp,
        operation: &Operation,
        mask: u32,
    ) -> Result<Next, Fault> {
        self.events += 1;
        match operation {
            Operation::StoreMatrix(access) => self.store_matrix(warp, access, mask)?,
            Operation::Wgmma(wgmma) => self.wgmma(warp, wgmma, mask)?,
            Operation::WgmmaCommit => warp.products.push_back(Vec::new()),
            Operation::WgmmaWait(left) => self.products_end(warp, *left),
            Operation::CopyAsync(copy) => self.copy_async(warp, copy, mask)?,
            Operation::CopyCommit => warp.copies.commit(mask),
            Operation::CopyWait(left) => {
                lanes(mask).for_each(|lane| self.copies_come(warp, lane, *left));
            }
            Operation::CopyWaitAll => {
                lanes(mask).for_each(|lane| self.all_copies_come(warp, lane));
            }
            Operation::CopyArrive { address, expected } => {
                let addresses = warp.shared_addresses(*address);
                for lane in lanes(mask) {
                    let barrier = self.mbarriers.at(addresses[lane])?;
                    if *expected {
                        barrier.expect_arrival();
                    }
                    warp.copies.arrive_later(addresses[lane], lane);
                }
            }
            Operation::TensorLoad(copy) => self.tensor_load(warp, copy, mask)?,
            Operation::TensorStore(copy) => self.tensor_store(warp, copy, mask)?,
            Operation::BulkCommit => warp.stores.push_back(Vec::new()),
            Operation::BulkWait(left) => self.boxes_go(warp, *left),
            Operation::ProxyFence => self.shared.fence(&mut warp.clock),
            Operation::Barrier { id, threads, waits } => {
                let id = warp.first_word(*id, mask);
                let threads = threads.map(|row| warp.first_word(row, mask));
                self.barriers.arrive(warp, id, threads, *waits)?;
                if *waits {
                    return Ok(Next::Wait);
                }
            }
            Operation::MbarrierInit { address, arrivals } => {
                let addresses = warp.shared_addresses(*address);
                for lane in lanes(mask) {
                    let at = self.shared.offset(addresses[lane], 8)?;
                    self.shared.write(&warp.clock, at, &[0; 8]);
                    let arrivals = warp.words[*arrivals as usize][lane];
                    self.mbarriers
                        .init(addresses[lane], arrivals, self.warps + 1);
                }
            }
            Operation::MbarrierInvalidate(address) => {
                let addresses = warp.shared_addresses(*address);
                lanes(mask).for_each(|lane| self.mbarriers.invalidate(addresses[lane]));
            }
            Operation::MbarrierArrive(arrive) => self.mbarrier_arrive(warp, arrive, mask)?,
            Operation::MbarrierWait(wait) => return self.mbarrier_wait(warp, wait, mask),
            Operation::Sleep => {
                self.events -= 1;
                return Ok(Next::AskLater);
            }
            // The scheduler executes control flow itself, so a control-flow instruction at this point is an error.
            operation => return Err(Fault::Unsupported(format!("{operation:?} here"))),
        }
        Ok(Next::GoOn)
    }

    fn mbarrier_arrive(
        &mut self,
        warp: &mut Warp,
        arrive: &MbarrierArrive,
        mask: u32,
    ) -> Result<(), Fault> {
        let addresses = warp.shared_addresses(arrive.address);
        for lane in lanes(mask) {
            let barrier = self.mbarriers.at(addresses[lane])?;
            if let Some(bytes) = arrive.bytes {
                barrier.expect_bytes(warp.words[bytes as usize][lane]);
            }
            let arrivals = warp.words[arrive.arrivals as usize][lane];
            let phase = barrier.arrive(arrivals, warp.clock.times())?;
            if let Some(to) = arrive.to {
                warp.set(to, lane, phase);
            }
        }
        warp.clock.tick();
        Ok(())
    }

    fn mbarrier_wait(
        &mut self,
        warp: &mut Warp,
        wait: &MbarrierWait,
        mask: u32,
    ) -> Result<Next, Fault> {
        let addresses = warp.shared_addresses(wait.address);
        let mut complete = 0;
        for lane in lanes(mask) {
            let state = warp.get(wait.state, lane);
            let barrier = self.mbarriers.at(addresses[lane])?;
            if barrier.is_complete(state, wait.parity, &mut warp.clock) {
                complete |= 1 << lane;
            }
        }
        warp.put_predicate(wait.to, complete, mask);
        if complete == mask {
            Ok(Next::GoOn)
        } else {
            self.events -= 1;
            Ok(Next::AskLater)
        }
    }
}
