//! The instruction `mma.sync` with the shapes 16 × 8 × 8 and 16 × 8 × 16.

use super::{
    COLUMNS, DEPTH, add_product, check_all, halves, left_operand, place, register_of, sums_of,
};
use crate::cube::Warp;
use crate::fault::Fault;
use crate::ptx::Mma;

impl Warp {
    /// Multiplies two matrix fragments of a whole warp, and adds the accumulators to the product.
    ///
    /// # Errors
    /// Returns an error if not all lanes of the warp execute the instruction.
    pub fn mma(&mut self, mma: &Mma, mask: u32) -> Result<(), Fault> {
        check_all(mask)?;
        let row = |row: &u32| &self.words[*row as usize];
        let left = left_operand(mma.half, mma.left.iter().map(row));
        let mut right = [[0.0; COLUMNS]; DEPTH];
        for (k, register) in mma.right.iter().enumerate() {
            for (lane, word) in row(register).iter().enumerate() {
                let (column, depth) = place(lane);
                let [low, high] = halves(mma.half, *word);
                right[depth + 8 * k][column] = low;
                right[depth + 8 * k + 1][column] = high;
            }
        }
        let mut sums = sums_of(mma.sums.map(|at| &self.words[at as usize]));
        add_product(&mut sums, &left, &right, 8 * mma.right.len());
        for (k, to) in mma.to.iter().enumerate() {
            self.words[*to as usize] = register_of(&sums, k);
        }
        Ok(())
    }
}
