//! Products whose right operands come by chunks through one ring: the texts wait for a chunk each, and free what is behind.

use crate::engine::wgmma::plan::{ChunkedProduct, ChunkedScores, RingShape, SplitDTiles};
use cube_kit::hopper::pipeline::PipelineState;
use cube_kit::hopper::ptx::{arrive_text, value_of, wait_text};
use cube_kit::hopper::wgmma::{
    STEP, STEP_BYTES, STEP_ROWS_BYTES, SUBTILE_STEPS, descriptor_text, instruction, load_rows,
    moves, registers, units,
};
use cube_kit::hopper::{Half, PRODUCT_ROWS, ROW_BYTES, SUBTILE};
use cubecl::prelude::*;

/// Scores of a warpgroup in split-D: 64 rows and 64 keys.
const HALF_KEYS: usize = SplitDTiles::KEYS / 2;

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
            units(SplitDTiles::STAGE_BYTES)
        );
    }

    /// Waits for the chunk.
    fn wait(&mut self, label: usize) {
        self.text += &wait_text(&label.to_string(), "is_full", 8 * self.offset, "parity");
        self.text += "wgmma.fence.sync.aligned;\n";
    }

    /// What to add to `chunk` for its data.
    const fn data(&self) -> usize {
        units(self.offset * SplitDTiles::STAGE_BYTES)
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
    for part in 0..SplitDTiles::VALUE_KEYS / STEP {
        let step = chunk * (SplitDTiles::VALUE_KEYS / STEP) + part;
        let in_p =
            step / SUBTILE_STEPS * SplitDTiles::HALF_BYTES + step % SUBTILE_STEPS * STEP_BYTES;
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
        SplitDTiles::WARPGROUPS
    );
    let mut walk = Walk::new(
        product.ring,
        [stage, parity, full, empty, value],
        SplitDTiles::WARPGROUPS,
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
///
/// Where the last chunk needs the stage of the first, the text gives its own first chunk back once: the other time is
/// `share_first_chunk`'s of the split-D forward.
fn chunked_output_text(tiles: &SplitDTiles) -> String {
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
    let chunks = SplitDTiles::KEYS / SplitDTiles::VALUE_KEYS;
    let mut walk = Walk::new(
        tiles.ring(),
        [stage, parity, full, empty, value],
        SplitDTiles::WARPGROUPS,
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
        walk.text += &arrive_text("first", 1);
    }
    format!("{{\n{}}}\n", walk.text)
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
    at: PipelineState,
    #[comptime] tiles: SplitDTiles,
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
    at: PipelineState,
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
    at: PipelineState,
    other: PipelineState,
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

/// The warp's rows of the first queries, as registers of the product's left operand.
#[cube]
pub(crate) fn load_first_queries<NQ: Size>(
    queries: u32,
    #[comptime] tiles: SplitDTiles,
) -> Vector<u32, NQ> {
    load_rows::<NQ>(
        queries,
        PRODUCT_ROWS,
        comptime!(SUBTILE_STEPS * tiles.register_chunks()),
    )
}

/// Starts `O += P V` of a block whose chunks are every second from `at` on.
#[cube]
pub(crate) fn multiply_chunked_output<NO: Size>(
    o: Vector<f32, NO>,
    p: u32,
    value: u32,
    ring: Ring,
    at: PipelineState,
    key_empty: u32,
    key_elected: u32,
    #[comptime] tiles: SplitDTiles,
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
