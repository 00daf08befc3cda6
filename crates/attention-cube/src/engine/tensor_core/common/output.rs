//! The epilogue of a forward tile. It adds the sinks to row_sum, divides each row of O by row_sum, and writes O and the LSE.

use super::softmax::finite;
use super::tile_scheduler::Tile;
use super::{FragmentKind, RowPair};
use crate::math::score::{ScoreArguments, saved_logarithm};
use cube_kit::nvidia::accumulator::{Pair, is_second};
use cube_kit::nvidia::ptx::exp2;
use cubecl::prelude::*;

/// The registers of a thread after the last block: its elements of O, and the softmax state of its two rows.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Finished<NO: Size> {
    pub o: Vector<f32, NO>,
    pub reference: Pair,
    /// The row_sum of each of the thread's two rows. The row_sum covers the columns of all threads that share the row.
    pub sums: Pair,
}

/// The position of a row in the output tensor or in a gradient tensor.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct OutputRow {
    /// The row's index in the tensor's first dimension: `batch + split · batches`, where `batches` is the number of
    /// sequences.
    pub part: u32,
    pub head: u32,
    pub position: i32,
    pub exists: bool,
}

/// The indices of a thread's two rows in the output tensor or in a gradient tensor.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct OutputRows {
    pub first: OutputRow,
    pub second: OutputRow,
}

/// Returns the tensor indices of a thread's two rows, which are rows `row` and `row + 8` of the tile.
#[cube]
pub(crate) fn output_rows(tile: &Tile, rows: &RowPair, row: i32) -> OutputRows {
    OutputRows {
        first: OutputRow {
            part: tile.part,
            head: rows.head_0,
            position: rows.position_0,
            exists: row < tile.rows,
        },
        second: OutputRow {
            part: tile.part,
            head: rows.head_1,
            position: rows.position_1,
            exists: row + 8i32 < tile.rows,
        },
    }
}

/// Elements of a thread's two output rows, and one factor per row. The store multiplies each element by the factor of its
/// row.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct OutputPart<NO: Size> {
    pub o: Vector<f32, NO>,
    pub factors: Pair,
}

/// The number of registers in which a thread holds its part of 16 fragment columns: four columns in each of two rows.
pub(crate) const STEP_REGISTERS: usize = 8;

/// Extracts the registers of columns `16 · step` to `16 · step + 15`.
#[cube]
pub(crate) fn step_of<NO: Size, N: Size>(
    part: OutputPart<NO>,
    #[comptime] step: usize,
) -> OutputPart<N> {
    let mut o = Vector::<f32, N>::zeroed();
    #[unroll]
    for i in 0..STEP_REGISTERS {
        o.insert(i, part.o.extract(comptime!(STEP_REGISTERS * step + i)));
    }
    OutputPart::<N> {
        o,
        factors: part.factors,
    }
}

/// Computes the factor that normalizes each of the thread's two rows. If a row sees no key, the function sets the row's
/// elements of O to 0. The factor includes `output_factor` (see [`output_factor`](super::dropout::output_factor)). If
/// `writes_logsumexp`, the function also writes the LSE of both rows.
#[cube]
pub(crate) fn normalised<K: Float, NO: Size>(
    finished: Finished<NO>,
    rows: &OutputRows,
    sinks: &ComptimeOption<OwnedTensor<K>>,
    logsumexp: &mut Tensor<f32>,
    writes_logsumexp: bool,
    arguments: &ScoreArguments,
    output_factor: f32,
    #[comptime] columns: usize,
    #[comptime] kind: FragmentKind,
) -> OutputPart<NO> {
    // A `raw` kernel keeps scores unscaled. Its references (row maxima) are therefore unscaled dot products.
    let to_score = if comptime!(kind.raw) {
        arguments.scale
    } else {
        f32::new(1.0)
    };
    let hidden = arguments.negative_infinity;
    let reference = finished.reference;
    let sums = finished.sums;
    let first = normalise::<K>(
        reference.first,
        sums.first,
        to_score,
        rows.first,
        sinks,
        hidden,
    );
    let second = normalise::<K>(
        reference.second,
        sums.second,
        to_score,
        rows.second,
        sinks,
        hidden,
    );
    if writes_logsumexp {
        write_logsumexp(logsumexp, first, rows.first);
        write_logsumexp(logsumexp, second, rows.second);
    }
    let mut factors = Pair {
        first: first.factor,
        second: second.factor,
    };
    if comptime!(kind.score.dropout) {
        factors = Pair {
            first: first.factor * output_factor,
            second: second.factor * output_factor,
        };
    }
    OutputPart::<NO> {
        o: without_blind::<NO>(finished.o, factors, columns),
        factors,
    }
}

/// The factor that normalizes a row, and the row's LSE as a sum of two numbers.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Normalised {
    /// The factor that normalizes the row of O.
    factor: f32,
    /// The row maximum that the softmax subtracted. The LSE is `reference + logarithm`, both in natural units.
    reference: f32,
    logarithm: f32,
}

/// Computes the normalizing factor and the LSE of a row. If the row's head has a sink, the function adds the sink to row_sum.
#[cube]
fn normalise<K: Float>(
    reference: f32,
    sum: f32,
    to_score: f32,
    row: OutputRow,
    sinks: &ComptimeOption<OwnedTensor<K>>,
    negative_infinity: f32,
) -> Normalised {
    let score = finite(reference, negative_infinity);
    // Multiply the reference (the row maximum) by the scale only, without a conversion to log2 units. For very large scores,
    // each extra rounding of the LSE would show in the backward. `fma` keeps the compiler from fusing this multiplication
    // with the later subtraction of the sink.
    let mut base = fma(score, to_score, 0.0f32);
    // If a score is NaN, row_sum is NaN. NaN is not 0, so `has_keys` is true for this row.
    let has_keys = sum != 0.0f32;
    let mut sum = sum;
    let mut rescale = f32::new(1.0);
    #[comptime]
    match sinks {
        ComptimeOption::Some(sinks) => {
            if row.exists {
                let sink = f32::cast_from(sinks[row.head as usize * sinks.stride(0)]);
                let keys = select(has_keys, base, negative_infinity);
                // If the row sees no key and the sink is −∞, the maximum is −∞, and `finite` replaces it by 0. Both
                // exponentials are then 0, so row_sum stays 0.
                base = finite(max(keys, sink), negative_infinity);
                rescale = exp2((keys - base) * comptime!(std::f32::consts::LOG2_E));
                sum = sum * rescale + exp2((sink - base) * comptime!(std::f32::consts::LOG2_E));
            }
        }
        ComptimeOption::None => {}
    }
    let empty = sum == 0.0f32;
    Normalised {
        factor: select(empty, 0.0f32, rescale / sum),
        reference: select(empty, negative_infinity, base),
        logarithm: saved_logarithm(sum, has_keys),
    }
}

/// Sets the elements of a row to 0 if the row's factor is 0, that is, if the row sees no key. Otherwise these elements
/// could be NaN: the GEMM multiplies P = 0 by rows of V that may be NaN, and 0 · NaN is NaN.
#[cube]
pub(crate) fn without_blind<NO: Size>(
    o: Vector<f32, NO>,
    factors: Pair,
    #[comptime] columns: usize,
) -> Vector<f32, NO> {
    let mut o = o;
    let first = factors.first == 0.0f32;
    let second = factors.second == 0.0f32;
    if plane_any(first || second) {
        #[unroll]
        for i in 0..columns / 2 {
            let blind = if comptime!(is_second(i)) {
                second
            } else {
                first
            };
            o.insert(i, select(blind, 0.0f32, o.extract(i)));
        }
    }
    o
}

/// Writes a row's LSE to `logsumexp`, which is `[2 · splits · batch, q_heads, q_len]`. The first half of the tensor gets the
/// reference (the row maximum), the second half the logarithm of row_sum.
#[cube]
fn write_logsumexp(logsumexp: &mut Tensor<f32>, normalised: Normalised, row: OutputRow) {
    let column = UNIT_POS % 4u32;
    if row.exists && column == 0u32 {
        let at = row.part as usize * logsumexp.stride(0)
            + row.head as usize * logsumexp.stride(1)
            + row.position as usize;
        let to_logarithms = logsumexp.shape(0) / 2 * logsumexp.stride(0);
        logsumexp[at] = normalised.reference;
        logsumexp[at + to_logarithms] = normalised.logarithm;
    }
}

/// Writes columns `first_column` to `first_column + columns − 1` of the thread's two rows. Columns at or past `width` are
/// skipped.
#[cube]
pub(crate) fn write_rows<O: Float, N: Size, NO: Size>(
    written: OutputPart<NO>,
    output: &mut Tensor<Vector<O, N>>,
    rows: &OutputRows,
    first_column: u32,
    #[comptime] columns: usize,
    #[comptime] width: usize,
) {
    let factors = written.factors;
    write_row::<O, N, NO>(
        written.o,
        factors.first,
        output,
        rows.first,
        0usize,
        first_column,
        columns,
        width,
    );
    write_row::<O, N, NO>(
        written.o,
        factors.second,
        output,
        rows.second,
        1usize,
        first_column,
        columns,
        width,
    );
}

/// Writes columns `first_column` to `first_column + columns − 1` of one of the thread's two rows: the first row if `which`
/// is 0, else the second. Columns at or past `width` are skipped.
#[cube]
pub(crate) fn write_row<O: Float, N: Size, NO: Size>(
    o: Vector<f32, NO>,
    factor: f32,
    output: &mut Tensor<Vector<O, N>>,
    row: OutputRow,
    #[comptime] which: usize,
    first_column: u32,
    #[comptime] columns: usize,
    #[comptime] width: usize,
) {
    if row.exists {
        let base = row_start::<O, N>(output, row);
        #[unroll]
        for tile in 0..columns / 8 {
            let column = first_column + comptime!(8 * tile as u32) + UNIT_POS % 4u32 * 2u32;
            let register = comptime!(4 * tile + 2 * which);
            write_pair::<O, N>(
                o.extract(register) * factor,
                o.extract(comptime!(register + 1)) * factor,
                output,
                base,
                column,
                width,
            );
        }
    }
}

/// Writes columns `first_column` to `first_column + 15` of the thread's two rows. Columns at or past `width` are
/// skipped.
///
/// In each row, the thread holds four adjacent columns. Registers 0 to 3 hold the first and the third of these columns,
/// for both rows. Registers 4 to 7 hold the second and the fourth.
#[cube]
pub(crate) fn write_fours<O: Float, N: Size>(
    written: OutputPart<Const<STEP_REGISTERS>>,
    output: &mut Tensor<Vector<O, N>>,
    rows: &OutputRows,
    first_column: u32,
    #[comptime] width: usize,
) {
    #[unroll]
    for which in 0..2usize {
        let (row, factor) = if comptime!(which == 0) {
            (rows.first, written.factors.first)
        } else {
            (rows.second, written.factors.second)
        };
        if row.exists {
            let base = row_start::<O, N>(output, row);
            #[unroll]
            for pair in 0..2usize {
                let column = first_column + UNIT_POS % 4u32 * 4u32 + comptime!(2 * pair as u32);
                let register = comptime!(2 * which + pair);
                write_pair::<O, N>(
                    written.o.extract(register) * factor,
                    written.o.extract(comptime!(register + STEP_REGISTERS / 2)) * factor,
                    output,
                    base,
                    column,
                    width,
                );
            }
        }
    }
}

/// Returns the offset of a row in `output`, in elements.
#[cube]
fn row_start<O: Float, N: Size>(output: &mut Tensor<Vector<O, N>>, row: OutputRow) -> usize {
    row.part as usize * output.stride(0)
        + row.head as usize * output.stride(1)
        + row.position as usize * output.stride(2)
}

/// Writes two columns of the row that starts at the offset `base`: the even column `column` and the next column.
/// Columns at or past `width` are skipped.
#[cube]
fn write_pair<O: Float, N: Size>(
    low: f32,
    high: f32,
    output: &mut Tensor<Vector<O, N>>,
    base: usize,
    column: u32,
    #[comptime] width: usize,
) {
    let vector = output.vector_size();
    let end = comptime!(width as u32);
    let low = O::cast_from(low);
    let high = O::cast_from(high);
    if comptime!(vector == 2) {
        if column < end {
            let mut both = Vector::<O, N>::cast_from(low);
            both.insert(1usize, high);
            output[(base + column as usize) / 2] = both;
        }
    } else {
        if column < end {
            output[base + column as usize] = Vector::cast_from(low);
        }
        if column + 1u32 < end {
            output[base + column as usize + 1] = Vector::cast_from(high);
        }
    }
}
