//! PTX that multiplies a tile of a GEMM over all inner chunks, with both operands in shared memory. The PTX is one text, so
//! that no other code can use the registers of a wgmma in flight. See `hopper/wgmma.rs` for descriptors and fragments.

use crate::hopper::gemm::plan::{Major, MatrixTiles};
use crate::hopper::ptx::{arrive_text, arrive_where_text, wait_text};
use crate::hopper::wgmma::{
    STEP, STEP_BYTES, STEP_ROWS_BYTES, descriptor_text, instruction, registers, units,
};
use crate::nvidia::ptx::value_of;
use cubecl::prelude::*;

/// Returns the PTX of [`multiply_matrices()`]. Outputs: the accumulator registers. Inputs, in this order:
///
/// - the descriptors of both operands in the first stage of the ring buffer
/// - the first full barrier and the first empty barrier
/// - the elected flag, nonzero in threads that arrive at empty barriers
/// - the number of chunks
/// - the ring buffer stage and the parity of the first chunk
///
/// The PTX issues the wgmma of a chunk, waits for the wgmma of the previous chunk, and then releases the previous chunk's
/// stage.
fn product_text(tiles: &MatrixTiles) -> String {
    let sums = tiles.columns / 2;
    let [lhs, rhs, full, empty, elected, chunks, stage, parity] =
        [0, 1, 2, 3, 4, 5, 6, 7].map(|i| format!("%{}", sums + i));
    let step_of = |major| match major {
        Major::Inner => units(STEP_BYTES),
        Major::Outer => units(STEP_ROWS_BYTES),
    };
    let transposes = |major| usize::from(major == Major::Outer);
    let mut products = String::new();
    for step in 0..MatrixTiles::DEPTH / STEP {
        products += &descriptor_text("a", "left", step * step_of(tiles.lhs));
        products += &descriptor_text("b", "right", step * step_of(tiles.rhs));
        products += &format!(
            "{} {{{}}}, a, b, sum, 1, 1, {}, {};\n",
            instruction(tiles.columns, tiles.half),
            registers(0, sums),
            transposes(tiles.lhs),
            transposes(tiles.rhs),
        );
        if step == 0 {
            products += "setp.eq.b32 sum, 0, 0;\n";
        }
    }
    let stages = tiles.stages;
    let stage_units = units(tiles.stage_bytes());
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

/// Multiplies a tile over all inner chunks. The first chunk is in the ring buffer's stage `stage`. The function waits for
/// each chunk, and releases the chunk's stage after use.
#[cube]
pub(crate) fn multiply_matrices<N: Size>(
    lhs: u32,
    rhs: u32,
    full: u32,
    empty: u32,
    elected: u32,
    chunks: u32,
    stage: u32,
    parity: u32,
    #[comptime] tiles: MatrixTiles,
) -> Vector<f32, N> {
    let text = comptime!(product_text(&tiles));
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
