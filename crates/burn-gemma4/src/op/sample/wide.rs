//! Numbers of 64 bits as two words, which every device has, and their sums over a cube. Sums of integers are the same in any order.

use cubecl::prelude::*;

/// Units of a cube.
pub(super) const UNITS: usize = 256;

/// `high · 2³² + low`.
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

    /// Times a factor, where the product has no more than 64 bits.
    pub fn times(&self, factor: u32) -> Wide {
        Wide {
            low: self.low * factor,
            high: self.low.mul_hi(factor) + self.high * factor,
        }
    }

    /// The product's upper 64 bits of 128: the share `fraction / 2⁶⁴`, rounded down.
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

/// Sums over a cube.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Sums {
    /// Of what the units up to this one have, its own included.
    pub to: Wide,
    /// Of what all have.
    pub all: Wide,
}

/// Adds up what the units have; `sums` has two words a unit. Syncs.
#[cube]
pub(super) fn cube_sums(value: Wide, sums: &mut Shared<[u32]>) -> Sums {
    let mut low = value.low;
    let mut high = value.high;
    let own = 2 * UNIT_POS as usize;
    // Someone may still be reading earlier sums.
    sync_cube();
    sums[own] = low;
    sums[own + 1] = high;
    sync_cube();
    #[unroll]
    for step in 0..comptime!(UNITS.ilog2()) {
        let distance = comptime!(1u32 << step);
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
    }
    Sums {
        to: Wide { low, high },
        all: Wide {
            low: sums[comptime!(2 * UNITS - 2)],
            high: sums[comptime!(2 * UNITS - 1)],
        },
    }
}
