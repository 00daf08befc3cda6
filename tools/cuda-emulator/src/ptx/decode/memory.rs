//! Decodes loads, stores, atomics, address conversions and fences.

use super::{Decoder, Result, reduction};
use crate::numbers::{Arithmetic, Flags};
use crate::ptx::instruction::{Access, Atomic, AtomicOperation, Operation};
use crate::ptx::operand::Operand;
use crate::ptx::types::{Class, Register, Space, Type};

/// The modifiers for caching and visibility. These modifiers have no effect, because in the emulator every access is
/// visible at once.
const CACHING: [&str; 16] = [
    "nc",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::64B",
    "L2::128B",
    "L2::256B",
];
const ORDER: [&str; 7] = [
    "volatile", "weak", "relaxed", "cta", "cluster", "gpu", "sys",
];

impl Decoder<'_> {
    pub(super) fn memory(&mut self) -> Result<Operation> {
        match self.name {
            "ld" | "ldu" => self.access(true),
            "st" => self.access(false),
            "atom" | "red" => self.atomic(),
            "cvta" => self.shift_address(),
            "isspacep" => {
                let space = self.take_space();
                let to = self.predicate_target(0)?;
                let from = self.double(1)?;
                Ok(Operation::IsSpace { space, to, from })
            }
            "prefetch" | "prefetchu" | "discard" => Ok(self.nothing()),
            // Only the fence of the async proxy has an effect. The emulator performs memory accesses in program order,
            // so all other fences change nothing.
            _ => {
                let of_proxies = self.takes("proxy") && self.takes("async");
                self.modifiers.clear();
                Ok(if of_proxies {
                    Operation::ProxyFence
                } else {
                    Operation::Nothing
                })
            }
        }
    }

    pub(super) fn double(&mut self, at: usize) -> Result<u32> {
        match self.source(at, Type::B64)? {
            Register::Double(row) => Ok(row),
            _ => Err(self.unsupported("an address of 32 bits")),
        }
    }

    fn access(&mut self, loads: bool) -> Result<Operation> {
        let space = self.take_space();
        self.ignores(&CACHING);
        self.ignores(&ORDER);
        // The modifiers `acquire` and `release` are accepted for global memory only, because the race detection does not
        // support their ordering in shared memory.
        if space == Space::Global {
            self.ignores(&["acquire", "release"]);
        }
        self.ignores(&["v2", "v4", "v8"]);
        let number = self.take_type()?;
        let address = self.address(usize::from(loads))?;
        let at = usize::from(!loads);
        let operands = match self.operand(at)? {
            Operand::List(list) => list,
            operand => vec![operand],
        };
        let registers = operands
            .iter()
            .map(|operand| match operand {
                // The register may be wider than the value in memory, so the register's class is not checked.
                Operand::Register(register) if register.class() != Class::Predicate => {
                    Ok(*register)
                }
                operand if loads => self.target_of(operand, number.class()),
                operand => self.source_of(operand, number),
            })
            .collect::<Result<Box<[_]>>>()?;
        if number.bytes() * registers.len() > 32 || number == Type::Predicate {
            return Err(self.unsupported(&format!("{number:?} × {}", registers.len())));
        }
        let access = Box::new(Access {
            space,
            number,
            registers,
            address,
        });
        Ok(if loads {
            Operation::Load(access)
        } else {
            Operation::Store(access)
        })
    }

    fn atomic(&mut self) -> Result<Operation> {
        let space = self.take_space();
        self.ignores(&ORDER);
        self.ignores(&["acquire", "release", "acq_rel", "noftz"]);
        let reduction = self.take_first(reduction);
        let other = self.take_first(|modifier| {
            Some(match modifier {
                "exch" => AtomicOperation::Exchange,
                "cas" => AtomicOperation::CompareAndSwap,
                "inc" => AtomicOperation::Increment,
                "dec" => AtomicOperation::Decrement,
                _ => return None,
            })
        });
        let number = self.take_type()?;
        let operation = match (reduction, other) {
            (Some(operation), None) => {
                let arithmetic = Arithmetic {
                    operation,
                    number,
                    flags: Flags {
                        // As on a GPU, an f32 atomic flushes subnormals in global memory, but not in shared memory.
                        flush: number == Type::F32 && space != Space::Shared,
                        ..Flags::default()
                    },
                };
                if arithmetic.of([0; 4]).is_none() {
                    return Err(self.unsupported(&format!("{number:?}")));
                }
                AtomicOperation::Arithmetic(arithmetic)
            }
            (None, Some(other)) => other,
            _ => return Err(self.unsupported("the operation")),
        };
        let first = usize::from(self.name == "atom");
        let to = match first {
            1 => Some(self.target(0, number.class())?),
            _ => None,
        };
        let address = self.address(first)?;
        let operand = self.source(first + 1, number)?;
        let second = match operation {
            AtomicOperation::CompareAndSwap => self.source(first + 2, number)?,
            _ => operand,
        };
        Ok(Operation::Atomic(Box::new(Atomic {
            space,
            number,
            operation,
            to,
            address,
            operands: [operand, second],
        })))
    }

    /// Decodes `cvta`, which converts an address of a memory space to a generic address, or a generic address to an
    /// address of a memory space.
    fn shift_address(&mut self) -> Result<Operation> {
        let back = self.takes("to");
        let window = self.take_space().window();
        self.ignores(&["u64"]);
        let to = match self.target(0, Class::Double)? {
            Register::Double(row) => row,
            _ => return Err(self.unsupported("an address of 32 bits")),
        };
        let from = self.double(1)?;
        let offset = if back { window.wrapping_neg() } else { window };
        Ok(Operation::ShiftAddress { to, from, offset })
    }
}
