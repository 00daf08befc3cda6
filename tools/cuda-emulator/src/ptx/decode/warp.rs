//! Decodes the operations across the lanes of a warp, and the barriers of a thread block.

use super::{Decoder, Result, reduction};
use crate::numbers::Arithmetic;
use crate::ptx::instruction::{Match, Operation, Reduce, Shuffle, ShuffleMode, Vote, VoteMode};
use crate::ptx::types::{Class, Register, Type};

impl Decoder<'_> {
    pub(super) fn warp(&mut self) -> Result<Operation> {
        match self.name {
            "bar" | "barrier" => self.barrier(),
            "shfl" => self.shuffle(),
            "vote" => self.vote(),
            "match" => self.matching(),
            "redux" => self.reduce(),
            "activemask" => {
                self.takes("b32");
                Ok(Operation::ActiveLanes(self.word_target(0)?))
            }
            "elect" => {
                self.takes("sync");
                let (to, elected) = self.target_and_predicate(0, Class::Word)?;
                match (to, elected) {
                    (Register::Word(to), Some(elected)) => Ok(Operation::Elect {
                        to,
                        elected,
                        members: self.word(1)?,
                    }),
                    _ => Err(self.unsupported("the results")),
                }
            }
            // All other instructions set a warp's register count (`setmaxnreg`) or control the start of dependent
            // kernels (`griddepcontrol`). The emulator ignores these instructions, because they do not affect results.
            _ => Ok(self.nothing()),
        }
    }

    fn barrier(&mut self) -> Result<Operation> {
        self.ignores(&["cta", "aligned"]);
        if self.takes("warp") {
            self.takes("sync");
            return Ok(Operation::WarpBarrier {
                members: self.word(0)?,
            });
        }
        let waits = self.takes("sync");
        if !waits && !self.takes("arrive") {
            return Err(self.unsupported("the kind of barrier"));
        }
        let id = self.word(0)?;
        let threads = match self.operands.len() {
            1 => None,
            _ => Some(self.word(1)?),
        };
        Ok(Operation::Barrier { id, threads, waits })
    }

    fn shuffle(&mut self) -> Result<Operation> {
        self.ignores(&["sync", "b32"]);
        let mode = self.take_first(|modifier| {
            Some(match modifier {
                "up" => ShuffleMode::Up,
                "down" => ShuffleMode::Down,
                "bfly" => ShuffleMode::Butterfly,
                "idx" => ShuffleMode::Index,
                _ => return None,
            })
        });
        let mode = mode.ok_or_else(|| self.unsupported("the mode"))?;
        let (Register::Word(to), found) = self.target_and_predicate(0, Class::Word)? else {
            return Err(self.unsupported("the result"));
        };
        Ok(Operation::Shuffle(Box::new(Shuffle {
            mode,
            to,
            found,
            value: self.word(1)?,
            lane: self.word(2)?,
            segment: self.word(3)?,
            members: self.word(4)?,
        })))
    }

    fn vote(&mut self) -> Result<Operation> {
        self.ignores(&["sync", "pred", "b32"]);
        let mode = self.take_first(|modifier| {
            Some(match modifier {
                "any" => VoteMode::Any,
                "all" => VoteMode::All,
                "uni" => VoteMode::Uniform,
                "ballot" => VoteMode::Ballot,
                _ => return None,
            })
        });
        let mode = mode.ok_or_else(|| self.unsupported("the mode"))?;
        let class = match mode {
            VoteMode::Ballot => Class::Word,
            _ => Class::Predicate,
        };
        Ok(Operation::Vote(Box::new(Vote {
            mode,
            to: self.target(0, class)?,
            condition: self.condition(1)?,
            members: self.word(2)?,
        })))
    }

    fn matching(&mut self) -> Result<Operation> {
        self.ignores(&["sync", "any"]);
        let all = self.takes("all");
        let number = self.take_type()?;
        let (Register::Word(to), agree) = self.target_and_predicate(0, Class::Word)? else {
            return Err(self.unsupported("the result"));
        };
        Ok(Operation::Match(Box::new(Match {
            all,
            to,
            agree,
            value: self.source(1, number)?,
            members: self.word(2)?,
        })))
    }

    fn reduce(&mut self) -> Result<Operation> {
        self.takes("sync");
        let operation = self.take_first(reduction);
        let operation = operation.ok_or_else(|| self.unsupported("the operation"))?;
        let number = self.take_type()?;
        if !matches!(number, Type::U32 | Type::S32 | Type::B32) {
            return Err(self.unsupported(&format!("{number:?}")));
        }
        Ok(Operation::Reduce(Box::new(Reduce {
            arithmetic: Arithmetic::plain(operation, number),
            to: self.word_target(0)?,
            value: self.word(1)?,
            members: self.word(2)?,
        })))
    }
}
