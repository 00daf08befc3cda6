//! GEMMs whose right operand streams through a ring of shared-memory buffers (*stages*). A *chunk* is some rows or
//! columns of the operand, as many as fill one stage.
//!
//! The functions `*_text` emit PTX.

use crate::engine::tensor_core::wgmma::plan::{
    ChunkedProduct, ChunkedScores, RingShape, WgmmaSplitDTiles,
};
use cube_kit::hopper::PRODUCT_ROWS;
use cube_kit::hopper::pipeline::PipelineState;
use cube_kit::hopper::ptx::{arrive_text, wait_text};
use cube_kit::hopper::wgmma::{
    STEP, STEP_BYTES, STEP_ROWS_BYTES, SUBTILE_STEPS, descriptor_text, instruction, load_rows,
    moves, registers, units,
};
use cube_kit::nvidia::ptx::value_of;
use cube_kit::nvidia::{Half, ROW_BYTES, SUBTILE};
use cubecl::prelude::*;

/// Half the number of keys in a block. In split-D, each warpgroup computes the scores of the tile's 64 queries for half
/// of the block's keys.
const HALF_KEYS: usize = WgmmaSplitDTiles::KEYS / 2;

/// Emits PTX that steps through the chunks in a ring of shared-memory buffers (stages), and computes the addresses of each
/// chunk's barriers and data.
///
/// If every operand's number of chunks is a multiple of the number of stages, the addresses of all chunks lie at
/// constant offsets from the addresses of the first chunk. Otherwise the PTX computes the stage of each chunk.
struct Walk {
    ring: RingShape,
    /// The PTX register with the address of the first stage's full barrier.
    full: String,
    /// The PTX register with the address of the first stage's empty barrier.
    empty: String,
    /// The PTX register with the shared memory descriptor of the ring's first stage.
    data: String,
    /// The step from one chunk that the warpgroup uses to the next: 1 if the warpgroup uses every chunk, 2 if the
    /// warpgroup uses every second chunk.
    step: usize,
    /// The PTX register `stage` holds the index of a stage. This field is the number of stages from that stage to the
    /// stage of the current chunk.
    offset: usize,
    text: String,
}

impl Walk {
    /// Creates a `Walk`. Each string is the name of a PTX register. The walk begins at the ring stage in the register
    /// `stage`. The register `parity` holds the parity of the full barrier of this stage.
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
            units(WgmmaSplitDTiles::STAGE_BYTES)
        );
    }

    /// Emits PTX that waits until the copy of the current chunk to shared memory is complete.
    fn wait(&mut self, label: usize) {
        self.text += &wait_text(&label.to_string(), "is_full", 8 * self.offset, "parity");
        self.text += "wgmma.fence.sync.aligned;\n";
    }

    /// Returns the number that the PTX adds to the descriptor in the PTX register `chunk`. The sum is the descriptor of
    /// the current chunk's data.
    const fn data(&self) -> usize {
        units(self.offset * WgmmaSplitDTiles::STAGE_BYTES)
    }

    /// Emits PTX that moves on to the next chunk that the warpgroup uses.
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

/// Emits the GEMM `S = Q Kᵀ` of a block of K. The chunks of K stream through a ring of shared-memory buffers (stages).
///
/// The outputs are the registers of S. The inputs are, in this order:
/// 1. The registers that hold the first query chunks. The GEMM reads the other query chunks from shared memory.
/// 2. The descriptors of the queries and of the ring.
/// 3. The full and the empty barrier of the ring's first stage, and `elected`, which is 1 in the lane that frees chunks
///    for its warp.
/// 4. The stage and the parity of the first chunk of K.
///
/// The PTX frees each chunk except the last. The caller frees the last chunk, after it has waited for S.
///
/// With `frees_before`, the PTX also frees the last chunk of the preceding GEMM. In this case, two more inputs follow:
/// the empty barrier of that last chunk, and the `elected` flag for this barrier.
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

/// Emits the wgmma instructions that multiply P (or dS) by the current chunk.
fn add_chunk(walk: &mut Walk, p: &str, columns: usize, half: Half, chunk: usize) {
    for part in 0..WgmmaSplitDTiles::VALUE_KEYS / STEP {
        let step = chunk * (WgmmaSplitDTiles::VALUE_KEYS / STEP) + part;
        let in_p =
            step / SUBTILE_STEPS * WgmmaSplitDTiles::HALF_BYTES + step % SUBTILE_STEPS * STEP_BYTES;
        walk.text += &descriptor_text("a", p, units(in_p));
        walk.text += &descriptor_text("b", "chunk", walk.data() + units(part * STEP_ROWS_BYTES));
        walk.text += &format!(
            "{} {{{}}}, a, b, sum, 1, 1, 0, 1;\n",
            instruction(columns, half),
            registers(0, columns / 2),
        );
    }
}

/// Emits the GEMM `sum += P V` over `chunks` chunks of V in a ring of shared-memory buffers (stages), beginning with
/// chunk number `first`. Both numbers count only the chunks that the warpgroup multiplies. In the backward, P may be
/// dS, and V may be Q, K or dO.
///
/// The outputs are the registers of the sum. The inputs are, in this order:
/// 1. The registers of the sum.
/// 2. The descriptors of P and of the ring.
/// 3. The full and the empty barrier of the ring's first stage, and `elected`, which is 1 in the lane that frees chunks
///    for its warp.
/// 4. The stage and the parity of the warpgroup's first chunk.
/// 5. The stage and the parity of the other warpgroup's first chunk.
///
/// The PTX frees each chunk except the last. The caller frees the last chunk, after it has waited for the sum.
///
/// The PTX also waits for each chunk of the other warpgroup, and frees that chunk at once. Without this wait, the
/// warpgroup would skip a phase of the full barrier of that chunk's stage. The phases before and after the skipped
/// phase have the same parity, so a later wait by parity could not tell them apart.
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
        WgmmaSplitDTiles::WARPGROUPS
    );
    let mut walk = Walk::new(
        product.ring,
        [stage, parity, full, empty, value],
        WgmmaSplitDTiles::WARPGROUPS,
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

/// Emits the GEMM `O += P V` of a block of V. The chunks of V stream through a ring of shared-memory buffers (stages).
///
/// The outputs are the registers of O. The inputs are, in this order:
/// 1. The registers of O.
/// 2. The descriptors of P and of the ring.
/// 3. The full and the empty barrier of the ring's first stage, and `elected`, which is 1 in the lane that frees chunks
///    for its warp.
/// 4. The stage and the parity of the warpgroup's first chunk.
/// 5. The empty barrier of the next block's last chunk of K, and a flag that is 1 in the lanes that free that chunk.
///
/// The caller frees the chunks of V, with one exception. If the ring has fewer stages than the block has chunks of V,
/// the block's last chunk of V reuses the stage of the block's first chunk of V. The PTX then helps to free the first
/// chunk of V that the warpgroup multiplies. In the PTX, each warp arrives once at the empty barrier of that chunk.
/// This barrier expects eight arrivals, but a warpgroup has only four warps. `share_first_chunk` or
/// `free_own_first_chunk` adds the other four arrivals.
fn chunked_output_text(tiles: &WgmmaSplitDTiles) -> String {
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
    let chunks = WgmmaSplitDTiles::KEYS / WgmmaSplitDTiles::VALUE_KEYS;
    let mut walk = Walk::new(
        tiles.ring(),
        [stage, parity, full, empty, value],
        WgmmaSplitDTiles::WARPGROUPS,
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
            // The wait that follows also waits for S of the next block. After the wait, the kernel can therefore free
            // the last chunk of K of that block.
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

/// The addresses of the first full barrier and the first empty barrier of a ring, and a flag for the lane that arrives
/// at barriers. The ring has one full and one empty barrier for each stage (shared-memory buffer).
///
/// `elected` is 1 in the lane that arrives for its warp, else 0.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Ring {
    pub full: u32,
    pub empty: u32,
    pub elected: u32,
}

/// Starts the GEMM `S = Q Kᵀ` of a block. `at` has the ring stage and the parity of the first chunk of K of the block.
/// The returned registers are valid only after a wait for the wgmma group.
#[cube]
pub(crate) fn multiply_chunked_scores<NS: Size, NQ: Size>(
    first_queries: Vector<u32, NQ>,
    query: u32,
    key: u32,
    ring: Ring,
    at: PipelineState,
    #[comptime] tiles: WgmmaSplitDTiles,
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

/// Starts the GEMM `S = left · rightᵀ` of a block. All chunks of `left` are in shared memory.
///
/// If `product.frees_before` is true, this call also frees the shared-memory buffer that holds the last chunk of the
/// preceding GEMM. `before` is the address of the empty barrier of that buffer.
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

/// Starts the GEMM `sum += P V` over `chunks` chunks, beginning with chunk number `first`. Both numbers count only the
/// chunks that the warpgroup multiplies. `at` has the stage and parity of this warpgroup's first chunk. `other` has the
/// stage and parity of the other warpgroup's first chunk.
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

/// Loads the warp's rows of the first query chunks into registers, in the layout of a wgmma's left operand.
#[cube]
pub(crate) fn load_first_queries<NQ: Size>(
    queries: u32,
    #[comptime] tiles: WgmmaSplitDTiles,
) -> Vector<u32, NQ> {
    load_rows::<NQ>(
        queries,
        PRODUCT_ROWS,
        comptime!(SUBTILE_STEPS * tiles.register_chunks()),
    )
}

/// Starts the GEMM `O += P V` of a block. The warpgroup multiplies every second chunk of V in the ring. `at` has the
/// stage and parity of the first of these chunks.
#[cube]
pub(crate) fn multiply_chunked_output<NO: Size>(
    o: Vector<f32, NO>,
    p: u32,
    value: u32,
    ring: Ring,
    at: PipelineState,
    key_empty: u32,
    key_elected: u32,
    #[comptime] tiles: WgmmaSplitDTiles,
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
