//! Writes the CUDA C++ source of the engine's kernels: see [`source`](crate::source::nvidia).

use super::backward::bias_gradient::bias_gradient_split_m::BiasGradientSplitM;
use super::backward::bias_gradient::{BiasGradientOperandsCompilationArg, BiasGridCompilationArg};
use super::backward::split_d::backward_split_d::BackwardSplitD;
use super::backward::split_m::backward_split_m::BackwardSplitM;
use super::forward::split_d::forward_split_d::ForwardSplitD;
use super::forward::split_m::forward_split_m::ForwardSplitM;
use super::forward::split_n::forward_split_n_pdl::ForwardSplitNPdl;
use super::plan::gradient_tiles;
use super::plan::{
    BiasGradientTiles, MmaForwardTiles, MmaGradientTiles, decode_code_tiles, few_rows_tiles,
    forward_tiles,
};
use crate::auxiliary::bias_gradient::scores::Broadcast;
use crate::engine::tensor_core::common::FragmentKind;
use crate::engine::tensor_core::common::bias::BiasReads;
use crate::engine::tensor_core::common::launch::joined_sizes;
use crate::engine::tensor_core::common::scoring::{
    ForwardOperandsCompilationArg, GradientOperandsCompilationArg, ScoringCompilationArg,
};
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tiling::BackwardTiles;
use crate::math::score::ScoreKind;
use crate::math::side::Side;
use crate::source::nvidia::{ELEMENT, GRADIENT_GRID, SCHEDULER, properties, save, scoring};
use crate::source::{GRID, Wanted, optional, settings, tensor};
use crate::testing::card;
use crate::types::quantized::CodeFormat;
use cube_kit::nvidia::Half;
use cubecl::ir::{ElemType, UIntKind};
use cubecl::{CubeKernel, prelude::*};
use std::{path::Path, sync::Arc};

#[test]
#[ignore = "writes compiled kernels to files for inspection"]
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
                (.., Some(rows)) => code_rows(wanted, folder, name, rows),
                _ => panic!(
                    "unknown kernel {name}: expected a name that begins with forward, backward, bias, decode<rows>, rows<rows> or words<rows>"
                ),
            }
        },
    );
}

/// The bytes of shared memory that a CTA may take on an H200.
const MOST_SHARED_MEMORY: usize = 232_448;

/// Returns the bytes of shared memory per CTA of the target GPU: the value of the environment variable `SHARED_MEMORY`,
/// or [`MOST_SHARED_MEMORY`] if the variable is not set.
fn shared_memory() -> usize {
    std::env::var("SHARED_MEMORY")
        .map_or(MOST_SHARED_MEMORY, |bytes| bytes.parse().expect("a number"))
}

/// True if a kernel launch may overlap the preceding launch (PDL). The function returns false for every GPU with less
/// shared memory than an H200, because some of these GPUs lack PDL.
fn supports_pdl() -> bool {
    shared_memory() == MOST_SHARED_MEMORY
}

/// Returns the compile-time settings of the kernel that `wanted` describes. With these settings, the kernel does not
/// prefetch biases.
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
    .expect("the head sizes have forward tiles");
    write_forward(wanted, folder, name, tiles, kind(wanted, Side::Queries));
}

/// Writes the source of the forward for `rows` query rows. If `shared`, the rows of eight heads share one tile, and the
/// keys are split (split-KV). Otherwise all rows are queries of one head.
fn few_rows(wanted: &Wanted, folder: &Path, name: &str, rows: usize, shared: bool) {
    let Wanted {
        head_dim,
        value_dim,
        ..
    } = *wanted;
    let tiles = few_rows_tiles(
        rows,
        [head_dim, value_dim],
        Half::Bf16,
        [shared_memory(), 1024],
        None,
    )
    .expect("the head sizes have tiles for few rows");
    let kind = TileKind {
        heads: if shared { 8 } else { 1 },
        split: shared,
        ..kind(wanted, Side::Queries)
    };
    write_forward(wanted, folder, name, tiles, kind);
}

/// Writes the source of the forward over int8 keys and values, for `rows` query rows. The rows belong to eight heads
/// that share one tile. The keys are split (split-KV).
fn code_rows(wanted: &Wanted, folder: &Path, name: &str, rows: usize) {
    let widths = [wanted.head_dim, wanted.value_dim];
    let tiles = decode_code_tiles(
        rows,
        widths,
        CodeFormat::Int8,
        [shared_memory(), 1024],
        None,
    )
    .expect("the head sizes have int8 tiles");
    let kind = TileKind {
        heads: 8,
        split: true,
        ..kind(wanted, Side::Queries)
    };
    write_forward(wanted, folder, name, tiles, kind);
}

fn write_forward(
    wanted: &Wanted,
    folder: &Path,
    name: &str,
    tiles: MmaForwardTiles,
    kind: TileKind,
) {
    println!("{name}: {tiles:?}");
    let reads_int8 = matches!(tiles, MmaForwardTiles::SplitN(tiles) if tiles.codes.is_some());
    macro_rules! definition {
        ($kernel:ident, $tiles:expr, $elements:expr $(, $pdl:expr)?) => {
            $kernel::new(
                settings(tiles.units()),
                properties(),
                Arc::default(),
                ForwardOperandsCompilationArg {
                    query: tensor(),
                    key: tensor(),
                    value: tensor(),
                    key_scales: optional!(reads_int8),
                    value_scales: optional!(reads_int8),
                    page_table: optional!(false),
                },
                scoring(wanted),
                optional!(wanted.sinks),
                tensor(),
                tensor(),
                SCHEDULER,
                (),
                $tiles,
                kind,
                $($pdl,)?
                $elements,
                joined_sizes([2, 2], $tiles.vectors()),
            )
            .define()
        };
    }
    let definition = match tiles {
        MmaForwardTiles::SplitM(tiles) => definition!(ForwardSplitM, tiles, [ELEMENT; 4]),
        MmaForwardTiles::SplitN(tiles) => {
            let key_element = match reads_int8 {
                true => ElemType::UInt(UIntKind::U32),
                false => ELEMENT,
            };
            let elements = [ELEMENT, key_element, ELEMENT, ELEMENT, ELEMENT];
            definition!(ForwardSplitNPdl, tiles, elements, supports_pdl())
        }
        MmaForwardTiles::SplitD(tiles) => definition!(ForwardSplitD, tiles, [ELEMENT; 4]),
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
                    GradientOperandsCompilationArg {
                        stationary_qk: tensor(),
                        stationary_v_do: tensor(),
                        q_or_k: tensor(),
                        v_or_do: tensor(),
                        lse_delta: tensor(),
                    },
                    scoring(wanted),
                    tensor(),
                    tensor(),
                    GRADIENT_GRID,
                    $tiles,
                    kind(wanted, tiles.side()),
                    [ELEMENT; 3],
                    joined_sizes([2, 2], $tiles.vectors()),
                )
                .define()
            };
        }
        let definition = match tiles {
            MmaGradientTiles::SplitM(tiles) => definition!(BackwardSplitM, tiles),
            MmaGradientTiles::SplitD(tiles) => definition!(BackwardSplitD, tiles),
        };
        let name = format!("{name}-{summed}");
        save(folder, &name, tiles.shared_memory(), definition);
    }
}

/// Writes the source of the bias gradient. The bias is shared by all sequences and has one element per head, query and key.
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
            bias_reads: BiasReads::Ahead(Half::Bf16),
            ..kind.fragment
        },
        ..kind
    };
    let definition = BiasGradientSplitM::new(
        settings(tiles.units()),
        properties(),
        Arc::default(),
        BiasGradientOperandsCompilationArg {
            query: tensor(),
            key: tensor(),
            value: tensor(),
            output_gradient: tensor(),
            lse_delta: tensor(),
        },
        ScoringCompilationArg {
            bias: optional!(true),
            ..scoring(wanted)
        },
        tensor(),
        BiasGridCompilationArg {
            grid: GRID,
            batches: (),
            q_heads: (),
            group: (),
            key_tiles: (),
        },
        broadcast,
        tiles,
        kind,
        [ELEMENT; 3],
        joined_sizes([2, 2], tiles.vectors()),
    )
    .define();
    save(folder, name, tiles.shared_memory(), definition);
}
