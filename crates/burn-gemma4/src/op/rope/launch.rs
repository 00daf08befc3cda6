//! Launches the heads of projections.

use super::{
    heads::{HeadOptions, HeadsBackend, LayerColumns, LayerHeads, LayerTensors, OwnShape},
    kernel::{Columns, HeadsPlan, place_heads_overlapped},
    sides::SideLaunch,
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

/// Buffers that a launch of a layer's heads binds. WebGPU promises one less.
const LAYER_BINDINGS: u32 = 9;

impl HeadsBackend for CubeBackend {
    fn query_heads(
        projected: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        positions: IntTensor<Self>,
        options: HeadOptions,
    ) -> FloatTensor<Self> {
        let target = empty_heads(&projected, &cos, options.count);
        Heads {
            weights: Some(HeadWeights { weight, cos, sin }),
            positions: Some(positions),
            // Of compact keys the weight is computed.
            reads_ahead: options.compact.is_none(),
            ..Heads::new(projected, &target, Columns::CompactQueries, options)
        }
        .launch();
        target
    }

    fn layer_heads(tensors: LayerTensors<Self>, columns: LayerColumns) -> LayerHeads<Self> {
        let LayerTensors {
            projected,
            query_weight,
            key_weight,
            cos,
            sin,
            positions,
            keys,
            values,
        } = tensors;
        let of_keys = keys.meta.shape()[1] * keys.meta.shape()[3];
        let options = |start, count| HeadOptions {
            start,
            count,
            compact: None,
            epsilon: columns.epsilon,
        };
        let of_queries = options(columns.queries, columns.count);
        let of_values = options(columns.values, of_keys);
        let of_keys = options(columns.keys, of_keys);
        let bindings = projected.client.properties().hardware.max_bindings;
        if bindings < LAYER_BINDINGS {
            let (rows, at) = (projected.clone(), positions.clone());
            let (cosines, sines) = (cos.clone(), sin.clone());
            return LayerHeads {
                keys: Self::write_keys(rows, key_weight, cosines, sines, at, keys, of_keys),
                values: Self::write_values(projected.clone(), positions.clone(), values, of_values),
                queries: Self::query_heads(
                    projected,
                    query_weight,
                    cos,
                    sin,
                    positions,
                    of_queries,
                ),
            };
        }
        let queries = empty_heads(&projected, &cos, columns.count);
        let weight = query_weight;
        Heads {
            weights: Some(HeadWeights { weight, cos, sin }),
            positions: Some(positions),
            own: Some(OwnHeads {
                key_weight,
                keys: Target::new(&keys, of_keys),
                values: Target::new(&values, of_values),
            }),
            reads_ahead: true,
            ..Heads::new(projected, &queries, Columns::Channels, of_queries)
        }
        .launch();
        LayerHeads {
            queries,
            keys,
            values,
        }
    }

    fn layer_heads_in_order(
        projected: FloatTensor<Self>,
        query_weight: FloatTensor<Self>,
        key_weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        columns: LayerColumns,
        own: OwnShape,
    ) -> LayerHeads<Self> {
        let shape = own.of(projected.meta.shape()[0], 2 * cos.meta.shape()[1]);
        let [keys, values] = [(); 2].map(|()| empty(&projected, shape, projected.dtype));
        let queries = empty_heads(&projected, &cos, columns.count);
        let options = |start, count| HeadOptions {
            start,
            count,
            compact: None,
            epsilon: columns.epsilon,
        };
        let of_queries = options(columns.queries, columns.count);
        let weight = query_weight;
        Heads {
            weights: Some(HeadWeights { weight, cos, sin }),
            own: Some(OwnHeads {
                key_weight,
                keys: Target::new(&keys, options(columns.keys, own.columns)),
                values: Target::new(&values, options(columns.values, own.columns)),
            }),
            ..Heads::new(projected, &queries, Columns::Channels, of_queries)
        }
        .launch();
        LayerHeads {
            queries,
            keys,
            values,
        }
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
        let target = empty_heads(&projected, &cos, options.count);
        Heads {
            weights: Some(HeadWeights { weight, cos, sin }),
            ..Heads::new(projected, &target, Columns::Channels, options)
        }
        .launch();
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
        Heads {
            weights: Some(HeadWeights { weight, cos, sin }),
            positions: Some(positions),
            reads_ahead: true,
            ..Heads::new(projected, &buffer, Columns::CompactKeys, options)
        }
        .launch();
        buffer
    }

    fn write_values(
        projected: FloatTensor<Self>,
        positions: IntTensor<Self>,
        buffer: FloatTensor<Self>,
        options: HeadOptions,
    ) -> FloatTensor<Self> {
        Heads {
            positions: Some(positions),
            reads_ahead: true,
            ..Heads::new(projected, &buffer, Columns::CompactValues, options)
        }
        .launch();
        buffer
    }
}

/// `[rows, heads, 1, head_dim]`, of so many columns of a projection and its rotation's table.
fn empty_heads(projected: &CubeTensor, cos: &CubeTensor, columns: usize) -> CubeTensor {
    let head_dim = 2 * cos.meta.shape()[1];
    let rows = projected.meta.shape()[0];
    let shape = [rows, columns / head_dim, 1, head_dim];
    empty(projected, shape, projected.dtype)
}

/// What scales and rotates heads.
struct HeadWeights {
    weight: CubeTensor,
    cos: CubeTensor,
    sin: CubeTensor,
}

/// Where heads go, and the columns that they are made of.
struct Target {
    tensor: CubeTensor,
    start: usize,
    head_dim: usize,
}

impl Target {
    fn new(tensor: &CubeTensor, options: HeadOptions) -> Self {
        let heads = tensor.meta.shape()[1];
        let head_dim = options.count / heads;
        assert_eq!(heads * head_dim, options.count, "whole heads");
        assert_eq!(tensor.meta.strides()[3], 1, "a head's columns lie together");
        Self {
            tensor: tensor.clone(),
            start: options.start,
            head_dim,
        }
    }

    fn heads(&self) -> usize {
        self.tensor.meta.shape()[1]
    }

    /// One more than the last column that is read.
    fn end(&self) -> usize {
        self.start + self.heads() * self.head_dim
    }

    /// Of so many rows, which are as many of each sequence.
    fn side(&self, rows: usize) -> SideLaunch {
        let sequences = self.tensor.meta.shape()[0];
        assert!(
            rows.is_multiple_of(sequences),
            "as many rows of each sequence"
        );
        let (shape, strides) = (self.tensor.meta.shape(), self.tensor.meta.strides());
        SideLaunch::new(
            self.start as u32,
            shape[1] as u32,
            shape[2] as u32,
            (rows / sequences) as u32,
            strides[0] as u32,
            strides[1] as u32,
            strides[2] as u32,
        )
    }
}

/// A layer's keys and values beside its queries.
struct OwnHeads {
    key_weight: CubeTensor,
    keys: Target,
    values: Target,
}

/// One launch.
struct Heads {
    projected: CubeTensor,
    weights: Option<HeadWeights>,
    /// Without them, rows are at the tables' positions in their order, and from their beginning again after the last, and a sequence's are in
    /// the slots from the first on.
    positions: Option<CubeTensor>,
    target: Target,
    own: Option<OwnHeads>,
    columns: Columns,
    /// Pairs that are, where slots are shared.
    rotated: usize,
    epsilon: f64,
    /// Whether no launch writes weights, tables and positions.
    reads_ahead: bool,
}

impl Heads {
    /// In `columns` where keys share their values' slots; else in the channels' order.
    fn new(
        projected: CubeTensor,
        target: &CubeTensor,
        columns: Columns,
        options: HeadOptions,
    ) -> Self {
        Self {
            projected: rows_of(projected),
            weights: None,
            positions: None,
            target: Target::new(target, options),
            own: None,
            columns: match options.compact {
                Some(_) => columns,
                None => Columns::Channels,
            },
            rotated: options.compact.unwrap_or(0),
            epsilon: options.epsilon,
            reads_ahead: false,
        }
    }

    fn launch(self) {
        let Self {
            projected,
            weights,
            positions,
            target,
            own,
            columns,
            rotated,
            epsilon,
            reads_ahead,
        } = self;
        let client = projected.client.clone();
        let (rows, head_dim) = (projected.meta.shape()[0], target.head_dim);
        assert!(2 * rotated <= head_dim, "rotated are channels");
        let own_targets = own.iter().flat_map(|own| [&own.keys, &own.values]);
        for own in own_targets.clone() {
            assert_eq!(own.head_dim, head_dim, "heads of one size");
        }
        let end = own_targets.clone().map(Target::end).max().unwrap_or(0);
        assert!(
            end.max(target.end()) <= projected.meta.shape()[1],
            "columns that there are"
        );
        let all_heads = target.heads() + own_targets.map(Target::heads).sum::<usize>();
        let projected_stride = projected.meta.strides()[0] as u32;
        let positions_in_order = match &weights {
            Some(HeadWeights { cos, .. }) => cos.meta.shape()[0],
            None => 1,
        };
        let (weight, cos, sin) = match weights {
            Some(HeadWeights { weight, cos, sin }) => (Some(weight), Some(cos), Some(sin)),
            None => (None, None, None),
        };
        let first_side = target.side(rows);
        // Of one side alone nothing else is read.
        let [keys_side, values_side] = match &own {
            Some(own) => [own.keys.side(rows), own.values.side(rows)],
            None => [target.side(rows), target.side(rows)],
        };
        let (key_weight, keys, values) = match own {
            Some(own) => (
                Some(own.key_weight),
                Some(own.keys.tensor),
                Some(own.values.tensor),
            ),
            None => (None, None, None),
        };
        let read = [&weight, &key_weight, &cos, &sin, &positions];
        // Else a launch gives them another layout, or they are not of what is read ahead.
        let stay = read.into_iter().flatten().all(|tensor| {
            let elements = matches!(tensor.dtype.size(), 2 | 4);
            elements && !tensor.meta.is_tiled() && tensor.is_contiguous()
        });
        let team = team(&client, head_dim / 2);
        let plan = HeadsPlan {
            columns,
            team,
            held: (head_dim / 2).div_ceil(team.units),
            of_layer: keys.is_some(),
            overlaps: overlaps(&client),
            reads_ahead: reads_ahead && stay && overlaps(&client),
        };
        let argument = |tensor: Option<CubeTensor>| {
            tensor.map(|tensor| into_contiguous(tensor).into_tensor_arg())
        };
        let written = |tensor: Option<CubeTensor>| tensor.map(CubeTensor::into_tensor_arg);
        let (element, integer) = (
            dtype_to_storage_type(projected.dtype),
            dtype_to_storage_type(
                positions
                    .as_ref()
                    .map_or(DType::I32, |positions| positions.dtype),
            ),
        );
        let widest = [Some(&projected), Some(&target.tensor)];
        let widest = widest.into_iter().chain([keys.as_ref(), values.as_ref()]);
        // SAFETY: a cube reads one head of one row, its position's row of the tables, which reach every position that the
        // cache has room for, and writes one slot of that head in its sequence, which has columns for all that are placed.
        unsafe {
            place_heads_overlapped::launch_unchecked(
                &client,
                cube_count(&client, rows * all_heads),
                CubeDim::new_1d(team.units as u32),
                address_type(widest.flatten()),
                projected.into_tensor_arg(),
                argument(weight).into(),
                argument(key_weight).into(),
                argument(cos).into(),
                argument(sin).into(),
                argument(positions).into(),
                target.tensor.into_tensor_arg(),
                written(keys).into(),
                written(values).into(),
                first_side,
                keys_side,
                values_side,
                projected_stride,
                rows as u32,
                positions_in_order as u32,
                (head_dim / 2) as u32,
                rotated as u32,
                epsilon as f32,
                plan,
                element,
                integer,
            );
        }
    }
}
