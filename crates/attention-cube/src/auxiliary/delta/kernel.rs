//! Computes the logsumexp (LSE) and `Δ = rowsum(do ∘ o) − dlse` of every query, before the backward pass. Here `o` is
//! the output, `do` the output's gradient, and `dlse` the gradient of the LSE.
//!
//! The result is the LSE/delta tensor, `[batch, q_heads, 5, padded q_len]` in f32. Each row is padded to a multiple of
//! [`MULTIPLE`].
//!
//! The *reference score* of a query is the score that the softmax subtracted before `exp`. The reference score is about
//! the row maximum. A query is *far* if the magnitude of its reference score is at least [`FAR`]. The five rows of a
//! head are:
//!
//! - row 0: the LSE. With [`LogsumexpForm::Apart`], row 0 holds only the reference score of each query. With
//!   [`LogsumexpForm::Marked`], row 0 holds a mark in place of the LSE of each far query.
//! - row 1: Δ
//! - row 2: the logarithm of the softmax sum relative to the reference score, for each query whose LSE is not in row 0
//! - row 3: the reference scores of far queries, with [`LogsumexpForm::Marked`]
//! - row 4: one flag per [`ROWS`] queries, with [`LogsumexpForm::Marked`]. A flag is 1 if row 0 holds a mark for one of
//!   the queries.
//!
//! Kernels read rows 0 and 1 of every query, and with [`LogsumexpForm::Apart`] also row 2. The padding of these rows is
//! 0. A kernel that streams blocks of queries looks for marks only if a flag of its queries is 1.
//!
//! Schedule: eight units share a row of the attention output. All rows that a cube processes belong to one head.
//! Budget: 1 KB of shared memory, and two vectors in registers. Bound: memory. The kernel reads the output and its
//! gradient once.

use crate::math::gradient::RowLseDelta;
use crate::math::layout::{head_rows, row_offset};
use crate::math::lse_form::LogsumexpForm;
use crate::math::score::{is_hidden, saw_no_key};
use crate::tile_ops::row_access::load_vec4;
use cubecl::prelude::*;

/// `UNITS` is the number of units per cube. `ROW_UNITS` is the number of units that share one row of the attention output.
pub(crate) const UNITS: u32 = 256;
const ROW_UNITS: u32 = 8;
/// The number of queries (rows of the attention output) per cube.
pub(crate) const ROWS: u32 = UNITS / ROW_UNITS;
/// True if a query sees no key. The argument is the query's element in row 0 of the LSE/delta tensor. An element of +∞
/// marks a query without visible keys, and makes the query's probabilities 0.
#[cube]
pub(crate) fn is_blind(logsumexp: f32) -> bool {
    u32::reinterpret(logsumexp) == 0x7F80_0000u32
}

/// A query is far if the magnitude of its reference score is at least this number (see the module's documentation).
/// Below this magnitude, the rounding of the LSE changes a probability by a relative error of at most 2⁻¹³. This error
/// is less than that of rounding P to half precision.
pub(crate) const FAR: f32 = 2048.0;

/// The bits of −0, which row 0 of the LSE/delta tensor holds in place of the LSE of a far query (see the module's
/// documentation). Subtracting −0 from a score changes nothing.
const FAR_MARK: u32 = 0x8000_0000;

/// True if a query is far (see the module's documentation). The argument is an element of row 0 of the LSE/delta tensor.
#[cube]
pub(crate) fn is_far(logsumexp: f32) -> bool {
    u32::reinterpret(logsumexp) == comptime!(FAR_MARK)
}

/// The number of f32 values per query in the LSE/delta tensor: rows 0 to 3.
const NUMBERS: usize = 4;

/// The number of rows per head in the LSE/delta tensor: the rows with one f32 per query, and the row of flags.
pub(crate) const TERMS: usize = NUMBERS + 1;

/// The index of the row of flags in the LSE/delta tensor.
pub(crate) const FLAGS: usize = NUMBERS;

/// The indices of two rows of a head in the LSE/delta tensor. Row `LOGARITHM` holds the logarithms of the softmax sums.
/// Row `REFERENCE` holds the reference scores of far queries (see the module's documentation).
pub(crate) const LOGARITHM: usize = 2;
pub(crate) const REFERENCE: usize = 3;

/// The number of rows per head of the LSE/delta tensor from which kernels read the element of every query. Kernels read
/// the later rows only at far queries (see the module's documentation). At all other queries, the later rows may hold
/// any value.
const fn rows_without_marks(form: LogsumexpForm) -> usize {
    match form {
        LogsumexpForm::Whole | LogsumexpForm::Marked => LOGARITHM,
        LogsumexpForm::Apart => LOGARITHM + 1,
    }
}

/// Rows of the LSE/delta tensor are padded to a multiple of this number of elements. TMA requires rows at multiples of 16
/// bytes.
pub(crate) const MULTIPLE: usize = 4;

/// The runtime sizes of [`row_lse_delta`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct LseDeltaSizes {
    pub q_heads: u32,
    pub q_len: u32,
    /// The number of queries per head in `target`, including the padding.
    pub padded: u32,
    /// The number of heads over all sequences.
    pub planes: u32,
    pub value_dim: u32,
}

/// Writes LSE, delta and the flags of far queries to `target` (see the module's documentation). Each cube handles
/// [`ROWS`] queries of one head.
///
/// # Shapes
/// `output` and `output_gradient [batch, q_heads, q_len, value_dim]`, `logsumexp` and
/// `logsumexp_gradient [2 · batch, q_heads, q_len]` in f32, `target [batch, q_heads, 5, padded q_len]` in f32. The
/// first half of `logsumexp` holds the reference scores, the second half the logarithms of the softmax sums. The kernel
/// reads only the first half of `logsumexp_gradient`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn row_lse_delta<E: Float, N: Size>(
    output: &Tensor<Vector<E, N>>,
    output_gradient: &Tensor<Vector<E, N>>,
    logsumexp: &Tensor<f32>,
    logsumexp_gradient: ComptimeOption<&Tensor<f32>>,
    target: &mut Tensor<f32>,
    sizes: LseDeltaSizes,
    infinity: f32,
    #[comptime] form: LogsumexpForm,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let LseDeltaSizes {
        q_heads,
        q_len,
        padded,
        planes,
        value_dim,
    } = sizes;
    let parts = padded.div_ceil(ROWS);
    let part = CUBE_POS as u32 % parts;
    let plane = CUBE_POS as u32 / parts;
    let lane = UNIT_POS % ROW_UNITS;
    let query = part * ROWS + UNIT_POS / ROW_UNITS;
    let head = plane % q_heads;
    let batch = plane / q_heads;
    let exists = plane < planes && query < q_len;
    let mut sum = 0.0f32;
    if exists {
        let end = q_len as i32;
        let output_rows = head_rows(output, batch, head, 0i32, end, value_dim);
        let gradient_rows = head_rows(output_gradient, batch, head, 0i32, end, value_dim);
        let at = row_offset(&output_rows, query, false);
        let gradient_at = row_offset(&gradient_rows, query, false);
        let vectors = value_dim.div_ceil(4u32);
        let mut vector = lane;
        while vector < vectors {
            let o = load_vec4(output, &output_rows, at, vector * 4u32);
            let g = load_vec4(output_gradient, &gradient_rows, gradient_at, vector * 4u32);
            #[unroll]
            for component in 0..4usize {
                // A query that sees no key has an output of 0, but its output gradient may be infinite or NaN. The
                // product of the two would be NaN, so the sum skips products with an output of 0.
                let output = o.extract(component);
                sum += select(output == 0.0f32, 0.0f32, output * g.extract(component));
            }
            vector += ROW_UNITS;
        }
    }
    let mut partial = Shared::<[f32]>::new_slice(comptime!(UNITS as usize));
    partial[UNIT_POS as usize] = sum;
    sync_cube();
    let head_at = (TERMS as u32 * plane) as usize * padded as usize;
    let at = head_at + query as usize;
    if lane == 0u32 && !exists && plane < planes && query < padded {
        #[unroll]
        for term in 0..comptime!(rows_without_marks(form)) {
            target[at + term * padded as usize] = 0.0f32;
        }
    }
    let mut has_mark = 0.0f32;
    if lane == 0u32 && exists {
        let mut delta = 0.0f32;
        #[unroll]
        for other in 0..comptime!(ROW_UNITS as usize) {
            delta += partial[UNIT_POS as usize + other];
        }
        let saved_at = batch as usize * logsumexp.stride(0)
            + head as usize * logsumexp.stride(1)
            + query as usize * logsumexp.stride(2);
        let reference = logsumexp[saved_at];
        let logarithm = logsumexp[saved_at + logsumexp.shape(0) / 2 * logsumexp.stride(0)];
        #[comptime]
        match &logsumexp_gradient {
            ComptimeOption::Some(gradient) => {
                delta -= gradient[batch as usize * gradient.stride(0)
                    + head as usize * gradient.stride(1)
                    + query as usize * gradient.stride(2)];
            }
            ComptimeOption::None => {}
        }
        let constant = is_hidden(reference);
        let blind = constant || saw_no_key(logarithm);
        target[at + padded as usize] = select(constant, 0.0f32, delta);
        let is_marked =
            comptime!(form == LogsumexpForm::Marked) && reference.abs() >= FAR && !blind;
        if comptime!(form == LogsumexpForm::Apart) {
            target[at] = select(blind, infinity, reference);
            target[at + 2 * padded as usize] = logarithm;
        } else if is_marked {
            has_mark = 1.0f32;
            target[at] = f32::reinterpret(u32::new(comptime!(FAR_MARK as i64)));
            target[at + LOGARITHM * padded as usize] = logarithm;
            target[at + REFERENCE * padded as usize] = reference;
        } else {
            let sum = reference + logarithm;
            // Replace an LSE of −0 by +0, because −0 marks a query whose LSE is stored in rows 2 and 3.
            let logsumexp = select(sum == 0.0f32, 0.0f32, sum);
            target[at] = select(blind, infinity, logsumexp);
        }
    }
    if comptime!(form == LogsumexpForm::Marked) {
        // Wait until all units have read the partial sums, because the flags of the units overwrite the partial sums in
        // shared memory.
        sync_cube();
        partial[UNIT_POS as usize] = has_mark;
        sync_cube();
        if UNIT_POS == 0u32 && plane < planes {
            let mut flag = 0.0f32;
            #[unroll]
            for row in 0..comptime!(ROWS as usize) {
                flag = max(flag, partial[row * comptime!(ROW_UNITS as usize)]);
            }
            target[head_at + FLAGS * padded as usize + part as usize] = flag;
        }
    }
}

/// Returns the delta of a query, and the LSE of the query as two numbers: the reference score that the softmax
/// subtracted, and the logarithm of the softmax sum. Returns zeros if `query` is not below `q_len`.
#[cube]
pub(crate) fn row_lse_delta_of(
    rows: &Tensor<f32>,
    batch: u32,
    head: u32,
    query: i32,
    q_len: i32,
) -> RowLseDelta {
    let mut reference = 0.0f32;
    let mut delta = 0.0f32;
    let mut logarithm = 0.0f32;
    if query < q_len {
        let at = batch as usize * rows.stride(0) + head as usize * rows.stride(1) + query as usize;
        reference = rows[at];
        delta = rows[at + rows.stride(2)];
        logarithm = rows[at + 2 * rows.stride(2)];
    }
    RowLseDelta {
        reference,
        delta,
        logarithm,
    }
}
