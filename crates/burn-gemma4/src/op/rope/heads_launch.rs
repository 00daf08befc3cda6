//! The launch of the kernel that normalizes, rotates and writes the heads of a projection.

use super::{
    heads::HeadOptions,
    kernel::{
        HeadNormWeightsLaunch, HeadSizesLaunch, HeadTargetsLaunch, HeadsPlan, RopeColumns,
        RopeInputsLaunch, apply_norm_rope_pdl,
    },
    layouts::{HeadLayoutLaunch, QkvLayoutsLaunch},
};
use crate::op::launch::{rows_of, team};
use burn::{backend::cubecl::dtype_to_storage_type, tensor::DType};
use burn_cubecl::{cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count};
use cube_kit::pdl::supports_pdl;
use cubecl::prelude::CubeDim;

/// The norm's weight and the rotation tables.
pub(super) struct HeadWeights {
    pub weight: CubeTensor,
    pub cos: CubeTensor,
    pub sin: CubeTensor,
}

/// The target tensor of the heads, and the columns of the projection's output from which the heads are computed.
pub(super) struct RopeTarget {
    tensor: CubeTensor,
    start: usize,
    head_dim: usize,
}

impl RopeTarget {
    pub fn new(tensor: &CubeTensor, options: HeadOptions) -> Self {
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

    /// Returns the kernel's argument for this target. `rows` is the projection's total number of rows, divided equally
    /// among the sequences.
    fn layout(&self, rows: usize) -> HeadLayoutLaunch {
        let sequences = self.tensor.meta.shape()[0];
        assert!(
            rows.is_multiple_of(sequences),
            "rows: expected the same number for each sequence"
        );
        let (shape, strides) = (self.tensor.meta.shape(), self.tensor.meta.strides());
        HeadLayoutLaunch::new(
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
pub(super) struct OwnHeads {
    pub key_weight: CubeTensor,
    pub keys: RopeTarget,
    pub values: RopeTarget,
}

/// The arguments of one launch.
pub(super) struct HeadsLaunch {
    pub projected: CubeTensor,
    pub weights: Option<HeadWeights>,
    /// The position of each row. Without positions, row `r` uses row `r % n` of the rotation tables, which have `n`
    /// rows. Each sequence then fills its slots in order, starting at slot 0.
    pub positions: Option<CubeTensor>,
    pub target: RopeTarget,
    pub own: Option<OwnHeads>,
    pub columns: RopeColumns,
    /// The number of rotated channel pairs per head if the KV cache stores only the rotated channels of keys. The
    /// number is 0 for other KV caches.
    pub rotated: usize,
    pub epsilon: f64,
    /// True if the kernel may read the weights, tables and positions before the previous launch has ended. No launch
    /// may write these tensors.
    pub reads_ahead: bool,
}

impl HeadsLaunch {
    /// Creates the arguments of a launch. `columns` is the channel order if the KV cache stores only the rotated
    /// channels of keys. For other KV caches, the function ignores `columns`, and the heads keep their channel order.
    pub fn new(
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

    pub fn launch(self) {
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
        // In a launch without keys and values, pass dummy layouts for keys and values, which the kernel does not read.
        let [keys_layout, values_layout] = match &own {
            Some(own) => [own.keys.layout(rows), own.values.layout(rows)],
            None => [target.layout(rows), target.layout(rows)],
        };
        let layouts = QkvLayoutsLaunch::new(target.layout(rows), keys_layout, values_layout);
        let sizes = HeadSizesLaunch::new(
            projected_stride,
            rows as u32,
            positions_in_order as u32,
            (head_dim / 2) as u32,
            rotated as u32,
        );
        let (key_weight, keys, values) = match own {
            Some(own) => (
                Some(own.key_weight),
                Some(own.keys.tensor),
                Some(own.values.tensor),
            ),
            None => (None, None, None),
        };
        let read = [&weight, &key_weight, &cos, &sin, &positions];
        // Read the weights, tables and positions before the previous launch has ended only if they are contiguous, with
        // 2- or 4-byte elements. A launch first copies tensors in other layouts, and the kernel must wait for this
        // launch.
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
        // SAFETY: each cube reads one head of one row of the projection, and the table row for the row's position. The
        // tables contain every position that the cache can hold. Each cube writes one slot, which has columns for all
        // channels of the head.
        unsafe {
            apply_norm_rope_pdl::launch_unchecked(
                &client,
                cube_count(&client, rows * all_heads),
                CubeDim::new_1d(team.units as u32),
                address_type(widest.flatten()),
                projected.into_tensor_arg(),
                HeadNormWeightsLaunch::new(argument(weight).into(), argument(key_weight).into()),
                RopeInputsLaunch::new(
                    argument(cos).into(),
                    argument(sin).into(),
                    argument(positions).into(),
                ),
                HeadTargetsLaunch::new(
                    target.tensor.into_tensor_arg(),
                    written(keys).into(),
                    written(values).into(),
                ),
                layouts,
                sizes,
                epsilon as f32,
                plan,
                [element, integer],
            );
        }
    }
}
