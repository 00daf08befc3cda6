//! The arithmetic instructions, computed for the lanes of a warp. A frequent operation has its own branch-free loop over all
//! lanes. Any other operation is computed one lane at a time.

use super::warp::{ALL, DoubleRow, LANES, Warp, WordRow, lanes};
use crate::fault::Fault;
use crate::numbers::{
    Arithmetic, Comparison, Conversion, compare, convert, exponential, max, min, single_bits,
    to_brain, to_half,
};
use crate::ptx::{
    Compare, DoubleOperation as D, Guard, Logic, Register, Type, WordComparison as C,
    WordOperation as W,
};

fn float(bits: u32) -> f32 {
    f32::from_bits(bits)
}

fn shifted(amount: u32, width: u32) -> u32 {
    amount.min(width - 1)
}

/// Stores `values` into a register row for the lanes in `mask`. A register row has one value per lane.
#[inline(always)]
fn put<T: Copy>(row: &mut [T; LANES], values: [T; LANES], mask: u32) {
    if mask == ALL {
        *row = values;
    } else {
        for lane in 0..LANES {
            row[lane] = if mask >> lane & 1 != 0 {
                values[lane]
            } else {
                row[lane]
            };
        }
    }
}

/// Applies a function to the values of two register rows, lane by lane.
#[inline(always)]
fn of_rows<A: Copy, B: Copy, T: Copy + Default>(
    a: &[A; LANES],
    b: &[B; LANES],
    f: impl Fn(A, B) -> T,
) -> [T; LANES] {
    let mut result = [T::default(); LANES];
    for lane in 0..LANES {
        result[lane] = f(a[lane], b[lane]);
    }
    result
}

impl Warp {
    fn put_words(&mut self, to: u32, values: WordRow, mask: u32) {
        put(&mut self.words[to as usize], values, mask);
    }

    fn put_doubles(&mut self, to: u32, values: DoubleRow, mask: u32) {
        put(&mut self.doubles[to as usize], values, mask);
    }

    #[inline(always)]
    fn of_one(&mut self, to: u32, from: u32, mask: u32, f: impl Fn(u32) -> u32) {
        self.put_words(to, self.words[from as usize].map(f), mask);
    }

    #[inline(always)]
    fn of_two(&mut self, to: u32, from: [u32; 3], mask: u32, f: impl Fn(u32, u32) -> u32) {
        let [a, b, _] = from;
        let (a, b) = (&self.words[a as usize], &self.words[b as usize]);
        self.put_words(to, of_rows(a, b, f), mask);
    }

    #[inline(always)]
    fn of_three(&mut self, to: u32, from: [u32; 3], mask: u32, f: impl Fn(u32, u32, u32) -> u32) {
        let [a, b, c] = from.map(|row| &self.words[row as usize]);
        let mut result = [0; LANES];
        for lane in 0..LANES {
            result[lane] = f(a[lane], b[lane], c[lane]);
        }
        self.put_words(to, result, mask);
    }

    #[inline(always)]
    fn of_floats(&mut self, to: u32, from: [u32; 3], mask: u32, f: impl Fn(f32, f32) -> f32) {
        self.of_two(to, from, mask, |a, b| single_bits(f(float(a), float(b))));
    }

    pub fn compute_words(&mut self, operation: W, to: u32, from: [u32; 3], mask: u32) {
        match operation {
            W::Move => self.of_one(to, from[0], mask, |a| a),
            W::Add => self.of_two(to, from, mask, u32::wrapping_add),
            W::Subtract => self.of_two(to, from, mask, u32::wrapping_sub),
            W::Multiply => self.of_two(to, from, mask, u32::wrapping_mul),
            W::MultiplyAdd => {
                self.of_three(to, from, mask, |a, b, c| a.wrapping_mul(b).wrapping_add(c))
            }
            W::MultiplyHigh => self.of_two(to, from, mask, |a, b| {
                ((u64::from(a) * u64::from(b)) >> 32) as u32
            }),
            W::And => self.of_two(to, from, mask, |a, b| a & b),
            W::Or => self.of_two(to, from, mask, |a, b| a | b),
            W::Xor => self.of_two(to, from, mask, |a, b| a ^ b),
            W::Not => self.of_one(to, from[0], mask, |a| !a),
            W::ShiftLeft => {
                self.of_two(
                    to,
                    from,
                    mask,
                    |a, b| {
                        if b < 32 { a << shifted(b, 32) } else { 0 }
                    },
                )
            }
            W::ShiftRight => {
                self.of_two(
                    to,
                    from,
                    mask,
                    |a, b| {
                        if b < 32 { a >> shifted(b, 32) } else { 0 }
                    },
                )
            }
            W::ShiftRightSigned => {
                self.of_two(to, from, mask, |a, b| (a as i32 >> shifted(b, 32)) as u32);
            }
            W::Min => self.of_two(to, from, mask, u32::min),
            W::Max => self.of_two(to, from, mask, u32::max),
            W::MinSigned => self.of_two(to, from, mask, |a, b| (a as i32).min(b as i32) as u32),
            W::MaxSigned => self.of_two(to, from, mask, |a, b| (a as i32).max(b as i32) as u32),
            W::AddFloat => self.of_floats(to, from, mask, |a, b| a + b),
            W::SubtractFloat => self.of_floats(to, from, mask, |a, b| a - b),
            W::MultiplyFloat => self.of_floats(to, from, mask, |a, b| a * b),
            W::MultiplyAddFloat => self.of_three(to, from, mask, |a, b, c| {
                single_bits(float(a).mul_add(float(b), float(c)))
            }),
            W::MinFloat => self.of_floats(to, from, mask, min),
            W::MaxFloat => self.of_floats(to, from, mask, max),
            W::NegateFloat => self.of_one(to, from[0], mask, |a| a ^ 1 << 31),
            W::AbsoluteFloat => self.of_one(to, from[0], mask, |a| a & !(1 << 31)),
            W::Exponential => {
                self.of_one(to, from[0], mask, |a| single_bits(exponential(float(a))));
            }
            W::ToFloat => self.of_one(to, from[0], mask, |a| (a as f32).to_bits()),
            W::ToFloatSigned => self.of_one(to, from[0], mask, |a| (a as i32 as f32).to_bits()),
            W::PairBrain => self.of_two(to, from, mask, |high, low| {
                u32::from(to_brain(float(low))) | u32::from(to_brain(float(high))) << 16
            }),
            W::PairHalf => self.of_two(to, from, mask, |high, low| {
                u32::from(to_half(float(low))) | u32::from(to_half(float(high))) << 16
            }),
        }
    }

    #[inline(always)]
    fn double_of_two(&mut self, to: u32, from: [u32; 3], mask: u32, f: impl Fn(u64, u64) -> u64) {
        let [a, b, _] = from;
        let (a, b) = (&self.doubles[a as usize], &self.doubles[b as usize]);
        self.put_doubles(to, of_rows(a, b, f), mask);
    }

    #[inline(always)]
    fn double_shifted(&mut self, to: u32, from: [u32; 3], mask: u32, f: impl Fn(u64, u32) -> u64) {
        let [a, b, _] = from;
        let (a, b) = (&self.doubles[a as usize], &self.words[b as usize]);
        self.put_doubles(to, of_rows(a, b, f), mask);
    }

    /// Computes a 64-bit result from two rows of 32-bit words, lane by lane. If `adds` is true, the 64-bit values of
    /// the third row are added to the result.
    #[inline(always)]
    fn wide(
        &mut self,
        to: u32,
        from: [u32; 3],
        adds: bool,
        mask: u32,
        f: impl Fn(u32, u32) -> u64,
    ) {
        let (a, b) = (&self.words[from[0] as usize], &self.words[from[1] as usize]);
        let mut result = match adds {
            true => self.doubles[from[2] as usize],
            false => [0; LANES],
        };
        for lane in 0..LANES {
            result[lane] = result[lane].wrapping_add(f(a[lane], b[lane]));
        }
        self.put_doubles(to, result, mask);
    }

    pub fn compute_doubles(&mut self, operation: D, to: u32, from: [u32; 3], mask: u32) {
        let unsigned = |a: u32, b: u32| u64::from(a) * u64::from(b);
        let signed = |a: u32, b: u32| (i64::from(a as i32) * i64::from(b as i32)) as u64;
        match operation {
            D::Move => self.put_doubles(to, self.doubles[from[0] as usize], mask),
            D::Add => self.double_of_two(to, from, mask, u64::wrapping_add),
            D::Subtract => self.double_of_two(to, from, mask, u64::wrapping_sub),
            D::Multiply => self.double_of_two(to, from, mask, u64::wrapping_mul),
            D::MultiplyAdd => {
                let addend = self.doubles[from[2] as usize];
                let [a, b, _] = from.map(|row| &self.doubles[row as usize]);
                let mut result = addend;
                for lane in 0..LANES {
                    result[lane] = a[lane].wrapping_mul(b[lane]).wrapping_add(addend[lane]);
                }
                self.put_doubles(to, result, mask);
            }
            D::And => self.double_of_two(to, from, mask, |a, b| a & b),
            D::Or => self.double_of_two(to, from, mask, |a, b| a | b),
            D::ShiftLeft => {
                self.double_shifted(
                    to,
                    from,
                    mask,
                    |a, b| {
                        if b < 64 { a << shifted(b, 64) } else { 0 }
                    },
                )
            }
            D::ShiftRight => {
                self.double_shifted(
                    to,
                    from,
                    mask,
                    |a, b| {
                        if b < 64 { a >> shifted(b, 64) } else { 0 }
                    },
                )
            }
            D::MultiplyWide => self.wide(to, from, false, mask, unsigned),
            D::MultiplyWideSigned => self.wide(to, from, false, mask, signed),
            D::MultiplyAddWide => self.wide(to, from, true, mask, unsigned),
            D::MultiplyAddWideSigned => self.wide(to, from, true, mask, signed),
            D::Widen => {
                self.put_doubles(to, self.words[from[0] as usize].map(u64::from), mask);
            }
            D::WidenSigned => {
                let widened = self.words[from[0] as usize].map(|a| i64::from(a as i32) as u64);
                self.put_doubles(to, widened, mask);
            }
        }
    }

    pub fn narrow(&mut self, to: u32, from: u32, mask: u32) {
        let values = self.doubles[from as usize].map(|value| value as u32);
        self.put_words(to, values, mask);
    }

    #[inline(always)]
    fn compared(&mut self, to: u32, from: [u32; 2], mask: u32, f: impl Fn(u32, u32) -> bool) {
        let [a, b] = from.map(|row| &self.words[row as usize]);
        let mut result = 0;
        for lane in 0..LANES {
            result |= u32::from(f(a[lane], b[lane])) << lane;
        }
        self.put_predicate(to, result, mask);
    }

    pub fn put_predicate(&mut self, to: u32, values: u32, mask: u32) {
        let row = &mut self.predicates[to as usize];
        *row = *row & !mask | values & mask;
    }

    pub fn compare_words(&mut self, comparison: C, to: u32, from: [u32; 2], mask: u32) {
        match comparison {
            C::Equal => self.compared(to, from, mask, |a, b| a == b),
            C::NotEqual => self.compared(to, from, mask, |a, b| a != b),
            C::Less => self.compared(to, from, mask, |a, b| a < b),
            C::LessOrEqual => self.compared(to, from, mask, |a, b| a <= b),
            C::Greater => self.compared(to, from, mask, |a, b| a > b),
            C::GreaterOrEqual => self.compared(to, from, mask, |a, b| a >= b),
            C::LessSigned => self.compared(to, from, mask, |a, b| (a as i32) < b as i32),
            C::LessOrEqualSigned => self.compared(to, from, mask, |a, b| a as i32 <= b as i32),
            C::GreaterSigned => self.compared(to, from, mask, |a, b| a as i32 > b as i32),
            C::GreaterOrEqualSigned => self.compared(to, from, mask, |a, b| a as i32 >= b as i32),
            C::EqualFloat => self.compared(to, from, mask, |a, b| float(a) == float(b)),
            C::NotEqualFloat => self.compared(to, from, mask, |a, b| float(a) != float(b)),
            C::LessFloat => self.compared(to, from, mask, |a, b| float(a) < float(b)),
            C::LessOrEqualFloat => self.compared(to, from, mask, |a, b| float(a) <= float(b)),
            C::GreaterFloat => self.compared(to, from, mask, |a, b| float(a) > float(b)),
            C::GreaterOrEqualFloat => self.compared(to, from, mask, |a, b| float(a) >= float(b)),
        }
    }

    pub fn select_words(&mut self, to: u32, from: [u32; 2], condition: Guard, mask: u32) {
        let holds = self.holds(condition);
        let [a, b] = from.map(|row| &self.words[row as usize]);
        let mut result = [0; LANES];
        for lane in 0..LANES {
            result[lane] = if holds >> lane & 1 != 0 {
                a[lane]
            } else {
                b[lane]
            };
        }
        self.put_words(to, result, mask);
    }

    pub fn select(&mut self, to: Register, from: [Register; 2], condition: Guard, mask: u32) {
        let holds = self.holds(condition);
        for lane in lanes(mask) {
            let chosen = from[usize::from(holds >> lane & 1 == 0)];
            self.set(to, lane, self.get(chosen, lane));
        }
    }

    pub fn combine(&mut self, logic: Logic, to: u32, from: [u32; 2], mask: u32) {
        let [a, b] = from.map(|row| self.predicates[row as usize]);
        self.put_predicate(to, combined(logic, a, b), mask);
    }

    /// Computes any arithmetic operation, one lane at a time.
    ///
    /// # Errors
    /// Returns an error if the operation is not supported for this type.
    pub fn compute(
        &mut self,
        arithmetic: Arithmetic,
        to: Register,
        from: [Register; 4],
        mask: u32,
    ) -> Result<(), Fault> {
        for lane in lanes(mask) {
            let operands = from.map(|register| self.get(register, lane));
            let result = arithmetic
                .of(operands)
                .ok_or_else(|| Fault::Unsupported(format!("{arithmetic:?}")))?;
            self.set(to, lane, result);
        }
        Ok(())
    }

    /// Returns the mask of the lanes in `mask` for which a comparison holds.
    pub fn compare(&self, compared: &Compare, mask: u32) -> u32 {
        let [a, b] = compared.from.map(|register| self.row(register));
        lanes(mask)
            .filter(|lane| compare(compared.comparison, compared.number, a[*lane], b[*lane]))
            .fold(0, |holds, lane| holds | 1 << lane)
    }

    pub fn compare_and_combine(&mut self, compared: &Compare, mask: u32) {
        let mut holds = self.compare(compared, mask);
        let mut opposite = !holds;
        if let Some((logic, condition)) = compared.combined {
            let other = self.holds(condition);
            holds = combined(logic, holds, other);
            opposite = combined(logic, opposite, other);
        }
        self.put_predicate(compared.to, holds, mask);
        if let Some(to) = compared.opposite {
            self.put_predicate(to, opposite, mask);
        }
    }

    pub fn set_word(&mut self, compared: &Compare, truth: u32, to: u32, mask: u32) {
        let holds = self.compare(compared, mask);
        for lane in lanes(mask) {
            self.words[to as usize][lane] = truth * (holds >> lane & 1);
        }
    }

    pub fn set_halves(
        &mut self,
        comparison: Comparison,
        number: Type,
        truth: u32,
        to: u32,
        from: [Register; 2],
        mask: u32,
    ) {
        let [a, b] = from.map(|register| self.row(register));
        for lane in lanes(mask) {
            let holds = |shift: u32| {
                let holds = compare(comparison, number, a[lane] >> shift, b[lane] >> shift);
                (u32::from(holds) * truth) << shift
            };
            self.words[to as usize][lane] = holds(0) | holds(16);
        }
    }

    pub fn convert(&mut self, conversion: Conversion, to: Register, from: Register, mask: u32) {
        for lane in lanes(mask) {
            self.set(to, lane, convert(conversion, self.get(from, lane)));
        }
    }

    pub fn pack(&mut self, to: Register, from: &[Register], mask: u32) {
        let bits = bits_of(to) / from.len() as u32;
        for lane in lanes(mask) {
            let packed = from.iter().enumerate().fold(0, |packed, (k, register)| {
                let part = self.get(*register, lane) & low_bits(bits);
                packed | part << (k as u32 * bits)
            });
            self.set(to, lane, packed);
        }
    }

    pub fn unpack(&mut self, to: &[Register], from: Register, mask: u32) {
        let bits = bits_of(from) / to.len() as u32;
        let row = self.row(from);
        for (k, register) in to.iter().enumerate() {
            let part = row.map(|value| value >> (k as u32 * bits) & low_bits(bits));
            self.set_row(*register, &part, mask);
        }
    }

    pub fn shift_address(&mut self, to: u32, from: u32, offset: u64, mask: u32) {
        let values = self.doubles[from as usize].map(|address| address.wrapping_add(offset));
        self.put_doubles(to, values, mask);
    }
}

fn combined(logic: Logic, a: u32, b: u32) -> u32 {
    match logic {
        Logic::Move => a,
        Logic::And => a & b,
        Logic::Or => a | b,
        Logic::Xor => a ^ b,
        Logic::Not => !a,
    }
}

fn bits_of(register: Register) -> u32 {
    match register {
        Register::Predicate(_) => 1,
        Register::Word(_) => 32,
        Register::Double(_) => 64,
    }
}

fn low_bits(bits: u32) -> u64 {
    u64::MAX >> (64 - bits)
}
