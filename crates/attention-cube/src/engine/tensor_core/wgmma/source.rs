//! Writes the CUDA C++ source of the engine's kernels: see [`source`](crate::source::nvidia).

use super::backward::load::GradientMapsCompilationArg;
use super::backward::split_d::backward_split_d::BackwardSplitD;
use super::backward::split_m::backward_split_m::BackwardSplitM;
use super::forward::load::ForwardMapsCompilationArg;
use super::forward::pages::PageTableCompilationArg;
use super::forward::split_d::forward_split_d::ForwardSplitD;
use super::forward::split_m::forward_split_m::ForwardSplitM;
use crate::engine::tensor_core::common::bias::BiasReads;
use crate::engine::tensor_core::common::launch::joined_sizes;
use crate::engine::tensor_core::wgmma::backward::load::GradientStepsCompilationArg;
use crate::engine::tensor_core::wgmma::forward::load::StepsCompilationArg;
use crate::engine::tensor_core::wgmma::plan::{
    ForwardChoice, WgmmaForwardTiles, WgmmaGradientTiles, forward_tiles, gradient_tiles,
};
use crate::engine::tiling::BackwardTiles;
use crate::math::side::Side;
use crate::source::nvidia::{ELEMENT, GRADIENT_GRID, SCHEDULER, properties, save, scoring};
use crate::source::{Wanted, optional, settings, tensor};
use cube_kit::nvidia::Half;
use cubecl::{CubeKernel, prelude::*};
use std::{path::Path, sync::Arc};

#[test]
#[ignore = "writes the kernels' CUDA C++ to files; run by hand"]
fn write() {
    crate::source::write(
        "forward-128-128 backward-128-128",
        |wanted, folder, name| match name.split('-').next() {
            Some("forward") => wanted.forward(folder, name),
            Some("backward") => wanted.backward(folder, name),
            _ => panic!("{name}: expected a name that begins with forward or backward"),
        },
    );
}

impl Wanted {
    fn forward(&self, folder: &Path, name: &str) {
        let masked = self.structure.mask || self.score.bias;
        let choice = ForwardChoice {
            causal: self.causal,
            masked,
            dropout: self.score.dropout,
            mask_block: None,
            loads_bias_by_tma: self.score.bias && !self.bias_of_head,
        };
        let tiles = forward_tiles([self.head_dim, self.value_dim], Half::Bf16, choice);
        let tiles = tiles.unwrap_or_else(|| panic!("no tiles for {name}"));
        let kind = self.kind(Side::Queries);
        let settings = settings(tiles.units());
        macro_rules! definition {
            ($kernel:ident, $tiles:expr) => {
                $kernel::new(
                    settings,
                    properties(),
                    Arc::default(),
                    ForwardMapsCompilationArg {
                        query: (),
                        key: (),
                        value: (),
                        bias: (),
                        output: (),
                        steps: STEPS,
                        page_table: match self.page_len {
                            0 => ComptimeOptionCompilationArg::None,
                            _ => ComptimeOptionCompilationArg::Some(PAGE_TABLE),
                        },
                    },
                    scoring(self),
                    optional!(self.sinks),
                    tensor(),
                    tensor(),
                    SCHEDULER,
                    (),
                    $tiles,
                    kind,
                    tiles.stores_output_by_tma(),
                    [ELEMENT; 4],
                    joined_sizes([2, 2], $tiles.fragments()),
                )
                .define()
            };
        }
        let definition = match tiles {
            WgmmaForwardTiles::SplitM(tiles) => definition!(ForwardSplitM, tiles),
            WgmmaForwardTiles::SplitD(tiles) => definition!(ForwardSplitD, tiles),
        };
        save(folder, name, tiles.shared_memory(), definition);
    }

    fn backward(&self, folder: &Path, name: &str) {
        let kernels = gradient_tiles(
            self.head_dim,
            self.value_dim,
            Half::Bf16,
            self.kind(Side::Queries).fragment.has_logarithms(),
            self.score.bias && !self.bias_of_head && !self.score.softcap,
        );
        for (tiles, sums) in kernels.into_iter().zip(["query", "key", "value"]) {
            let Some(tiles) = tiles else { continue };
            let mut kind = self.kind(tiles.side());
            if self.score.bias && !self.bias_of_head {
                kind.fragment.bias_reads = match tiles.has_bias_boxes() {
                    true => BiasReads::Ahead(Half::Bf16),
                    false => BiasReads::There,
                };
            }
            let settings = settings(tiles.units());
            // The split-M kernel has two arguments for gradients, and the split-D kernel has one.
            macro_rules! definition {
                ($kernel:ident, $tiles:expr, [$($gradient:expr),*]) => {
                    $kernel::new(
                        settings,
                        properties(),
                        Arc::default(),
                        GradientMapsCompilationArg {
                            stationary_qk: (),
                            stationary_v_do: (),
                            q_or_k: (),
                            v_or_do: (),
                            bias_or_summed: (),
                            lse_delta: (),
                            qk_gradient: (),
                            value_gradient: (),
                            steps: GRADIENT_STEPS,
                        },
                        tensor(),
                        scoring(self),
                        $($gradient,)*
                        GRADIENT_GRID,
                        $tiles,
                        kind,
                        [ELEMENT; 3],
                        joined_sizes([2, 2], $tiles.fragments()),
                    )
                    .define()
                };
            }
            let definition = match tiles {
                WgmmaGradientTiles::SplitM(tiles) => {
                    definition!(BackwardSplitM, tiles, [tensor(), tensor()])
                }
                WgmmaGradientTiles::SplitD(tiles) => definition!(BackwardSplitD, tiles, [tensor()]),
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

const PAGE_TABLE: PageTableCompilationArg = PageTableCompilationArg {
    entries: tensor(),
    last_page: (),
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
    bias_batch: (),
    bias_head: (),
};
