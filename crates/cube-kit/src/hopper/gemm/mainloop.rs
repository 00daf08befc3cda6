//! The mainloop of a GEMM: PTX that multiplies a tile over all inner chunks, with both operands in shared memory. The
//! PTX is one text, so that no other code can use the registers of a wgmma in flight. See `hopper/wgmma.rs` for
//! descriptors and fragments.

use crate::hopper::PRODUCT_ROWS;
use crate::hopper::ptx::{arrive_text, arrive_where_text, wait_text};
use crate::hopper::wgmma::{
    STEP, STEP_BYTES, STEP_ROWS_BYTES, descriptor_text, instruction, registers, units,
};
use crate::nvidia::matrix::Major;
use crate::nvidia::ptx::value_of;
use crate::nvidia::{Half, ROW_BYTES, SUBTILE};
use cubecl::prelude::*;

/// The number of bytes in 64 rows of a subtile. A row of a subtile has 64 half-precision elements.
pub const SUBTILE_BYTES: usize = PRODUCT_ROWS * ROW_BYTES;

/// The compile-time settings of a mainloop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mainloop {
    /// The number of row tiles per warpgroup. A row tile has 64 rows of the left operand. The row tiles of a warpgroup
    /// are [`SUBTILE_BYTES`] apart.
    pub row_tiles: usize,
    /// The number of columns of the right operand, at most 256.
    pub columns: usize,
    /// The dimension along which the left operand is contiguous.
    pub lhs: Major,
    /// The dimension along which the right operand is contiguous.
    pub rhs: Major,
    /// The precision of both operands.
    pub half: Half,
    /// The number of stages in the ring buffer. Each stage holds one chunk of 64 inner elements.
    pub stages: usize,
    /// The distance between neighboring stages in bytes.
    pub stage_bytes: usize,
}

impl Mainloop {
    /// Returns the number of accumulator registers per thread.
    pub const fn sums(&self) -> usize {
        self.row_tiles * self.columns / 2
    }
}

/// Returns the PTX of [`multiply_matrices()`]. Outputs: the accumulator registers. Inputs, in this order:
///
/// - the descriptors of both operands in the first stage of the ring buffer
/// - the first full barrier and the first empty barrier
/// - the elected flag, nonzero in threads that arrive at empty barriers
/// - the number of chunks
/// - the ring buffer stage and the parity of the first chunk
///
/// The PTX issues the wgmma of a chunk, waits for the wgmma of the previous chunk, and then releases the previous
/// chunk's stage.
fn mainloop_text(mainloop: &Mainloop) -> String {
    let sums = mainloop.sums();
    let [lhs, rhs, full, empty, elected, chunks, stage, parity] =
        [0, 1, 2, 3, 4, 5, 6, 7].map(|i| format!("%{}", sums + i));
    let step_of = |major| match major {
        Major::Inner => units(STEP_BYTES),
        Major::Outer => units(STEP_ROWS_BYTES),
    };
    let transposes = |major| usize::from(major == Major::Outer);
    let of_tile = sums / mainloop.row_tiles;
    let mut products = String::new();
    for step in 0..SUBTILE / STEP {
        for tile in 0..mainloop.row_tiles {
            let left = units(tile * SUBTILE_BYTES) + step * step_of(mainloop.lhs);
            products += &descriptor_text("a", "left", left);
            products += &descriptor_text("b", "right", step * step_of(mainloop.rhs));
            products += &format!(
                "{} {{{}}}, a, b, sum, 1, 1, {}, {};\n",
                instruction(mainloop.columns, mainloop.half),
                registers(tile * of_tile, of_tile),
                transposes(mainloop.lhs),
                transposes(mainloop.rhs),
            );
        }
        if step == 0 {
            products += "setp.eq.b32 sum, 0, 0;\n";
        }
    }
    let stages = mainloop.stages;
    let stage_units = units(mainloop.stage_bytes);
    let wait = wait_text("", "is_full", 0, "parity");
    let arrive = arrive_text("previous", 1);
    let arrive_after_first = arrive_where_text("holds", "previous", 1);
    format!(
        "{{\n.reg .pred waited, sum, elected, holds, wrapped, more;\n.reg .b64 a, b;\n\
         .reg .b32 low, left, right, stage, parity, count, at, is_full, previous;\n\
         setp.ne.b32 elected, {elected}, 0;\nsetp.ne.b32 sum, 0, 0;\n\
         mov.b32 stage, {stage};\nmov.b32 parity, {parity};\nmov.b32 count, {chunks};\nmov.b32 previous, 0;\n\
         NEXT:\n\
         mad.lo.u32 is_full, stage, 8, {full};\n{wait}\
         mul.lo.u32 at, stage, {stage_units};\nadd.u32 left, at, {lhs};\nadd.u32 right, at, {rhs};\n\
         redux.sync.or.b32 left, left, 0xFFFFFFFF;\nredux.sync.or.b32 right, right, 0xFFFFFFFF;\n\
         wgmma.fence.sync.aligned;\n{products}wgmma.commit_group.sync.aligned;\n\
         wgmma.wait_group.sync.aligned 1;\n\
         setp.ne.b32 holds, previous, 0;\nand.pred holds, holds, elected;\n\
         {arrive_after_first}mad.lo.u32 previous, stage, 8, {empty};\n\
         add.u32 stage, stage, 1;\nsetp.eq.b32 wrapped, stage, {stages};\n\
         @wrapped mov.b32 stage, 0;\n@wrapped xor.b32 parity, parity, 1;\n\
         sub.u32 count, count, 1;\nsetp.ne.b32 more, count, 0;\n@more bra NEXT;\n\
         wgmma.wait_group.sync.aligned 0;\n{arrive}}}\n"
    )
}

/// Multiplies a tile over all inner chunks. The function waits for each chunk, and releases the chunk's stage after
/// use. The result has [`Mainloop::sums`] accumulator registers per thread, which `N` must equal. The registers of the
/// first row tile (64 rows of the left operand) come first.
///
/// `lhs` and `rhs` are the descriptors of both operands in the first stage of the ring buffer. `full` and `empty` are
/// the addresses of the first stage's barriers. `elected` is nonzero in one thread per warp, which arrives at the empty
/// barriers. `stage` and `parity` belong to the first chunk.
#[cube]
pub fn multiply_matrices<N: Size>(
    lhs: u32,
    rhs: u32,
    full: u32,
    empty: u32,
    elected: u32,
    chunks: u32,
    stage: u32,
    parity: u32,
    #[comptime] mainloop: Mainloop,
) -> Vector<f32, N> {
    let text = comptime!(mainloop_text(&mainloop));
    let sum: Vector<f32, N>;
    gpu_asm!(
        "{text} // {sum} {lhs} {rhs} {full} {empty} {elected} {chunks} {stage} {parity}\n",
        sum = out(_) sum,
        lhs = in(_) value_of::<u32>(lhs),
        rhs = in(_) value_of::<u32>(rhs),
        full = in(_) value_of::<u32>(full),
        empty = in(_) value_of::<u32>(empty),
        elected = in(_) value_of::<u32>(elected),
        chunks = in(_) value_of::<u32>(chunks),
        stage = in(_) value_of::<u32>(stage),
        parity = in(_) value_of::<u32>(parity)
    );
    sum
}
