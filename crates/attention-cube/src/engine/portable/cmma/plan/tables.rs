//! The tile tables of the cmma engine. From a table, the plan takes the first tile that is wide enough and fits the device.
//! A tile without a rate in its comment was not measured.
//!
//! The stationary rows are the rows that a tile keeps. A tile of queries streams blocks of keys, and a tile of keys streams
//! blocks of queries.

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
// gradients, a rate is the rate of the whole backward, not of one kernel. The "other tiles" of a comment differ from
// the next tile only in the stated sizes.
//
// Several cubes of few units on a multiprocessor are faster than one cube of many units.

/// The tiles of the forward if shared memory holds all operands of a block.
pub(super) const RESIDENT_FORWARD: &[Shape] = &[
    // With the next tile, the forward at head size 64 runs at 135 TFLOP/s on an H200. Other tiles give 108 TFLOP/s with 256
    // units per cube, 125 with blocks of 64 keys, and 122 with 64 rows and 64 keys. A tile of 64 rows, 64 keys and 256 units
    // gives 111 TFLOP/s. The tile of `HELD_FORWARD` gives 81 TFLOP/s.
    shape(64, 128, 128, 32, 64),
    // With the next tile, the forward at head size 128 runs at 161 TFLOP/s on an H200. Other tiles give 109 TFLOP/s with 256
    // units per cube, and 114 with the 512 units and 64 keys of `HELD_FORWARD`.
    shape(128, 128, 128, 32, 128),
    // With the next tile, the forward at head size 256 runs at 141 TFLOP/s on an H200. Blocks of 64 keys, multiplied 64
    // columns at a time, give 69 TFLOP/s.
    shape(256, 256, 64, 32, 256),
    // The next tile needs 53 KB of shared memory.
    shape(64, 256, 64, 64, 64),
];

/// The tiles of the query's gradient if shared memory holds all operands of a block.
pub(super) const RESIDENT_QUERY: &[Shape] = &[
    // With the next tile, the backward at head size 64 runs at 95 TFLOP/s on an H200. The backward runs at 108 TFLOP/s if the
    // kernel for dK and dV also uses a `RESIDENT` table. Other tiles give 92 TFLOP/s with 256 units per cube, and 88 with 64
    // rows and 64 keys.
    shape(64, 128, 128, 32, 64),
    // With the next tile, the backward at head size 128 runs at 88 TFLOP/s on an H200. The backward runs at 131 TFLOP/s if
    // the kernel for dK and dV also uses a `RESIDENT` table. Other tiles give 84 TFLOP/s with 64 rows and 64 keys, and 76
    // with 512 units per cube.
    shape(128, 128, 128, 32, 128),
    // With the next tile and a `RESIDENT` table for the kernel of dK and dV, the backward at head size 256 runs at 98 TFLOP/s
    // on an H200. A cube of 256 units with only the stationary operands in shared memory gives 68 TFLOP/s.
    shape(256, 512, 64, 64, 256),
    // With the next tile, the kernel for dQ at head size 512 takes 209 KB of shared memory and spills 8 bytes of registers.
    // The backward runs at 55 TFLOP/s on an H200. The backward runs at 41 TFLOP/s if the kernel multiplies 64 columns at a
    // time. With 512 units, 64 keys and only stationary operands in shared memory, the backward runs at 47 TFLOP/s.
    shape(512, 256, 64, 32, 512),
    // The next tiles need 64 to 160 KB of shared memory, and were not measured.
    shape(64, 256, 64, 64, 64),
    shape(128, 512, 64, 64, 128),
    // The next two tiles fit 32 KB and 48 KB of shared memory.
    shape(64, 128, 32, 32, 64),
    shape(128, 128, 32, 32, 128),
];

/// The tiles of the gradients of keys and values if shared memory holds all operands of a block.
pub(super) const RESIDENT_KEY_VALUE: &[Shape] = &[
    // With the next tile, the backward at head size 64 runs at 99 TFLOP/s on an H200. Other tiles, in TFLOP/s: 92 with 64
    // keys per tile; 89 with 64 keys and blocks of 64 queries; 88 with 64 keys and 256 units per cube; 75 with 128 keys and
    // 256 units.
    shape(64, 128, 128, 32, 64),
    // With the next tile, the backward at head size 128 runs at 104 TFLOP/s on an H200. Other tiles, in TFLOP/s: 99 with 256
    // units per cube and blocks of 32 queries; 101 with 512 units and 128 keys per tile; 76 with 512 units and 64 keys per
    // tile.
    shape(128, 128, 64, 64, 128),
    // With the next tile, the kernel for dK and dV at head size 256 takes 173 KB of shared memory. The backward runs at 98
    // TFLOP/s on an H200, or at 79 TFLOP/s with 256 units per cube.
    shape(256, 512, 64, 64, 256),
    // With the next tile, the backward at head size 512 runs at 58 TFLOP/s on an H200. Other tiles, in TFLOP/s: 48 with 512
    // units per cube; 41 if the kernel multiplies 64 columns at a time; 33 with the tile of `HELD_KEY_VALUE`.
    shape(512, 256, 32, 64, 512),
    // The next two tiles need 74 KB and 106 KB of shared memory, and were not measured.
    shape(64, 256, 64, 64, 64),
    shape(128, 512, 64, 64, 128),
    // The next two tiles fit 32 KB and 48 KB of shared memory.
    shape(64, 128, 32, 32, 64),
    shape(128, 128, 32, 32, 128),
];

/// The tiles of the forward if shared memory holds all columns of the tile's queries, but not all operands of a block.
pub(super) const HELD_FORWARD: &[Shape] = &[
    // With the next tile, the forward at head size 64 runs at 81 TFLOP/s on an H200.
    shape(64, 256, 64, 64, 64),
    // With the next tile, the forward at head size 128 runs at 114 TFLOP/s on an H200. Other tiles give 75 TFLOP/s with 256
    // units per cube, and 79 with 64 rows and 256 units. A cube of 256 units that multiplies 64 columns at a time, without
    // queries in shared memory, gives 91 TFLOP/s.
    shape(128, 512, 128, 64, 128),
];

/// The tiles of the kernel for dK and dV if shared memory holds all columns of K and V. In addition, shared memory
/// holds Q or dO of one block, but not both at a time. At head size 512, the backward runs at 33 TFLOP/s on an H200
/// with such a tile.
pub(super) const HELD_KEY_VALUE: &[Shape] = &[
    // With the next tile, the kernel takes 147 KB of shared memory and spills 48 bytes of registers. With 512 units per cube,
    // the kernel spills 192 bytes.
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

/// The tiles of the forward for few query rows, as in decoding. The time to read the keys from memory limits the
/// kernel's speed.
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
