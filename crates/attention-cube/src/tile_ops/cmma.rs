//! Matrix fragments that a plane loads and multiplies (`cubecl::cmma`). Only the device knows the register layout of a
//! fragment.
//!
//! Tests can emulate fragments. An emulated operand fragment is a view of shared memory, so a kernel must multiply the
//! fragment before the kernel overwrites that memory.

use super::tiles::UnitTiles;
use super::vec4::{Four, Vec4};
use crate::types::device::Emulation;
use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl::prelude::*;

/// A matrix in shared memory. The first row starts at vector `at`, and rows are `pitch` vectors (of 4 elements) apart.
#[derive(CubeType)]
pub(super) struct Piece<C: Float> {
    pub memory: Shared<[Four<C>]>,
    pub at: usize,
    #[cube(comptime)]
    pub pitch: usize,
}

/// The left operand of a fragment multiplication, with `m` rows and `k` columns.
#[expect(
    dead_code,
    reason = "constructed only by functions that CubeCL's macros generate"
)]
#[derive(CubeType)]
pub(super) enum LeftFragment<C: Float> {
    Matrix(Matrix<Four<C>>),
    Emulated(Piece<C>),
}

/// The right operand of a fragment multiplication, a `k × n` matrix. If the operand is transposed, shared memory holds
/// the operand as `n` rows of `k` columns.
#[expect(
    dead_code,
    reason = "constructed only by functions that CubeCL's macros generate"
)]
#[derive(CubeType)]
pub(super) enum RightFragment<C: Float> {
    Matrix(Matrix<Four<C>>),
    Emulated(Piece<C>),
}

/// An accumulator fragment in f32.
#[expect(
    dead_code,
    reason = "constructed only by functions that CubeCL's macros generate"
)]
#[derive(CubeType)]
pub(crate) enum SumFragment {
    /// A fragment in registers, in the layout of the device's matrix units.
    Matrix(Matrix<f32>),
    /// One unit's part of an emulated fragment, in vectors of 4 elements. Unit `u` of a plane holds the fragment's
    /// vectors `u`, `u + plane`, `u + 2 · plane` and so on, where `plane` is the number of units per plane.
    Emulated(Array<Vec4>),
}

/// True if the tile's fragments are emulated with the results of `emulation`.
fn has_emulation(tiles: UnitTiles, emulation: Emulation) -> bool {
    tiles.fragment_tiles().fragments.emulation == Some(emulation)
}

/// Returns the index of the unit's plane in the cube.
#[cube]
pub(super) fn plane_index(#[comptime] tiles: UnitTiles) -> usize {
    let fragments = comptime!(tiles.fragment_tiles());
    if comptime!(fragments.fragments.is_emulated()) {
        UNIT_POS as usize / fragments.plane
    } else {
        PLANE_POS as usize
    }
}

/// Loads the left operand from shared memory. The operand's first row starts at vector `at`, and its rows are `pitch`
/// vectors apart.
#[cube]
pub(super) fn load_left<C: Float>(
    memory: &Shared<[Four<C>]>,
    at: usize,
    #[comptime] pitch: usize,
    #[comptime] tiles: UnitTiles,
) -> LeftFragment<C> {
    let [m, n, k] = comptime!(tiles.fragment_shape());
    match comptime!(tiles.fragment_tiles().fragments.is_emulated()) {
        true => LeftFragment::new_Emulated(Piece::<C> {
            memory: memory.clone(),
            at,
            pitch,
        }),
        false => LeftFragment::new_Matrix(Matrix::<Four<C>>::from_slice(
            MatrixIdent::A,
            m,
            n,
            k,
            MatrixLayout::RowMajor,
            &memory[at..at + comptime!((m - 1) * pitch + k / 4)],
            comptime!(4 * pitch as u32),
        )),
    }
}

/// Loads the right operand from shared memory. The operand's first row starts at vector `at`, and its rows are `pitch`
/// vectors apart.
#[cube]
pub(super) fn load_right<C: Float>(
    memory: &Shared<[Four<C>]>,
    at: usize,
    #[comptime] pitch: usize,
    #[comptime] transposed: bool,
    #[comptime] tiles: UnitTiles,
) -> RightFragment<C> {
    let [m, n, k] = comptime!(tiles.fragment_shape());
    match comptime!(tiles.fragment_tiles().fragments.is_emulated()) {
        true => RightFragment::new_Emulated(Piece::<C> {
            memory: memory.clone(),
            at: if comptime!(has_emulation(tiles, Emulation::FirstTile)) {
                0usize.runtime()
            } else {
                at
            },
            pitch,
        }),
        false => {
            let (rows, columns) = comptime!(if transposed { (n, k) } else { (k, n) });
            RightFragment::new_Matrix(Matrix::<Four<C>>::from_slice(
                MatrixIdent::B,
                m,
                n,
                k,
                comptime!(if transposed {
                    MatrixLayout::ColMajor
                } else {
                    MatrixLayout::RowMajor
                }),
                &memory[at..at + comptime!((rows - 1) * pitch + columns / 4)],
                comptime!(4 * pitch as u32),
            ))
        }
    }
}

/// Returns an accumulator of zeros.
#[cube]
pub(super) fn zero_sum(#[comptime] tiles: UnitTiles) -> SumFragment {
    let [m, n, k] = comptime!(tiles.fragment_shape());
    match comptime!(tiles.fragment_tiles().fragments.is_emulated()) {
        true => {
            let count = comptime!(
                tiles
                    .fragment_vectors()
                    .div_ceil(tiles.fragment_tiles().plane)
            );
            let mut sum = Array::<Vec4>::new(count);
            #[unroll]
            for index in 0..count {
                sum[index] = Vec4::new(0.0);
            }
            SumFragment::new_Emulated(sum)
        }
        false => SumFragment::new_Matrix(Matrix::<f32>::from_value(
            MatrixIdent::Accumulator,
            m,
            n,
            k,
            MatrixLayout::Undefined,
            0.0f32,
        )),
    }
}

/// Returns `count` accumulators of zeros.
#[cube]
pub(super) fn zero_sums(
    #[comptime] count: usize,
    #[comptime] tiles: UnitTiles,
) -> Sequence<SumFragment> {
    let mut sums = Sequence::<SumFragment>::new();
    #[unroll]
    for _ in 0..count {
        sums.push(zero_sum(tiles));
    }
    sums
}

/// Computes `sum += left · right`.
#[cube]
pub(super) fn multiply<C: Float>(
    left: &LeftFragment<C>,
    right: &RightFragment<C>,
    sum: &mut SumFragment,
    #[comptime] transposed: bool,
    #[comptime] tiles: UnitTiles,
) {
    match sum {
        SumFragment::Matrix(sum) => match left {
            LeftFragment::Matrix(left) => match right {
                RightFragment::Matrix(right) => cmma::execute(left, right, &*sum, &*sum),
                RightFragment::Emulated(_) => panic!("expected a right operand of the device"),
            },
            LeftFragment::Emulated(_) => panic!("expected a left operand of the device"),
        },
        SumFragment::Emulated(sum) => match left {
            LeftFragment::Emulated(left) => match right {
                RightFragment::Emulated(right) => emulate(left, right, sum, transposed, tiles),
                RightFragment::Matrix(_) => panic!("expected an emulated right operand"),
            },
            LeftFragment::Matrix(_) => panic!("expected an emulated left operand"),
        },
    }
}

/// Computes `sum += left · right`, as [`multiply`] does, but for emulated fragments and with loops.
#[cube]
fn emulate<C: Float>(
    left: &Piece<C>,
    right: &Piece<C>,
    sum: &mut Array<Vec4>,
    #[comptime] transposed: bool,
    #[comptime] tiles: UnitTiles,
) {
    let [_, n, k] = comptime!(tiles.fragment_shape());
    let plane = comptime!(tiles.fragment_tiles().plane);
    let total = comptime!(tiles.fragment_vectors());
    let steps = comptime!(if has_emulation(tiles, Emulation::Short) {
        k / 4 - 1
    } else {
        k / 4
    });
    let left_pitch = comptime!(left.pitch);
    let right_pitch = comptime!(right.pitch);
    #[unroll]
    for v in 0..comptime!(total.div_ceil(plane)) {
        let index = UNIT_POS as usize % plane + v * plane;
        let whole = comptime!((v + 1) * plane <= total);
        if whole || index < total {
            let row = index / comptime!(n / 4);
            let column = index % comptime!(n / 4);
            let mut values = sum[v];
            for step in 0..steps {
                let a = Vec4::cast_from(left.memory[left.at + row * left_pitch + step]);
                #[unroll]
                for j in 0..4usize {
                    if comptime!(transposed) {
                        let at = right.at + (column * 4 + j) * right_pitch + step;
                        let b = Vec4::cast_from(right.memory[at]);
                        let mut dot = values.extract(j);
                        #[unroll]
                        for lane in 0..4usize {
                            dot += a.extract(lane) * b.extract(lane);
                        }
                        values.insert(j, dot);
                    } else {
                        let at = right.at + (step * 4 + j) * right_pitch + column;
                        let b = Vec4::cast_from(right.memory[at]);
                        values += Vec4::cast_from(a.extract(j)) * b;
                    }
                }
            }
            sum[v] = values;
        }
    }
}

/// Writes an accumulator to rows in shared memory. The first row starts at vector `at`, and rows are `pitch` vectors
/// (of 4 elements) apart.
#[cube]
pub(super) fn store_sum(
    sum: &SumFragment,
    memory: &mut Shared<[Vec4]>,
    at: usize,
    #[comptime] pitch: usize,
    #[comptime] tiles: UnitTiles,
) {
    let [m, n, _] = comptime!(tiles.fragment_shape());
    match sum {
        SumFragment::Matrix(sum) => cmma::store(
            &mut memory[at..at + comptime!((m - 1) * pitch + n / 4)],
            sum,
            comptime!(4 * pitch as u32),
            MatrixLayout::RowMajor,
        ),
        SumFragment::Emulated(sum) => {
            let plane = comptime!(tiles.fragment_tiles().plane);
            let total = comptime!(tiles.fragment_vectors());
            #[unroll]
            for v in 0..comptime!(total.div_ceil(plane)) {
                let index = UNIT_POS as usize % plane + v * plane;
                if index < total {
                    let row = index / comptime!(n / 4);
                    let mut values = sum[v];
                    if comptime!(has_emulation(tiles, Emulation::Swapped)) {
                        let first = values.extract(0usize);
                        values.insert(0usize, sum[v].extract(1usize));
                        values.insert(1usize, first);
                    }
                    if comptime!(has_emulation(tiles, Emulation::UpperRows)) {
                        let kept = select(row < comptime!(m / 2), 1.0f32, 0.0f32);
                        values *= Vec4::cast_from(kept);
                    }
                    memory[at + row * pitch + index % comptime!(n / 4)] = values;
                }
            }
        }
    }
}

/// Loads an accumulator that [`store_sum`] wrote.
#[cube]
pub(super) fn load_sum(
    sum: &mut SumFragment,
    memory: &Shared<[Vec4]>,
    at: usize,
    #[comptime] pitch: usize,
    #[comptime] tiles: UnitTiles,
) {
    let [m, n, _] = comptime!(tiles.fragment_shape());
    match sum {
        SumFragment::Matrix(sum) => cmma::load_with_layout(
            sum,
            &memory[at..at + comptime!((m - 1) * pitch + n / 4)],
            comptime!(4 * pitch as u32),
            MatrixLayout::RowMajor,
        ),
        SumFragment::Emulated(sum) => {
            let plane = comptime!(tiles.fragment_tiles().plane);
            let total = comptime!(tiles.fragment_vectors());
            #[unroll]
            for v in 0..comptime!(total.div_ceil(plane)) {
                let index = UNIT_POS as usize % plane + v * plane;
                if index < total {
                    let row = index / comptime!(n / 4);
                    sum[v] = memory[at + row * pitch + index % comptime!(n / 4)];
                }
            }
        }
    }
}
