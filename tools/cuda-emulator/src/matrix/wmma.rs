//! The `wmma` instructions: matrix multiplication of fragments, and loads and stores of fragments. PTX does not specify
//! the layout of a fragment, so this module chooses one. In row-major order, the elements of the tile fill the lanes of
//! the first register, then the lanes of the second register, and so on. If the registers have space for more elements
//! than the tile has, the tile is repeated.

use super::check_all;
use crate::cube::{Cube, LANES, Warp, WordRow};
use crate::fault::Fault;
use crate::numbers::{half_to_single, single_bits};
use crate::ptx::{Element, Fragment, Wmma, WmmaAccess};

impl Element {
    /// Returns the size of an element in memory in bytes.
    fn bytes(self) -> usize {
        match self {
            Self::Half(_) => 2,
            Self::Reduced | Self::Single => 4,
        }
    }

    /// Returns the number of elements per register.
    fn in_register(self) -> usize {
        4 / self.bytes()
    }

    fn value(self, bits: u32) -> f32 {
        match self {
            Self::Half(half) => half_to_single(half, bits as u16),
            // Tensor cores ignore the lowest 13 bits of a tf32 element.
            Self::Reduced => f32::from_bits(bits & !0x1fff),
            Self::Single => f32::from_bits(bits),
        }
    }
}

impl Fragment {
    fn elements(&self) -> usize {
        self.rows * self.columns
    }

    /// Returns the bits of the tile's elements in row-major order.
    fn bits(&self, words: &[WordRow]) -> Vec<u32> {
        let (per, width) = (self.element.in_register(), 8 * self.element.bytes() as u32);
        (0..self.elements())
            .map(|element| {
                let (slot, part) = (element / per, (element % per) as u32);
                let word = words[self.registers[slot / LANES] as usize][slot % LANES];
                word >> (part * width) & (u32::MAX >> (32 - width))
            })
            .collect()
    }

    fn values(&self, words: &[WordRow]) -> Vec<f32> {
        let bits = self.bits(words).into_iter();
        bits.map(|bits| self.element.value(bits)).collect()
    }

    fn set(&self, words: &mut [WordRow], bits: &[u32]) {
        let (per, width) = (self.element.in_register(), 8 * self.element.bytes() as u32);
        for (k, register) in self.registers.iter().enumerate() {
            for lane in 0..LANES {
                let first = (k * LANES + lane) * per;
                words[*register as usize][lane] = (0..per).fold(0, |word, part| {
                    word | bits[(first + part) % bits.len()] << (part as u32 * width)
                });
            }
        }
    }
}

impl Warp {
    /// Multiplies two fragments of a whole warp, and adds the accumulators to the product.
    ///
    /// # Errors
    /// Returns an error if not all lanes of the warp execute the instruction.
    pub fn wmma(&mut self, wmma: &Wmma, mask: u32) -> Result<(), Fault> {
        check_all(mask)?;
        let (left, right) = (
            wmma.left.values(&self.words),
            wmma.right.values(&self.words),
        );
        let mut sums = wmma.sums.values(&self.words);
        let (depth, columns) = (wmma.left.columns, wmma.right.columns);
        for (sums, left) in sums.chunks_exact_mut(columns).zip(left.chunks_exact(depth)) {
            for (x, right) in left.iter().zip(right.chunks_exact(columns)) {
                for (sum, y) in sums.iter_mut().zip(right) {
                    *sum = x.mul_add(*y, *sum);
                }
            }
        }
        let bits: Vec<u32> = sums.into_iter().map(single_bits).collect();
        wmma.to.set(&mut self.words, &bits);
        Ok(())
    }
}

impl Cube<'_> {
    /// Returns the start address of each line of the tile, and the number of elements per line. A line is a row or a
    /// column, whichever is contiguous in memory.
    fn tile_lines(&self, warp: &Warp, access: &WmmaAccess) -> (Vec<u64>, usize) {
        let fragment = &access.fragment;
        let (lines, length) = match access.by_rows {
            true => (fragment.rows, fragment.columns),
            false => (fragment.columns, fragment.rows),
        };
        let start = warp.addresses(access.address)[0];
        let stride = match access.stride {
            Some(row) => warp.words[row as usize][0] as usize,
            None => length,
        };
        let stride = (stride * fragment.element.bytes()) as u64;
        let starts = (0..lines as u64).map(|line| start.wrapping_add(line * stride));
        (starts.collect(), length)
    }

    pub fn wmma_load(
        &mut self,
        warp: &mut Warp,
        access: &WmmaAccess,
        mask: u32,
    ) -> Result<(), Fault> {
        check_all(mask)?;
        let (fragment, width) = (&access.fragment, access.fragment.element.bytes());
        let (starts, length) = self.tile_lines(warp, access);
        let mut bits = vec![0; fragment.elements()];
        for (line, start) in starts.into_iter().enumerate() {
            let bytes = self.read_line(warp, access.space, start, length * width)?;
            for (k, bytes) in bytes.chunks_exact(width).enumerate() {
                let element = bytes
                    .iter()
                    .rev()
                    .fold(0, |all, byte| all << 8 | u32::from(*byte));
                bits[place(access, line, k)] = element;
            }
        }
        fragment.set(&mut warp.words, &bits);
        Ok(())
    }

    pub fn wmma_store(
        &mut self,
        warp: &mut Warp,
        access: &WmmaAccess,
        mask: u32,
    ) -> Result<(), Fault> {
        check_all(mask)?;
        let bits = access.fragment.bits(&warp.words);
        let width = access.fragment.element.bytes();
        let (starts, length) = self.tile_lines(warp, access);
        for (line, start) in starts.into_iter().enumerate() {
            let elements = (0..length).map(|k| bits[place(access, line, k)]);
            let bytes: Vec<u8> = elements
                .flat_map(|element| element.to_le_bytes().into_iter().take(width))
                .collect();
            self.write_line(warp, access.space, start, &bytes)?;
        }
        Ok(())
    }
}

/// Returns the index of element `k` of a line (a row or a column), counted in row-major order in the tile.
fn place(access: &WmmaAccess, line: usize, k: usize) -> usize {
    let columns = access.fragment.columns;
    match access.by_rows {
        true => line * columns + k,
        false => k * columns + line,
    }
}
