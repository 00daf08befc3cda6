//! The tile products of Hopper: `wgmma`, by which a warpgroup multiplies 64 rows with operands that the
//! copy engine brought to shared memory, while its threads do something else.
//!
//! A product in flight writes registers that nothing may touch, so each product is one PTX text: wait for
//! the operands, issue, commit. Its accumulator leaves the text at once, and a *fence* text later waits for
//! the product and hands the registers on; in between they must only be carried along.
//!
//! Operands are in subtiles of 64 columns: `rows × 128` bytes with the copy engine's 128-byte swizzle, in
//! which the descriptors below find rows 8 by 8, 1024 bytes apart (PTX ISA, "Asynchronous warpgroup level
//! matrix shared memory layout"). Accumulator register `i` of lane `l` of warp `w` is row
//! `16 w + l / 4 + 8 (i / 2 % 2)`, column `8 (i / 4) + 2 (l % 4) + i % 2`; P, as registers of the second
//! product's left operand, has the same layout, two columns a register.

use super::ring::Turn;
use crate::kernel::ptx::{arrive_text, load_matrices, value_of, wait_text};
use crate::plan::wgmma::{
    ChunkedProduct, ChunkedScores, ColumnTiles, Half, PRODUCT_ROWS, Product, ROW_BYTES, RingShape,
    RowTiles, SUBTILE, ScoreProduct,
};
use cubecl::prelude::*;

/// Columns of one step of a product.
pub(crate) const STEP: usize = 16;

/// Bytes of a step in a row of a subtile, and of 16 rows of one.
pub(super) const STEP_BYTES: usize = 2 * STEP;
pub(super) const STEP_ROWS_BYTES: usize = STEP * ROW_BYTES;

/// The upper half of every descriptor: eight rows take 1024 bytes, and the 128-byte swizzle.
const DESCRIPTOR_LAYOUT: u32 = ((8 * ROW_BYTES as u32) >> 4) | (1 << 30);

/// The lower half of the descriptor of the operand at `address` whose columns are summed over: queries,
/// keys, P.
#[cube]
pub(crate) fn descriptor(address: u32) -> u32 {
    described(address, 16usize)
}

/// The same of an operand whose rows are summed over, values, in subtiles of `subtile_bytes`.
#[cube]
pub(crate) fn transposed_descriptor(address: u32, #[comptime] subtile_bytes: usize) -> u32 {
    described(address, subtile_bytes)
}

#[cube]
fn described(address: u32, #[comptime] leading_bytes: usize) -> u32 {
    ((address & 0x3FFFFu32) >> 4u32) | comptime!(((leading_bytes as u32) >> 4) << 16)
}

/// Makes `name` the descriptor whose lower half is `low + offset`. Sums of halves are cheaper than of whole
/// descriptors; needs a register `low`.
pub(super) fn descriptor_text(name: &str, low: &str, offset: usize) -> String {
    format!("add.u32 low, {low}, {offset};\nmov.b64 {name}, {{low, {DESCRIPTOR_LAYOUT}}};\n")
}

/// What an address in bytes adds to a descriptor.
pub(super) const fn units(bytes: usize) -> usize {
    bytes >> 4
}

pub(super) fn registers(from: usize, count: usize) -> String {
    let names: Vec<_> = (from..from + count).map(|i| format!("%{i}")).collect();
    names.join(", ")
}

fn moves(count: usize, from: usize) -> String {
    (0..count)
        .map(|i| format!("mov.b32 %{i}, %{};\n", from + i))
        .collect()
}

pub(super) fn instruction(columns: usize, half: Half) -> String {
    let half = half.ptx();
    format!("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{half}.{half}")
}

/// `S = Q Kᵀ` of a whole block: registers of S | queries' and keys' descriptors.
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

/// `O += P V` of a whole block, P in registers: registers of O | O, P, values' descriptor.
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

/// Waits until at most `pending` products are in flight, then says at a barrier that a stage is free:
/// `used` registers of a fragment | the same, barrier, elected.
fn release_text(used: usize, fragment: usize, pending: usize) -> String {
    let [barrier, elected] = [0, 1].map(|i| format!("%{}", 2 * fragment + i));
    format!(
        "{{\n.reg .pred elected;\nsetp.ne.b32 elected, {elected}, 0;\nwgmma.wait_group.sync.aligned {pending};\n{}{}}}\n",
        arrive_text(&barrier, 1),
        moves(used, fragment)
    )
}

/// Starts `S = Q Kᵀ` of a block, whose keys are there.
#[cube]
pub(crate) fn multiply_scores<NS: Size>(
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

/// S, once at most one later product is in flight; frees the keys' stage.
#[cube]
pub(crate) fn take_scores<NS: Size>(
    s: Vector<f32, NS>,
    empty: u32,
    elected: u32,
    #[comptime] pending: usize,
    #[comptime] tiles: RowTiles,
) -> Vector<f32, NS> {
    let text = comptime!(release_text(tiles.keys / 2, tiles.fragments()[0], pending));
    let taken: Vector<f32, NS>;
    gpu_asm!(
        "{text} // {taken} {s} {empty} {elected}\n",
        taken = out(_) taken,
        s = in(_) value_of::<Vector<f32, NS>>(s),
        empty = in(_) value_of::<u32>(empty),
        elected = in(_) value_of::<u32>(elected)
    );
    taken
}

/// Starts `O += P V` of a block, whose values are there.
#[cube]
pub(crate) fn multiply_output<NO: Size, NP: Size>(
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

/// O, once no product is in flight; frees the values' stage. P is named so that it outlives the product.
#[cube]
pub(crate) fn take_output<NO: Size, NP: Size>(
    o: Vector<f32, NO>,
    p: Vector<u32, NP>,
    empty: u32,
    elected: u32,
    #[comptime] tiles: RowTiles,
) -> Vector<f32, NO> {
    let text = comptime!(release_text(
        tiles.value_columns() / 2,
        tiles.fragments()[2],
        0
    ));
    let taken: Vector<f32, NO>;
    gpu_asm!(
        "{text} // {taken} {o} {empty} {elected} {p}\n",
        taken = out(_) taken,
        o = in(_) value_of::<Vector<f32, NO>>(o),
        empty = in(_) value_of::<u32>(empty),
        elected = in(_) value_of::<u32>(elected),
        p = in(_) value_of::<Vector<u32, NP>>(p)
    );
    taken
}

/// Scores of a warpgroup in the arrangement by columns: 64 rows and 64 keys.
const HALF_KEYS: usize = ColumnTiles::KEYS / 2;

/// Steps of 16 columns in a subtile.
pub(crate) const SUBTILE_STEPS: usize = 4;

/// How a text walks the ring: where the next chunk's barriers and data are.
///
/// Where a block is whole rounds of the ring, every block starts at the first stage, and a chunk is a
/// constant away from it. Elsewhere each step is computed.
struct Walk {
    ring: RingShape,
    /// Registers: the first barrier of the full and of the empty ones, the ring's descriptor.
    full: String,
    empty: String,
    data: String,
    /// Stages from a chunk to the next.
    step: usize,
    /// Stages since the registers were set.
    offset: usize,
    text: String,
}

impl Walk {
    /// From `stage` in the phase of parity `parity` on.
    fn new(ring: RingShape, [stage, parity, full, empty, data]: [String; 5], step: usize) -> Self {
        let text = format!(
            ".reg .pred waited, wrapped;\n.reg .b32 stage, parity, is_full, is_empty, chunk, low;\n\
             mov.b32 stage, {stage};\nmov.b32 parity, {parity};\n"
        );
        let mut walk = Self {
            ring,
            full,
            empty,
            data,
            step,
            offset: 0,
            text,
        };
        walk.locate();
        walk
    }

    fn locate(&mut self) {
        let Self {
            full, empty, data, ..
        } = &self;
        self.text += &format!(
            "mad.lo.u32 is_full, stage, 8, {full};\nmad.lo.u32 is_empty, stage, 8, {empty};\n\
             mad.lo.u32 chunk, stage, {}, {data};\nredux.sync.or.b32 chunk, chunk, 0xFFFFFFFF;\n",
            units(ColumnTiles::STAGE_BYTES)
        );
    }

    /// Waits for the chunk.
    fn wait(&mut self, label: usize) {
        self.text += &wait_text(&label.to_string(), "is_full", 8 * self.offset, "parity");
        self.text += "wgmma.fence.sync.aligned;\n";
    }

    /// What to add to `chunk` for its data.
    const fn data(&self) -> usize {
        units(self.offset * ColumnTiles::STAGE_BYTES)
    }

    /// Goes to the next chunk.
    fn advance(&mut self) {
        let stages = self.ring.stages;
        if self.ring.whole_rounds {
            self.offset += self.step;
            if self.offset >= stages {
                self.offset -= stages;
                self.text += "xor.b32 parity, parity, 1;\n";
            }
        } else {
            self.text += &format!(
                "add.u32 stage, stage, {};\nsetp.ge.u32 wrapped, stage, {stages};\n\
                 @wrapped sub.u32 stage, stage, {stages};\n@wrapped xor.b32 parity, parity, 1;\n",
                self.step
            );
            self.locate();
        }
    }
}

/// `S = Q Kᵀ` of a block whose chunks come through the ring: registers of S | the first queries' registers,
/// queries' and the ring's descriptors, the first full and the first empty barrier, elected, stage and
/// parity of the first chunk. A chunk is free when the one after the next is issued; the last is left to
/// whoever waits for S.
///
/// Where it says so, the last chunk of what was multiplied before, of an empty barrier and elected in two more
/// registers, is freed once the first of these is issued.
fn chunked_scores_text(product: &ChunkedScores) -> String {
    let first_query = HALF_KEYS / 2;
    let after = first_query + product.query_fragment;
    let [query, key, full, empty, elected, stage, parity] =
        [0, 1, 2, 3, 4, 5, 6].map(|i| format!("%{}", after + i));
    let chunks = product.depth.div_ceil(SUBTILE);
    let steps = product.depth.div_ceil(STEP);
    let scores = registers(0, HALF_KEYS / 2);
    let instruction = instruction(HALF_KEYS, product.half);
    let mut walk = Walk::new(product.ring, [stage, parity, full, empty, key], 1);
    walk.text += &format!(
        ".reg .pred sum, elected;\n.reg .b64 a, b;\n.reg .b32 free;\n\
         setp.ne.b32 elected, {elected}, 0;\nsetp.ne.b32 sum, 0, 0;\n"
    );
    for chunk in 0..chunks {
        walk.wait(chunk);
        for step in chunk * SUBTILE_STEPS..steps.min((chunk + 1) * SUBTILE_STEPS) {
            let within = units(step % SUBTILE_STEPS * STEP_BYTES);
            walk.text += &descriptor_text("b", "chunk", walk.data() + within);
            walk.text += &if chunk < product.register_chunks {
                let a = registers(first_query + 4 * step, 4);
                format!("{instruction} {{{scores}}}, {{{a}}}, b, sum, 1, 1, 0;\n")
            } else {
                let a = units(chunk * PRODUCT_ROWS * ROW_BYTES) + within;
                descriptor_text("a", &query, a)
                    + &format!("{instruction} {{{scores}}}, a, b, sum, 1, 1, 0, 0;\n")
            };
            if step == 0 {
                walk.text += "setp.eq.b32 sum, 0, 0;\n";
            }
        }
        walk.text += "wgmma.commit_group.sync.aligned;\n";
        if chunk > 0 {
            walk.text += "wgmma.wait_group.sync.aligned 1;\n";
            walk.text += &arrive_text("free", 1);
        } else if product.frees_before {
            let [before, before_elected] = [7, 8].map(|i| format!("%{}", after + i));
            walk.text += &format!(
                "wgmma.wait_group.sync.aligned 1;\nsetp.ne.b32 elected, {before_elected}, 0;\n{}\
                 setp.ne.b32 elected, {elected}, 0;\n",
                arrive_text(&before, 1)
            );
        }
        walk.text += &format!("add.u32 free, is_empty, {};\n", 8 * walk.offset);
        walk.advance();
    }
    format!("{{\n{}}}\n", walk.text)
}

/// Multiplies P, or dS, with the chunk that is there.
fn add_chunk(walk: &mut Walk, p: &str, columns: usize, half: Half, chunk: usize) {
    for part in 0..ColumnTiles::VALUE_KEYS / STEP {
        let step = chunk * (ColumnTiles::VALUE_KEYS / STEP) + part;
        let in_p =
            step / SUBTILE_STEPS * ColumnTiles::HALF_BYTES + step % SUBTILE_STEPS * STEP_BYTES;
        walk.text += &descriptor_text("a", p, units(in_p));
        walk.text += &descriptor_text("b", "chunk", walk.data() + units(part * STEP_ROWS_BYTES));
        walk.text += &format!(
            "{} {{{}}}, a, b, sum, 1, 1, 0, 1;\n",
            instruction(columns, half),
            registers(0, columns / 2),
        );
    }
}

/// `sum += P V` of `chunks` of a warpgroup's, from the `first` on: registers of the sum | the same, P's and the
/// ring's descriptors, the first full and the first empty barrier, elected, stage and parity of the first of these
/// chunks, and of the other warpgroup's first. A chunk is free when the one after the next is issued; the last is
/// left to whoever waits for the sum.
///
/// The other warpgroup's chunks are waited for, and given back at once: who skipped a phase of a barrier could take
/// the next but one for it, since their parities are the same.
fn chunked_sum_text(product: &ChunkedProduct, first: usize, chunks: usize) -> String {
    let fragment = product.fragment();
    let [
        p,
        value,
        full,
        empty,
        elected,
        stage,
        parity,
        other_stage,
        other_parity,
    ] = [0, 1, 2, 3, 4, 5, 6, 7, 8].map(|i| format!("%{}", 2 * fragment + i));
    let stages = product.ring.stages;
    let others = format!(
        ".reg .pred round;\n.reg .b32 other, other_parity, other_full, other_empty;\n\
         mov.b32 other, {other_stage};\nmov.b32 other_parity, {other_parity};\n"
    );
    let locate_other = format!(
        "mad.lo.u32 other_full, other, 8, {full};\nmad.lo.u32 other_empty, other, 8, {empty};\n"
    );
    let next_other = format!(
        "add.u32 other, other, {};\nsetp.ge.u32 round, other, {stages};\n\
         @round sub.u32 other, other, {stages};\n@round xor.b32 other_parity, other_parity, 1;\n",
        ColumnTiles::WARPGROUPS
    );
    let mut walk = Walk::new(
        product.ring,
        [stage, parity, full, empty, value],
        ColumnTiles::WARPGROUPS,
    );
    walk.text += &others;
    walk.text += &format!(
        ".reg .pred sum, elected;\n.reg .b64 a, b;\n.reg .b32 free;\nsetp.eq.b32 sum, 0, 0;\n\
         setp.ne.b32 elected, {elected}, 0;\n{}",
        moves(product.columns / 2, fragment)
    );
    for chunk in 0..chunks {
        walk.wait(chunk);
        add_chunk(&mut walk, &p, product.columns, product.half, first + chunk);
        walk.text += "wgmma.commit_group.sync.aligned;\n";
        walk.text += &locate_other;
        walk.text += &wait_text(&format!("O{chunk}"), "other_full", 0, "other_parity");
        walk.text += &arrive_text("other_empty", 1);
        walk.text += &next_other;
        if chunk > 0 {
            walk.text += "wgmma.wait_group.sync.aligned 1;\n";
            walk.text += &arrive_text("free", 1);
        }
        walk.text += &format!("add.u32 free, is_empty, {};\n", 8 * walk.offset);
        walk.advance();
    }
    format!("{{\n{}}}\n", walk.text)
}

/// `O += P V` of a block whose chunks come through the ring: registers of O | O, P's and the ring's
/// descriptors, the first full and the first empty barrier, elected, stage and parity of the warpgroup's
/// first chunk, the keys' last chunk's empty barrier, and who says that this is free.
fn chunked_output_text(tiles: &ColumnTiles) -> String {
    let fragment = tiles.output_fragment();
    let [
        p,
        value,
        full,
        empty,
        elected,
        stage,
        parity,
        key_empty,
        key_elected,
    ] = [0, 1, 2, 3, 4, 5, 6, 7, 8].map(|i| format!("%{}", 2 * fragment + i));
    let columns = tiles.value_columns();
    let chunks = ColumnTiles::KEYS / ColumnTiles::VALUE_KEYS;
    let mut walk = Walk::new(
        tiles.ring(),
        [stage, parity, full, empty, value],
        ColumnTiles::WARPGROUPS,
    );
    walk.text += &format!(
        ".reg .pred sum, elected;\n.reg .b64 a, b;\n.reg .b32 first;\nsetp.eq.b32 sum, 0, 0;\nmov.b32 first, is_empty;\n{}",
        moves(columns / 2, fragment)
    );
    for chunk in 0..chunks {
        walk.wait(chunk);
        add_chunk(&mut walk, &p, columns, tiles.half, chunk);
        walk.text += "wgmma.commit_group.sync.aligned;\n";
        if chunk == 0 {
            // Everything before this product, that is S, is done.
            walk.text += &format!(
                "wgmma.wait_group.sync.aligned 1;\nsetp.ne.b32 elected, {key_elected}, 0;\n"
            );
            walk.text += &arrive_text(&key_empty, 1);
        }
        walk.advance();
    }
    walk.text += &format!("setp.ne.b32 elected, {elected}, 0;\n");
    if tiles.frees_first_chunk_at_once() {
        walk.text += "wgmma.wait_group.sync.aligned 3;\n";
        walk.text += &arrive_text("first", 2);
    }
    format!("{{\n{}}}\n", walk.text)
}

/// Waits until at most `pending` products are in flight: `used` registers of a fragment | the same.
fn fence_text(used: usize, fragment: usize, pending: usize) -> String {
    format!(
        "{{\nwgmma.wait_group.sync.aligned {pending};\n{}}}\n",
        moves(used, fragment)
    )
}

/// A warpgroup's part of the ring: where its chunk is, and who speaks for each warp.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Ring {
    pub full: u32,
    pub empty: u32,
    pub elected: u32,
}

/// Starts `S = Q Kᵀ` of a block whose first chunk is `at`.
#[cube]
pub(crate) fn multiply_chunked_scores<NS: Size, NQ: Size>(
    first_queries: Vector<u32, NQ>,
    query: u32,
    key: u32,
    ring: Ring,
    at: Turn,
    #[comptime] tiles: ColumnTiles,
) -> Vector<f32, NS> {
    let text = comptime!(chunked_scores_text(&tiles.chunked_scores()));
    let s: Vector<f32, NS>;
    gpu_asm!(
        "{text} // {s} {first_queries} {query} {key} {full} {empty} {elected} {stage} {parity}\n",
        s = out(_) s,
        first_queries = in(_) value_of::<Vector<u32, NQ>>(first_queries),
        query = in(_) value_of::<u32>(query),
        key = in(_) value_of::<u32>(key),
        full = in(_) value_of::<u32>(ring.full),
        empty = in(_) value_of::<u32>(ring.empty),
        elected = in(_) value_of::<u32>(ring.elected),
        stage = in(_) value_of::<u32>(at.stage),
        parity = in(_) value_of::<u32>(at.parity)
    );
    s
}

/// The same without queries in registers, of any operands; once the first chunk is issued, frees the last one of
/// what was multiplied `before`.
#[cube]
pub(crate) fn multiply_chunks<NS: Size>(
    left: u32,
    right: u32,
    ring: Ring,
    at: Turn,
    before: u32,
    before_elected: u32,
    #[comptime] product: ChunkedScores,
) -> Vector<f32, NS> {
    let text = comptime!(chunked_scores_text(&product));
    let s: Vector<f32, NS>;
    gpu_asm!(
        "{text} // {s} {left} {right} {full} {empty} {elected} {stage} {parity} {before} {before_elected}\n",
        s = out(_) s,
        left = in(_) value_of::<u32>(left),
        right = in(_) value_of::<u32>(right),
        full = in(_) value_of::<u32>(ring.full),
        empty = in(_) value_of::<u32>(ring.empty),
        elected = in(_) value_of::<u32>(ring.elected),
        stage = in(_) value_of::<u32>(at.stage),
        parity = in(_) value_of::<u32>(at.parity),
        before = in(_) value_of::<u32>(before),
        before_elected = in(_) value_of::<u32>(before_elected)
    );
    s
}

/// Starts `sum += P V` of `chunks` of the warpgroup's from the `first` on, the first of which is `at`; the other
/// warpgroup's first is `other`.
#[cube]
pub(crate) fn add_chunks<NO: Size>(
    sum: Vector<f32, NO>,
    p: u32,
    value: u32,
    ring: Ring,
    at: Turn,
    other: Turn,
    #[comptime] first: usize,
    #[comptime] chunks: usize,
    #[comptime] product: ChunkedProduct,
) -> Vector<f32, NO> {
    let text = comptime!(chunked_sum_text(&product, first, chunks));
    let added: Vector<f32, NO>;
    gpu_asm!(
        "{text} // {added} {sum} {p} {value} {full} {empty} {elected} {stage} {parity} {other_stage} {other_parity}\n",
        added = out(_) added,
        sum = in(_) value_of::<Vector<f32, NO>>(sum),
        p = in(_) value_of::<u32>(p),
        value = in(_) value_of::<u32>(value),
        full = in(_) value_of::<u32>(ring.full),
        empty = in(_) value_of::<u32>(ring.empty),
        elected = in(_) value_of::<u32>(ring.elected),
        stage = in(_) value_of::<u32>(at.stage),
        parity = in(_) value_of::<u32>(at.parity),
        other_stage = in(_) value_of::<u32>(other.stage),
        other_parity = in(_) value_of::<u32>(other.parity)
    );
    added
}

/// Where the thread's row of a warp's matrices lies: of the warpgroup's 64 rows of the subtile at `subtile`, 16
/// columns from the `step`-th on. The 128-byte swizzle permutes a row's pieces of 16 bytes by its number.
#[cube]
pub(crate) fn matrix_row(subtile: u32, #[comptime] step: usize) -> u32 {
    let lane = UNIT_POS % 32u32;
    let row = UNIT_POS / 32u32 % 4u32 * 16u32 + lane % 16u32;
    let swizzle = ((lane / 16u32) ^ (lane % 8u32)) << 4u32;
    subtile + row * comptime!(ROW_BYTES as u32) + (swizzle ^ comptime!((STEP_BYTES * step) as u32))
}

/// The warp's rows of the first queries, as registers of the product's left operand.
#[cube]
pub(crate) fn load_first_queries<NQ: Size>(
    queries: u32,
    #[comptime] tiles: ColumnTiles,
) -> Vector<u32, NQ> {
    let mut registers = Vector::<u32, NQ>::zeroed();
    #[unroll]
    for step in 0..comptime!(SUBTILE_STEPS * tiles.register_chunks()) {
        let subtile = queries + comptime!((step / SUBTILE_STEPS * PRODUCT_ROWS * ROW_BYTES) as u32);
        let loaded = load_matrices(matrix_row(subtile, comptime!(step % SUBTILE_STEPS)));
        #[unroll]
        for i in 0..4usize {
            registers.insert(comptime!(4 * step + i), loaded.extract(i));
        }
    }
    registers
}

/// Starts `O += P V` of a block whose chunks are every second from `at` on.
#[cube]
pub(crate) fn multiply_chunked_output<NO: Size>(
    o: Vector<f32, NO>,
    p: u32,
    value: u32,
    ring: Ring,
    at: Turn,
    key_empty: u32,
    key_elected: u32,
    #[comptime] tiles: ColumnTiles,
) -> Vector<f32, NO> {
    let text = comptime!(chunked_output_text(&tiles));
    let sum: Vector<f32, NO>;
    gpu_asm!(
        "{text} // {sum} {o} {p} {value} {full} {empty} {elected} {stage} {parity} {key_empty} {key_elected}\n",
        sum = out(_) sum,
        o = in(_) value_of::<Vector<f32, NO>>(o),
        p = in(_) value_of::<u32>(p),
        value = in(_) value_of::<u32>(value),
        full = in(_) value_of::<u32>(ring.full),
        empty = in(_) value_of::<u32>(ring.empty),
        elected = in(_) value_of::<u32>(ring.elected),
        stage = in(_) value_of::<u32>(at.stage),
        parity = in(_) value_of::<u32>(at.parity),
        key_empty = in(_) value_of::<u32>(key_empty),
        key_elected = in(_) value_of::<u32>(key_elected)
    );
    sum
}

/// A fragment of which `used` registers are used, once at most `pending` later products are in flight.
#[cube]
pub(crate) fn take_fragment<NF: Size>(
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

/// The same of a product whose left operand is `p`, which outlives it.
#[cube]
pub(crate) fn take_sums<NF: Size, NP: Size>(
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

/// Waits until at most `pending` products are in flight, then arrives `times` times at a barrier.
#[cube]
pub(crate) fn free_chunk(
    empty: u32,
    elected: u32,
    #[comptime] pending: usize,
    #[comptime] times: usize,
) {
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
