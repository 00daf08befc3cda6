//! Tile multiplications on Hopper with `wgmma`: a warpgroup multiplies 64 rows of operands that TMA copied to shared
//! memory. A `wgmma` runs asynchronously, so the warpgroup's threads can do other work meanwhile.
//!
//! No instruction may touch the registers of a `wgmma` in flight. Each multiplication is therefore one PTX text that
//! issues and commits its `wgmma`. The text outputs the accumulator registers immediately, although the result is not
//! complete. A later *fence* text waits for the `wgmma`, and passes the same registers on. Between these two texts,
//! code may neither read nor write the registers.
//!
//! Operands are subtiles of 64 columns: `rows × 128` bytes with TMA's 128-byte swizzle. The descriptors address the
//! subtiles in groups of 8 rows, 1024 bytes apart (PTX ISA, "Asynchronous warpgroup level matrix shared memory
//! layout").
//!
//! Accumulator register `i` of lane `l` of warp `w` is row `16 w + l / 4 + 8 (i / 2 % 2)` and column
//! `8 (i / 4) + 2 (l % 4) + i % 2`. P, the left operand of `O += P V`, has the same layout with two columns per
//! register.

use crate::hopper::ptx::arrive_text;
use crate::hopper::{Product, ScoreProduct};
use crate::nvidia::ptx::{load_matrices, load_matrices_transposed, value_of};
use crate::nvidia::{Half, ROW_BYTES};
use cubecl::prelude::*;

/// The number of inner elements (columns of Q and K, or rows of V) that one `wgmma` multiplies.
pub const STEP: usize = 16;

/// The size of 16 half-precision columns in a row of a subtile, in bytes. One `wgmma` multiplies 16 columns.
pub const STEP_BYTES: usize = 2 * STEP;

/// The size of 16 rows of a subtile, in bytes. A row of a subtile has 128 bytes.
pub const STEP_ROWS_BYTES: usize = STEP * ROW_BYTES;

/// The upper half of every descriptor: a stride of 1024 bytes per eight rows, and the 128-byte swizzle.
const DESCRIPTOR_LAYOUT: u32 = ((8 * ROW_BYTES as u32) >> 4) | (1 << 30);

/// Returns the lower half of the descriptor of an operand at `address`, if the `wgmma` sums over the operand's columns.
/// In attention these operands are Q, K and P.
#[cube]
pub fn descriptor(address: u32) -> u32 {
    described(address, 16usize)
}

/// Returns the lower half of the descriptor of an operand in subtiles of `subtile_bytes` bytes, if the `wgmma` sums
/// over the operand's rows. In attention this operand is V.
#[cube]
pub fn transposed_descriptor(address: u32, #[comptime] subtile_bytes: usize) -> u32 {
    described(address, subtile_bytes)
}

#[cube]
fn described(address: u32, #[comptime] leading_bytes: usize) -> u32 {
    ((address & 0x3FFFFu32) >> 4u32) | comptime!(((leading_bytes as u32) >> 4) << 16)
}

/// Returns PTX that sets `name` to the descriptor whose lower half is `low + offset`. The surrounding text must declare
/// a register `low`.
pub fn descriptor_text(name: &str, low: &str, offset: usize) -> String {
    format!("add.u32 low, {low}, {offset};\nmov.b64 {name}, {{low, {DESCRIPTOR_LAYOUT}}};\n")
}

/// Converts an offset from bytes to the unit of a descriptor, which is 16 bytes.
pub const fn units(bytes: usize) -> usize {
    bytes >> 4
}

/// Returns a PTX operand that lists `count` registers, beginning with `%from`.
pub fn registers(from: usize, count: usize) -> String {
    let names: Vec<_> = (from..from + count).map(|i| format!("%{i}")).collect();
    names.join(", ")
}

/// Returns PTX that copies `count` registers. The copies begin at register `%0`, and the originals begin at register
/// `%from`.
pub fn moves(count: usize, from: usize) -> String {
    (0..count)
        .map(|i| format!("mov.b32 %{i}, %{};\n", from + i))
        .collect()
}

/// Returns the name of the `wgmma` instruction whose result has `columns` columns.
pub fn instruction(columns: usize, half: Half) -> String {
    let half = half.ptx();
    format!("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{half}.{half}")
}

/// Returns the PTX of `S = Q Kᵀ` for a block. Outputs: the registers of S. Inputs: the descriptors of Q and K.
fn scores_text(product: &ScoreProduct) -> String {
    let [query, key] = [0, 1].map(|i| format!("%{}", product.fragment() + i));
    let mut text = String::from("{\n.reg .pred sum;\n.reg .b64 a, b;\n.reg .b32 low;\n");
    text += "setp.ne.b32 sum, 0, 0;\nwgmma.fence.sync.aligned;\n";
    for step in 0..product.depth.div_ceil(STEP) {
        let (subtile, within) = (step / 4, step % 4 * STEP_BYTES);
        let a = units(subtile * product.left_rows * ROW_BYTES + within);
        let b = units(subtile * product.right_rows * ROW_BYTES + within);
        text += &descriptor_text("a", &query, a);
        text += &descriptor_text("b", &key, b);
        text += &format!(
            "{} {{{}}}, a, b, sum, 1, 1, 0, 0;\n",
            instruction(product.right_rows, product.half),
            registers(0, product.right_rows / 2),
        );
        if step == 0 {
            text += "setp.eq.b32 sum, 0, 0;\n";
        }
    }
    text + "wgmma.commit_group.sync.aligned;\n}\n"
}

/// Returns the PTX of `O += P V` for a block. P, the attention probabilities, is in registers. Outputs: the registers
/// of O. Inputs: the previous O, P, and the descriptor of V.
fn output_text(product: &Product) -> String {
    let [p_fragment, o_fragment] = product.fragments();
    let p = 2 * o_fragment;
    let value = format!("%{}", p + p_fragment);
    let columns = product.columns;
    let mut text = String::from("{\n.reg .pred sum;\n.reg .b64 b;\n.reg .b32 low;\n");
    text += &moves(columns / 2, o_fragment);
    text += "setp.eq.b32 sum, 0, 0;\nwgmma.fence.sync.aligned;\n";
    for step in 0..product.depth / STEP {
        text += &descriptor_text("b", &value, units(step * STEP_ROWS_BYTES));
        text += &format!(
            "{} {{{}}}, {{{}}}, b, sum, 1, 1, 1;\n",
            instruction(columns, product.half),
            registers(0, columns / 2),
            registers(p + 4 * step, 4),
        );
    }
    text + "wgmma.commit_group.sync.aligned;\n}\n"
}

/// Returns PTX that waits until at most `pending` `wgmma` groups are in flight. The PTX then signals at a barrier that
/// a ring buffer stage is free.
///
/// The output is a vector of `fragment` registers. The PTX writes only its first `used` registers. The inputs are a vector
/// of the same size, the barrier's address, and the elected flag. The flag is nonzero in threads that arrive at the
/// barrier.
pub fn release_text(used: usize, fragment: usize, pending: usize) -> String {
    let [barrier, elected] = [0, 1].map(|i| format!("%{}", 2 * fragment + i));
    format!(
        "{{\n.reg .pred elected;\nsetp.ne.b32 elected, {elected}, 0;\nwgmma.wait_group.sync.aligned {pending};\n{}{}}}\n",
        arrive_text(&barrier, 1),
        moves(used, fragment)
    )
}

/// Starts `S = Q Kᵀ` of a block without waiting for the result. Q and K must be in shared memory.
#[cube]
pub fn multiply_scores<NS: Size>(
    query: u32,
    key: u32,
    #[comptime] product: ScoreProduct,
) -> Vector<f32, NS> {
    let text = comptime!(scores_text(&product));
    let s: Vector<f32, NS>;
    gpu_asm!(
        "{text} // {s} {query} {key}\n",
        s = out(_) s,
        query = in(_) value_of::<u32>(query),
        key = in(_) value_of::<u32>(key)
    );
    s
}

/// Starts `O += P V` of a block without waiting for the result. V must be in shared memory.
#[cube]
pub fn multiply_output<NO: Size, NP: Size>(
    o: Vector<f32, NO>,
    p: Vector<u32, NP>,
    value: u32,
    #[comptime] product: Product,
) -> Vector<f32, NO> {
    let text = comptime!(output_text(&product));
    let sum: Vector<f32, NO>;
    gpu_asm!(
        "{text} // {sum} {o} {p} {value}\n",
        sum = out(_) sum,
        o = in(_) value_of::<Vector<f32, NO>>(o),
        p = in(_) value_of::<Vector<u32, NP>>(p),
        value = in(_) value_of::<u32>(value)
    );
    sum
}

/// The number of 16-column groups in a 64-column subtile. One `wgmma` multiplies 16 columns.
pub const SUBTILE_STEPS: usize = 4;

/// Returns PTX that waits until at most `pending` `wgmma` groups are in flight. The output is a vector of `fragment`
/// registers. The PTX writes only its first `used` registers. The input is a vector of the same size.
fn fence_text(used: usize, fragment: usize, pending: usize) -> String {
    format!(
        "{{\nwgmma.wait_group.sync.aligned {pending};\n{}}}\n",
        moves(used, fragment)
    )
}

/// Returns the address of the matrix row that the thread passes to `ldmatrix` or `stmatrix`. The 64-column subtile at
/// `subtile` holds the warpgroup's 64 rows. The warp's matrices cover 16 of these rows, and the 16 columns that begin
/// at column `16 · step`.
#[cube]
pub fn matrix_row(subtile: u32, #[comptime] step: usize) -> u32 {
    let lane = UNIT_POS % 32u32;
    let row = UNIT_POS / 32u32 % 4u32 * 16u32 + lane % 16u32;
    let swizzle = ((lane / 16u32) ^ (lane % 8u32)) << 4u32;
    subtile + row * comptime!(ROW_BYTES as u32) + (swizzle ^ comptime!((STEP_BYTES * step) as u32))
}

/// Loads 16 rows per warp into registers, as the left operand of a `wgmma`. A row has `16 · steps` columns. The operand
/// lies in 64-column subtiles of `subtile_rows` rows, and the first subtile starts at `start`.
#[cube]
pub fn load_rows<N: Size>(
    start: u32,
    #[comptime] subtile_rows: usize,
    #[comptime] steps: usize,
) -> Vector<u32, N> {
    let mut registers = Vector::<u32, N>::zeroed();
    #[unroll]
    for step in 0..steps {
        let subtile = start + comptime!((step / SUBTILE_STEPS * subtile_rows * ROW_BYTES) as u32);
        let loaded = load_matrices(matrix_row(subtile, comptime!(step % SUBTILE_STEPS)));
        #[unroll]
        for i in 0..4usize {
            registers.insert(comptime!(4 * step + i), loaded.extract(i));
        }
    }
    registers
}

/// Loads 16 columns per warp from the subtile at `subtile` into registers. The columns become 16 rows of the left
/// operand of a `wgmma`. A column has `16 · steps` rows.
#[cube]
pub fn load_columns_as_rows<N: Size>(subtile: u32, #[comptime] steps: usize) -> Vector<u32, N> {
    let lane = UNIT_POS % 32u32;
    // Each load brings four 8 × 8 matrices from 16 rows of the subtile. The first two matrices come from the first 8
    // rows.
    let row = lane / 16u32 * 8u32 + lane % 8u32;
    let piece = UNIT_POS / 32u32 % 4u32 * 2u32 + lane / 8u32 % 2u32;
    let at = subtile + row * comptime!(ROW_BYTES as u32) + ((piece ^ (lane % 8u32)) << 4u32);
    let mut registers = Vector::<u32, N>::zeroed();
    #[unroll]
    for step in 0..steps {
        let loaded = load_matrices_transposed(at + comptime!((step * STEP * ROW_BYTES) as u32));
        #[unroll]
        for i in 0..4usize {
            registers.insert(comptime!(4 * step + i), loaded.extract(i));
        }
    }
    registers
}

/// Waits until at most the latest `pending` `wgmma` groups are in flight. Then returns the first `used` registers of
/// the fragment.
#[cube]
pub fn take_fragment<NF: Size>(
    fragment: Vector<f32, NF>,
    #[comptime] used: usize,
    #[comptime] size: usize,
    #[comptime] pending: usize,
) -> Vector<f32, NF> {
    let text = comptime!(fence_text(used, size, pending));
    let taken: Vector<f32, NF>;
    gpu_asm!(
        "{text} // {taken} {fragment}\n",
        taken = out(_) taken,
        fragment = in(_) value_of::<Vector<f32, NF>>(fragment)
    );
    taken
}

/// Does the same as [`take_fragment()`] for a multiplication whose left operand is `p`. Passing `p` keeps its registers
/// alive until the wait.
#[cube]
pub fn take_sums<NF: Size, NP: Size>(
    fragment: Vector<f32, NF>,
    p: Vector<u32, NP>,
    #[comptime] used: usize,
    #[comptime] size: usize,
    #[comptime] pending: usize,
) -> Vector<f32, NF> {
    let text = comptime!(fence_text(used, size, pending));
    let taken: Vector<f32, NF>;
    gpu_asm!(
        "{text} // {taken} {fragment} {p}\n",
        taken = out(_) taken,
        fragment = in(_) value_of::<Vector<f32, NF>>(fragment),
        p = in(_) value_of::<Vector<u32, NP>>(p)
    );
    taken
}

/// Waits until at most `pending` `wgmma` groups are in flight. Then each thread whose `elected` is not 0 arrives
/// `times` times at the barrier `empty`.
#[cube]
pub fn free_chunk(empty: u32, elected: u32, #[comptime] pending: usize, #[comptime] times: usize) {
    let text = comptime!(format!(
        "{{\n.reg .pred elected;\nsetp.ne.b32 elected, %1, 0;\nwgmma.wait_group.sync.aligned {pending};\n{}}}\n",
        arrive_text("%0", times)
    ));
    gpu_asm!(
        "{text} // {empty} {elected}\n",
        empty = in(_) value_of::<u32>(empty),
        elected = in(_) value_of::<u32>(elected)
    );
}
