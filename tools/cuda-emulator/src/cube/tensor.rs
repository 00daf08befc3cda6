//! Tensor maps, and the TMA copies of boxes (tiles of a tensor). A load is completed only when no warp can continue
//! without its data. A store writes global memory only when its warp waits for the store or exits.

use super::Cube;
use super::memory::host_bytes;
use super::warp::{BoxStore, Warp, lanes};
use crate::fault::Fault;
use crate::ptx::{Register, Space, TensorCopy};

/// The first word of an encoded tensor map. The emulator recognizes a map by this word.
const MAGIC: u64 = 0x7465_6e73_6f72_6d70;

/// The size of an encoded tensor map in bytes.
pub const MAP_BYTES: usize = 128;

/// The number of bytes in a piece. The swizzle moves each piece as a unit.
pub const PIECE: usize = 16;

/// The maximum number of dimensions of a tensor map.
pub const DIMENSIONS: usize = 5;

/// A tensor in global memory, with the shape of the boxes that TMA copies from it or to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TensorMap {
    pub rank: usize,
    pub element: usize,
    /// The number of swizzled address bits, `n`, from 0 to 3. The swizzle exchanges the 16-byte pieces of a row: the
    /// number of each piece is XORed with the lowest `n` bits of the row's number.
    pub swizzle: u32,
    pub start: u64,
    pub sizes: [u64; DIMENSIONS],
    pub boxes: [u64; DIMENSIONS],
    /// The stride in bytes of each dimension after the first.
    pub strides: [u64; DIMENSIONS],
}

impl TensorMap {
    pub fn to_bytes(self) -> [u8; MAP_BYTES] {
        let head = [
            MAGIC,
            self.start,
            self.rank as u64 | (self.element as u64) << 8 | u64::from(self.swizzle) << 16,
        ];
        // A box has at most 256 elements in a dimension, so 12 bits suffice for a size.
        let boxes = self
            .boxes
            .iter()
            .rev()
            .fold(0, |all, size| all << 12 | size);
        let words = head
            .into_iter()
            .chain([boxes])
            .chain(self.sizes)
            .chain(self.strides[1..].iter().copied());
        let mut bytes = [0; MAP_BYTES];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes an encoded tensor map. Returns `None` if the bytes are not a map.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let word = |k: usize| -> Option<u64> {
            let bytes = bytes.get(8 * k..8 * k + 8)?;
            Some(u64::from_le_bytes(bytes.try_into().ok()?))
        };
        if word(0)? != MAGIC {
            return None;
        }
        let shape = word(2)?;
        let mut map = Self {
            rank: shape as usize & 255,
            element: shape as usize >> 8 & 255,
            swizzle: (shape >> 16) as u32,
            start: word(1)?,
            ..Self::default()
        };
        for dimension in 0..DIMENSIONS {
            map.boxes[dimension] = word(3)? >> (12 * dimension) & 0xfff;
            map.sizes[dimension] = word(4 + dimension)?;
            if dimension > 0 {
                map.strides[dimension] = word(8 + dimension)?;
            }
        }
        Some(map)
    }

    /// Splits a box into 16-byte pieces. `place` holds the coordinates of the first element of the box. A piece has an
    /// offset in the box, a global address, and the number of its bytes that are inside the tensor.
    fn pieces(&self, place: &[i64]) -> Result<Vec<Piece>, Fault> {
        if place.len() != self.rank {
            return Err(Fault::Argument(format!(
                "coordinates of {} dimensions in a tensor of {}",
                place.len(),
                self.rank
            )));
        }
        let row_bytes = self.boxes[0] as usize * self.element;
        let rows: u64 = self.boxes[1..self.rank].iter().product();
        let mut pieces = Vec::new();
        for row in 0..rows {
            let (mut rest, mut inside, mut start) = (row, true, self.start);
            for dimension in 1..self.rank {
                let at = place[dimension] + (rest % self.boxes[dimension]) as i64;
                rest /= self.boxes[dimension];
                inside &= (0..self.sizes[dimension] as i64).contains(&at);
                start = start.wrapping_add((at as u64).wrapping_mul(self.strides[dimension]));
            }
            for at in (0..row_bytes).step_by(PIECE) {
                let per_piece = (PIECE / self.element) as i64;
                let first = place[0] + (at / self.element) as i64;
                if inside && first < 0 {
                    return Err(Fault::Unsupported(
                        "a box that starts before its row".into(),
                    ));
                }
                let left = (self.sizes[0] as i64 - first).clamp(0, per_piece) as usize;
                pieces.push(Piece {
                    at: row as usize * row_bytes + at,
                    address: start.wrapping_add((first as u64).wrapping_mul(self.element as u64)),
                    bytes: if inside { left * self.element } else { 0 },
                });
            }
        }
        Ok(pieces)
    }
}

struct Piece {
    at: usize,
    address: u64,
    bytes: usize,
}

/// Applies the swizzle to the shared memory address of a byte in a box. The lowest `bits` bits of the row number are
/// XORed into the address bits that select the 16-byte piece.
pub fn swizzled(address: u64, bits: u32) -> u64 {
    let rows = address >> 7 & ((1 << bits) - 1);
    address ^ rows << 4
}

/// A pending TMA load of a box. Each 16-byte piece has its target offset in shared memory and its data. `barrier` is
/// the address of the mbarrier that counts the copied bytes.
pub struct Arrival {
    pieces: Vec<(usize, [u8; PIECE])>,
    barrier: u64,
}

impl Cube<'_> {
    fn map_and_place(
        &self,
        warp: &Warp,
        copy: &TensorCopy,
        lane: usize,
    ) -> Result<(TensorMap, Vec<i64>), Fault> {
        let address = warp.get(copy.map, lane);
        let map = match Space::of_generic(address) {
            (Space::Parameter, at) => {
                let arguments = self.launch.arguments.get(at as usize..);
                arguments.and_then(TensorMap::from_bytes)
            }
            _ => {
                self.launch.check_global(address, MAP_BYTES)?;
                // SAFETY: the check above found the bytes in an allocation. No other code writes them while this lane
                // reads.
                TensorMap::from_bytes(unsafe { host_bytes(address, MAP_BYTES) })
            }
        };
        let map = map.ok_or_else(|| Fault::Argument(format!("no tensor map at {address:#x}")))?;
        let place = copy
            .place
            .iter()
            .map(|row| (warp.get(Register::Word(*row), lane) as u32 as i32).into())
            .collect();
        Ok((map, place))
    }

    pub(super) fn tensor_load(
        &mut self,
        warp: &mut Warp,
        copy: &TensorCopy,
        mask: u32,
    ) -> Result<(), Fault> {
        let targets = warp.shared_addresses(copy.shared);
        for lane in lanes(mask) {
            let (map, place) = self.map_and_place(warp, copy, lane)?;
            let barrier = copy
                .barrier
                .ok_or_else(|| Fault::Unsupported("a box without a barrier".into()))?;
            let barrier = warp.shared_addresses(barrier)[lane];
            let mut arrival = Arrival {
                pieces: Vec::new(),
                barrier,
            };
            for piece in map.pieces(&place)? {
                let target = swizzled(targets[lane] + piece.at as u64, map.swizzle);
                let target = self.shared.offset(target, PIECE)?;
                let mut data = [0; PIECE];
                if piece.bytes > 0 {
                    self.launch.check_global(piece.address, piece.bytes)?;
                    // SAFETY: the check above found the bytes in an allocation. No other code writes them while this
                    // lane reads.
                    let source = unsafe { host_bytes(piece.address, piece.bytes) };
                    data[..piece.bytes].copy_from_slice(source);
                }
                self.shared.copy_starts(&warp.clock, target, PIECE);
                arrival.pieces.push((target, data));
            }
            self.arrivals.push_back(arrival);
        }
        Ok(())
    }

    /// Completes the oldest pending TMA load. Returns false if no load is pending.
    pub(super) fn box_comes(&mut self) -> Result<bool, Fault> {
        let Some(arrival) = self.arrivals.pop_front() else {
            return Ok(false);
        };
        self.copy_time += 1;
        let (actor, time) = (self.warps, self.copy_time);
        for (at, data) in &arrival.pieces {
            self.shared.copy_ends(actor, time, *at, PIECE, data);
        }
        let bytes = arrival.pieces.len() * PIECE;
        self.mbarriers
            .at(arrival.barrier)?
            .bytes_came(bytes, actor, time);
        Ok(true)
    }

    pub(super) fn tensor_store(
        &mut self,
        warp: &mut Warp,
        copy: &TensorCopy,
        mask: u32,
    ) -> Result<(), Fault> {
        let sources = warp.shared_addresses(copy.shared);
        for lane in lanes(mask) {
            let (map, place) = self.map_and_place(warp, copy, lane)?;
            let mut store = BoxStore { pieces: Vec::new() };
            for piece in map.pieces(&place)? {
                if piece.bytes == 0 {
                    continue;
                }
                let source = swizzled(sources[lane] + piece.at as u64, map.swizzle);
                let source = self.shared.offset(source, PIECE)?;
                self.launch.check_global(piece.address, piece.bytes)?;
                self.shared.read_starts(&warp.clock, source, PIECE);
                store.pieces.push((source, piece.address, piece.bytes));
            }
            if let Some(group) = warp.stores.back_mut() {
                group.push(store);
            }
        }
        Ok(())
    }

    /// Writes the oldest committed groups of stores to global memory until at most `left` committed groups are pending.
    /// Stores that are not committed stay pending.
    pub(super) fn boxes_go(&mut self, warp: &mut Warp, left: usize) {
        while warp.stores.len() > left + 1 {
            let group = warp.stores.pop_front();
            self.write_boxes(warp, group.into_iter().flatten());
        }
    }

    /// Writes all pending stores to global memory, including those that are not committed.
    pub(super) fn all_boxes_go(&mut self, warp: &mut Warp) {
        warp.stores.push_back(Vec::new());
        self.boxes_go(warp, 0);
    }

    fn write_boxes(&mut self, warp: &Warp, stores: impl Iterator<Item = BoxStore>) {
        for (source, target, bytes) in stores.flat_map(|store| store.pieces) {
            let data = &self.shared.bytes()[source..source + bytes];
            // SAFETY: `tensor_store` has found the target in an allocation, and no references into allocations exist.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), target as *mut u8, bytes) };
            self.shared.read_ends(&warp.clock, source, PIECE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_map_round_trips_through_bytes() {
        let map = TensorMap {
            rank: 4,
            element: 2,
            swizzle: 3,
            start: 1 << 40,
            sizes: [64, 1 << 31, 3, 4, 0],
            boxes: [64, 256, 1, 1, 0],
            strides: [0, 128, 1 << 38, 16, 32],
        };
        assert_eq!(TensorMap::from_bytes(&map.to_bytes()), Some(map));
        assert_eq!(TensorMap::from_bytes(&[0; MAP_BYTES]), None);
    }

    #[test]
    fn swizzle_permutes_pieces_by_row() {
        assert_eq!(
            swizzled(0x400 + 3 * 128 + 16, 3),
            0x400 + 3 * 128 + (16 ^ 48)
        );
        assert_eq!(swizzled(0x400 + 3 * 128 + 16, 1), 0x400 + 3 * 128);
        assert_eq!(swizzled(0x400 + 3 * 128 + 16, 0), 0x400 + 3 * 128 + 16);
    }

    #[test]
    fn pieces_outside_of_the_tensor_have_no_bytes() {
        let map = TensorMap {
            rank: 2,
            element: 2,
            swizzle: 0,
            start: 4096,
            sizes: [12, 3, 0, 0, 0],
            boxes: [16, 2, 0, 0, 0],
            strides: [0, 32, 0, 0, 0],
        };
        let pieces = map.pieces(&[0, 2]).unwrap();
        let bytes: Vec<_> = pieces.iter().map(|piece| piece.bytes).collect();
        assert_eq!(bytes, [16, 8, 0, 0]);
        assert_eq!(pieces[1].address, 4096 + 2 * 32 + 16);
    }
}
