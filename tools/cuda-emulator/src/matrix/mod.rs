//! The matrix instructions, and the loads and stores of their tiles. The accumulators are f32, and the code names them
//! `sums`. The emulator rounds after each addition. A GPU accumulates in another order and rounds at other points.

mod mma;
mod tiles;
mod wgmma;
mod wmma;

pub use wgmma::Product;

use crate::cube::{ALL, WordRow};
use crate::fault::Fault;
use crate::numbers::{half_to_single, single_bits};
use crate::ptx::Type;

/// The number of rows of the left matrix that a warp multiplies. The accumulators have the same number of rows.
const ROWS: usize = 16;
/// The inner dimension (k) of a warp's matrix multiplication.
const DEPTH: usize = 16;

/// The number of columns in a tile of accumulators. A pair of registers holds two neighboring columns per lane.
const COLUMNS: usize = 8;

/// Checks that all lanes of the warp execute the instruction, as matrix instructions require.
fn check_all(mask: u32) -> Result<(), Fault> {
    match mask {
        ALL => Ok(()),
        _ => Err(Fault::Argument("not all lanes take part".into())),
    }
}

/// Returns the position of the two neighboring elements that a lane holds in an 8 × 8 tile: the row and the first
/// column.
fn place(lane: usize) -> (usize, usize) {
    (lane / 4, 2 * (lane % 4))
}

/// Converts the two 16-bit floats in a word to f32.
fn halves(half: Type, word: u32) -> [f32; 2] {
    [word as u16, (word >> 16) as u16].map(|bits| half_to_single(half, bits))
}

/// Unpacks the left matrix from its registers. The first two registers hold the first eight columns: one register holds
/// the upper eight rows, and the other holds the lower eight rows. The last two registers hold the next eight columns
/// in the same order.
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

/// Multiplies the left matrix by eight columns of the right matrix, and adds the result to the accumulators.
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

/// Returns the accumulators of a 16 × 8 tile, which are in four registers.
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

/// Returns register `k` of the four registers that contain the accumulators of a tile.
fn register_of(sums: &[[f32; COLUMNS]; ROWS], k: usize) -> WordRow {
    std::array::from_fn(|lane| {
        let (row, column) = place(lane);
        single_bits(sums[row + 8 * (k / 2)][column + k % 2])
    })
}
