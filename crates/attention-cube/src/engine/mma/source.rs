//! The CUDA C++ of the engine's kernels: see [`source`](crate::source::nvidia).

use super::backward::bias_gradient::bias_gradient_split_m::BiasGradientSplitM;
use super::backward::split_d::backward_split_d::BackwardSplitD;
use super::backward::split_m::backward_split_m::BackwardSplitM;
use super::forward::split_d::forward_split_d::ForwardSplitD;
use super::forward::split_m::forward_split_m::ForwardSplitM;
use super::forward::split_n::forward_split_n_overlapped::ForwardSplitNOverlapped;
use super::plan::gradient_tiles;
use super::plan::{
    BiasGradientTiles, ForwardTiles, GradientTiles, few_rows_tiles, forward_tiles, word_tiles,
};
use crate::division::HeldTiles;
use crate::fragment::FragmentKind;
use crate::fragment::bias::BiasReads;
use crate::fragment::work_tile::TileKind;
use crate::math::score::ScoreKind;
use crate::math::side::Side;
use crate::passes::bias_gradient::scores::Broadcast;
use crate::source::nvidia::{ELEMENT, MASK_PLACES, SCHEDULE, properties, save};
use crate::source::{ARGUMENTS, EXTENT, GRID, Wanted, optional, settings, tensor};
use crate::testing::card;
use cube_kit::hopper::Half;
use cubecl::ir::{ElemType, UIntKind};
use cubecl::{CubeKernel, prelude::*};
use std::{path::Path, sync::Arc};

#[test]
#[ignore = "writes files for whoever reads them"]
fn write() {
    crate::source::write(
        "forward-128-128 backward-128-128",
        |wanted, folder, name| {
            let pass = name.split('-').next().unwrap_or_default();
            let rows_of = |kind: &str| pass.strip_prefix(kind)?.parse().ok();
            match (pass, rows_of("decode"), rows_of("rows"), rows_of("words")) {
                ("forward", ..) => forward(wanted, folder, name),
                ("backward", ..) => backward(wanted, folder, name),
                ("bias", ..) => bias_gradient(wanted, folder, name),
                (_, Some(rows), ..) => few_rows(wanted, folder, name, rows, true),
                (_, _, Some(rows), _) => few_rows(wanted, folder, name, rows, false),
                (.., Some(rows)) => rows_of_words(wanted, folder, name, rows),
                _ => panic!(
                    "{name} begins with none of forward, backward, bias, decode, rows and words, the last three with a number of rows"
                ),
            }
        },
    );
}

/// An H200's.
const MOST_SHARED_MEMORY: usize = 232_448;

/// Bytes of shared memory of the card that kernels are written for: those that `SHARED_MEMORY` says, or an H200's.
fn shared_memory() -> usize {
    std::env::var("SHARED_MEMORY")
        .map_or(MOST_SHARED_MEMORY, |bytes| bytes.parse().expect("a number"))
}

/// Whether launches overlap. Of cards with less shared memory some have no instruction for it.
fn overlaps() -> bool {
    shared_memory() == MOST_SHARED_MEMORY
}

/// What is wanted; biases are never read ahead.
fn kind(wanted: &Wanted, side: Side) -> TileKind {
    let mut kind = wanted.kind(side);
    if kind.fragment.reads_ahead() {
        kind.fragment.bias_reads = BiasReads::There;
    }
    kind
}

fn forward(wanted: &Wanted, folder: &Path, name: &str) {
    let half = Half::Bf16;
    let shared_memory = shared_memory();
    let tiles = forward_tiles(
        wanted.head_dim,
        wanted.value_dim,
        half,
        [shared_memory, 1024],
    )
    .expect("tiles");
    write_forward(wanted, folder, name, tiles, kind(wanted, Side::Queries));
}

/// The forward for so many rows: of one head, or of eight that share a tile, and whose keys are split.
fn few_rows(wanted: &Wanted, folder: &Path, name: &str, rows: usize, shared: bool) {
    let Wanted {
        head_dim,
        value_dim,
        ..
    } = *wanted;
    let tiles = few_rows_tiles(
        rows,
        head_dim,
        value_dim,
        Half::Bf16,
        [shared_memory(), 1024],
    )
    .expect("tiles");
    let kind = TileKind {
        heads: if shared { 8 } else { 1 },
        split: shared,
        ..kind(wanted, Side::Queries)
    };
    write_forward(wanted, folder, name, tiles, kind);
}

/// The forward for so many rows of eight heads that share a tile, whose keys are split, and are int8 like the values.
fn rows_of_words(wanted: &Wanted, folder: &Path, name: &str, rows: usize) {
    let widths = [wanted.head_dim, wanted.value_dim];
    let tiles = word_tiles(rows, widths, [shared_memory(), 1024]).expect("tiles");
    let kind = TileKind {
        heads: 8,
        split: true,
        ..kind(wanted, Side::Queries)
    };
    write_forward(wanted, folder, name, tiles, kind);
}

fn write_forward(wanted: &Wanted, folder: &Path, name: &str, tiles: ForwardTiles, kind: TileKind) {
    println!("{name}: {tiles:?}");
    macro_rules! definition {
        ($kernel:ident, $tiles:expr $(, $key_scales:expr, $value_scales:expr, $key_element:expr, $overlaps:expr)?) => {
            $kernel::new(
                settings(tiles.units()),
                properties(),
                Arc::default(),
                tensor(),
                tensor(),
                tensor(),
                $($key_scales, $value_scales,)?
                optional!(wanted.structure.mask),
                optional!(wanted.score.bias),
                optional!(wanted.structure.segments || wanted.structure.lengths),
                optional!(wanted.sinks),
                tensor(),
                tensor(),
                GRID,
                SCHEDULE,
                EXTENT,
                ARGUMENTS,
                MASK_PLACES,
                (),
                (),
                $tiles,
                kind,
                $($overlaps,)?
                ELEMENT,
                $($key_element,)?
                ELEMENT,
                ELEMENT,
                ELEMENT,
                2,
                2,
                $tiles.vectors(),
            )
            .define()
        };
    }
    let definition = match tiles {
        ForwardTiles::SplitM(tiles) => definition!(ForwardSplitM, tiles),
        ForwardTiles::SplitN(tiles) => {
            let key_element = match tiles.reads_words {
                true => ElemType::UInt(UIntKind::U32),
                false => ELEMENT,
            };
            definition!(
                ForwardSplitNOverlapped,
                tiles,
                optional!(tiles.reads_words),
                optional!(tiles.reads_words),
                key_element,
                overlaps()
            )
        }
        ForwardTiles::SplitD(tiles) => definition!(ForwardSplitD, tiles),
    };
    save(folder, name, tiles.shared_memory(), definition);
}

fn backward(wanted: &Wanted, folder: &Path, name: &str) {
    let device = card(shared_memory());
    let (query, key, value) = gradient_tiles(
        wanted.head_dim,
        wanted.value_dim,
        Half::Bf16,
        wanted.kind(Side::Queries).fragment.has_logarithms(),
        &device,
    )
    .unwrap_or_else(|refusal| panic!("{name}: {refusal}"));
    for (tiles, summed) in [(Some(query), "query"), (Some(key), "key"), (value, "value")] {
        let Some(tiles) = tiles else { continue };
        println!("{name}-{summed}: {tiles:?}");
        macro_rules! definition {
            ($kernel:ident, $tiles:expr) => {
                $kernel::new(
                    settings(tiles.units()),
                    properties(),
                    Arc::default(),
                    tensor(),
                    tensor(),
                    tensor(),
                    tensor(),
                    tensor(),
                    optional!(wanted.structure.mask),
                    optional!(wanted.score.bias),
                    optional!(wanted.structure.segments || wanted.structure.lengths),
                    tensor(),
                    tensor(),
                    GRID,
                    EXTENT,
                    ARGUMENTS,
                    MASK_PLACES,
                    (),
                    $tiles,
                    kind(wanted, tiles.side()),
                    ELEMENT,
                    ELEMENT,
                    2,
                    2,
                    $tiles.vectors(),
                )
                .define()
            };
        }
        let definition = match tiles {
            GradientTiles::SplitM(tiles) => definition!(BackwardSplitM, tiles),
            GradientTiles::SplitD(tiles) => definition!(BackwardSplitD, tiles),
        };
        let name = format!("{name}-{summed}");
        save(folder, &name, tiles.shared_memory(), definition);
    }
}

/// The gradient of a bias of one sequence, which has a number for each score of a head.
fn bias_gradient(wanted: &Wanted, folder: &Path, name: &str) {
    let tiles = BiasGradientTiles::new([wanted.head_dim, wanted.value_dim], Half::Bf16);
    let broadcast = Broadcast {
        batch: true,
        heads: false,
        queries: false,
    };
    let kind = wanted.kind(Side::Queries);
    let kind = TileKind {
        fragment: FragmentKind {
            score: ScoreKind {
                bias: true,
                ..wanted.score
            },
            raw: false,
            has_slope: false,
            bias_reads: BiasReads::There,
            ..kind.fragment
        },
        ..kind
    };
    let definition = BiasGradientSplitM::new(
        settings(tiles.units()),
        properties(),
        Arc::default(),
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        optional!(wanted.structure.mask),
        optional!(true),
        optional!(wanted.structure.segments || wanted.structure.lengths),
        tensor(),
        GRID,
        EXTENT,
        ARGUMENTS,
        MASK_PLACES,
        (),
        (),
        (),
        (),
        broadcast,
        tiles,
        kind,
        ELEMENT,
        ELEMENT,
        ELEMENT,
        2,
        2,
        tiles.vectors(),
    )
    .define();
    save(folder, name, tiles.shared_memory(), definition);
}
