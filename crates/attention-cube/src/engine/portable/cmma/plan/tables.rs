//! The tile tables of the cmma engine. From a table, the plan takes the first tile that is wide enough and fits the device.
//! A tile without a rate in its comment was not measured.
//!
//! The stationary side is the side whose rows a tile keeps, queries or keys. Blocks of the opposite side stream.

/// The sizes that a table states for a tile. All other sizes follow from the fragments and the width of the output.
pub(super) struct Shape {
    /// The widest output that the tile serves, in columns.
    pub width: usize,
    pub units: usize,
    /// The number of rows that the tile keeps, queries or keys.
    pub rows: usize,
    /// The number of rows in a streamed block.
    pub columns: usize,
    /// The number of columns that the GEMMs for S and dP multiply at a time. Shared memory holds at most this many columns
    /// of each operand.
    pub depth: usize,
}

const fn shape(width: usize, units: usize, rows: usize, columns: usize, depth: usize) -> Shape {
    Shape {
        width,
        units,
        rows,
        columns,
        depth,
    }
}

// With the `RESIDENT` tables, shared memory holds all operands of a block: the stationary rows, the streamed rows, S, and P
// or dS.
//
// Comments give rates measured on an H200 in f16, over single launches with 4,096 queries and keys. In the tables for
// gradients, the rate is the rate of the whole backward. A variant differs from the tile only in the stated sizes.
//
// On a multiprocessor, several cubes of few units are faster than one cube of many units.

/// The tiles of the forward if shared memory holds all operands of a block.
pub(super) const RESIDENT_FORWARD: &[Shape] = &[
    // At head size 64, the forward runs at 135 TFLOP/s. Variants, in TFLOP/s: 108 with 256 units; 125 with 64 keys; 122 with 64
    // rows and 64 keys; 111 with 64 rows, 64 keys and 256 units; 81 with the tile of `HELD_FORWARD`.
    shape(64, 128, 128, 32, 64),
    // At head size 128, the forward runs at 161 TFLOP/s. Variants, in TFLOP/s: 109 with 256 units; 114 with the tile of
    // `HELD_FORWARD`, which has 512 units and 64 keys.
    shape(128, 128, 128, 32, 128),
    // At head size 256, the forward runs at 141 TFLOP/s. Variant: 69 TFLOP/s with 64 columns at a time and 64 keys.
    shape(256, 256, 64, 32, 256),
    // The next tile needs 53 KB of shared memory.
    shape(64, 256, 64, 64, 64),
];

/// The tiles of the query's gradient if shared memory holds all operands of a block.
pub(super) const RESIDENT_QUERY: &[Shape] = &[
    // At head size 64, the backward runs at 95 TFLOP/s, or at 108 TFLOP/s if the kernel for the gradients of keys and values
    // also uses a `RESIDENT` table. Variants, in TFLOP/s: 92 with 256 units; 88 with 64 rows and 64 keys.
    shape(64, 128, 128, 32, 64),
    // At head size 128, the backward runs at 88 TFLOP/s, or at 131 TFLOP/s if the kernel for the gradients of keys and
    // values also uses a `RESIDENT` table. Variants, in TFLOP/s: 84 with 64 rows and 64 keys; 76 with 512 units.
    shape(128, 128, 128, 32, 128),
    // At head size 256, the backward runs at 98 TFLOP/s if both of its kernels use `RESIDENT` tables. Variant: 68 TFLOP/s
    // with 256 units and with only the stationary operands in shared memory.
    shape(256, 512, 64, 64, 256),
    // At head size 512, the kernel takes 209 KB of shared memory and spills 8 bytes, and the backward runs at 55 TFLOP/s.
    // Variants, in TFLOP/s: 47 with 512 units, 64 keys, and only stationary operands in shared memory; 41 with 64 columns at a
    // time.
    shape(512, 256, 64, 32, 512),
    // The next tiles need 64 to 160 KB of shared memory, and were not measured.
    shape(64, 256, 64, 64, 64),
    shape(128, 512, 64, 64, 128),
    // The next tiles fit 32 KB and 48 KB of shared memory.
    shape(64, 128, 32, 32, 64),
    shape(128, 128, 32, 32, 128),
];

/// The tiles of the gradients of keys and values if shared memory holds all operands of a block.
pub(super) const RESIDENT_KEY_VALUE: &[Shape] = &[
    // At head size 64, the backward runs at 99 TFLOP/s. Variants, in TFLOP/s: 92 with 64 rows; 89 with 64 rows and 64
    // queries; 88 with 64 rows and 256 units; 75 with 128 rows and 256 units.
    shape(64, 128, 128, 32, 64),
    // At head size 128, the backward runs at 104 TFLOP/s. Variants, in TFLOP/s: 99 with 256 units and 32 queries; 101 with
    // 512 units and 128 rows; 76 with 512 units and 64 rows.
    shape(128, 128, 64, 64, 128),
    // At head size 256, the kernel takes 173 KB of shared memory, and the backward runs at 98 TFLOP/s. Variant: 79 TFLOP/s
    // with 256 units.
    shape(256, 512, 64, 64, 256),
    // At head size 512, the backward runs at 58 TFLOP/s. Variants, in TFLOP/s: 48 with 512 units; 33 with the tile of
    // `HELD_KEY_VALUE`; 41 with 64 columns at a time.
    shape(512, 256, 32, 64, 512),
    // The next tiles need 74 KB and 106 KB of shared memory, and were not measured.
    shape(64, 256, 64, 64, 64),
    shape(128, 512, 64, 64, 128),
    // The next tiles fit 32 KB and 48 KB of shared memory.
    shape(64, 128, 32, 32, 64),
    shape(128, 128, 32, 32, 128),
];

/// The tiles of the forward if shared memory holds all columns of the stationary rows, but not all operands of a block.
pub(super) const HELD_FORWARD: &[Shape] = &[
    // At head size 64, the forward runs at 81 TFLOP/s.
    shape(64, 256, 64, 64, 64),
    // At head size 128, the forward runs at 114 TFLOP/s. Variants, in TFLOP/s: 75 with 256 units; 79 with 64 rows and 256
    // units; 91 with 256 units, 64 columns at a time, and no stationary rows in shared memory.
    shape(128, 512, 128, 64, 128),
];

/// The tiles of the gradients of keys and values if shared memory holds all columns of both stationary operands, and one
/// streamed operand at a time. At head size 512 the backward runs at 33 TFLOP/s with such a tile.
pub(super) const HELD_KEY_VALUE: &[Shape] = &[
    // The kernel takes 147 KB of shared memory with this tile and spills 48 bytes. The kernel spills 192 bytes with 512 units.
    shape(512, 256, 32, 64, 512),
];

/// The tiles of kernels with one output in registers: the forward, and the query's gradient.
pub(super) const SINGLE: &[Shape] = &[
    // The next tile fits 99 KB of shared memory.
    shape(128, 256, 128, 64, 64),
    // The next tiles fit 64 KB of shared memory.
    shape(256, 256, 64, 64, 64),
    shape(512, 512, 64, 64, 64),
    // The next tiles fit 48 KB of shared memory.
    shape(256, 256, 64, 64, 32),
    shape(512, 512, 64, 64, 32),
    // The next tiles fit 32 KB of shared memory.
    shape(128, 128, 32, 64, 32),
    shape(512, 256, 32, 64, 32),
    shape(1024, 512, 32, 64, 32),
    // The next tile fits 32 KB of shared memory if the operands are f32.
    shape(512, 256, 32, 32, 32),
    // The next tiles fit 16 KB of shared memory, or 32 KB if the operands are f32.
    shape(128, 128, 16, 32, 32),
    shape(1024, 256, 16, 64, 32),
];

/// The tiles of the kernel with two outputs in registers: the gradients of keys and values.
pub(super) const DOUBLE: &[Shape] = &[
    // The next tiles fit 64 KB of shared memory.
    shape(128, 256, 64, 64, 64),
    shape(256, 512, 64, 64, 64),
    // The next tiles fit 48 KB of shared memory.
    shape(128, 256, 64, 64, 32),
    shape(256, 512, 64, 64, 32),
    // The next tiles fit 32 KB of shared memory.
    shape(128, 128, 32, 64, 32),
    shape(256, 256, 32, 64, 32),
    shape(512, 512, 32, 64, 32),
    shape(1024, 512, 16, 128, 32),
    shape(512, 256, 16, 64, 32),
    // The next tile fits 32 KB of shared memory if the operands are f32.
    shape(256, 256, 32, 32, 32),
    // The next tiles fit 16 KB of shared memory, or 32 KB if the operands are f32.
    shape(128, 128, 16, 32, 32),
    shape(1024, 256, 16, 64, 32),
];

/// The tiles of the forward for few query rows, as in decoding. The kernel is bound by the time to read the keys from memory.
pub(super) const DECODE: &[Shape] = &[
    shape(512, 128, 16, 64, 64),
    shape(1024, 256, 16, 64, 64),
    shape(512, 256, 32, 64, 32),
    shape(1024, 512, 32, 64, 32),
    // The next tile fits 32 KB of shared memory if the operands are f32.
    shape(512, 256, 32, 32, 32),
    // The next tiles fit 16 KB of shared memory, or 32 KB if the operands are f32.
    shape(128, 128, 16, 32, 32),
    shape(1024, 256, 16, 64, 32),
];
