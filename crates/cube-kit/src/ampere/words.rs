//! The products of warps whose right operand is int8 in shared memory: of the left one, in bf16, and of codes that become bf16 in registers.
//!
//! Budget: a byte of shared memory a code, read once; 7 instructions for the four codes of a register, of which the matrix unit takes none.
//!
//! The codes of a row lie as halves do, twice as many columns to a subtile: 128. `ldmatrix` moves halves, here two codes of a row each, of
//! which the first becomes the first of two products' operands, and the second the other's. So nothing has to change places:
//!
//! - Of scores, whose columns are summed over, a lane has four neighbouring columns of a row. The left operand has them in the same order:
//!   see [`order_columns`].
//! - Of sums, whose rows are summed over, it has two neighbouring columns of two rows, and the result's even columns are in one tile of 8,
//!   the odd ones in another: register `i` of lane `l` is row `l / 4 + 8 (i / 2 % 2)`, column
//!   `16 (i / 8) + 4 (l % 4) + 2 (i % 2) + i / 4 % 2`, so that a lane has four neighbours of a row.

use super::product::{Scores, Sums, addresses, fragment_registers, load, multiply, named};
use super::{FRAGMENT_ROWS, copy::PIECE_BYTES};
use crate::hopper::ptx::value_of;
use crate::hopper::wgmma::{STEP, SUBTILE_STEPS, moves, registers};
use crate::hopper::{Half, ROW_BYTES, registers as vector_of};
use cubecl::prelude::*;

/// Columns of a row of a subtile of codes.
pub const WORDS_SUBTILE: usize = ROW_BYTES;

/// Columns of the codes that one `ldmatrix` has of a row: two steps.
const LOADED_STEPS: usize = 2;

/// Bits of four bf16 numbers: 128 in both halves, whose last 7 bits are a code's; −128, whose last bit is its sign; and 1.
const CONSTANTS: &str =
    "mov.b32 base, 0x43004300;\nmov.b32 shift, 0xC300C300;\nmov.b32 one, 0x3F803F80;\n";

/// Declares what [`numbers`] uses.
const NAMES: &str = ".reg .b32 base, shift, one, low, high, next;\n";

/// The codes of a register as bf16: the first of its halves to `even`, the others to `odd`. A code of 8 bits is its last 7, less 128 where
/// its sign is set; both are exact under the exponent of 128.
fn numbers(register: &str, even: &str, odd: &str) -> String {
    let half = |from: &str, to: &str| {
        format!(
            "lop3.b32 low, {from}, 0x007F007F, base, 0xEA;\nlop3.b32 high, {from}, 0x00800080, shift, 0xEA;\n\
             fma.rn.bf16x2 {to}, low, one, high;\n"
        )
    };
    half(register, even) + &format!("shr.u32 next, {register}, 8;\n") + &half("next", odd)
}

/// Registers of the scores | the lane's addresses of left and right operand.
fn scores_text(product: &Scores) -> String {
    let count = product.registers();
    let mut text = String::from(
        "{\n.reg .b32 la<4>, ra<4>, n<2>;\n.reg .f32 zero;\nmov.f32 zero, 0f00000000;\n",
    );
    text += NAMES;
    text += CONSTANTS;
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
                text += &numbers(&register, "n0", "n1");
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

/// Registers of the sums | the same, the left operand's, the lane's address of the right one.
fn sums_text(product: &Sums) -> String {
    let count = product.registers();
    let left = 2 * count;
    let address = left + product.left_registers();
    let mut text = String::from("{\n.reg .b32 ra<4>, b<4>, n<4>;\n");
    text += NAMES;
    text += CONSTANTS;
    text += &moves(count, count);
    text += &addresses("ra", &format!("%{address}"));
    let steps = product.columns / STEP;
    for step in 0..product.depth / STEP {
        for loaded in 0..steps.div_ceil(LOADED_STEPS) {
            let (subtile, within) = (loaded / SUBTILE_STEPS, loaded % SUBTILE_STEPS);
            let rows = subtile * product.right_rows + STEP * step;
            text += &load("b", "ra", within, rows * ROW_BYTES, true);
            for of_load in 0..LOADED_STEPS.min(steps - LOADED_STEPS * loaded) {
                // The even columns' operand is n0 and n2, that of the odd ones n1 and n3.
                text += &numbers(&format!("b{}", 2 * of_load), "n0", "n1");
                text += &numbers(&format!("b{}", 2 * of_load + 1), "n2", "n3");
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

/// The addresses of two pieces.
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

/// Brings a row's 16 columns of the left operand of [`word_scores`] into the order in which lanes have those of codes: every lane's first
/// and third of four neighbours, and behind those its second and fourth. They are the two pieces at `first` and the next.
#[cube]
pub fn order_columns(first: u32) {
    let text = comptime!(order_text());
    // Two pieces of a step are neighbours, whichever permutation the row has.
    let second = first ^ comptime!(PIECE_BYTES as u32);
    gpu_asm!(
        "{text} // {first} {second}\n",
        first = in(_) value_of::<u32>(first),
        second = in(_) value_of::<u32>(second)
    );
}

/// The scores of the warp's rows by codes, from operands that are there: the left one's columns in the order of [`order_columns`].
#[cube]
pub fn word_scores<NS: Size>(
    left: u32,
    right: u32,
    #[comptime] product: Scores,
) -> Vector<f32, NS> {
    let text = comptime!(checked(product.half, scores_text(&product)));
    let s: Vector<f32, NS>;
    gpu_asm!(
        "{text} // {s} {left} {right}\n",
        s = out(_) s,
        left = in(_) value_of::<u32>(left),
        right = in(_) value_of::<u32>(right)
    );
    s
}

/// The sums with a block's product, whose right operand is codes that are there. None of these is NaN, and nothing is masked.
#[cube]
pub fn add_word_product<NO: Size, NP: Size>(
    sums: Vector<f32, NO>,
    left: Vector<u32, NP>,
    right: u32,
    #[comptime] product: Sums,
) -> Vector<f32, NO> {
    let text = comptime!(checked(product.half, sums_text(&product)));
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

/// The text of a product in the only precision that codes become.
fn checked(half: Half, text: String) -> String {
    assert_eq!(half, Half::Bf16, "codes become bf16");
    text
}
