//! The CUDA C++ of the engine's kernels: see [`source`](crate::source::nvidia).

use super::backward::split_d::backward_split_d::BackwardSplitD;
use super::backward::split_m::backward_split_m::BackwardSplitM;
use super::forward::split_d::forward_split_d::ForwardSplitD;
use super::forward::split_m::forward_split_m::ForwardSplitM;
use crate::division::HeldTiles;
use crate::engine::wgmma::backward::copies::GradientStepsCompilationArg;
use crate::engine::wgmma::forward::copies::StepsCompilationArg;
use crate::engine::wgmma::plan::{ForwardTiles, GradientTiles, forward_tiles, gradient_tiles};
use crate::math::side::Side;
use crate::source::nvidia::{ELEMENT, MASK_PLACES, SCHEDULE, properties, save};
use crate::source::{ARGUMENTS, EXTENT, GRID, Wanted, optional, settings, tensor};
use cube_kit::hopper::Half;
use cubecl::{CubeKernel, prelude::*};
use std::{path::Path, sync::Arc};

#[test]
#[ignore = "writes files for whoever reads them"]
fn write() {
    crate::source::write(
        "forward-128-128 backward-128-128",
        |wanted, folder, name| match name.split('-').next() {
            Some("forward") => wanted.forward(folder, name),
            Some("backward") => wanted.backward(folder, name),
            _ => panic!("{name} begins with neither forward nor backward"),
        },
    );
}

impl Wanted {
    fn forward(&self, folder: &Path, name: &str) {
        let masked = self.structure.mask || self.score.bias;
        let tiles = forward_tiles(
            self.head_dim,
            self.value_dim,
            Half::Bf16,
            self.causal,
            masked,
            self.score.bias && !self.bias_of_head,
        );
        let tiles = tiles.unwrap_or_else(|| panic!("no tiles for {name}"));
        let kind = self.kind(Side::Queries);
        let settings = settings(tiles.units());
        macro_rules! definition {
            ($kernel:ident, $tiles:expr, [$($read:expr),*]) => {
                $kernel::new(
                    settings,
                    properties(),
                    Arc::default(),
                    $($read,)*
                    optional!(self.structure.mask),
                    optional!(self.score.bias),
                    optional!(self.structure.segments || self.structure.lengths),
                    optional!(self.sinks),
                    (),
                    tensor(),
                    tensor(),
                    GRID,
                    SCHEDULE,
                    EXTENT,
                    ARGUMENTS,
                    STEPS,
                    MASK_PLACES,
                    (),
                    (),
                    $tiles,
                    kind,
                    tiles.stores_output_by_tma(),
                    ELEMENT,
                    ELEMENT,
                    ELEMENT,
                    ELEMENT,
                    2,
                    2,
                    $tiles.fragments(),
                )
                .define()
            };
        }
        let definition = match tiles {
            ForwardTiles::SplitM(tiles) => definition!(ForwardSplitM, tiles, [(), (), (), ()]),
            ForwardTiles::SplitD(tiles) => definition!(ForwardSplitD, tiles, [(), (), ()]),
        };
        save(folder, name, tiles.shared_memory(), definition);
    }

    fn backward(&self, folder: &Path, name: &str) {
        let kernels = gradient_tiles(
            self.head_dim,
            self.value_dim,
            Half::Bf16,
            self.kind(Side::Queries).fragment.has_logarithms(),
        );
        for (tiles, sums) in kernels.into_iter().zip(["query", "key", "value"]) {
            let Some(tiles) = tiles else { continue };
            let kind = self.kind(tiles.side());
            let settings = settings(tiles.units());
            let has_lengths_or_ids = self.structure.segments || self.structure.lengths;
            // By the tensors that differ: what the copy engine reads, and what is summed.
            macro_rules! definition {
                ($kernel:ident, $tiles:expr, [$($read:expr),*], [$($summed:expr),*]) => {
                    $kernel::new(
                        settings,
                        properties(),
                        Arc::default(),
                        $($read,)*
                        tensor(),
                        optional!(self.structure.mask),
                        optional!(self.score.bias),
                        optional!(has_lengths_or_ids),
                        $($summed,)*
                        GRID,
                        EXTENT,
                        ARGUMENTS,
                        GRADIENT_STEPS,
                        MASK_PLACES,
                        (),
                        $tiles,
                        kind,
                        ELEMENT,
                        ELEMENT,
                        2,
                        2,
                        $tiles.fragments(),
                    )
                    .define()
                };
            }
            let definition = match tiles {
                GradientTiles::SplitM(tiles) => definition!(
                    BackwardSplitM,
                    tiles,
                    [(), (), (), (), ()],
                    [(), tensor(), (), tensor()]
                ),
                GradientTiles::SplitD(tiles) => definition!(
                    BackwardSplitD,
                    tiles,
                    [(), (), (), (), (), ()],
                    [(), tensor()]
                ),
            };
            save(
                folder,
                &format!("{name}-{sums}"),
                tiles.shared_memory(),
                definition,
            );
        }
    }
}

const STEPS: StepsCompilationArg = StepsCompilationArg {
    query_batch: (),
    key_batch: (),
    key_head: (),
    value_batch: (),
    value_head: (),
    bias_batch: (),
    bias_head: (),
};

const GRADIENT_STEPS: GradientStepsCompilationArg = GradientStepsCompilationArg {
    stationary_dot_batch: (),
    stationary_dot_head: (),
    stationary_value_batch: (),
    stationary_value_head: (),
    dot_batch: (),
    dot_head: (),
    value_batch: (),
    value_head: (),
};
