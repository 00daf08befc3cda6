//! Decodes the `wmma` instructions: matrix multiplication of fragments, and loads and stores of fragments.

use super::{Decoder, Result};
use crate::ptx::instruction::{Element, Fragment, Operation, Wmma, WmmaAccess};
use crate::ptx::types::Type;

/// The shape of a matrix multiplication: the rows of the left matrix, the columns of the right matrix, and the inner
/// dimension.
struct Shape {
    rows: usize,
    columns: usize,
    depth: usize,
}

/// Parses a shape such as `m16n16k8`.
fn shape(modifier: &str) -> Option<Shape> {
    let (rows, rest) = modifier.strip_prefix('m')?.split_once('n')?;
    let (columns, depth) = rest.split_once('k')?;
    Some(Shape {
        rows: rows.parse().ok()?,
        columns: columns.parse().ok()?,
        depth: depth.parse().ok()?,
    })
}

fn element(modifier: &str) -> Option<Element> {
    match modifier {
        "tf32" => Some(Element::Reduced),
        "f32" => Some(Element::Single),
        _ => match Type::of(modifier)? {
            half @ (Type::F16 | Type::BF16) => Some(Element::Half(half)),
            _ => None,
        },
    }
}

impl Decoder<'_> {
    pub(super) fn wmma(&mut self) -> Result<Operation> {
        self.ignores(&["sync", "aligned"]);
        let access = match () {
            () if self.takes("load") => Some(true),
            () if self.takes("store") => Some(false),
            () if self.takes("mma") => None,
            () => return Err(self.unsupported("the instruction")),
        };
        let shape = self
            .take_first(shape)
            .ok_or_else(|| self.unsupported("the shape"))?;
        match access {
            Some(loads) => self.wmma_access(loads, &shape),
            None => self.wmma_product(&shape),
        }
    }

    fn take_element(&mut self) -> Result<Element> {
        self.take_first(element)
            .ok_or_else(|| self.unsupported("the elements"))
    }

    fn fragment(
        &mut self,
        at: usize,
        element: Element,
        rows: usize,
        columns: usize,
    ) -> Result<Fragment> {
        let registers = self.words(at)?;
        let per_register = match element {
            Element::Half(_) => 64,
            _ => 32,
        };
        let room = registers.len() * per_register;
        if room == 0 || room % (rows * columns) != 0 {
            return Err(self.unsupported("this number of registers"));
        }
        Ok(Fragment {
            element,
            registers: registers.into(),
            rows,
            columns,
        })
    }

    fn wmma_access(&mut self, loads: bool, shape: &Shape) -> Result<Operation> {
        let (rows, columns) = match () {
            () if self.takes("a") => (shape.rows, shape.depth),
            () if self.takes("b") => (shape.depth, shape.columns),
            () if self.takes("c") || self.takes("d") => (shape.rows, shape.columns),
            () => return Err(self.unsupported("the operand")),
        };
        let by_rows = self.takes("row");
        if !by_rows && !self.takes("col") {
            return Err(self.unsupported("the order"));
        }
        let space = self.take_space();
        let element = self.take_element()?;
        let fragment = self.fragment(usize::from(!loads), element, rows, columns)?;
        let address = self.address(usize::from(loads))?;
        let stride = match self.operands.len() {
            2 => None,
            _ => Some(self.word(2)?),
        };
        let access = Box::new(WmmaAccess {
            fragment,
            by_rows,
            space,
            address,
            stride,
        });
        Ok(if loads {
            Operation::WmmaLoad(access)
        } else {
            Operation::WmmaStore(access)
        })
    }

    fn wmma_product(&mut self, shape: &Shape) -> Result<Operation> {
        // The layouts of the matrices in memory do not affect a multiplication of fragments.
        self.ignores(&["row", "col"]);
        let to = self.take_element()?;
        let of_halves = !self.modifiers.contains(&"tf32") && self.modifiers.len() == 1;
        // The modifiers of a multiplication in f16 do not name the type of the two multiplied matrices, which is f16.
        let (left, right) = match of_halves {
            true => (Element::Half(Type::F16), Element::Half(Type::F16)),
            false => (self.take_element()?, self.take_element()?),
        };
        let sums = self.take_element()?;
        let single = to == Element::Single && sums == Element::Single;
        if !single || left != right || left == Element::Single {
            return Err(self.unsupported("the elements"));
        }
        Ok(Operation::Wmma(Box::new(Wmma {
            to: self.fragment(0, to, shape.rows, shape.columns)?,
            left: self.fragment(1, left, shape.rows, shape.depth)?,
            right: self.fragment(2, right, shape.depth, shape.columns)?,
            sums: self.fragment(3, sums, shape.rows, shape.columns)?,
        })))
    }
}
