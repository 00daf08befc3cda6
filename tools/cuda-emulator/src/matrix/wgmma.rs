//! The instruction `wgmma`: a matrix multiplication by a warpgroup (four warps) with matrices in shared memory. The
//! emulator computes the result as soon as the instruction starts. The race detection reports a kernel that writes to
//! the matrices before the warp has waited for its `wgmma`.

use super::{
    COLUMNS, DEPTH, ROWS, add_product, check_all, halves, left_operand, register_of, sums_of,
};
use crate::cube::{Cube, PIECE, Warp, swizzled};
use crate::fault::Fault;
use crate::ptx::{Left, Wgmma};

/// The number of warps per warpgroup.
const WARPS: usize = 4;

/// The number of halves (16-bit floats) in a 16-byte piece. The swizzle moves such pieces as a unit.
const PIECE_HALVES: usize = PIECE / 2;

/// The number of bytes per row of a tile. A matrix in shared memory consists of such tiles.
const TILE_ROW: usize = 128;
/// The number of rows per tile.
const TILE_ROWS: usize = 8;
/// The number of halves per row of a tile.
const TILE_COLUMNS: usize = 64;

/// A pending `wgmma`. It has the offsets of the 16-byte pieces that the instruction reads from shared memory.
pub struct Product {
    reads: Vec<usize>,
}

/// A matrix in shared memory, in swizzled tiles of 8 rows of 128 bytes.
struct Operand {
    start: u64,
    /// The distance in bytes between a tile and the tile with the next 8 rows.
    rows_apart: usize,
    /// The distance in bytes between a tile and the tile with the next 64 columns.
    columns_apart: usize,
}

impl Operand {
    fn of(descriptor: u64) -> Result<Self, Fault> {
        let field = |from: u32| (descriptor >> from & 0x3fff) << 4;
        if descriptor >> 62 != 1 || descriptor >> 49 & 7 != 0 {
            return Err(Fault::Unsupported(format!(
                "the layout of the descriptor {descriptor:#x}"
            )));
        }
        Ok(Self {
            start: field(0),
            rows_apart: field(32) as usize,
            columns_apart: field(16) as usize,
        })
    }

    /// Returns the address of the 16-byte piece that begins at the given row and column.
    fn piece(&self, row: usize, column: usize) -> u64 {
        let tile = row / TILE_ROWS * self.rows_apart + column / TILE_COLUMNS * self.columns_apart;
        let inside = row % TILE_ROWS * TILE_ROW + column % TILE_COLUMNS * 2;
        swizzled(self.start + (tile + inside) as u64, 3)
    }
}

impl Cube<'_> {
    fn piece(
        &self,
        wgmma: &Wgmma,
        address: u64,
        product: &mut Product,
    ) -> Result<[f32; PIECE_HALVES], Fault> {
        let at = self.shared.offset(address, PIECE)?;
        product.reads.push(at);
        let mut piece = [0.0; PIECE_HALVES];
        let bytes = &self.shared.bytes()[at..at + PIECE];
        for (to, from) in piece.chunks_exact_mut(2).zip(bytes.chunks_exact(4)) {
            let word = u32::from_le_bytes([from[0], from[1], from[2], from[3]]);
            to.copy_from_slice(&halves(wgmma.half, word));
        }
        Ok(piece)
    }

    fn left(
        &self,
        warp: &Warp,
        wgmma: &Wgmma,
        product: &mut Product,
    ) -> Result<[[f32; DEPTH]; ROWS], Fault> {
        let row = match &wgmma.left {
            Left::Registers(registers) => {
                let rows = registers.iter().map(|row| &warp.words[*row as usize]);
                return Ok(left_operand(wgmma.half, rows));
            }
            Left::Shared(row) => *row,
        };
        let operand = Operand::of(warp.doubles[row as usize][0])?;
        let mut matrix = [[0.0; DEPTH]; ROWS];
        for (row, values) in matrix.iter_mut().enumerate() {
            for column in (0..DEPTH).step_by(PIECE_HALVES) {
                let address = operand.piece(warp.id % WARPS * ROWS + row, column);
                let piece = self.piece(wgmma, address, product)?;
                values[column..column + PIECE_HALVES].copy_from_slice(&piece);
            }
        }
        Ok(matrix)
    }

    /// Returns the eight columns of the right matrix that begin at column `first`.
    fn right(
        &self,
        operand: &Operand,
        wgmma: &Wgmma,
        first: usize,
        product: &mut Product,
    ) -> Result<[[f32; COLUMNS]; DEPTH], Fault> {
        let mut matrix = [[0.0; COLUMNS]; DEPTH];
        if wgmma.transposed {
            for (depth, values) in matrix.iter_mut().enumerate() {
                *values = self.piece(wgmma, operand.piece(depth, first), product)?;
            }
            return Ok(matrix);
        }
        for column in 0..COLUMNS {
            for depth in (0..DEPTH).step_by(PIECE_HALVES) {
                let piece = self.piece(wgmma, operand.piece(first + column, depth), product)?;
                for (values, value) in matrix[depth..].iter_mut().zip(piece) {
                    values[column] = value;
                }
            }
        }
        Ok(matrix)
    }

    pub fn wgmma(&mut self, warp: &mut Warp, wgmma: &Wgmma, mask: u32) -> Result<(), Fault> {
        check_all(mask)?;
        let mut product = Product { reads: Vec::new() };
        let left = self.left(warp, wgmma, &mut product)?;
        let right = Operand::of(warp.doubles[wgmma.right as usize][0])?;
        let goes_on = warp.holds(wgmma.accumulates) & 1 != 0;
        for (tile, registers) in wgmma.sums.chunks_exact(4).enumerate() {
            let mut sums = match goes_on {
                true => sums_of(std::array::from_fn(|k| &warp.words[registers[k] as usize])),
                false => [[0.0; COLUMNS]; ROWS],
            };
            let right = self.right(&right, wgmma, tile * COLUMNS, &mut product)?;
            add_product(&mut sums, &left, &right, DEPTH);
            for (k, to) in registers.iter().enumerate() {
                warp.words[*to as usize] = register_of(&sums, k);
            }
        }
        for at in &product.reads {
            self.shared.read_starts(&warp.clock, *at, PIECE);
        }
        if let Some(group) = warp.products.back_mut() {
            group.push(product);
        }
        Ok(())
    }

    /// Completes the oldest committed groups of `wgmma` until at most `left` committed groups are pending. Instructions
    /// that are not committed stay pending.
    pub fn products_end(&mut self, warp: &mut Warp, left: usize) {
        while warp.products.len() > left + 1 {
            let group = warp.products.pop_front();
            for at in group
                .into_iter()
                .flatten()
                .flat_map(|product| product.reads)
            {
                self.shared.read_ends(&warp.clock, at, PIECE);
            }
        }
    }
}
