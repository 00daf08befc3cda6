//! Products of matrices, and loads and stores of their tiles. Sums are f32, added one after the other and rounded each time: a card
//! adds in another order and rounds elsewhere.

mod mma;
mod tiles;
mod wgmma;
mod wmma;

pub use wgmma::Product;

use crate::cube::{ALL, WordRow};
use crate::fault::Fault;
use crate::numbers::{half_to_single, single_bits};
use crate::ptx::Type;

/// Rows of a warp's tile, and how deep its products are.
const ROWS: usize = 16;
const DEPTH: usize = 16;

/// The columns that a register of sums has two of.
const COLUMNS: usize = 8;

/// Whether a warp's lanes are all there, as these instructions ask.
fn check_all(mask: u32) -> Result<(), Fault> {
    match mask {
        ALL => Ok(()),
        _ => Err(Fault::Argument("not all lanes take part".into())),
    }
}

/// The row of a tile of which a lane has a register's two elements, and the first of their columns.
fn place(lane: usize) -> (usize, usize) {
    (lane / 4, 2 * (lane % 4))
}

/// The two halves of a word.
fn halves(half: Type, word: u32) -> [f32; 2] {
    [word as u16, (word >> 16) as u16].map(|bits| half_to_single(half, bits))
}

/// Takes a left operand apart: registers are of the upper and lower eight rows, then the same of the next eight columns.
fn left_operand<'a>(
    half: Type,
    registers: impl Iterator<Item = &'a WordRow>,
) -> [[f32; DEPTH]; ROWS] {
    let mut matrix = [[0.0; DEPTH]; ROWS];
    for (k, register) in registers.enumerate() {
        for (lane, word) in register.iter().enumerate() {
            let (row, column) = place(lane);
            let (row, column) = (row + 8 * (k % 2), column + 8 * (k / 2));
            matrix[row][column..column + 2].copy_from_slice(&halves(half, *word));
        }
    }
    matrix
}

/// Adds the product of a left operand and eight columns of a right one to a tile of sums.
fn add_product(
    sums: &mut [[f32; COLUMNS]; ROWS],
    left: &[[f32; DEPTH]; ROWS],
    right: &[[f32; COLUMNS]; DEPTH],
    depth: usize,
) {
    for (sums, left) in sums.iter_mut().zip(left) {
        for (x, right) in left[..depth].iter().zip(right) {
            for (sum, y) in sums.iter_mut().zip(right) {
                *sum = x.mul_add(*y, *sum);
            }
        }
    }
}

/// A tile of sums from the four registers that have it.
fn sums_of(registers: [&WordRow; 4]) -> [[f32; COLUMNS]; ROWS] {
    let mut sums = [[0.0; COLUMNS]; ROWS];
    for (k, register) in registers.iter().enumerate() {
        for (lane, word) in register.iter().enumerate() {
            let (row, column) = place(lane);
            sums[row + 8 * (k / 2)][column + k % 2] = f32::from_bits(*word);
        }
    }
    sums
}

/// What one of the four registers has of a tile of sums.
fn register_of(sums: &[[f32; COLUMNS]; ROWS], k: usize) -> WordRow {
    std::array::from_fn(|lane| {
        let (row, column) = place(lane);
        single_bits(sums[row + 8 * (k / 2)][column + k % 2])
    })
}
