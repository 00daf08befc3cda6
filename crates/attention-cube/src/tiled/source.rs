//! What AMD's cards run of these kernels: see [`source`](crate::source::amd).

use super::backward::key_value::key_value_gradient::KeyValueGradient;
use super::backward::query::query_gradient::QueryGradient;
use super::forward::ForwardKind;
use super::forward::forward::Forward;
use super::plan::ForwardPlan;
use crate::device::DeviceProfile;
use crate::engine::AttentionEngine;
use crate::engine::cmma::Cmma;
use crate::engine::unit::Unit;
use crate::passes::backward::BackwardKind;
use crate::select::{Layouts, Refusal};
use crate::source::amd::Card;
use crate::source::{ARGUMENTS, EXTENT, GRID, Wanted, optional, settings, tensor};
use crate::testing;
use crate::tile::tiles::UnitTiles;
use crate::tiled::plan::BackwardPlan;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use cubecl::ir::{ElemType, UIntKind};
use cubecl::{CubeKernel, prelude::*};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{env, fs, path::Path, sync::Arc, thread};

/// Bytes of a compiling thread's stack: CubeCL's passes recurse.
const STACK: usize = 256 << 20;

/// For every card of `CARDS` machine code into a folder of its name, beside `kernels.txt`, which has a line for every kernel: its name,
/// units of a cube, and bytes of shared memory or why there is no code.
#[test]
#[ignore = "writes files for whoever reads them"]
fn write() {
    let cards = env::var("CARDS").unwrap_or_else(|_| "gfx90a gfx942 gfx1100 gfx1201".into());
    thread::scope(|scope| {
        for card in cards.split_whitespace() {
            thread::Builder::new()
                .stack_size(STACK)
                .spawn_scoped(scope, || write_for(&Card::of(card)))
                .expect("a thread");
        }
    });
}

fn write_for(card: &Card) {
    crate::source::write(
        "forward-128-128 backward-128-128 decode-128-128",
        |wanted, folder, name| {
            let folder = folder.join(card.name());
            fs::create_dir_all(&folder).expect("a folder");
            for dtype in [DType::F16, DType::BF16] {
                let kernel = |engine: &str| format!("{engine}-{dtype:?}-{name}").to_lowercase();
                let pass = name.split('-').next().unwrap_or_default();
                write_engine::<Cmma>(wanted, pass, card, dtype, &folder, &kernel("cmma"));
                write_engine::<Unit>(wanted, pass, card, dtype, &folder, &kernel("unit"));
            }
        },
    );
}

/// A pass of an engine, if it serves the card.
fn write_engine<E>(
    wanted: &Wanted,
    pass: &str,
    card: &Card,
    dtype: DType,
    folder: &Path,
    name: &str,
) where
    E: AttentionEngine<Forward = ForwardPlan, Backward = BackwardPlan>,
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
    std::io::Write::write_all(&mut file.expect("a file"), line.as_bytes()).expect("a line");
}

/// A kernel and its tiles.
enum Kernel {
    Forward(ForwardPlan),
    QueryGradient(UnitTiles),
    KeyValueGradient(UnitTiles),
}

/// The kernels of a pass; those of decoding have eight heads of queries for one of keys, and split these.
fn kernels<E>(
    wanted: &Wanted,
    pass: &str,
    device: &DeviceProfile,
    dtype: DType,
) -> Result<Vec<Kernel>, Refusal>
where
    E: AttentionEngine<Forward = ForwardPlan, Backward = BackwardPlan>,
{
    assert!(
        !wanted.causal && !wanted.bias_of_head,
        "kernels over tiles are not compiled for these options"
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
        "a pass is forward, backward or decode"
    );
    let plan = E::plan_forward(&problem, device, layouts)?;
    Ok(vec![Kernel::Forward(plan)])
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
        let has_lengths_or_ids = wanted.structure.segments || wanted.structure.lengths;
        macro_rules! gradient {
            ($kernel:ident, [$($gradient:expr),+]) => {
                $kernel::new(
                    settings(tiles.units),
                    card.properties(),
                    Arc::default(),
                    tensor(),
                    tensor(),
                    tensor(),
                    tensor(),
                    tensor(),
                    optional!(wanted.structure.mask),
                    optional!(wanted.score.bias),
                    optional!(has_lengths_or_ids),
                    $($gradient,)+
                    GRID,
                    EXTENT,
                    ARGUMENTS,
                    (),
                    (),
                    (),
                    BackwardKind {
                        tiles,
                        structure: wanted.structure,
                        score: wanted.score,
                    },
                    element,
                    product_element,
                    mask_element,
                    element,
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
            tensor(),
            tensor(),
            tensor(),
            optional!(false),
            optional!(false),
            optional!(wanted.structure.mask),
            optional!(wanted.score.bias),
            optional!(has_lengths_or_ids),
            optional!(wanted.sinks && !split),
            tensor(),
            tensor(),
            GRID,
            EXTENT,
            ARGUMENTS,
            (),
            (),
            (),
            ForwardKind {
                tiles,
                structure: wanted.structure,
                score: wanted.score,
                packed: plan.packed,
                split,
            },
            element,
            element,
            product_element,
            output_element,
            mask_element,
            element,
            element,
            tiles.vector,
            tiles.vector,
        )
        .define()
    }
}
