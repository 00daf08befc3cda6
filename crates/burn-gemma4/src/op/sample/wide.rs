//! 64-bit unsigned integers, and their sums over a cube. Each integer is stored as two 32-bit words, because some
//! devices support no 64-bit words.

use cubecl::prelude::*;

/// The number of units in a cube.
pub(super) const UNITS: usize = 256;

/// A 64-bit unsigned integer with the value `high · 2³² + low`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Wide {
    pub low: u32,
    pub high: u32,
}

#[cube]
impl Wide {
    pub fn of(low: u32) -> Wide {
        Wide { low, high: 0u32 }
    }

    pub fn plus(&self, other: Wide) -> Wide {
        let low = self.low + other.low;
        let carry = select(low < other.low, 1u32, 0u32);
        Wide {
            low,
            high: self.high + other.high + carry,
        }
    }

    pub fn minus(&self, other: Wide) -> Wide {
        let borrow = select(self.low < other.low, 1u32, 0u32);
        Wide {
            low: self.low - other.low,
            high: self.high - other.high - borrow,
        }
    }

    pub fn is_below(&self, other: Wide) -> bool {
        self.high < other.high || (self.high == other.high && self.low < other.low)
    }

    /// Multiplies the integer by `factor`. The result must fit in 64 bits.
    pub fn times(&self, factor: u32) -> Wide {
        Wide {
            low: self.low * factor,
            high: self.low.mul_hi(factor) + self.high * factor,
        }
    }

    /// Multiplies the integer by `fraction / 2⁶⁴` and rounds down. The result is the upper 64 bits of the 128-bit
    /// product.
    pub fn share(&self, fraction: Wide) -> Wide {
        let lowest = Wide::of(self.low.mul_hi(fraction.low));
        let one = Wide {
            low: self.low * fraction.high,
            high: self.low.mul_hi(fraction.high),
        };
        let one = one.plus(lowest);
        let other = Wide {
            low: self.high * fraction.low,
            high: self.high.mul_hi(fraction.low),
        };
        let other = other.plus(Wide::of(one.low));
        let highest = Wide {
            low: self.high * fraction.high,
            high: self.high.mul_hi(fraction.high),
        };
        highest.plus(Wide::of(one.high)).plus(Wide::of(other.high))
    }
}

/// A unit's running sum, and the sum over all units.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Sums {
    /// The sum over the units up to and including this unit.
    pub to: Wide,
    /// The sum over all units.
    pub all: Wide,
}

/// Computes each unit's running sum, and the sum over all units. `sums` is shared memory with two words per unit.
/// Synchronizes the cube.
#[cube]
pub(super) fn cube_sums(value: Wide, sums: &mut Shared<[u32]>) -> Sums {
    let mut low = value.low;
    let mut high = value.high;
    let own = 2 * UNIT_POS as usize;
    // Wait until all units have read earlier sums from the shared memory.
    sync_cube();
    sums[own] = low;
    sums[own + 1] = high;
    sync_cube();
    let mut distance = 1u32;
    while distance < comptime!(UNITS as u32) {
        if UNIT_POS >= distance {
            let at = 2 * (UNIT_POS - distance) as usize;
            let other = Wide {
                low: sums[at],
                high: sums[at + 1],
            };
            let sum = Wide { low, high }.plus(other);
            low = sum.low;
            high = sum.high;
        }
        sync_cube();
        sums[own] = low;
        sums[own + 1] = high;
        sync_cube();
        distance *= 2u32;
    }
    Sums {
        to: Wide { low, high },
        all: Wide {
            low: sums[comptime!(2 * UNITS - 2)],
            high: sums[comptime!(2 * UNITS - 1)],
        },
    }
}
