//! The cmma engine's tables of tiles. Where a row does not say what was measured, none was: it is for as few registers and as much of the
//! stationary side as fit. The first row that is wide enough and fits the device is taken.

/// The part of a tile that is chosen; the rest follows from the device's fragments and the output's width.
pub(super) struct Shape {
    /// The widest output it is for.
    pub width: usize,
    pub units: usize,
    /// Stationary rows.
    pub rows: usize,
    /// Streamed rows of a block.
    pub columns: usize,
    /// Columns of the operands of S that are multiplied at a time, at most.
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

// Where shared memory holds all that a block's products need: the stationary rows, the streamed rows of both products, S, and what it becomes.
// Measured on an H200 in f16, 4,096 queries and keys: single launches, TFLOP/s, of gradients both kernels together, one of them changed. Few units
// with much each, in several cubes a multiprocessor, are faster than many units.

/// The forward.
pub(super) const RESIDENT_FORWARD: &[Shape] = &[
    // D64: 135. With 256 units 108, of 64 keys 125; with 64 rows and keys 122, with 256 units 111; held 81.
    shape(64, 128, 128, 32, 64),
    // D128: 161. With 256 units 109; held, with 512 units and 64 keys, 114.
    shape(128, 128, 128, 32, 128),
    // D256: 141. By 64 columns at a time, of 64 keys, 69.
    shape(256, 256, 64, 32, 256),
    // 53 KB
    shape(64, 256, 64, 64, 64),
];

/// The query's gradient.
pub(super) const RESIDENT_QUERY: &[Shape] = &[
    // D64: 95, both kernels as they are here 108. With 256 units 92, with 64 rows and keys 88.
    shape(64, 128, 128, 32, 64),
    // D128: 88, both 131. With 64 rows and keys 84, with 512 units 76.
    shape(128, 128, 128, 32, 128),
    // D256: both 98. With 256 units, held, 68.
    shape(256, 512, 64, 64, 256),
    // D512, 209 KB, 8 bytes spilled: 55. With 512 units and 64 keys, held, 47; by 64 columns at a time 41.
    shape(512, 256, 64, 32, 512),
    // 64 to 160 KB; not measured
    shape(64, 256, 64, 64, 64),
    shape(128, 512, 64, 64, 128),
    // 32 KB, 48 KB
    shape(64, 128, 32, 32, 64),
    shape(128, 128, 32, 32, 128),
];

/// The gradients of keys and values.
pub(super) const RESIDENT_KEY_VALUE: &[Shape] = &[
    // D64: 99. Of 64 rows 92, and with 64 queries 89, with 256 units 88; with 256 units of 128 rows 75.
    shape(64, 128, 128, 32, 64),
    // D128: 104. With 256 units and 32 queries 99, with 512 units of 128 rows 101, of 64 rows 76.
    shape(128, 128, 64, 64, 128),
    // D256, 173 KB: 98. With 256 units 79.
    shape(256, 512, 64, 64, 256),
    // D512: 58. With 512 units 48, held 33; by 64 columns at a time 41.
    shape(512, 256, 32, 64, 512),
    // 74 KB, 106 KB; not measured
    shape(64, 256, 64, 64, 64),
    shape(128, 512, 64, 64, 128),
    // 32 KB, 48 KB
    shape(64, 128, 32, 32, 64),
    shape(128, 128, 32, 32, 128),
];

/// The forward, where shared memory holds all of the stationary rows' columns. Measured as well.
pub(super) const HELD_FORWARD: &[Shape] = &[
    // D64: 81.
    shape(64, 256, 64, 64, 64),
    // D128: 114. With 256 units 75, of 64 rows 79; not held, with 256 units and 64 columns at a time, 91.
    shape(128, 512, 128, 64, 128),
];

/// The gradients of keys and values, where shared memory holds both stationary operands, all columns of them, and one of the streamed ones at a
/// time. Measured at D512: 33, less than all that stay.
pub(super) const HELD_KEY_VALUE: &[Shape] = &[
    // 147 KB, 48 bytes spilled; with 512 units 192
    shape(512, 256, 32, 64, 512),
];

/// Output in registers once: the forward, and the query's gradient.
pub(super) const SINGLE: &[Shape] = &[
    // 99 KB
    shape(128, 256, 128, 64, 64),
    // 64 KB
    shape(256, 256, 64, 64, 64),
    shape(512, 512, 64, 64, 64),
    // 48 KB
    shape(256, 256, 64, 64, 32),
    shape(512, 512, 64, 64, 32),
    // 32 KB
    shape(128, 128, 32, 64, 32),
    shape(512, 256, 32, 64, 32),
    shape(1024, 512, 32, 64, 32),
    // 32 KB, operands widened to f32
    shape(512, 256, 32, 32, 32),
    // 16 KB; 32 KB widened
    shape(128, 128, 16, 32, 32),
    shape(1024, 256, 16, 64, 32),
];

/// Output in registers twice: the gradients of keys and values.
pub(super) const DOUBLE: &[Shape] = &[
    // 64 KB
    shape(128, 256, 64, 64, 64),
    shape(256, 512, 64, 64, 64),
    // 48 KB
    shape(128, 256, 64, 64, 32),
    shape(256, 512, 64, 64, 32),
    // 32 KB
    shape(128, 128, 32, 64, 32),
    shape(256, 256, 32, 64, 32),
    shape(512, 512, 32, 64, 32),
    shape(1024, 512, 16, 128, 32),
    shape(512, 256, 16, 64, 32),
    // 32 KB, operands widened to f32
    shape(256, 256, 32, 32, 32),
    // 16 KB; 32 KB widened
    shape(128, 128, 16, 32, 32),
    shape(1024, 256, 16, 64, 32),
];

/// Few rows: decoding, where reading the keys bounds everything.
pub(super) const DECODE: &[Shape] = &[
    shape(512, 128, 16, 64, 64),
    shape(1024, 256, 16, 64, 64),
    shape(512, 256, 32, 64, 32),
    shape(1024, 512, 32, 64, 32),
    // 32 KB, operands widened to f32
    shape(512, 256, 32, 32, 32),
    // 16 KB; 32 KB widened
    shape(128, 128, 16, 32, 32),
    shape(1024, 256, 16, 64, 32),
];
