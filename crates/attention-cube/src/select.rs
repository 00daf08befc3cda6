//! Selection: a problem and a device → a kernel with its tiles, or the reasons why each faster one refused.
//!
//! Engines are asked in order, the fastest first; each answers with a plan or a typed [`Refusal`]. The
//! [`reference`](crate::reference) comes last and serves everything.

use crate::AttentionProblem;
use crate::device::{DeviceProfile, Feature};
use crate::engine::{BackwardKernel, Engine, ForwardKernel, Kernel};
use crate::tiled::plan::DECODE_ROWS;
use burn::tensor::DType;
use std::fmt;

/// The longest sequence that positions in i32 allow.
pub(crate) const MAX_LENGTH: usize = 1 << 29;

/// Which of the two passes is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Output and logsumexp.
    Forward,
    /// The gradients.
    Backward,
}

/// Which gradients the backward is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardRequest {
    /// The query's.
    pub query: bool,
    /// The keys'.
    pub key: bool,
    /// The values'.
    pub value: bool,
    /// The bias's: where it has as many numbers as there are scores, it costs a pass over these.
    pub bias: bool,
    /// The sinks'.
    pub sinks: bool,
}

/// How the inputs' rows lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layouts {
    /// Every row can be read in vectors of four.
    pub vectors: bool,
    /// The operands that Hopper's copy engine can read where they lie: rows are contiguous, and start at
    /// multiples of 16 bytes.
    pub tma: Operands,
    /// So can the bias, whatever it is broadcast along.
    pub tma_bias: bool,
}

/// Some of attention's operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Operands {
    /// The query.
    pub query: bool,
    /// The keys.
    pub key: bool,
    /// The values.
    pub value: bool,
    /// The output's gradient, in the backward.
    pub output_gradient: bool,
}

impl Operands {
    /// All of them.
    pub const ALL: Self = Self {
        query: true,
        key: true,
        value: true,
        output_gradient: true,
    };

    /// Those that are not among these, as far as `pass` reads them.
    pub fn others(self, pass: Pass) -> Self {
        Self {
            query: !self.query,
            key: !self.key,
            value: !self.value,
            output_gradient: !self.output_gradient && pass == Pass::Backward,
        }
    }
}

impl Layouts {
    /// Elements of a load that every row can be read by: 4, or 1 where strides or sizes do not allow it.
    pub(crate) fn vector(&self, problem: &AttentionProblem) -> usize {
        let fours = problem.head_dim.is_multiple_of(4) && problem.value_dim.is_multiple_of(4);
        if self.vectors && fours { 4 } else { 1 }
    }

    /// Of contiguous inputs.
    pub fn contiguous(problem: &AttentionProblem) -> Self {
        let dots = problem.head_dim.is_multiple_of(8);
        let values = problem.value_dim.is_multiple_of(8);
        // Numbers of 16 bytes of keys and values.
        let piece = if problem.quantized { 16 } else { 8 };
        Self {
            vectors: problem.head_dim.is_multiple_of(4) && problem.value_dim.is_multiple_of(4),
            tma: Operands {
                query: dots,
                key: problem.head_dim.is_multiple_of(piece),
                value: problem.value_dim.is_multiple_of(piece),
                output_gradient: values,
            },
            tma_bias: problem.kv_len.is_multiple_of(8),
        }
    }
}

/// Why an engine does not serve a problem on a device.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The device runs no CubeCL kernels.
    #[error("the device does not run CubeCL kernels")]
    NoCubeCL,
    /// The crate was compiled without the Cargo feature that builds the engine's kernels.
    #[error(
        "attention-cube is built without its feature `{0}`; add the feature to use this engine"
    )]
    NotBuilt(&'static str),
    /// A test leaves the engine out.
    #[error("it is left out by ATTENTION_ENGINES")]
    LeftOut,
    /// The device does not have what the kernels are made of.
    #[error("the device does not have {0}")]
    MissingFeature(Feature),
    /// The matrix unit multiplies half precision.
    #[error("it multiplies F16 and BF16, not {0:?}")]
    NotHalf(DType),
    /// The rows are too wide for the registers.
    #[error(
        "it has tiles for head_dim up to {widest_head} and value_dim up to {widest_value}, not for {head_dim} and {value_dim}"
    )]
    Width {
        /// The widest queries and keys that it has tiles for.
        widest_head: usize,
        /// The widest values.
        widest_value: usize,
        /// Columns of queries and keys.
        head_dim: usize,
        /// Columns of values.
        value_dim: usize,
    },
    /// Of so few numbers a row is often one alone, and its probability in half precision the larger error.
    #[error(
        "it is for head_dim and value_dim from {narrowest} on, not for {head_dim} and {value_dim}"
    )]
    Narrow {
        /// The narrowest operands that it takes.
        narrowest: usize,
        /// Columns of queries and keys.
        head_dim: usize,
        /// Columns of values.
        value_dim: usize,
    },
    /// Planes of several sizes: a kernel divides fragments among them, and has to know how many there are.
    #[error(
        "a plane has {least} to {most} units on this device, and it needs all to have 32 or 64"
    )]
    PlaneSizes {
        /// The fewest units of a plane.
        least: usize,
        /// The most.
        most: usize,
    },
    /// A driver is known to compute wrong results.
    #[error("{0}")]
    Fault(&'static str),
    /// The dtype cannot be read or written by kernels there.
    #[error("kernels on this device have no {0:?}")]
    Dtype(DType),
    /// No row of the tile table fits.
    #[error(
        "no tile for {width} columns fits {shared_memory} bytes of shared memory and {units} units a cube"
    )]
    Tiles {
        /// Columns that the output needs.
        width: usize,
        /// The device's limit.
        shared_memory: usize,
        /// The device's limit.
        units: usize,
    },
    /// Too many tensors at once.
    #[error(
        "these options need {needed} buffers, and a kernel on this device may bind {available}"
    )]
    Bindings {
        /// Buffers of the kernel with the most.
        needed: usize,
        /// The device's limit.
        available: usize,
    },
    /// A software driver would end the kernel's loops before their end.
    #[error(
        "a unit would run up to {needed} iterations, and this software driver ends a unit's loops after {limit}"
    )]
    Iterations {
        /// At most, of all loops of a unit.
        needed: usize,
        /// Somewhat below the driver's limit.
        limit: usize,
    },
    /// Places among the mask's bits would not fit.
    #[error("its bits of this mask are {words} words, and it counts up to {limit}")]
    MaskWords {
        /// Words of 32 bits.
        words: usize,
        /// The engine's limit.
        limit: usize,
    },
    /// Its kernels do not read words of int8.
    #[error("keys and values are int8: {0}")]
    Quantized(&'static str),
    /// Positions would not fit.
    #[error("sequences of {length} are longer than {limit}")]
    Length {
        /// The longer of the two lengths.
        length: usize,
        /// The engine's limit.
        limit: usize,
    },
}

/// Where the kernel chosen falls short of what the contract promises elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// The matrix unit multiplies the gradients of the scores in f16. A fixed scale would only trade what is infinite for
    /// what becomes zero.
    ScoreGradientsInF16,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ScoreGradientsInF16 => f.write_str(
                "the gradients of the scores, P ∘ (dP − Δ), pass through F16: where one is beyond 65504, as under a large \
                 loss scale, the gradients of query and keys are infinite; in BF16 they are not",
            ),
        }
    }
}

/// The choice for one pass, and what was not chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection<K = Kernel> {
    /// The kernel chosen.
    pub kernel: K,
    /// The engines asked before it, and their reasons.
    pub refusals: Vec<(Engine, Refusal)>,
    /// What to know of the kernel chosen.
    pub warnings: Vec<Warning>,
}

/// Rows up to which the mma engine's forward is asked first: those of a group's heads together. On one H200 (2026-11-23, bf16, 32,768 keys,
/// GB/s, mma and wgmma; `--engine mma,unit` and `wgmma,unit` of the benchmark): D64, 8 rows, 3,805 and 2,707; D128, 4 rows, 4,175 and
/// 4,147; D256, 2 rows, 4,510 and 4,489; D512, 8 rows, 4,342 and 3,996; D256 and D512, 32 rows, 4,082 and 4,095, 4,235 and 3,958; but
/// D512, 64 rows, 1,364 and 1,475.
const MMA_FIRST_ROWS: usize = 32;

/// The engines in the order in which they are asked: of the list's, the fastest first, as far as a problem's sizes tell.
fn engines(problem: &AttentionProblem, pass: Pass) -> impl Iterator<Item = Engine> {
    let rows = problem.q_len * problem.group().max(1);
    let first = (pass == Pass::Forward && rows <= MMA_FIRST_ROWS).then_some(Engine::Mma);
    let rest = Engine::WITH_KERNELS.iter().copied();
    first
        .into_iter()
        .chain(rest.filter(move |engine| Some(*engine) != first))
}

/// Refuses words of int8 where they are not read: by most engines, and by many rows, for which one copy of the keys and values costs less
/// than dequantizing them for every tile.
fn check_quantized(engine: Engine, problem: &AttentionProblem, pass: Pass) -> Result<(), Refusal> {
    if !problem.quantized {
        return Ok(());
    }
    if pass == Pass::Backward {
        return Err(Refusal::Quantized("they have no gradients"));
    }
    if !engine.reads_words() {
        return Err(Refusal::Quantized("its kernels read whole numbers"));
    }
    if problem.q_len * problem.group() > DECODE_ROWS {
        return Err(Refusal::Quantized(
            "so many rows read them dequantized, by the kernel that serves whole numbers",
        ));
    }
    Ok(())
}

/// Chooses the kernel for `pass`. `device` is `None` where no CubeCL kernels run.
pub fn select(
    problem: &AttentionProblem,
    device: Option<&DeviceProfile>,
    layouts: Layouts,
    pass: Pass,
) -> Selection {
    match pass {
        Pass::Forward => select_forward(problem, device, layouts).map(Kernel::Forward),
        Pass::Backward => select_backward(problem, device, layouts).map(Kernel::Backward),
    }
}

/// Chooses the kernel of a forward. `device` is `None` where no CubeCL kernels run.
pub(crate) fn select_forward(
    problem: &AttentionProblem,
    device: Option<&DeviceProfile>,
    layouts: Layouts,
) -> Selection<ForwardKernel> {
    let (kernel, refusals) = first_plan(problem, device, Pass::Forward, |engine, device| {
        engine.plan_forward(problem, device, layouts)
    });
    Selection {
        kernel: kernel.unwrap_or(ForwardKernel::Reference),
        refusals,
        warnings: Vec::new(),
    }
}

/// Chooses the kernel of a backward. `device` is `None` where no CubeCL kernels run.
pub(crate) fn select_backward(
    problem: &AttentionProblem,
    device: Option<&DeviceProfile>,
    layouts: Layouts,
) -> Selection<BackwardKernel> {
    let (kernel, refusals) = first_plan(problem, device, Pass::Backward, |engine, device| {
        engine.plan_backward(problem, device, layouts)
    });
    let kernel = kernel.unwrap_or(BackwardKernel::Reference);
    Selection {
        warnings: kernel.warnings(problem),
        kernel,
        refusals,
    }
}

impl<K> Selection<K> {
    fn map<L>(self, convert: impl FnOnce(K) -> L) -> Selection<L> {
        Selection {
            kernel: convert(self.kernel),
            refusals: self.refusals,
            warnings: self.warnings,
        }
    }
}

/// The plan of the first engine that serves the problem, and the reasons of those that were asked before.
fn first_plan<K>(
    problem: &AttentionProblem,
    device: Option<&DeviceProfile>,
    pass: Pass,
    plan: impl Fn(Engine, &DeviceProfile) -> Result<K, Refusal>,
) -> (Option<K>, Vec<(Engine, Refusal)>) {
    let Some(device) = device else {
        return (None, vec![(Engine::Unit, Refusal::NoCubeCL)]);
    };
    let mut refusals = Vec::new();
    for engine in engines(problem, pass) {
        let answer = match device.left_out.contains(&engine) {
            true => Err(Refusal::LeftOut),
            false => check_quantized(engine, problem, pass)
                .and_then(|()| if_built(engine, device, plan(engine, device))),
        };
        match answer {
            Ok(kernel) => return (Some(kernel), refusals),
            Err(refusal) => refusals.push((engine, refusal)),
        }
    }
    (None, refusals)
}

/// Refuses a plan whose kernels this build lacks. On NVIDIA's runtime the build is also why a feature of the device is missing:
/// without the crate's feature CubeCL compiles through LLVM, which has neither asynchronous copies nor TMA.
fn if_built<K>(
    engine: Engine,
    device: &DeviceProfile,
    answer: Result<K, Refusal>,
) -> Result<K, Refusal> {
    let not_built = device.not_built.iter().find(|(lacks, _)| *lacks == engine);
    let Some((_, feature)) = not_built else {
        return answer;
    };
    match answer {
        Err(Refusal::MissingFeature(_)) if device.name.starts_with(feature) => {
            Err(Refusal::NotBuilt(feature))
        }
        Ok(_) => Err(Refusal::NotBuilt(feature)),
        Err(refusal) => Err(refusal),
    }
}
