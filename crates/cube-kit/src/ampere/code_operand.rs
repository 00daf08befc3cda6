//! Matrix products of a warp on tensor cores, with 8-bit codes as the right operand in shared memory. The left operand
//! is bf16, and the codes are converted to bf16 in registers.
//!
//! Budget: a code takes one byte of shared memory, which is read once. Seven instructions convert four int8 codes, and
//! nine instructions convert four e4m3 codes. None of these instructions runs on the tensor cores.
//!
//! A subtile of codes has 128 columns. `ldmatrix` moves 16-bit elements. Each element holds two neighboring codes of a
//! row. The first codes of all elements form the right operand of one `mma.sync`. The second codes form the right
//! operand of another `mma.sync`. The columns are therefore in an unusual order, but no data has to move between lanes:
//!
//! - For scores (summed over columns), a lane holds codes of four neighboring columns of a row. The columns of the left
//!   operand must be in the order in which lanes hold the codes: see [`order_columns()`].
//! - For sums (summed over rows), a lane has two neighboring columns of two rows. Of each 16 columns of the result, one
//!   `mma.sync` computes the 8 even columns, and another computes the 8 odd columns. Register `i` of lane `l` holds the
//!   result's element in row `l / 4 + 8 (i / 2 % 2)` and column `16 (i / 8) + 4 (l % 4) + 2 (i % 2) + i / 4 % 2`.

use super::FRAGMENT_ROWS;
use super::cp_async::PIECE_BYTES;
use super::mma::{Scores, Sums, addresses, fragment_registers, load, multiply, named};
use crate::hopper::wgmma::{STEP, SUBTILE_STEPS, moves, registers};
use crate::nvidia::ptx::value_of;
use crate::nvidia::{Half, ROW_BYTES, registers as vector_of};
use cubecl::prelude::*;

/// The number of 8-bit codes in a row of a subtile in shared memory.
pub const WORDS_SUBTILE: usize = ROW_BYTES;

/// The number of 16-column groups of 8-bit codes that one `ldmatrix` loads.
const LOADED_STEPS: usize = 2;

/// The format of the codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codes {
    /// Signed integers.
    Int8,
    /// Floats with 4 exponent bits and 3 mantissa bits (e4m3fn). A NaN code is decoded as ±480.
    E4m3,
}

impl Codes {
    /// Returns PTX that declares the registers that the PTX of [`numbers`](Self::numbers) uses. The returned PTX also
    /// sets the constants among these registers. Each constant is a pair of bf16 numbers.
    const fn constants(self) -> &'static str {
        match self {
            // `base` is 128: `base` OR a code's 7 low bits is 128 plus these bits. `shift` is −128: `shift` OR a set
            // sign bit of a code is −256. `one` is 1.
            Self::Int8 => {
                ".reg .b32 base, shift, one, low, high, next;\n\
                 mov.b32 base, 0x43004300;\nmov.b32 shift, 0xC300C300;\nmov.b32 one, 0x3F803F80;\n"
            }
            // `factor` is 2¹²⁰. `zero2` is −0: a product plus −0 is the unchanged product.
            Self::E4m3 => {
                ".reg .b32 factor, zero2, low, high;\n\
                 mov.b32 factor, 0x7B807B80;\nmov.b32 zero2, 0x80008000;\n"
            }
        }
    }

    /// Returns PTX that converts the four codes of a register to bf16. The first code of each 16-bit half goes to
    /// `even`, and the second code goes to `odd`.
    fn numbers(self, register: &str, even: &str, odd: &str) -> String {
        match self {
            Self::Int8 => int8_numbers(register, even, odd),
            Self::E4m3 => e4m3_numbers(register, even, odd),
        }
    }
}

/// Returns PTX that converts e4m3 codes to bf16. A code's exponent becomes the low bits of a bf16 exponent, and the
/// code's mantissa becomes the high bits of the bf16 mantissa. The exponent biases differ by 120, so a product with
/// 2¹²⁰ gives the number exactly, subnormal codes included.
fn e4m3_numbers(register: &str, even: &str, odd: &str) -> String {
    format!(
        "shl.b32 low, {register}, 4;\nshl.b32 high, {register}, 8;\nand.b32 low, low, 0x07F007F0;\n\
         lop3.b32 {even}, high, 0x80008000, low, 0xEA;\nfma.rn.bf16x2 {even}, {even}, factor, zero2;\n\
         shr.u32 low, {register}, 4;\nand.b32 low, low, 0x07F007F0;\n\
         lop3.b32 {odd}, {register}, 0x80008000, low, 0xEA;\nfma.rn.bf16x2 {odd}, {odd}, factor, zero2;\n"
    )
}

/// Returns PTX that converts int8 codes to bf16.
///
/// Each result is the sum of two bf16 numbers, without rounding. The first number is 128 plus the code's 7 low bits.
/// The second number is −256 if the code's sign bit is set, and −128 otherwise.
fn int8_numbers(register: &str, even: &str, odd: &str) -> String {
    let half = |from: &str, to: &str| {
        format!(
            "lop3.b32 low, {from}, 0x007F007F, base, 0xEA;\nlop3.b32 high, {from}, 0x00800080, shift, 0xEA;\n\
             fma.rn.bf16x2 {to}, low, one, high;\n"
        )
    };
    half(register, even) + &format!("shr.u32 next, {register}, 8;\n") + &half("next", odd)
}

/// Returns the PTX of [`word_scores()`]. Outputs: the scores. Inputs: the lane's addresses of the left and right
/// operand.
fn scores_text(product: &Scores, codes: Codes) -> String {
    let count = product.registers();
    let mut text = String::from(
        "{\n.reg .b32 la<4>, ra<4>, n<2>;\n.reg .f32 zero;\nmov.f32 zero, 0f00000000;\n",
    );
    text += codes.constants();
    for fragment in 0..product.fragments {
        text += &format!(".reg .b32 a{fragment}_<4>;\n");
    }
    for pair in 0..product.columns / 16 {
        text += &format!(".reg .b32 b{pair}_<4>;\n");
    }
    text += &addresses("la", &format!("%{count}"));
    text += &addresses("ra", &format!("%{}", count + 1));
    for step in 0..product.depth.div_ceil(STEP) {
        if step % LOADED_STEPS == 0 {
            let loaded = step / LOADED_STEPS;
            let (subtile, within) = (loaded / SUBTILE_STEPS, loaded % SUBTILE_STEPS);
            for pair in 0..product.columns / 16 {
                let rows = subtile * product.right_rows + 16 * pair;
                let name = format!("b{pair}_");
                text += &load(&name, "ra", within, rows * ROW_BYTES, false);
            }
        }
        let (subtile, within) = (step / SUBTILE_STEPS, step % SUBTILE_STEPS);
        for fragment in 0..product.fragments {
            let rows = subtile * product.left_rows + FRAGMENT_ROWS * fragment;
            let name = format!("a{fragment}_");
            text += &load(&name, "la", within, rows * ROW_BYTES, false);
        }
        for pair in 0..product.columns / 16 {
            for half in 0..2 {
                let register = format!("b{pair}_{}", 2 * half + step % LOADED_STEPS);
                text += &codes.numbers(&register, "n0", "n1");
                for fragment in 0..product.fragments {
                    let first =
                        fragment * fragment_registers(product.columns) + 8 * pair + 4 * half;
                    let sum = registers(first, 4);
                    let before = match step {
                        0 => String::from("zero, zero, zero, zero"),
                        _ => sum.clone(),
                    };
                    let left = named(&format!("a{fragment}_"), 0, 4);
                    text += &multiply(product.half, &sum, &left, "n0, n1", &before);
                }
            }
        }
    }
    text + "}\n"
}

/// Returns the PTX of [`add_word_product()`]. Outputs: the sums. Inputs: the previous sums, the left operand's
/// registers, and the lane's address of the right operand.
fn sums_text(product: &Sums, codes: Codes) -> String {
    let count = product.registers();
    let left = 2 * count;
    let address = left + product.left_registers();
    let mut text = String::from("{\n.reg .b32 ra<4>, b<4>, n<4>;\n");
    text += codes.constants();
    text += &moves(count, count);
    text += &addresses("ra", &format!("%{address}"));
    let steps = product.columns / STEP;
    for step in 0..product.depth / STEP {
        for loaded in 0..steps.div_ceil(LOADED_STEPS) {
            let (subtile, within) = (loaded / SUBTILE_STEPS, loaded % SUBTILE_STEPS);
            let rows = subtile * product.right_rows + STEP * step;
            text += &load("b", "ra", within, rows * ROW_BYTES, true);
            for of_load in 0..LOADED_STEPS.min(steps - LOADED_STEPS * loaded) {
                // The registers n0 and n2 hold the right operand for the even columns of the result. The registers n1
                // and n3 hold the right operand for the odd columns.
                text += &codes.numbers(&format!("b{}", 2 * of_load), "n0", "n1");
                text += &codes.numbers(&format!("b{}", 2 * of_load + 1), "n2", "n3");
                for (tile, right) in ["n0, n2", "n1, n3"].into_iter().enumerate() {
                    for fragment in 0..product.fragments {
                        let first = fragment * fragment_registers(product.columns)
                            + 8 * (LOADED_STEPS * loaded + of_load)
                            + 4 * tile;
                        let sum = registers(first, 4);
                        let own = left + fragment * vector_of(product.depth / 4) + 4 * step;
                        text += &multiply(product.half, &sum, &registers(own, 4), right, &sum);
                    }
                }
            }
        }
    }
    text + "}\n"
}

/// Returns the PTX of [`order_columns()`]. Inputs: the addresses of two 16-byte pieces.
fn order_text() -> String {
    let loads =
        "ld.shared.v4.b32 {w0, w1, w2, w3}, [%0];\nld.shared.v4.b32 {w4, w5, w6, w7}, [%1];\n";
    let mut text = format!("{{\n.reg .b32 w<8>, o<8>;\n{loads}");
    for lane in 0..4 {
        let of_lane = format!("w{}, w{}", 2 * lane, 2 * lane + 1);
        text += &format!("prmt.b32 o{lane}, {of_lane}, 0x5410;\n");
        text += &format!("prmt.b32 o{}, {of_lane}, 0x7632;\n", lane + 4);
    }
    let stores =
        "st.shared.v4.b32 [%0], {o0, o1, o2, o3};\nst.shared.v4.b32 [%1], {o4, o5, o6, o7};\n";
    text + stores + "}\n"
}

/// Reorders 16 columns of a row of the left operand of [`word_scores()`] into the order in which lanes hold codes. The
/// columns are in two 16-byte pieces, and the first piece is at address `first`.
///
/// Four lanes share the 16 columns, and each of these lanes has four neighboring columns. After the reordering, the
/// first and third columns of each lane come first, in the order of the lanes. The second and fourth columns of each
/// lane follow, in the same order.
#[cube]
pub fn order_columns(first: u32) {
    let text = comptime!(order_text());
    // Flip one address bit to get the address of the second 16-byte piece. The swizzle keeps the two pieces of 16
    // columns next to each other.
    let second = first ^ comptime!(PIECE_BYTES as u32);
    gpu_asm!(
        "{text} // {first} {second}\n",
        first = in(_) value_of::<u32>(first),
        second = in(_) value_of::<u32>(second)
    );
}

/// Returns the scores of the warp's rows. The keys are stored as codes of the format `codes`. The operands must be in
/// shared memory, with the left operand's columns in the order of [`order_columns()`].
#[cube]
pub fn word_scores<NS: Size>(
    left: u32,
    right: u32,
    #[comptime] product: Scores,
    #[comptime] codes: Codes,
) -> Vector<f32, NS> {
    let text = comptime!(checked(product.half, scores_text(&product, codes)));
    let s: Vector<f32, NS>;
    gpu_asm!(
        "{text} // {s} {left} {right}\n",
        s = out(_) s,
        left = in(_) value_of::<u32>(left),
        right = in(_) value_of::<u32>(right)
    );
    s
}

/// Multiplies `left` by a block of codes in shared memory, and adds the product to `sums`. No rows are masked, because
/// no code decodes to NaN.
#[cube]
pub fn add_word_product<NO: Size, NP: Size>(
    sums: Vector<f32, NO>,
    left: Vector<u32, NP>,
    right: u32,
    #[comptime] product: Sums,
    #[comptime] codes: Codes,
) -> Vector<f32, NO> {
    let text = comptime!(checked(product.half, sums_text(&product, codes)));
    let sum: Vector<f32, NO>;
    gpu_asm!(
        "{text} // {sum} {before} {left} {right}\n",
        sum = out(_) sum,
        before = in(_) value_of::<Vector<f32, NO>>(sums),
        left = in(_) value_of::<Vector<u32, NP>>(left),
        right = in(_) value_of::<u32>(right)
    );
    sum
}

/// Checks that the multiplication uses bf16, and returns `text`. The conversion of codes supports no other precision.
fn checked(half: Half, text: String) -> String {
    assert_eq!(half, Half::Bf16, "codes are converted to bf16 only");
    text
}
