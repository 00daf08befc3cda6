//! Launches grouped GEMM on Hopper.

use super::grouped::{GroupSizesLaunch, product_of_groups};
use super::launch::LONGEST;
use super::operand::{BOX_ALIGNMENT, Operand};
use super::plan::{Grouping, MatrixTiles};
use crate::hopper::{PRODUCT_ROWS, is_hopper, multiprocessors};
use crate::launch::empty;
use crate::nvidia::Half;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::{CubeCount, CubeDim};

/// Multiplies the rows of each group by the group's matrix. The operands are f16 or bf16. Sums are in f32, and each sum
/// is rounded once.
///
/// Returns `None` if the device is not a Hopper GPU, if the dtype is neither f16 nor bf16, or if TMA cannot read an
/// operand or write the result. Each operand must be contiguous along its last dimension, and its other strides must be
/// multiples of 16 bytes. Alternatively, `rhs` may be contiguous along its second dimension. `columns` must be a
/// multiple of 8.
///
/// # Shapes
/// - `lhs`: `[slots, inner]`. The rows of a group begin at a multiple of [`MatrixTiles::ROWS`], which divides `slots`.
/// - `rhs`: `[groups, inner, columns]`.
/// - `table`: i32, `[groups + 1 + slots / MatrixTiles::ROWS]`. A tile row consists of [`MatrixTiles::ROWS`] rows of one
///   group. The table holds the first tile row of each group, then the total number of tile rows, and then the group of
///   each tile row.
/// - output: `[slots, columns]`. Rows behind the last group are not written.
///
/// # Panics
/// Panics if the shapes or the dtypes of the operands do not fit each other.
pub fn grouped_rows(lhs: &CubeTensor, rhs: &CubeTensor, table: &CubeTensor) -> Option<CubeTensor> {
    let [slots, inner] = lhs.meta.shape().dims();
    let [groups, rhs_inner, columns] = rhs.meta.shape().dims();
    assert_eq!(rhs_inner, inner, "grouped GEMM: expected equal inner sizes");
    let problem = Problem {
        lhs: Operand::of(lhs, [0, 1])?,
        rhs: Operand::of(rhs, [2, 1])?,
        lengths: [slots, inner, columns],
        grouping: Grouping::Rows,
        groups,
        slots,
    };
    problem.launch(lhs, rhs, table, vec![slots, columns])
}

/// Multiplies the transpose of a group's rows of `lhs` by the group's rows of `rhs`, for each group. The dtypes, and
/// the cases in which the function returns `None`, are those of [`grouped_rows`].
///
/// # Shapes
/// - `lhs`: `[slots, rows]`, and `rhs`: `[slots, columns]`. The rows of a group begin at a multiple of
///   [`MatrixTiles::ROWS`]. The rows between the end of a group and the next multiple must be zero.
/// - `table`: see [`grouped_rows`].
/// - output: `[groups, rows, columns]`, which is zero for a group without rows.
///
/// # Panics
/// Panics if the shapes or the dtypes of the operands do not fit each other.
pub fn grouped_inner(
    lhs: &CubeTensor,
    rhs: &CubeTensor,
    table: &CubeTensor,
    groups: usize,
) -> Option<CubeTensor> {
    let [slots, rows] = lhs.meta.shape().dims();
    let [rhs_slots, columns] = rhs.meta.shape().dims();
    assert_eq!(rhs_slots, slots, "grouped GEMM: expected equal inner sizes");
    let problem = Problem {
        lhs: Operand::of(lhs, [1, 0])?,
        rhs: Operand::of(rhs, [1, 0])?,
        lengths: [rows, slots.div_ceil(groups), columns],
        grouping: Grouping::Inner,
        groups,
        slots,
    };
    problem.launch(lhs, rhs, table, vec![groups, rows, columns])
}

struct Problem {
    lhs: Operand,
    rhs: Operand,
    /// The sizes from which the tiles are chosen: the number of result rows, the inner size, and the number of result
    /// columns. With [`Grouping::Inner`], the inner size is the average over all groups.
    lengths: [usize; 3],
    grouping: Grouping,
    groups: usize,
    slots: usize,
}

impl Problem {
    fn launch(
        self,
        lhs: &CubeTensor,
        rhs: &CubeTensor,
        table: &CubeTensor,
        shape: Vec<usize>,
    ) -> Option<CubeTensor> {
        let Self {
            lhs: of_lhs,
            rhs: of_rhs,
            lengths,
            grouping,
            groups,
            slots,
        } = self;
        assert_eq!(lhs.dtype, rhs.dtype, "grouped GEMM: expected equal dtypes");
        assert_eq!(
            table.dtype,
            DType::I32,
            "grouped GEMM: expected an i32 table"
        );
        assert_eq!(
            table.meta.num_elements(),
            groups + 1 + slots / MatrixTiles::ROWS,
            "grouped GEMM: expected one number per group and tile in the table"
        );
        let client = lhs.client.clone();
        let half = Half::of(lhs.dtype)?;
        let [rows, inner, columns] = lengths;
        let fits = [rows, inner, columns, groups]
            .into_iter()
            .all(|length| (1..=LONGEST).contains(&length))
            && slots <= LONGEST
            && columns.is_multiple_of(BOX_ALIGNMENT / 2);
        if !is_hopper(&client) || !fits {
            return None;
        }
        let multiprocessors = multiprocessors(&client);
        let majors = [of_lhs.major, of_rhs.major];
        // Count the rows of the results of all groups together.
        let all_rows = match grouping {
            Grouping::Rows => rows,
            Grouping::Inner => rows * groups,
        };
        let all = [all_rows, inner, columns];
        let tiles = MatrixTiles::choose(all, &[], multiprocessors, majors, half);
        let output = empty(lhs, shape, lhs.dtype);
        let of_output = match grouping {
            Grouping::Rows => Operand::of(&output, [0, 1])?,
            Grouping::Inner => Operand::of(&output, [1, 2])?,
        };
        let sizes = GroupSizesLaunch::new(
            groups as u32,
            rows.div_ceil(MatrixTiles::ROWS) as u32,
            columns.div_ceil(tiles.columns) as u32,
            inner.div_ceil(MatrixTiles::DEPTH) as u32,
            slots as u32,
        );
        // SAFETY: the kernel accesses the operands and the output only by TMA, which accesses only elements inside its
        // tensor maps. The kernel reads the table's first `groups + 1` elements. Behind these elements, the kernel
        // reads only the elements of tile rows that belong to a group.
        unsafe {
            product_of_groups::launch_unchecked(
                &client,
                CubeCount::Static(multiprocessors as u32, 1, 1),
                CubeDim::new_1d(MatrixTiles::UNITS as u32),
                of_lhs.map(lhs, MatrixTiles::ROWS),
                of_rhs.map(rhs, tiles.columns),
                of_output.map(&output, PRODUCT_ROWS),
                table.clone().into_tensor_arg(),
                sizes,
                grouping,
                tiles,
                dtype_to_storage_type(lhs.dtype),
                tiles.columns / 2,
            );
        }
        Some(output)
    }
}
