//! Launches the heads of projections.

use super::{
    heads::{HeadOptions, HeadsBackend},
    kernel::{Columns, HeadStridesLaunch, place_heads_overlapped},
};
use crate::op::launch::{rows_of, team};
use burn::{
    backend::{
        cubecl::dtype_to_storage_type,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::DType,
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::{
    launch::{address_type, cube_count, empty},
    overlap::overlaps,
};
use cubecl::prelude::CubeDim;

impl HeadsBackend for CubeBackend {
    fn query_heads(
        projected: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        positions: IntTensor<Self>,
        options: HeadOptions,
    ) -> FloatTensor<Self> {
        let shape = heads(&projected, &cos, options.count);
        let target = empty(&projected, shape, projected.dtype);
        let weights = Some(HeadWeights { weight, cos, sin });
        let placing = Placing::of(options.compact, Columns::CompactQueries);
        launch(
            projected,
            weights,
            Some(positions),
            &target,
            placing,
            options,
        );
        target
    }

    fn heads_in_order(
        projected: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let options = HeadOptions {
            start: 0,
            count: projected.meta.shape()[1],
            compact: None,
            epsilon,
        };
        let shape = heads(&projected, &cos, options.count);
        let target = empty(&projected, shape, projected.dtype);
        let weights = HeadWeights { weight, cos, sin };
        let placing = Placing::CHANNELS;
        launch(projected, Some(weights), None, &target, placing, options);
        target
    }

    fn write_keys(
        projected: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        positions: IntTensor<Self>,
        buffer: FloatTensor<Self>,
        options: HeadOptions,
    ) -> FloatTensor<Self> {
        let weights = Some(HeadWeights { weight, cos, sin });
        let placing = Placing::of(options.compact, Columns::CompactKeys);
        launch(
            projected,
            weights,
            Some(positions),
            &buffer,
            placing,
            options,
        );
        buffer
    }

    fn write_values(
        projected: FloatTensor<Self>,
        positions: IntTensor<Self>,
        buffer: FloatTensor<Self>,
        options: HeadOptions,
    ) -> FloatTensor<Self> {
        let placing = Placing::of(options.compact, Columns::CompactValues);
        launch(projected, None, Some(positions), &buffer, placing, options);
        buffer
    }
}

/// What scales and rotates heads.
struct HeadWeights {
    weight: CubeTensor,
    cos: CubeTensor,
    sin: CubeTensor,
}

/// `[rows, heads, 1, head_dim]`, of so many columns of a projection and its rotation's table.
fn heads(projected: &CubeTensor, cos: &CubeTensor, columns: usize) -> [usize; 4] {
    let head_dim = 2 * cos.meta.shape()[1];
    let rows = projected.meta.shape()[0];
    [rows, columns / head_dim, 1, head_dim]
}

/// Where a head's channels go.
struct Placing {
    columns: Columns,
    rotated: usize,
}

impl Placing {
    const CHANNELS: Self = Self {
        columns: Columns::Channels,
        rotated: 0,
    };

    /// In `columns`, where `compact` pairs are rotated; in order, where slots are not shared.
    fn of(compact: Option<usize>, columns: Columns) -> Self {
        match compact {
            Some(rotated) => Self { columns, rotated },
            None => Self::CHANNELS,
        }
    }
}

/// Without `positions`, rows are at the tables' positions in their order, and from their beginning again after the last.
fn launch(
    projected: CubeTensor,
    weights: Option<HeadWeights>,
    positions: Option<CubeTensor>,
    target: &CubeTensor,
    placing: Placing,
    options: HeadOptions,
) {
    let client = projected.client.clone();
    let projected = rows_of(projected);
    let shape = target.meta.shape();
    let [sequences, heads, slots] = [shape[0], shape[1], shape[2]];
    let rows = projected.meta.shape()[0];
    assert!(
        rows.is_multiple_of(sequences),
        "as many rows of each sequence"
    );
    let head_dim = options.count / heads;
    assert_eq!(heads * head_dim, options.count, "whole heads");
    let columns = options.start + options.count;
    assert!(
        columns <= projected.meta.shape()[1],
        "columns that there are"
    );
    let strides = target.meta.strides();
    assert_eq!(strides[3], 1, "a head's columns lie together");
    assert!(2 * placing.rotated <= head_dim, "rotated are channels");
    let team = team(&client, head_dim / 2);
    let projected_stride = projected.meta.strides()[0] as u32;
    let positions_in_order = match &weights {
        Some(HeadWeights { cos, .. }) => cos.meta.shape()[0],
        None => 1,
    };
    let (weight, cos, sin) = match weights {
        Some(HeadWeights { weight, cos, sin }) => (Some(weight), Some(cos), Some(sin)),
        None => (None, None, None),
    };
    let argument =
        |tensor: Option<CubeTensor>| tensor.map(|tensor| into_contiguous(tensor).into_tensor_arg());
    let (element, integer) = (
        dtype_to_storage_type(projected.dtype),
        dtype_to_storage_type(
            positions
                .as_ref()
                .map_or(DType::I32, |positions| positions.dtype),
        ),
    );
    // SAFETY: a cube reads one head of one row, its position's row of the tables, which reach every position that the
    // cache has room for, and writes one slot of that head in its sequence, which has columns for all that are placed.
    unsafe {
        place_heads_overlapped::launch_unchecked(
            &client,
            cube_count(&client, rows * heads),
            CubeDim::new_1d(team.units as u32),
            address_type([&projected, target]),
            projected.into_tensor_arg(),
            argument(weight).into(),
            argument(cos).into(),
            argument(sin).into(),
            argument(positions).into(),
            target.clone().into_tensor_arg(),
            HeadStridesLaunch::new(strides[0] as u32, strides[1] as u32, strides[2] as u32),
            projected_stride,
            options.start as u32,
            rows as u32,
            (rows / sequences) as u32,
            positions_in_order as u32,
            heads as u32,
            (head_dim / 2) as u32,
            placing.rotated as u32,
            slots as u32,
            options.epsilon as f32,
            placing.columns,
            team,
            (head_dim / 2).div_ceil(team.units),
            overlaps(&client),
            element,
            integer,
        );
    }
}
