//! Fragments: matrices that a plane holds and multiplies, in a layout that is the device's own (`cubecl::cmma`).
//!
//! Where they are emulated, a fragment of an operand is the piece of shared memory that it is loaded from, so that it must be multiplied
//! before others write there; a fragment of a sum is some of its elements for each unit of what would be a plane; and a product is a loop.
//! The kernels are the same: nothing but the functions here knows.

use super::product::{Four, Vec4};
use super::tiles::UnitTiles;
use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl::prelude::*;

/// Rows in shared memory, `pitch` vectors of 4 apart, from the vector `at` on.
#[derive(CubeType)]
pub(super) struct Piece<C: Float> {
    pub memory: Shared<[Four<C>]>,
    pub at: usize,
    #[cube(comptime)]
    pub pitch: usize,
}

/// The left operand of a product: `m` rows of a piece, `k` columns of each.
#[expect(
    dead_code,
    reason = "made by the functions that CubeCL's macros write beside it"
)]
#[derive(CubeType)]
pub(super) enum LeftFragment<C: Float> {
    Matrix(Matrix<Four<C>>),
    Emulated(Piece<C>),
}

/// The right operand of a product: `k` rows of a piece, `n` columns of each; or, transposed, `n` rows, `k` columns of each.
#[expect(
    dead_code,
    reason = "made by the functions that CubeCL's macros write beside it"
)]
#[derive(CubeType)]
pub(super) enum RightFragment<C: Float> {
    Matrix(Matrix<Four<C>>),
    Emulated(Piece<C>),
}

/// A sum of products, in f32.
#[expect(
    dead_code,
    reason = "made by the functions that CubeCL's macros write beside it"
)]
#[derive(CubeType)]
pub(crate) enum SumFragment {
    /// The device's own.
    Matrix(Matrix<f32>),
    /// A unit's vectors of 4, those of the plane's units one after the other.
    Emulated(Array<Vec4>),
}

/// The plane that the unit belongs to.
#[cube]
pub(super) fn plane_index(#[comptime] tiles: UnitTiles) -> usize {
    let fragments = comptime!(tiles.fragment_tiles());
    if comptime!(fragments.fragments.emulated) {
        UNIT_POS as usize / fragments.plane
    } else {
        PLANE_POS as usize
    }
}

/// The left operand at a piece.
#[cube]
pub(super) fn load_left<C: Float>(
    memory: &Shared<[Four<C>]>,
    at: usize,
    #[comptime] pitch: usize,
    #[comptime] tiles: UnitTiles,
) -> LeftFragment<C> {
    let [m, n, k] = comptime!(tiles.fragment_shape());
    match comptime!(tiles.fragment_tiles().fragments.emulated) {
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

/// The right operand at a piece.
#[cube]
pub(super) fn load_right<C: Float>(
    memory: &Shared<[Four<C>]>,
    at: usize,
    #[comptime] pitch: usize,
    #[comptime] transposed: bool,
    #[comptime] tiles: UnitTiles,
) -> RightFragment<C> {
    let [m, n, k] = comptime!(tiles.fragment_shape());
    match comptime!(tiles.fragment_tiles().fragments.emulated) {
        true => RightFragment::new_Emulated(Piece::<C> {
            memory: memory.clone(),
            at,
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

/// A sum of nothing.
#[cube]
pub(super) fn zero_sum(#[comptime] tiles: UnitTiles) -> SumFragment {
    let [m, n, k] = comptime!(tiles.fragment_shape());
    match comptime!(tiles.fragment_tiles().fragments.emulated) {
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

/// `sum += left · right`.
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
                RightFragment::Emulated(_) => panic!("one operand is emulated"),
            },
            LeftFragment::Emulated(_) => panic!("one operand is emulated"),
        },
        SumFragment::Emulated(sum) => match left {
            LeftFragment::Emulated(left) => match right {
                RightFragment::Emulated(right) => emulate(left, right, sum, transposed, tiles),
                RightFragment::Matrix(_) => panic!("one operand is not emulated"),
            },
            LeftFragment::Matrix(_) => panic!("one operand is not emulated"),
        },
    }
}

/// [`multiply`] by loops.
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
            for step in 0..comptime!(k / 4) {
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

/// Writes a sum to rows in shared memory, `pitch` vectors of 4 apart, from the vector `at` on.
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
                    memory[at + row * pitch + index % comptime!(n / 4)] = sum[v];
                }
            }
        }
    }
}

/// Reads a sum back that [`store_sum`] wrote.
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
