//! A range of columns of a matrix, such as one of several projections that one GEMM computed side by side.

use burn::tensor::Tensor;

/// A range of the columns of a `[rows, columns]` matrix.
#[derive(Clone, Debug)]
pub(crate) struct ColumnSlice {
    pub rows: Tensor<2>,
    /// The first column of the range.
    pub start: usize,
    /// The number of columns in the range.
    pub count: usize,
}

impl ColumnSlice {
    /// Splits `rows` into consecutive column ranges. Range `i` has `counts[i]` columns.
    #[cfg(feature = "cube")]
    pub fn consecutive(rows: &Tensor<2>, counts: &[usize]) -> Vec<Self> {
        let mut start = 0;
        let columns = counts.iter().map(|count| {
            start += count;
            Self {
                rows: rows.clone(),
                start: start - count,
                count: *count,
            }
        });
        columns.collect()
    }

    /// Returns the range of all columns.
    pub fn all(rows: Tensor<2>) -> Self {
        let [_, count] = rows.dims();
        Self {
            rows,
            start: 0,
            count,
        }
    }

    /// Returns the columns of the range, `[rows, count]`.
    pub fn columns(self) -> Tensor<2> {
        let [_, columns] = self.rows.dims();
        match columns == self.count {
            true => self.rows,
            false => self.rows.narrow(1, self.start, self.count),
        }
    }
}
