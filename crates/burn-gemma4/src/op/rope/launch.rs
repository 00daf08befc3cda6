//! Launches the kernel that normalizes, rotates and writes the heads of a projection.

use super::{
    heads::{HeadOptions, HeadsBackend, LayerColumns, LayerHeads, LayerTensors, OwnShape},
    kernel::{HeadsPlan, RopeColumns, place_heads_pdl},
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
use cube_kit::launch::{address_type, cube_count, empty};
use cube_kit::pdl::supports_pdl;
use cubecl::prelude::CubeDim;

/// The number of buffers that a launch for queries, keys and values binds. WebGPU guarantees only one buffer less.
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
            // Read the weight after the previous launch has ended if keys are compact, because a launch computes that weight.
            reads_ahead: options.compact.is_none(),
            ..Heads::new(projected, &target, RopeColumns::CompactQueries, options)
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
                keys: RopeTarget::new(&keys, of_keys),
                values: RopeTarget::new(&values, of_values),
            }),
            reads_ahead: true,
            ..Heads::new(projected, &queries, RopeColumns::Channels, of_queries)
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
                keys: RopeTarget::new(&keys, options(columns.keys, own.columns)),
                values: RopeTarget::new(&values, options(columns.values, own.columns)),
            }),
            ..Heads::new(projected, &queries, RopeColumns::Channels, of_queries)
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
            ..Heads::new(projected, &target, RopeColumns::Channels, options)
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
            ..Heads::new(projected, &buffer, RopeColumns::CompactKeys, options)
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
            ..Heads::new(projected, &buffer, RopeColumns::CompactValues, options)
        }
        .launch();
        buffer
    }
}

/// Allocates `[rows, heads, 1, head_dim]` for heads with `columns` columns in all. The rotation table gives `head_dim`.
fn empty_heads(projected: &CubeTensor, cos: &CubeTensor, columns: usize) -> CubeTensor {
    let head_dim = 2 * cos.meta.shape()[1];
    let rows = projected.meta.shape()[0];
    let shape = [rows, columns / head_dim, 1, head_dim];
    empty(projected, shape, projected.dtype)
}

/// The norm's weight and the rotation tables.
struct HeadWeights {
    weight: CubeTensor,
    cos: CubeTensor,
    sin: CubeTensor,
}

/// The tensor to which heads are written, and their source columns in the projection's output.
struct RopeTarget {
    tensor: CubeTensor,
    start: usize,
    head_dim: usize,
}

impl RopeTarget {
    fn new(tensor: &CubeTensor, options: HeadOptions) -> Self {
        let heads = tensor.meta.shape()[1];
        let head_dim = options.count / heads;
        assert_eq!(
            heads * head_dim,
            options.count,
            "columns: expected whole heads"
        );
        assert_eq!(
            tensor.meta.strides()[3],
            1,
            "target: expected contiguous columns"
        );
        Self {
            tensor: tensor.clone(),
            start: options.start,
            head_dim,
        }
    }

    fn heads(&self) -> usize {
        self.tensor.meta.shape()[1]
    }

    /// Returns the index after the last source column.
    fn end(&self) -> usize {
        self.start + self.heads() * self.head_dim
    }

    /// Returns the kernel's argument for this target. The projection has `rows` rows, equally many per sequence.
    fn side(&self, rows: usize) -> SideLaunch {
        let sequences = self.tensor.meta.shape()[0];
        assert!(
            rows.is_multiple_of(sequences),
            "rows: expected the same number for each sequence"
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

/// The arguments for a layer's keys and values, which the launch computes together with the queries.
struct OwnHeads {
    key_weight: CubeTensor,
    keys: RopeTarget,
    values: RopeTarget,
}

/// The arguments of one launch.
struct Heads {
    projected: CubeTensor,
    weights: Option<HeadWeights>,
    /// The position of each row. If it is `None`, row `r` uses table row `r % n` of the `n` rows in the rotation tables.
    /// Each sequence then fills its slots from slot 0 on.
    positions: Option<CubeTensor>,
    target: RopeTarget,
    own: Option<OwnHeads>,
    columns: RopeColumns,
    /// The number of rotated channel pairs for compact keys.
    rotated: usize,
    epsilon: f64,
    /// True if no launch writes the weights, tables and positions.
    reads_ahead: bool,
}

impl Heads {
    /// Creates a launch. Compact keys have the channel order `columns`, other layouts the channels' own order.
    fn new(
        projected: CubeTensor,
        target: &CubeTensor,
        columns: RopeColumns,
        options: HeadOptions,
    ) -> Self {
        Self {
            projected: rows_of(projected),
            weights: None,
            positions: None,
            target: RopeTarget::new(target, options),
            own: None,
            columns: match options.compact {
                Some(_) => columns,
                None => RopeColumns::Channels,
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
        assert!(
            2 * rotated <= head_dim,
            "compact: more rotated pairs than the head has"
        );
        let own_targets = own.iter().flat_map(|own| [&own.keys, &own.values]);
        for own in own_targets.clone() {
            assert_eq!(
                own.head_dim, head_dim,
                "keys and values: expected the head size of the queries"
            );
        }
        let end = own_targets.clone().map(RopeTarget::end).max().unwrap_or(0);
        assert!(
            end.max(target.end()) <= projected.meta.shape()[1],
            "projected: the columns of a part exceed the projection"
        );
        let all_heads = target.heads() + own_targets.map(RopeTarget::heads).sum::<usize>();
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
        // Pass dummy arguments for keys and values in a launch without them. The kernel does not read these arguments.
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
        // Read the weights, tables and positions before the previous launch has ended only if all of them are contiguous with
        // 2- or 4-byte elements. A launch must first copy other layouts, and early loads support no other element size.
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
            pdl: supports_pdl(&client),
            reads_ahead: reads_ahead && stay && supports_pdl(&client),
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
        // SAFETY: each cube reads the columns of one head in one of the `rows` rows of `projected`, and the row of the tables
        // at the head's position. The tables have a row for every position that the cache can hold. The cube writes only the
        // head's slot in the target of its sequence, and the slot has columns for all channels.
        unsafe {
            place_heads_pdl::launch_unchecked(
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
