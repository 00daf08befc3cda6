//! The instructions `ldmatrix` and `stmatrix`, with tiles of 8 × 8 halves (16-bit floats). The lanes pass the addresses
//! of the tiles' rows.

use super::{check_all, place};
use crate::cube::{Cube, Warp, check_aligned};
use crate::fault::Fault;
use crate::ptx::MatrixAccess;

const SIZE: usize = 8;

/// The size of a tile's row in bytes.
const ROW: usize = 16;

/// Returns the row and the column of an element in its 8 × 8 tile. The element is half `k` (0 or 1) of the two halves
/// (16-bit floats) in the lane's register.
fn element(lane: usize, k: usize, transposed: bool) -> (usize, usize) {
    let (row, column) = place(lane);
    if transposed {
        (column + k, row)
    } else {
        (row, column + k)
    }
}

impl Cube<'_> {
    fn tile_rows(
        &self,
        warp: &Warp,
        access: &MatrixAccess,
        mask: u32,
    ) -> Result<Vec<usize>, Fault> {
        check_all(mask)?;
        warp.shared_addresses(access.address)[..SIZE * access.registers.len()]
            .iter()
            .map(|address| {
                check_aligned(*address, ROW)?;
                self.shared.offset(*address, ROW)
            })
            .collect()
    }

    pub fn load_matrix(
        &mut self,
        warp: &mut Warp,
        access: &MatrixAccess,
        mask: u32,
    ) -> Result<(), Fault> {
        let rows = self.tile_rows(warp, access, mask)?;
        for (rows, register) in rows.chunks_exact(SIZE).zip(&access.registers) {
            for at in rows {
                self.shared.reading(&warp.clock, *at, ROW);
            }
            let bytes = self.shared.bytes();
            let mut tile = [[0; SIZE]; SIZE];
            for (row, at) in tile.iter_mut().zip(rows) {
                for (half, pair) in row.iter_mut().zip(bytes[*at..*at + ROW].chunks_exact(2)) {
                    *half = u32::from(u16::from_le_bytes([pair[0], pair[1]]));
                }
            }
            for (lane, word) in warp.words[*register as usize].iter_mut().enumerate() {
                let half = |k| {
                    let (row, column) = element(lane, k, access.transposed);
                    tile[row][column]
                };
                *word = half(0) | half(1) << 16;
            }
        }
        Ok(())
    }

    pub fn store_matrix(
        &mut self,
        warp: &mut Warp,
        access: &MatrixAccess,
        mask: u32,
    ) -> Result<(), Fault> {
        let rows = self.tile_rows(warp, access, mask)?;
        for (rows, register) in rows.chunks_exact(SIZE).zip(&access.registers) {
            let mut tile = [[0u8; ROW]; SIZE];
            for (lane, word) in warp.words[*register as usize].iter().enumerate() {
                for (k, half) in [*word as u16, (*word >> 16) as u16].into_iter().enumerate() {
                    let (row, column) = element(lane, k, access.transposed);
                    tile[row][2 * column..2 * column + 2].copy_from_slice(&half.to_le_bytes());
                }
            }
            for (at, row) in rows.iter().zip(&tile) {
                self.shared.write(&warp.clock, *at, row);
            }
        }
        Ok(())
    }
}
