//! Writes the source or machine code that the compiler produces for kernels, on a machine without a GPU:
//!
//! ```sh
//! KERNELS="forward-128-128-mask backward-64-64" cargo test --features cuda --lib tensor_core::wgmma::source -- --ignored --nocapture
//! KERNELS="forward-128-128-mask decode-64-64" cargo test --features rocm --lib portable::common::source -- --ignored --nocapture
//! ```
//!
//! A kernel's name consists of the pass, head_dim, value_dim and the options of [`Wanted`], joined by `-`.

#[cfg(feature = "rocm")]
pub(crate) mod amd;
#[cfg(feature = "cuda")]
pub(crate) mod nvidia;

use crate::math::dropout::kernel::{DropoutArguments, DropoutArgumentsCompilationArg};
use crate::math::schedule::GridCompilationArg;
use crate::math::score::{ScoreArgumentsCompilationArg, ScoreKind};
use crate::math::score_mod::ScoreCode;
use crate::math::score_mod::kernel::{KernelTableCompilationArg, KernelTablesCompilationArg};
use crate::math::visibility::{SeqLensCompilationArg, Structure};
use crate::score_mod::Alibi;
use cubecl::{ir::settings::*, ir::*, prelude::*};
use std::{env, fs, path::Path};

/// Builds the compile-time argument of an optional tensor. `$present` says whether the kernel has the tensor.
macro_rules! optional {
    ($present:expr) => {
        match $present {
            true => ComptimeOptionCompilationArg::Some($crate::source::tensor()),
            false => ComptimeOptionCompilationArg::None,
        }
    };
}
pub(crate) use optional;

/// Calls `write` for each kernel that the environment variable `KERNELS` lists. If the variable is not set, the
/// function takes the kernels in `default`. The output goes to the folder `kernels` of the temporary directory.
pub(crate) fn write(default: &str, write: impl Fn(&Wanted, &Path, &str)) {
    let names = env::var("KERNELS").unwrap_or_else(|_| default.into());
    let folder = env::temp_dir().join("kernels");
    fs::create_dir_all(&folder).expect("the folder `kernels` can be created");
    for name in names.split_whitespace() {
        write(&Wanted::of(name), &folder, name);
    }
}

/// The compile-time argument for dropout.
const DROPOUT: DropoutArgumentsCompilationArg = DropoutArgumentsCompilationArg {
    seed_low: (),
    seed_high: (),
    thresholds: (),
    kept: (),
    minus_inverse_kept: (),
    q_heads: (),
    keeps_hits: false,
};

/// The compile-time settings of a kernel to write, parsed from the kernel's name.
pub(crate) struct Wanted {
    pub head_dim: usize,
    pub value_dim: usize,
    pub causal: bool,
    pub structure: Structure,
    pub score: ScoreKind,
    pub bias_of_head: bool,
    pub sinks: bool,
    /// The number of keys per page, or 0 without pages.
    #[cfg(feature = "cuda")]
    pub page_len: usize,
}

impl Wanted {
    fn of(name: &str) -> Self {
        let parts: Vec<&str> = name.split('-').collect();
        let width = |index: usize| -> usize {
            let part = parts.get(index).and_then(|part| part.parse().ok());
            part.unwrap_or_else(|| panic!("{name}: expected PASS-HEAD_DIM-VALUE_DIM…"))
        };
        let known = [
            "causal",
            "softcap",
            "wide",
            "bias",
            "headbias",
            "mask",
            "lengths",
            "querylengths",
            "segments",
            "interval",
            "intervals",
            "sinks",
            "dropout",
            "alibi",
            "pages",
        ];
        for option in parts.iter().skip(3) {
            assert!(
                known.contains(option),
                "option `{option}` is unknown; expected one of {known:?}"
            );
        }
        let has = |option: &str| parts[3..].contains(&option);
        Self {
            head_dim: width(1),
            value_dim: width(2),
            causal: has("causal"),
            structure: Structure {
                lengths: has("lengths"),
                lengths_ahead: false,
                query_lengths: has("querylengths"),
                segments: has("segments"),
                intervals: usize::from(has("interval")) + 2 * usize::from(has("intervals")),
                mask: has("mask"),
                mask_block: [1, 1],
            },
            score: ScoreKind {
                softcap: has("softcap") || has("wide"),
                wide_softcap: has("wide"),
                bias: has("bias") || has("headbias"),
                dropout: has("dropout"),
                score_mod: has("alibi").then(ScoreCode::of::<Alibi>),
                mask_mod: None,
            },
            bias_of_head: has("headbias"),
            sinks: has("sinks"),
            #[cfg(feature = "cuda")]
            page_len: if has("pages") { 64 } else { 0 },
        }
    }

    /// Returns the compile-time argument for dropout.
    pub(crate) fn dropout(&self) -> ComptimeOptionCompilationArg<DropoutArguments> {
        match self.score.dropout {
            true => ComptimeOptionCompilationArg::Some(DROPOUT),
            false => ComptimeOptionCompilationArg::None,
        }
    }

    /// Returns the compile-time argument for the tables of score mod and mask mod.
    pub(crate) fn tables(&self) -> KernelTablesCompilationArg {
        KernelTablesCompilationArg {
            score: KernelTableCompilationArg {
                elements: optional!(self.score.score_mod.is_some()),
            },
            mask: KernelTableCompilationArg {
                elements: ComptimeOptionCompilationArg::None,
            },
        }
    }

    /// True if the kernel reads sequence lengths, segment ids or intervals.
    pub(crate) fn has_lengths_or_ids(&self) -> bool {
        self.structure.has_bounds() || self.structure.lengths_record() > 0
    }
}

pub(crate) const fn tensor() -> TensorCompilationArg {
    TensorCompilationArg {
        meta: TensorMetaCompilationArg { len: (), rank: () },
        buffer: BufferCompilationArg { inplace: None },
    }
}

pub(crate) const GRID: GridCompilationArg = GridCompilationArg {
    tiles: (),
    splits: (),
    heads: (),
    planes: (),
    together: (),
    cubes: (),
};

pub(crate) const SEQ_LENS: SeqLensCompilationArg = SeqLensCompilationArg {
    q_len: (),
    kv_len: (),
    left: (),
    right: (),
    bottom_right: (),
    query_ids: (),
    key_ids: (),
    query_bounds: (),
    key_bounds: (),
    query_blocks: (),
    key_blocks: (),
};

pub(crate) const ARGUMENTS: ScoreArgumentsCompilationArg = ScoreArgumentsCompilationArg {
    scale: (),
    softcap: (),
    negative_infinity: (),
};

pub(crate) fn settings(units: usize) -> KernelSettings {
    let units = CubeDim::new_1d(units as u32);
    KernelSettings::new(units.into(), ExecutionMode::Unchecked, AddressType::U32)
}
