//! Launches the embedding kernels.

use super::{
    EmbedBackend, EmbedOptions, Embedded, MaybeTokens, PerLayerOptions,
    kernel::{EmbedPlan, FactorsLaunch, TableRowsLaunch, embed_pdl, per_layer_pdl},
};
use crate::op::gemv::Origin;
use crate::op::launch::{rows_of, team, vector_size};
use crate::op::norm::kernel::NormScalarsLaunch;
use burn::{
    backend::{
        cubecl::dtype_to_storage_type,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, bf16, f16},
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count, empty};
use cube_kit::pdl::{LOAD_BYTES, supports_pdl};
use cubecl::prelude::CubeDim;

impl EmbedBackend for CubeBackend {
    fn embed(
        tokens: IntTensor<Self>,
        table: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        options: EmbedOptions,
    ) -> Embedded<Self> {
        let client = table.client.clone();
        let ahead = options.reads_ahead(&[&table, &weight, &tokens]);
        let (table, tokens) = (rows_of(table), into_contiguous(tokens));
        let [table_rows, columns] = [table.meta.shape()[0], table.meta.shape()[1]];
        let (stride, dtype) = (table.meta.strides()[0], table.dtype);
        let rows = tokens.meta.shape()[0];
        let vector = vector_size(&client, dtype.size(), &[columns, stride]);
        let plan = plan(&table, columns / vector, vector, ahead);
        let embedded = empty(&table, [rows, columns], dtype);
        let normed = empty(&table, [rows, columns], dtype);
        let (element, integer) = (
            dtype_to_storage_type(dtype),
            dtype_to_storage_type(tokens.dtype),
        );
        // SAFETY: cube `r` works only if `r` is below `rows`. The cube reads token `r`, and a row of `table` whose index
        // is limited to the last row. The cube writes only row `r` of `embedded` and of `normed`.
        unsafe {
            embed_pdl::launch_unchecked(
                &client,
                cube_count(&client, rows),
                CubeDim::new_1d(plan.team.units as u32),
                address_type([&table, &embedded]),
                tokens.into_tensor_arg(),
                table.into_tensor_arg(),
                into_contiguous(weight).into_tensor_arg(),
                embedded.clone().into_tensor_arg(),
                normed.clone().into_tensor_arg(),
                TableRowsLaunch::new(table_rows as u32, (stride / vector) as u32),
                NormScalarsLaunch::new(
                    rows as u32,
                    (columns / vector) as u32,
                    columns as f32,
                    options.epsilon as f32,
                ),
                rounded(options.scale, dtype),
                plan,
                [element, integer],
                vector,
            );
        }
        Embedded {
            rows: embedded,
            normed,
        }
    }

    fn per_layer(
        projected: FloatTensor<Self>,
        table: FloatTensor<Self>,
        tokens: MaybeTokens<Self>,
        weight: FloatTensor<Self>,
        options: PerLayerOptions,
    ) -> FloatTensor<Self> {
        let PerLayerOptions { of_table, factors } = options;
        let tokens = match tokens {
            MaybeTokens::InOrder => None,
            MaybeTokens::InOrderOf(tokens) => Some(tokens),
        };
        let read = [Some(&table), Some(&weight), tokens.as_ref()];
        let read: Vec<_> = read.into_iter().flatten().collect();
        let ahead = of_table.reads_ahead(&read);
        let client = projected.client.clone();
        let (projected, table) = (into_contiguous(projected), rows_of(table));
        let shape = [projected.meta.shape()[0], projected.meta.shape()[1]];
        let [rows, all_columns] = shape;
        let columns = weight.meta.shape()[0];
        let layers = all_columns / columns;
        assert_eq!(
            layers * columns,
            all_columns,
            "projected: expected whole layers of columns"
        );
        assert_eq!(
            table.meta.shape()[1],
            all_columns,
            "table: expected the columns of all layers"
        );
        let (table_rows, stride) = (table.meta.shape()[0], table.meta.strides()[0]);
        let dtype = projected.dtype;
        // Use the same vector size as the norm kernel for f32, so that both kernels add the squares in the same order.
        let vector = vector_size(&client, size_of::<f32>(), &[columns, stride]);
        let plan = plan(&table, columns / vector, vector, ahead);
        let output = empty(&projected, shape, dtype);
        let integer = tokens.as_ref().map_or(DType::I32, |tokens| tokens.dtype);
        // SAFETY: a cube handles one layer's columns in one of the `rows` rows of `projected`, `output` and `table`. With
        // `tokens`, the index of the table row is limited to the last row.
        unsafe {
            per_layer_pdl::launch_unchecked(
                &client,
                cube_count(&client, rows * layers),
                CubeDim::new_1d(plan.team.units as u32),
                address_type([&table, &projected]),
                projected.into_tensor_arg(),
                tokens
                    .map(|tokens| into_contiguous(tokens).into_tensor_arg())
                    .into(),
                table.into_tensor_arg(),
                into_contiguous(weight).into_tensor_arg(),
                output.clone().into_tensor_arg(),
                TableRowsLaunch::new(table_rows as u32, (stride / vector) as u32),
                FactorsLaunch::new(
                    factors.projected as f32,
                    rounded(of_table.scale, dtype),
                    factors.sum as f32,
                ),
                NormScalarsLaunch::new(
                    rows as u32,
                    (columns / vector) as u32,
                    columns as f32,
                    of_table.epsilon as f32,
                ),
                layers as u32,
                plan,
                [dtype_to_storage_type(dtype), dtype_to_storage_type(integer)],
                vector,
            );
        }
        output
    }
}

impl EmbedOptions {
    /// True if the kernel may read the tensors in `read` before the previous launch has ended. No launch may write
    /// these tensors, and their elements must have 2 or 4 bytes. The rows must be contiguous, because a launch would
    /// first copy a tensor whose rows are not contiguous.
    fn reads_ahead(&self, read: &[&CubeTensor]) -> bool {
        let stays = |tensor: &&CubeTensor| {
            matches!(tensor.dtype.size(), 2 | 4)
                && !tensor.meta.is_tiled()
                && tensor.meta.strides().last() == Some(&1)
        };
        self.origin == Origin::Parameters && read.iter().all(stays)
    }
}

/// Plans a launch over rows of `vectors` vectors, each of `vector` elements.
fn plan(table: &CubeTensor, vectors: usize, vector: usize, reads_ahead: bool) -> EmbedPlan {
    let pdl = supports_pdl(&table.client);
    let team = team(&table.client, vectors);
    EmbedPlan {
        team,
        held: vectors.div_ceil(team.units),
        pdl,
        reads_ahead: pdl && reads_ahead,
        loads_now: vector * table.dtype.size() == LOAD_BYTES,
    }
}

/// Returns `scale` rounded to the dtype.
fn rounded(scale: f64, dtype: DType) -> f32 {
    match dtype {
        DType::F16 => f16::from_f64(scale).to_f32(),
        DType::BF16 => bf16::from_f64(scale).to_f32(),
        _ => scale as f32,
    }
}
