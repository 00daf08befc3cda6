//! The reasons why an engine refuses a problem, and warnings about the kernels that serve a problem.

use super::fragment_verdict::TileCheck;
use burn::tensor::DType;
use std::borrow::Cow;
use std::fmt;

/// A hardware or compiler feature that an engine may require.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Feature {
    /// The matrix multiplication of 16×16 by 16×8 elements of this dtype (`mma.sync`). The products are accumulated in
    /// f32, in a register layout that NVIDIA documents.
    #[error("matrix products of {0:?}, 16×8×16, of one plane (mma)")]
    Mma(DType),
    /// The loads of `mma.sync` operands from shared memory (`ldmatrix`).
    #[error("matrix loads of {0:?} from shared memory (ldmatrix)")]
    LoadMatrix(DType),
    /// The matrix multiplication on fragments (cmma), whose register layout only the device knows. The products are
    /// accumulated in f32. The field is the dtype of the inputs.
    #[error(
        "matrix products of {0:?} by a plane in fragments, 16×16×16, 16×8×16 or 8×8×8, summed in f32 (cmma)"
    )]
    Fragments(DType),
    /// The asynchronous copies from global to shared memory (`cp.async`).
    #[error("asynchronous copies from global to shared memory (copy_async)")]
    CopyAsync,
    /// Hopper's tensor memory accelerator (TMA), which copies tiles of tensors.
    #[error("the tensor memory accelerator (TMA)")]
    Tma,
    /// Warpgroup matrix multiplication (`wgmma`) and register reallocation (`setmaxnreg`) of NVIDIA's sm_90a. CubeCL does not
    /// report these features, so they are inferred from the architecture and the CUDA C++ compiler.
    #[error(
        "warpgroup matrix products (wgmma) of a Hopper GPU (sm_90), through CubeCL's CUDA C++ compiler"
    )]
    Wgmma,
}

/// The reason why an engine does not serve a problem on a device.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The device cannot run CubeCL kernels.
    #[error("the device does not run CubeCL kernels")]
    NoCubeCL,
    /// The crate was compiled without the Cargo feature that builds the engine's kernels.
    #[error(
        "attention-cube is built without its feature `{0}`; add the feature to use this engine"
    )]
    NotBuilt(&'static str),
    /// A test disabled the engine with `ATTENTION_ENGINES`.
    #[error("it is left out by ATTENTION_ENGINES")]
    LeftOut,
    /// The device lacks a feature that the kernels require.
    #[error("the device does not have {0}")]
    MissingFeature(Feature),
    /// The engine supports only f16 and bf16 inputs.
    #[error("it multiplies F16 and BF16, not {0:?}")]
    NotHalf(DType),
    /// The heads are wider than the widest tile of the engine.
    #[error(
        "it has tiles for head_dim up to {widest_head} and value_dim up to {widest_value}, not for {head_dim} and {value_dim}"
    )]
    Width {
        /// The largest `head_dim` for which the engine has a tile.
        widest_head: usize,
        /// The largest `value_dim` for which the engine has a tile.
        widest_value: usize,
        /// The problem's `head_dim`.
        head_dim: usize,
        /// The problem's `value_dim`.
        value_dim: usize,
    },
    /// The heads are narrower than the narrowest heads that the engine serves. For such heads, the rounding of P to
    /// half precision would dominate the error.
    #[error(
        "it is for head_dim and value_dim from {narrowest} on, not for {head_dim} and {value_dim}"
    )]
    Narrow {
        /// The smallest `head_dim` and `value_dim` that the engine serves.
        narrowest: usize,
        /// The problem's `head_dim`.
        head_dim: usize,
        /// The problem's `value_dim`.
        value_dim: usize,
    },
    /// The device has planes (warps) of several sizes, but a kernel must know the number of planes in a cube.
    #[error(
        "planes of this device have {least} to {most} units, and the engine needs one size, 32 or 64"
    )]
    PlaneSizes {
        /// The number of units of the smallest plane.
        least: usize,
        /// The number of units of the largest plane.
        most: usize,
    },
    /// The device's matrix multiplications on fragments (cmma) are disabled. The text gives the reason.
    #[error("{0}")]
    Fault(Cow<'static, str>),
    /// The device's matrix multiplications on fragments (cmma) have not passed the self-check of these tiles yet. A
    /// call on the device runs the self-check and then selects again.
    #[error("its matrix units are not checked yet for the tiles of the {0}")]
    Unchecked(Box<TileCheck>),
    /// Kernels on the device cannot read or write the dtype.
    #[error("kernels on this device have no {0:?}")]
    Dtype(DType),
    /// Every tile of the engine needs more shared memory or more units than the device has.
    #[error(
        "no tile for {width} columns fits {shared_memory} bytes of shared memory and {units} units a cube"
    )]
    Tiles {
        /// The number of columns of the output, `value_dim`.
        width: usize,
        /// The number of bytes of shared memory per cube on the device.
        shared_memory: usize,
        /// The largest number of units per cube on the device.
        units: usize,
    },
    /// A kernel would bind more buffers than the device allows.
    #[error(
        "these options need {needed} buffers, and a kernel on this device may bind {available}"
    )]
    Bindings {
        /// The largest number of buffers that any of the engine's kernels binds.
        needed: usize,
        /// The number of buffers that a kernel on the device may bind.
        available: usize,
    },
    /// The software driver would end the kernel's loops too early, because the driver limits the loop iterations of
    /// each unit.
    #[error(
        "a unit would run up to {needed} loop iterations, and this software driver ends loops after {limit}"
    )]
    Iterations {
        /// The largest number of loop iterations that a unit would run, over all loops of the kernel together.
        needed: usize,
        /// The limit that the engine allows, somewhat below the driver's own limit.
        limit: usize,
    },
    /// The packed mask has more words than the engine can index.
    #[error("it packs this mask into {words} words, and it counts up to {limit}")]
    MaskWords {
        /// The number of 32-bit words of the packed mask.
        words: usize,
        /// The largest number of words that the engine can index.
        limit: usize,
    },
    /// The gradient of a score mod's table covers more score tiles than the kernel can count.
    #[error(
        "the gradient of the table covers {tiles} score tiles, and the kernel counts up to {limit}"
    )]
    ScoreTiles {
        /// The number of score tiles in all sequences and heads.
        tiles: usize,
        /// The largest number of score tiles that the kernel can count.
        limit: usize,
    },
    /// The engine's kernels cannot read the quantized keys and values of this problem in place. The text gives the
    /// reason.
    #[error("keys and values are quantized: {0}")]
    Quantized(&'static str),
    /// The engine could serve the problem, but only over a copy of all pages, and a later engine reads the pages in place.
    #[error("it would copy pages of {0} keys, which the chosen engine reads in place")]
    CopiesPages(usize),
    /// The sequences are longer than the engine's position counters allow.
    #[error("sequences of {length} tokens are longer than the limit of {limit}")]
    Length {
        /// The larger of `q_len` and `kv_len`.
        length: usize,
        /// The longest sequence that the engine serves.
        limit: usize,
    },
}

/// A result of the chosen kernel that does not meet the contract in the crate's documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// The kernel rounds the gradients of the scores to f16, so large gradients overflow.
    ScoreGradientsInF16,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ScoreGradientsInF16 => f.write_str(
                "the gradients of the scores, P ∘ (dP − Δ), pass through F16: if one exceeds 65504, as under a large \
                 loss scale, the gradients of query and keys are infinite; use BF16 to avoid this",
            ),
        }
    }
}
