//! The arguments that the launches of the bias gradient and of the sums along diagonals share. Both kernels recompute dS
//! on tensor cores.

use crate::auxiliary::mask_bits::launch::{PackedMask, pack};
use crate::auxiliary::mask_bits::plan::MaskTile;
use crate::engine::backward_pass::BackwardPass;
use crate::engine::tensor_core::common::FragmentKind;
use crate::engine::tensor_core::common::bias::BiasReads;
use crate::engine::tensor_core::common::launch::fragment_kind;
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::mma::backward::bias_gradient::BiasGradientOperandsLaunch;
use crate::engine::tensor_core::mma::plan::BiasGradientTiles;
use crate::kernel_args::tensor_arg;
use crate::math::side::Side;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::address_type;
use cubecl::prelude::{AddressType, Float};

impl BackwardPass<'_> {
    /// Returns the compile-time settings of the kernels.
    pub(super) fn kind_of_score_gradient(&self, bias_reads: BiasReads) -> TileKind {
        TileKind {
            fragment: FragmentKind {
                has_slope: false,
                bias_reads,
                ..fragment_kind(self.problem, Side::Queries)
            },
            heads: 1,
            split: false,
            page_len: 0,
        }
    }

    /// Packs the mask for the kernels' tiles of queries.
    pub(super) fn mask_of_score_gradient(&self, tiles: BiasGradientTiles) -> PackedMask {
        pack(
            &self.inputs,
            self.problem,
            Side::Queries,
            MaskTile::Rows(tiles.rows()),
            tiles.columns,
        )
    }

    /// Returns an integer type that can index all tensors of a kernel that writes to `target`.
    pub(super) fn addresses_of_score_gradient(
        &self,
        mask: &PackedMask,
        target: &CubeTensor,
    ) -> AddressType {
        address_type(
            [
                &self.inputs.query,
                &self.inputs.key,
                &self.inputs.value,
                &self.output_gradient,
                &self.rows,
                target,
            ]
            .into_iter()
            .chain(&mask.bits)
            .chain(self.optional_inputs.beside_mask()),
        )
    }

    /// Returns the kernels' input tensors.
    pub(super) fn operands_of_score_gradient<E: Float>(&self) -> BiasGradientOperandsLaunch<E> {
        BiasGradientOperandsLaunch::new(
            tensor_arg(&self.inputs.query),
            tensor_arg(&self.inputs.key),
            tensor_arg(&self.inputs.value),
            tensor_arg(&self.output_gradient),
            tensor_arg(&self.rows),
        )
    }
}
