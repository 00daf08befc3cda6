//! Launches the kernel that groups (row, chosen expert) pairs by expert, and the MoE GEMMs.

use super::{
    GroupBackend, Grouped, GroupedBackend, NUMBERS, Stacked,
    group::{self, group_places},
    kernel::{Form, SizesLaunch, TILE, UNITS, grouped},
};
use crate::op::{
    dequantize::{kernel::RowPartsLaunch, row_parts},
    launch::{converts_f16, rows_of},
};
use burn::backend::{
    cubecl::dtype_to_storage_type,
    tensor::{FloatTensor, IntTensor},
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count, empty, exact_cube_count};
use cubecl::prelude::CubeDim;

/// The largest number of cubes among which an expert's row tiles are divided.
const MOST_OF_ROWS: usize = 16;

impl GroupBackend for CubeBackend {
    fn group(chosen: IntTensor<Self>, experts: usize) -> Grouped<Self> {
        let client = chosen.client.clone();
        let chosen = into_contiguous(chosen);
        let places = chosen.meta.num_elements();
        let order = empty(&chosen, [places], NUMBERS);
        let starts = empty(&chosen, [experts + 1], NUMBERS);
        // SAFETY: cube `e` groups the pairs of expert `e`. The cube reads all `places` elements of `chosen`. It writes
        // `starts[e]`, and its own range of `order`. The last cube also writes the last element of `starts`. All ranges
        // together have `places` elements, the length of `order`.
        unsafe {
            group_places::launch_unchecked(
                &client,
                exact_cube_count(&client, experts),
                CubeDim::new_1d(group::UNITS as u32),
                address_type([&chosen]),
                chosen.into_tensor_arg(),
                order.clone().into_tensor_arg(),
                starts.clone().into_tensor_arg(),
                places as u32,
                experts as u32,
            );
        }
        Grouped { order, starts }
    }
}

impl GroupedBackend for CubeBackend {
    fn grouped_rows(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        order: IntTensor<Self>,
        starts: IntTensor<Self>,
        of_row: usize,
    ) -> FloatTensor<Self> {
        let [_, columns_out, columns_in] = weight.meta.shape().dims();
        let product = Product {
            form: Form::Rows,
            left: input,
            right: Right::Whole(weight),
            columns_out,
            columns_in,
            of_row,
        };
        product.launch(order, starts)
    }

    fn grouped_rows_words(
        input: FloatTensor<Self>,
        words: IntTensor<Self>,
        order: IntTensor<Self>,
        starts: IntTensor<Self>,
        weight: Stacked,
        of_row: usize,
    ) -> FloatTensor<Self> {
        let product = Product {
            form: Form::Rows,
            left: input,
            right: Right::Words(rows_of(words), weight),
            columns_out: weight.rows,
            columns_in: weight.layout.columns,
            of_row,
        };
        product.launch(order, starts)
    }

    fn grouped_columns(
        gradient: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        order: IntTensor<Self>,
        starts: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let [_, columns_out, columns_in] = weight.meta.shape().dims();
        let product = Product {
            form: Form::Columns,
            left: gradient,
            right: Right::Whole(weight),
            columns_out,
            columns_in,
            of_row: 1,
        };
        product.launch(order, starts)
    }

    fn grouped_columns_words(
        gradient: FloatTensor<Self>,
        words: IntTensor<Self>,
        order: IntTensor<Self>,
        starts: IntTensor<Self>,
        weight: Stacked,
    ) -> FloatTensor<Self> {
        let product = Product {
            form: Form::Columns,
            left: gradient,
            right: Right::Words(rows_of(words), weight),
            columns_out: weight.rows,
            columns_in: weight.layout.columns,
            of_row: 1,
        };
        product.launch(order, starts)
    }

    fn grouped_weight(
        gradient: FloatTensor<Self>,
        input: FloatTensor<Self>,
        order: IntTensor<Self>,
        starts: IntTensor<Self>,
        of_row: usize,
    ) -> FloatTensor<Self> {
        let product = Product {
            form: Form::Weight,
            columns_out: gradient.meta.shape()[1],
            columns_in: input.meta.shape()[1],
            left: gradient,
            right: Right::Whole(input),
            of_row,
        };
        product.launch(order, starts)
    }
}

/// The arguments of an MoE GEMM.
pub(super) struct Product {
    pub form: Form,
    pub left: CubeTensor,
    pub right: Right,
    pub columns_out: usize,
    pub columns_in: usize,
    pub of_row: usize,
}

/// The right matrix of an MoE GEMM.
pub(super) enum Right {
    Whole(CubeTensor),
    Words(CubeTensor, Stacked),
}

impl Product {
    fn launch(self, order: CubeTensor, starts: CubeTensor) -> CubeTensor {
        #[cfg(feature = "cuda")]
        if let Some(output) = super::padded::product(&self, &order, &starts) {
            return output;
        }
        if let Right::Whole(right) = &self.right {
            assert_eq!(
                self.left.dtype, right.dtype,
                "operands: expected the same dtype"
            );
        }
        let left = into_contiguous(self.left);
        let client = left.client.clone();
        let experts = starts.meta.shape()[0] - 1;
        let places = order.meta.shape()[0];
        let columns = match self.form {
            Form::Rows => self.columns_out,
            Form::Columns | Form::Weight => self.columns_in,
        };
        // Launch twice as many cubes per expert as an expert has row tiles on average, because the experts get
        // different numbers of rows. If an expert has more row tiles than cubes, each of the expert's cubes computes
        // several tiles.
        let of_rows = match self.form {
            Form::Rows | Form::Columns => {
                (2 * places.div_ceil(experts * TILE)).clamp(1, MOST_OF_ROWS)
            }
            Form::Weight => self.columns_out.div_ceil(TILE),
        };
        let of_columns = columns.div_ceil(TILE);
        let cubes = experts * of_columns * of_rows;
        let output = match self.form {
            Form::Rows | Form::Columns => empty(&left, [places, columns], left.dtype),
            Form::Weight => empty(&left, [experts, self.columns_out, columns], left.dtype),
        };
        let sizes = SizesLaunch::new(
            self.columns_out as u32,
            self.columns_in as u32,
            self.of_row as u32,
            of_rows as u32,
            of_columns as u32,
            cubes as u32,
        );
        let (matrix, words, parts, format) = match self.right {
            Right::Whole(matrix) => (
                Some(into_contiguous(matrix)),
                None,
                RowPartsLaunch::new(0, 0, 0),
                None,
            ),
            Right::Words(words, weight) => {
                let parts = row_parts(&words, weight.layout);
                (None, Some(words), parts, Some(weight.layout.format))
            }
        };
        let address_type = address_type([&left, &output].into_iter().chain(&matrix).chain(&words));
        let converts_f16 = converts_f16(&left.device);
        let element = dtype_to_storage_type(left.dtype);
        // SAFETY: each cube reads rows of `left`, `matrix` and `words` within their shapes, and writes only its own
        // tiles of `output`. `order` contains each (row, chosen expert) pair once. The elements of `starts` are at most
        // the length of `order`.
        unsafe {
            grouped::launch_unchecked(
                &client,
                cube_count(&client, cubes),
                CubeDim::new_1d(UNITS as u32),
                address_type,
                left.into_tensor_arg(),
                matrix.map(CubeTensor::into_tensor_arg).into(),
                words.map(CubeTensor::into_tensor_arg).into(),
                order.into_tensor_arg(),
                starts.into_tensor_arg(),
                output.clone().into_tensor_arg(),
                sizes,
                parts,
                self.form,
                format,
                converts_f16,
                element,
            );
        }
        output
    }
}
