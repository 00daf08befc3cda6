//! Decodes asynchronous copies, and the barriers that signal their completion.

use super::{Decoder, Result};
use crate::ptx::instruction::{CopyAsync, MbarrierArrive, MbarrierWait, Operation, TensorCopy};
use crate::ptx::operand::Operand;
use crate::ptx::types::{Class, Register, Type};

impl Decoder<'_> {
    pub(super) fn asynchronous(&mut self) -> Result<Operation> {
        match self.name {
            "cp" => self.copy(),
            _ => self.mbarrier(),
        }
    }

    fn copy(&mut self) -> Result<Operation> {
        if !self.takes("async") {
            return Err(self.unsupported("a synchronous copy"));
        }
        if self.takes("bulk") {
            return self.bulk();
        }
        if self.takes("commit_group") {
            return Ok(Operation::CopyCommit);
        }
        if self.takes("wait_group") {
            return Ok(Operation::CopyWait(self.immediate(0)? as usize));
        }
        if self.takes("wait_all") {
            return Ok(Operation::CopyWaitAll);
        }
        if self.takes("mbarrier") {
            let arrives = self.takes("arrive");
            self.ignores(&["shared", "shared::cta", "b64"]);
            let expected = !self.takes("noinc");
            let address = self.address(0)?;
            return match arrives {
                true => Ok(Operation::CopyArrive { address, expected }),
                false => Err(self.unsupported("the instruction")),
            };
        }
        self.ignores(&["ca", "cg", "L2::64B", "L2::128B", "L2::256B"]);
        let to_shared = self.takes("shared") || self.takes("shared::cta");
        if !to_shared || !self.takes("global") {
            return Err(self.unsupported("a copy between these memories"));
        }
        let target = self.address(0)?;
        let source = self.address(1)?;
        let bytes = self.immediate(2)? as usize;
        if ![4, 8, 16].contains(&bytes) {
            return Err(self.unsupported(&format!("{bytes} bytes")));
        }
        let read = match self.operands.len() {
            3 => None,
            _ => Some(self.word(3)?),
        };
        Ok(Operation::CopyAsync(Box::new(CopyAsync {
            target,
            source,
            bytes,
            read,
        })))
    }

    fn bulk(&mut self) -> Result<Operation> {
        if self.takes("commit_group") {
            return Ok(Operation::BulkCommit);
        }
        if self.takes("wait_group") {
            // With the modifier `.read`, the instruction waits only until the stores have read their source. In the
            // emulator, a store reads its source and writes its target at the same time, so the modifier changes
            // nothing.
            self.takes("read");
            return Ok(Operation::BulkWait(self.immediate(0)? as usize));
        }
        if self.takes("prefetch") {
            return Ok(self.nothing());
        }
        if !self.takes("tensor") {
            return Err(self.unsupported("a bulk copy without a tensor map"));
        }
        self.ignores(&["tile", "1d", "2d", "3d", "4d", "5d"]);
        if self.takes("bulk_group") {
            let stores =
                self.takes("global") && (self.takes("shared") || self.takes("shared::cta"));
            if !stores {
                return Err(self.unsupported("a copy between these memories"));
            }
            let (map, place) = self.map_and_place(0)?;
            let shared = self.address(1)?;
            return Ok(Operation::TensorStore(Box::new(TensorCopy {
                shared,
                map,
                place,
                barrier: None,
            })));
        }
        // Each cluster in the emulator has a single thread block. Both `shared::cluster` and `shared::cta` therefore
        // mean the block's own shared memory.
        let to_shared = self.takes("shared::cluster") || self.takes("shared::cta");
        let tells = self.takes("mbarrier::complete_tx::bytes");
        if !to_shared || !tells || !self.takes("global") {
            return Err(self.unsupported("a copy between these memories"));
        }
        let shared = self.address(0)?;
        let (map, place) = self.map_and_place(1)?;
        let barrier = Some(self.address(2)?);
        Ok(Operation::TensorLoad(Box::new(TensorCopy {
            shared,
            map,
            place,
            barrier,
        })))
    }

    /// Decodes the operand `[map, {x, y, …}]` of a TMA copy: a tensor map and the coordinates of a box.
    fn map_and_place(&mut self, at: usize) -> Result<(Register, Box<[u32]>)> {
        let list = self.list(at)?;
        let [map, Operand::List(place)] = list.as_slice() else {
            return Err(self.unsupported("the coordinates in a map"));
        };
        let map = self.source_of(map, Type::B64)?;
        let place = place
            .iter()
            .map(|operand| self.word_of(operand))
            .collect::<Result<_>>()?;
        Ok((map, place))
    }

    fn mbarrier(&mut self) -> Result<Operation> {
        // The memory-order and scope modifiers have no effect: in the emulator, every arrival orders earlier accesses, and
        // every wait orders later accesses.
        self.ignores(&["shared", "shared::cta", "b64", "cta", "acquire", "release"]);
        if self.takes("init") {
            return Ok(Operation::MbarrierInit {
                address: self.address(0)?,
                arrivals: self.word(1)?,
            });
        }
        if self.takes("inval") {
            return Ok(Operation::MbarrierInvalidate(self.address(0)?));
        }
        if self.takes("arrive") {
            let expects = self.takes("expect_tx");
            let to = match self.operands.first() {
                Some(Operand::Address(..)) | None => None,
                Some(_) => Some(self.target(0, Class::Double)?),
            };
            let first = usize::from(to.is_some());
            let address = self.address(first)?;
            let count = match self.operands.len() {
                len if len == first + 1 => self.registers.constant(Class::Word, 1),
                _ => self.source(first + 1, Type::U32)?,
            };
            let one = self.registers.constant(Class::Word, 1);
            let (Register::Word(count), Register::Word(one)) = (count, one) else {
                return Err(self.unsupported("the count"));
            };
            return Ok(Operation::MbarrierArrive(Box::new(MbarrierArrive {
                to,
                address,
                arrivals: if expects { one } else { count },
                bytes: expects.then_some(count),
            })));
        }
        if self.takes("try_wait") || self.takes("test_wait") {
            let parity = self.takes("parity");
            let to = self.predicate_target(0)?;
            let address = self.address(1)?;
            let number = if parity { Type::U32 } else { Type::B64 };
            let state = self.source(2, number)?;
            // The optional last operand of `mbarrier.try_wait` limits how long the thread is suspended. This operand
            // has no effect in the emulator.
            if self.operands.len() > 3 {
                self.source(3, Type::U32)?;
            }
            return Ok(Operation::MbarrierWait(Box::new(MbarrierWait {
                to,
                address,
                state,
                parity,
            })));
        }
        Err(self.unsupported("the instruction"))
    }
}
