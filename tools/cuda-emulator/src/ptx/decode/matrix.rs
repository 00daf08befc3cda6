//! Decodes the matrix instructions, and the loads and stores of their tiles.

use super::{Decoder, Result};
use crate::ptx::instruction::{Left, MatrixAccess, Mma, Operation, Wgmma};
use crate::ptx::operand::Operand;
use crate::ptx::types::{Space, Type};

impl Decoder<'_> {
    pub(super) fn matrix(&mut self) -> Result<Operation> {
        match self.name {
            "ldmatrix" => self.tiles(true),
            "stmatrix" => self.tiles(false),
            "mma" => self.mma(),
            _ => self.wgmma(),
        }
    }

    fn tiles(&mut self, loads: bool) -> Result<Operation> {
        self.ignores(&["sync", "aligned"]);
        if !self.takes("m8n8") || self.take_space() != Space::Shared {
            return Err(self.unsupported("the shape or the memory"));
        }
        let tiles = self.take_first(|modifier| {
            Some(match modifier {
                "x1" => 1,
                "x2" => 2,
                "x4" => 4,
                _ => return None,
            })
        });
        let transposed = self.takes("trans");
        if self.take_type()? != Type::B16 {
            return Err(self.unsupported("elements that are not of 16 bits"));
        }
        let address = self.address(usize::from(loads))?;
        let registers = self.words(usize::from(!loads))?;
        if tiles != Some(registers.len()) {
            return Err(self.unsupported("this number of registers"));
        }
        let access = Box::new(MatrixAccess {
            transposed,
            registers: registers.into(),
            address,
        });
        Ok(if loads {
            Operation::LoadMatrix(access)
        } else {
            Operation::StoreMatrix(access)
        })
    }

    /// Consumes the types of all matrices, and returns the type of the two operands, f16 or bf16. `floats` is the
    /// number of accumulator matrices, whose type must be f32.
    fn halves(&mut self, floats: usize) -> Result<Type> {
        if self.take_type()? != Type::F32 {
            return Err(self.unsupported("sums that are not f32"));
        }
        let (left, right) = (self.take_type()?, self.take_type()?);
        for _ in 1..floats {
            if self.take_type()? != Type::F32 {
                return Err(self.unsupported("sums that are not f32"));
            }
        }
        match (left, right) {
            (Type::F16, Type::F16) | (Type::BF16, Type::BF16) => Ok(left),
            _ => Err(self.unsupported(&format!("{left:?} × {right:?}"))),
        }
    }

    fn four(&mut self, at: usize) -> Result<[u32; 4]> {
        let words = self.words(at)?;
        words
            .try_into()
            .map_err(|_| self.unsupported("this number of registers"))
    }

    fn mma(&mut self) -> Result<Operation> {
        self.ignores(&["sync", "aligned"]);
        let deep = self.takes("m16n8k16");
        if !deep && !self.takes("m16n8k8") || !self.takes("row") || !self.takes("col") {
            return Err(self.unsupported("the shape"));
        }
        let half = self.halves(2)?;
        let mma = Mma {
            half,
            to: self.four(0)?,
            left: self.words(1)?.into(),
            right: self.words(2)?.into(),
            sums: self.four(3)?,
        };
        let tiles = if deep { 2 } else { 1 };
        if mma.left.len() != 2 * tiles || mma.right.len() != tiles {
            return Err(self.unsupported("this number of registers"));
        }
        Ok(Operation::Mma(Box::new(mma)))
    }

    fn wgmma(&mut self) -> Result<Operation> {
        self.ignores(&["sync", "aligned"]);
        if self.takes("fence") {
            return Ok(Operation::Nothing);
        }
        if self.takes("commit_group") {
            return Ok(Operation::WgmmaCommit);
        }
        if self.takes("wait_group") {
            return Ok(Operation::WgmmaWait(self.immediate(0)? as usize));
        }
        if !self.takes("mma_async") {
            return Err(self.unsupported("the instruction"));
        }
        let columns = self.take_first(|modifier| {
            let columns = modifier.strip_prefix("m64n")?.strip_suffix("k16")?;
            columns.parse::<usize>().ok()
        });
        let columns = columns.ok_or_else(|| self.unsupported("the shape"))?;
        let half = self.halves(1)?;
        let sums: Box<[u32]> = self.words(0)?.into();
        if sums.len() != columns / 2 || columns % 8 != 0 {
            return Err(self.unsupported("this number of sums"));
        }
        let in_registers = matches!(self.operand(1)?, Operand::List(_));
        let left = match in_registers {
            true => Left::Registers(self.four(1)?),
            false => Left::Shared(self.double(1)?),
        };
        let right = self.double(2)?;
        let accumulates = self.condition(3)?;
        for sign in [4, 5] {
            if self.immediate(sign)? != 1 {
                return Err(self.unsupported("a negative operand"));
            }
        }
        if !in_registers && self.immediate(6)? != 0 {
            return Err(self.unsupported("a transposed left operand"));
        }
        let transposed = self.immediate(if in_registers { 6 } else { 7 })? != 0;
        Ok(Operation::Wgmma(Box::new(Wgmma {
            half,
            sums,
            left,
            right,
            transposed,
            accumulates,
        })))
    }
}
