//! Compiles the portable kernels for AMD GPUs, see [`source`](crate::source::amd).

use super::backward::key_value::key_value_gradient::KeyValueGradient;
use super::backward::query::query_gradient::QueryGradient;
use super::forward::ForwardKind;
use super::forward::forward::Forward;
use super::plan::PortableForwardPlan;
use crate::auxiliary::backward_kind::BackwardKind;
use crate::engine::api::AttentionEngine;
use crate::engine::portable::cmma::Cmma;
use crate::engine::portable::common::plan::PortableBackwardPlan;
use crate::engine::portable::unit::Unit;
use crate::math::inputs::{
    BackwardInputsCompilationArg, ForwardInputsCompilationArg, HeadSizesCompilationArg,
};
use crate::math::score::ScoringCompilationArg;
use crate::source::amd::Card;
use crate::source::{ARGUMENTS, GRID, SEQ_LENS, Wanted, optional, settings, tensor};
use crate::testing;
use crate::tile_ops::tiles::UnitTiles;
use crate::types::device::DeviceProfile;
use crate::types::refusal::Refusal;
use crate::types::request::Layouts;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use cubecl::ir::{ElemType, UIntKind};
use cubecl::{CubeKernel, prelude::*};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{env, fs, path::Path, sync::Arc, thread};

/// The bytes of stack for the thread that compiles. The thread needs a large stack, because CubeCL's compiler passes recurse
/// deeply.
const STACK: usize = 256 << 20;

/// Writes machine code for every AMD GPU that the environment variable `CARDS` lists, into one folder per GPU. Each
/// line of the folder's `kernels.txt` gives a kernel's name, its units per cube, and its bytes of shared memory. If a
/// kernel has no machine code, the kernel's line gives the reason instead.
#[test]
#[ignore = "writes compiled kernels to files for inspection"]
fn write() {
    let cards = env::var("CARDS").unwrap_or_else(|_| "gfx90a gfx942 gfx1100 gfx1201".into());
    thread::scope(|scope| {
        for card in cards.split_whitespace() {
            thread::Builder::new()
                .stack_size(STACK)
                .spawn_scoped(scope, || write_for(&Card::of(card)))
                .expect("the compiling thread starts");
        }
    });
}

fn write_for(card: &Card) {
    crate::source::write(
        "forward-128-128 backward-128-128 decode-128-128",
        |wanted, folder, name| {
            let folder = folder.join(card.name());
            fs::create_dir_all(&folder).expect("the card's output folder can be created");
            for dtype in [DType::F16, DType::BF16] {
                let kernel = |engine: &str| format!("{engine}-{dtype:?}-{name}").to_lowercase();
                let pass = name.split('-').next().unwrap_or_default();
                write_engine::<Cmma>(wanted, pass, card, dtype, &folder, &kernel("cmma"));
                write_engine::<Unit>(wanted, pass, card, dtype, &folder, &kernel("unit"));
            }
        },
    );
}

/// Compiles the kernels of an engine's forward or backward, or prints the reason why the engine refuses the GPU.
fn write_engine<E>(
    wanted: &Wanted,
    pass: &str,
    card: &Card,
    dtype: DType,
    folder: &Path,
    name: &str,
) where
    E: AttentionEngine<Forward = PortableForwardPlan, Backward = PortableBackwardPlan>,
{
    let kernels = match kernels::<E>(wanted, pass, &card.profile(), dtype) {
        Ok(kernels) => kernels,
        Err(refusal) => return println!("{name}: {refusal}"),
    };
    for kernel in kernels {
        let name = format!("{name}{}", kernel.suffix());
        let path = folder.join(format!("{name}.hsaco"));
        let compile = || card.save(&path, kernel.definition(wanted, card, dtype));
        let outcome = catch_unwind(AssertUnwindSafe(compile))
            .unwrap_or_else(|_| Err("CubeCL's compiler panics".into()));
        let outcome = match outcome {
            Ok(bytes) => bytes.to_string(),
            Err(error) => error.split_whitespace().collect::<Vec<_>>().join(" "),
        };
        println!("{} {name}: {outcome}", card.name());
        let line = format!("{name} {} {outcome}\n", kernel.tiles().units);
        append(&folder.join("kernels.txt"), &line);
    }
}

fn append(path: &Path, line: &str) {
    let file = fs::OpenOptions::new().create(true).append(true).open(path);
    std::io::Write::write_all(
        &mut file.expect("the list of kernels can be opened"),
        line.as_bytes(),
    )
    .expect("the list of kernels can be written");
}

/// A kernel to compile, with its tiles.
enum Kernel {
    Forward(PortableForwardPlan),
    QueryGradient(UnitTiles),
    KeyValueGradient(UnitTiles),
}

/// Plans the kernels of a forward, a backward or a decode step. A decode step has split keys and eight query heads per KV
/// head.
fn kernels<E>(
    wanted: &Wanted,
    pass: &str,
    device: &DeviceProfile,
    dtype: DType,
) -> Result<Vec<Kernel>, Refusal>
where
    E: AttentionEngine<Forward = PortableForwardPlan, Backward = PortableBackwardPlan>,
{
    assert!(
        !wanted.causal && !wanted.bias_of_head,
        "the portable kernels cannot be compiled with `causal` or a bias for each head; remove these options"
    );
    let few_rows = pass == "decode";
    let shape = match few_rows {
        true => [1, 32, 4, 1, 32_768, wanted.head_dim],
        false => [4, 16, 16, 4096, 4096, wanted.head_dim],
    };
    let mut problem = testing::problem(shape);
    problem.value_dim = wanted.value_dim;
    problem.dtype = dtype;
    let layouts = Layouts::contiguous(&problem);
    if pass == "backward" {
        let plan = E::plan_backward(&problem, device, layouts)?;
        return Ok(vec![
            Kernel::QueryGradient(plan.query),
            Kernel::KeyValueGradient(plan.key_value),
        ]);
    }
    assert!(
        few_rows || pass == "forward",
        "unknown pass: expected forward, backward or decode"
    );
    let plan = E::plan_forward(&problem, device, layouts)?;
    Ok(vec![Kernel::Forward(plan)])
}

const HEAD_SIZES: HeadSizesCompilationArg = HeadSizesCompilationArg {
    group: (),
    head_dim: (),
    value_dim: (),
};

/// Returns the kernel argument with which a kernel turns `q·k` into scores and hides keys. The argument has the
/// optional inputs that `wanted` lists.
fn scoring<M: Numeric, F: Float>(wanted: &Wanted) -> ScoringCompilationArg<M, F> {
    ScoringCompilationArg {
        seq_lens: SEQ_LENS,
        lengths_and_ids: optional!(wanted.has_lengths_or_ids()),
        mask: optional!(wanted.structure.mask),
        bias: optional!(wanted.score.bias),
        arguments: ARGUMENTS,
        dropout: wanted.dropout(),
        tables: wanted.tables(),
    }
}

impl Kernel {
    fn suffix(&self) -> &'static str {
        match self {
            Self::Forward(_) => "",
            Self::QueryGradient(_) => "-query",
            Self::KeyValueGradient(_) => "-key-value",
        }
    }

    fn tiles(&self) -> UnitTiles {
        match self {
            Self::Forward(plan) => plan.tiles,
            Self::QueryGradient(tiles) | Self::KeyValueGradient(tiles) => *tiles,
        }
    }

    fn definition(&self, wanted: &Wanted, card: &Card, dtype: DType) -> KernelDefinition {
        let tiles = self.tiles();
        let element = dtype_to_storage_type(dtype);
        let product_element = dtype_to_storage_type(tiles.product_dtype());
        let mask_element = ElemType::UInt(UIntKind::U8);
        macro_rules! gradient {
            ($kernel:ident, [$($gradient:expr),+]) => {
                $kernel::new(
                    settings(tiles.units),
                    card.properties(),
                    Arc::default(),
                    BackwardInputsCompilationArg {
                        query: tensor(),
                        key: tensor(),
                        value: tensor(),
                        output_gradient: tensor(),
                        lse_delta: tensor(),
                    },
                    scoring(wanted),
                    $($gradient,)+
                    GRID,
                    HEAD_SIZES,
                    BackwardKind {
                        tiles,
                        structure: wanted.structure,
                        score: wanted.score,
                    },
                    [element, product_element, mask_element, element],
                    tiles.vector,
                )
                .define()
            };
        }
        let plan = match self {
            Self::Forward(plan) => plan,
            Self::QueryGradient(_) => return gradient!(QueryGradient, [tensor()]),
            Self::KeyValueGradient(_) => return gradient!(KeyValueGradient, [tensor(), tensor()]),
        };
        let split = plan.splits > 1;
        let output_element = match split {
            true => dtype_to_storage_type(DType::F32),
            false => element,
        };
        Forward::new(
            settings(tiles.units),
            card.properties(),
            Arc::default(),
            ForwardInputsCompilationArg {
                query: tensor(),
                key: tensor(),
                value: tensor(),
                key_scales: optional!(false),
                value_scales: optional!(false),
                page_table: optional!(false),
            },
            scoring(wanted),
            optional!(wanted.sinks && !split),
            tensor(),
            tensor(),
            GRID,
            HEAD_SIZES,
            ForwardKind {
                tiles,
                structure: wanted.structure,
                score: wanted.score,
                packed: plan.packed,
                split,
                page_len: 0,
            },
            [
                element,
                element,
                product_element,
                output_element,
                mask_element,
                element,
                element,
            ],
            [tiles.vector, tiles.vector],
        )
        .define()
    }
}
