//! Tensor maps, and copies of their boxes (TMA): in, they arrive when nobody can go on without them; out, when they are waited for.

use super::Cube;
use super::memory::host_bytes;
use super::warp::{Warp, lanes};
use crate::fault::Fault;
use crate::ptx::{Register, Space, TensorCopy};

/// What the map starts with, so that nothing else is taken for one.
const MAGIC: u64 = 0x7465_6e73_6f72_6d70;

/// Bytes of a map.
pub const MAP_BYTES: usize = 128;

/// Bytes that stay together where rows are permuted.
pub const PIECE: usize = 16;

/// The dimensions that a map can have.
pub const DIMENSIONS: usize = 5;

/// A tensor in global memory, and the shape of the boxes that are copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TensorMap {
    pub rank: usize,
    pub element: usize,
    /// How many bits of a piece's row its place is permuted by: 0, 1, 2 or 3.
    pub swizzle: u32,
    pub start: u64,
    pub sizes: [u64; DIMENSIONS],
    pub boxes: [u64; DIMENSIONS],
    /// Bytes from one to the next, of the dimensions but the first.
    pub strides: [u64; DIMENSIONS],
}

impl TensorMap {
    pub fn to_bytes(self) -> [u8; MAP_BYTES] {
        let head = [
            MAGIC,
            self.start,
            self.rank as u64 | (self.element as u64) << 8 | u64::from(self.swizzle) << 16,
        ];
        // Boxes are at most 256 wide.
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

    /// The map in these bytes, if it is one.
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

    /// The pieces of the box at `place`: where each lies in the box, its address, and how many of its bytes are in the tensor.
    fn pieces(&self, place: &[i64]) -> Result<Vec<Piece>, Fault> {
        if place.len() != self.rank {
            return Err(Fault::Argument(format!(
                "a place of {} dimensions in a tensor of {}",
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

/// Where a byte of a box lies in shared memory: of the bits that say which piece of its row it is in, `bits` are changed by as many
/// that say which row.
pub fn swizzled(address: u64, bits: u32) -> u64 {
    let rows = address >> 7 & ((1 << bits) - 1);
    address ^ rows << 4
}

/// A box that is to come: pieces and where they go, and the barrier that is told.
pub struct Arrival {
    pieces: Vec<(usize, [u8; PIECE])>,
    barrier: u64,
}

/// Pieces that are to be written: where from, where to, and how many bytes.
pub struct BoxStore {
    pieces: Vec<(usize, u64, usize)>,
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
                // SAFETY: the check before; nobody writes while this lane reads.
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
                .ok_or_else(|| Fault::Unsupported("a box that tells no barrier".into()))?;
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
                    // SAFETY: the check before; nobody writes while this lane reads.
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

    /// The box that was asked for first comes. Returns whether there was one.
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

    /// Boxes are written until `left` groups of the warp are on their way; those not committed are not among them.
    pub(super) fn boxes_go(&mut self, warp: &mut Warp, left: usize) {
        while warp.stores.len() > left + 1 {
            let group = warp.stores.pop_front();
            self.write_boxes(warp, group.into_iter().flatten());
        }
    }

    /// All boxes are written, committed or not.
    pub(super) fn all_boxes_go(&mut self, warp: &mut Warp) {
        warp.stores.push_back(Vec::new());
        self.boxes_go(warp, 0);
    }

    fn write_boxes(&mut self, warp: &Warp, stores: impl Iterator<Item = BoxStore>) {
        for (source, target, bytes) in stores.flat_map(|store| store.pieces) {
            let data = &self.shared.bytes()[source..source + bytes];
            // SAFETY: `tensor_store` has found the target in an allocation; nobody holds references into one.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), target as *mut u8, bytes) };
            self.shared.read_ends(&warp.clock, source, PIECE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_comes_back_from_its_bytes() {
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
    fn pieces_are_permuted_by_their_row() {
        assert_eq!(
            swizzled(0x400 + 3 * 128 + 16, 3),
            0x400 + 3 * 128 + (16 ^ 48)
        );
        assert_eq!(swizzled(0x400 + 3 * 128 + 16, 1), 0x400 + 3 * 128);
        assert_eq!(swizzled(0x400 + 3 * 128 + 16, 0), 0x400 + 3 * 128 + 16);
    }

    #[test]
    fn what_is_outside_has_no_bytes() {
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
