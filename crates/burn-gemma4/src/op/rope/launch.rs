//! The operators that compute a projection's heads, for the CubeCL backend. All operators launch the same kernel,
//! usually once. `layer_heads` launches the kernel three times on a device that binds few buffers per launch.

use super::{
    heads::{HeadOptions, HeadsBackend, LayerColumns, LayerHeads, LayerTensors, OwnShape},
    heads_launch::{HeadWeights, HeadsLaunch, OwnHeads, RopeTarget},
    kernel::RopeColumns,
};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cube_kit::launch::empty;

/// The number of buffers that a launch for queries, keys and values binds. WebGPU guarantees only 8 buffers, so on some
/// devices the queries, keys and values need one launch each.
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
        HeadsLaunch {
            weights: Some(HeadWeights { weight, cos, sin }),
            positions: Some(positions),
            // If the KV cache stores only the rotated channels of keys, an earlier launch multiplies the query norm's
            // weight by a factor. The kernel must wait for that launch.
            reads_ahead: options.compact.is_none(),
            ..HeadsLaunch::new(projected, &target, RopeColumns::CompactQueries, options)
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
        HeadsLaunch {
            weights: Some(HeadWeights { weight, cos, sin }),
            positions: Some(positions),
            own: Some(OwnHeads {
                key_weight,
                keys: RopeTarget::new(&keys, of_keys),
                values: RopeTarget::new(&values, of_values),
            }),
            reads_ahead: true,
            ..HeadsLaunch::new(projected, &queries, RopeColumns::Channels, of_queries)
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
        HeadsLaunch {
            weights: Some(HeadWeights { weight, cos, sin }),
            own: Some(OwnHeads {
                key_weight,
                keys: RopeTarget::new(&keys, options(columns.keys, own.columns)),
                values: RopeTarget::new(&values, options(columns.values, own.columns)),
            }),
            ..HeadsLaunch::new(projected, &queries, RopeColumns::Channels, of_queries)
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
        HeadsLaunch {
            weights: Some(HeadWeights { weight, cos, sin }),
            ..HeadsLaunch::new(projected, &target, RopeColumns::Channels, options)
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
        HeadsLaunch {
            weights: Some(HeadWeights { weight, cos, sin }),
            positions: Some(positions),
            reads_ahead: true,
            ..HeadsLaunch::new(projected, &buffer, RopeColumns::CompactKeys, options)
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
        HeadsLaunch {
            positions: Some(positions),
            reads_ahead: true,
            ..HeadsLaunch::new(projected, &buffer, RopeColumns::CompactValues, options)
        }
        .launch();
        buffer
    }
}

/// Allocates `[rows, heads, 1, head_dim]` for heads with `columns` columns in all. `head_dim` is twice the number of
/// columns of the rotation table.
fn empty_heads(projected: &CubeTensor, cos: &CubeTensor, columns: usize) -> CubeTensor {
    let head_dim = 2 * cos.meta.shape()[1];
    let rows = projected.meta.shape()[0];
    let shape = [rows, columns / head_dim, 1, head_dim];
    empty(projected, shape, projected.dtype)
}
