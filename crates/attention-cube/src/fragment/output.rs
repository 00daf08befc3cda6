//! What becomes of a tile's fragments: normalised, with their sinks, their rows go to the output and the logsumexp.

use super::softmax::finite;
use super::work_tile::Tile;
use super::{FragmentKind, RowPair};
use crate::math::score::{ScoreArguments, saved_logarithm};
use cube_kit::hopper::accumulator::{Pair, is_second};
use cube_kit::hopper::ptx::exp2;
use cubecl::prelude::*;

/// A thread's part of a tile's output, when all blocks have been visited.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Finished<NO: Size> {
    pub o: Vector<f32, NO>,
    pub reference: Pair,
    /// Over all columns of the rows.
    pub sums: Pair,
}

/// The place of a row in the output, or in a gradient.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct OutputRow {
    /// The sequence, counted through the parts.
    pub part: u32,
    pub head: u32,
    pub position: i32,
    pub exists: bool,
}

/// The places of a thread's two rows.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct OutputRows {
    pub first: OutputRow,
    pub second: OutputRow,
}

/// The places of `rows`, which are the `row`-th of the tile and the 8th after it.
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

/// Rows of the output, but for the factor of each.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct OutputPart<NO: Size> {
    pub o: Vector<f32, NO>,
    pub factors: Pair,
}

/// Registers of 16 columns of a fragment.
pub(crate) const STEP_REGISTERS: usize = 8;

/// The `step`-th 16 columns of a fragment.
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

/// Normalises the rows of `columns` columns, and writes their logsumexps, where that is this thread's to do.
#[cube]
pub(crate) fn normalised<K: Float, NO: Size>(
    finished: Finished<NO>,
    rows: &OutputRows,
    sinks: &ComptimeOption<&Tensor<K>>,
    logsumexp: &mut Tensor<f32>,
    writes_logsumexp: bool,
    arguments: &ScoreArguments,
    #[comptime] columns: usize,
    #[comptime] kind: FragmentKind,
) -> OutputPart<NO> {
    // From references to scores.
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
    let factors = Pair {
        first: first.factor,
        second: second.factor,
    };
    OutputPart::<NO> {
        o: without_blind::<NO>(finished.o, factors, columns),
        factors,
    }
}

/// A row's result.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Normalised {
    /// On the row's output.
    factor: f32,
    /// The logsumexp is this and the logarithm of the sum by it.
    reference: f32,
    logarithm: f32,
}

/// Normalises a row; its head's sink joins the sum here, where it is no part of a split.
#[cube]
fn normalise<K: Float>(
    reference: f32,
    sum: f32,
    to_score: f32,
    row: OutputRow,
    sinks: &ComptimeOption<&Tensor<K>>,
    negative_infinity: f32,
) -> Normalised {
    let score = finite(reference, negative_infinity);
    // Not by way of powers of two: where scores are huge, the backward sees every rounding of the logsumexp.
    // A product alone might be fused with the difference from the sink.
    let mut base = fma(score, to_score, 0.0f32);
    // A NaN among the scores is a key that is seen.
    let has_keys = sum != 0.0f32;
    let mut sum = sum;
    let mut rescale = f32::new(1.0);
    #[comptime]
    match sinks {
        ComptimeOption::Some(sinks) => {
            if row.exists {
                let sink = f32::cast_from(sinks[row.head as usize * sinks.stride(0)]);
                let keys = select(has_keys, base, negative_infinity);
                // A sink of −∞ beside no key leaves nothing.
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

/// Zeros in the rows whose factor is 0, which may hold anything: others of the tile may have seen NaN.
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

/// Writes a row's logsumexp: the reference and, in the tensor's second half, the logarithm.
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

/// Writes the thread's rows, `columns` columns from `first_column` on, as far as the tensor's `width` goes.
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

/// Writes the first or the second of the thread's rows, `columns` columns from `first_column` on, as far as the tensor's `width`
/// goes.
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

/// Writes 16 columns of the thread's rows from `first_column` on, as far as the tensor's `width` goes, of which it has four neighbours: the
/// first and the third in its lower registers, the others in the upper ones.
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

/// Where a row starts in the output.
#[cube]
fn row_start<O: Float, N: Size>(output: &mut Tensor<Vector<O, N>>, row: OutputRow) -> usize {
    row.part as usize * output.stride(0)
        + row.head as usize * output.stride(1)
        + row.position as usize * output.stride(2)
}

/// Writes an even column of a row that starts at `base`, and the next, as far as the tensor's `width` goes.
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
