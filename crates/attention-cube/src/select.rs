//! Selects the kernel for a problem on a device, and records why each faster engine refused the problem.
//!
//! Selection tries the engines in order, the fastest first. Each engine returns a plan or a typed [`Refusal`]. The engine
//! [`Blocks`](Engine::Blocks) comes last and serves every problem.

use crate::engine::{BackwardKernel, ForwardKernel, Kernel};
use crate::problem::AttentionProblem;
use crate::types::device::DeviceProfile;
use crate::types::engine::Engine;
pub use crate::types::refusal::{Refusal, Warning};
pub use crate::types::request::{BackwardRequest, Layouts, Operands, Pass};

/// The kernel that selection chose for one pass (forward or backward), and the engines that refused the problem.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Selection<K = Kernel> {
    /// The chosen kernel.
    pub kernel: K,
    /// The engines that selection tried before the chosen engine, each with the reason for its refusal.
    pub refusals: Vec<(Engine, Refusal)>,
    /// Warnings about results of the chosen kernel that do not meet the contract in the crate's documentation.
    pub warnings: Vec<Warning>,
    /// True if the chosen kernel cannot read the keys and values from their pages. A call then first copies the visible
    /// rows to contiguous tensors.
    pub copies_pages: bool,
}

/// Returns the engines in selection order. The engines with priority for the problem come first. All other engines
/// follow in the order of `WITH_KERNELS`.
fn engines(problem: &AttentionProblem, pass: Pass) -> impl Iterator<Item = Engine> {
    let all = || Engine::WITH_KERNELS.iter().copied();
    let first = all().filter(move |engine| engine.goes_first(problem, pass));
    let rest = all().filter(move |engine| !engine.goes_first(problem, pass));
    first.chain(rest)
}

/// Refuses quantized keys and values if the engine cannot read codes in this pass. Also refuses quantized keys and
/// values if the call has more query rows than the engine's limit. For so many query rows, kernels are faster on a
/// dequantized copy.
fn check_quantized(engine: Engine, problem: &AttentionProblem, pass: Pass) -> Result<(), Refusal> {
    if problem.quantized.is_none() {
        return Ok(());
    }
    if pass == Pass::Backward {
        return Err(Refusal::Quantized(
            "gradients of quantized keys and values do not exist",
        ));
    }
    if engine.most_quantized_rows() == 0 {
        return Err(Refusal::Quantized(
            "the engine's kernels read unquantized keys and values only",
        ));
    }
    if problem.q_len * problem.group() > engine.most_quantized_rows() {
        return Err(Refusal::Quantized(
            "for this many query rows, a dequantized copy is faster; the kernel for unquantized keys reads it",
        ));
    }
    Ok(())
}

/// Chooses the kernel for `pass`. `device` is `None` for a device without CubeCL.
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

/// Chooses the kernel of a forward pass. `device` is `None` for a device without CubeCL.
pub(crate) fn select_forward(
    problem: &AttentionProblem,
    device: Option<&DeviceProfile>,
    layouts: Layouts,
) -> Selection<ForwardKernel> {
    let plan =
        |engine: Engine, device: &DeviceProfile| engine.plan_forward(problem, device, layouts);
    let (kernel, mut refusals) = first_plan(problem, device, Pass::Forward, plan);
    let mut kernel = kernel.unwrap_or(ForwardKernel::Blocks);
    let copies = |kernel: &ForwardKernel| {
        let page_len = problem.page_len;
        page_len.is_some_and(|page_len| !kernel.reads_pages(page_len))
    };
    // For few query rows, the mma engine goes before the wgmma engine. But a copy of all pages would take longer than
    // the faster kernel saves.
    if kernel.engine() == Engine::Mma
        && copies(&kernel)
        && let Some(device) = device
        && let Ok(other) = answer(problem, device, Pass::Forward, Engine::Wgmma, plan)
        && !copies(&other)
    {
        kernel = other;
        let page_len = problem.page_len.unwrap_or(0);
        refusals.push((Engine::Mma, Refusal::CopiesPages(page_len)));
    }
    let copies_pages = copies(&kernel);
    Selection {
        kernel,
        refusals,
        warnings: Vec::new(),
        copies_pages,
    }
}

/// Chooses the kernel of a backward pass. `device` is `None` for a device without CubeCL.
pub(crate) fn select_backward(
    problem: &AttentionProblem,
    device: Option<&DeviceProfile>,
    layouts: Layouts,
) -> Selection<BackwardKernel> {
    let (kernel, refusals) = first_plan(problem, device, Pass::Backward, |engine, device| {
        engine.plan_backward(problem, device, layouts)
    });
    let kernel = kernel.unwrap_or(BackwardKernel::Blocks);
    Selection {
        warnings: kernel.warnings(problem),
        kernel,
        refusals,
        copies_pages: problem.page_len.is_some(),
    }
}

impl<K> Selection<K> {
    fn map<L>(self, convert: impl FnOnce(K) -> L) -> Selection<L> {
        Selection {
            kernel: convert(self.kernel),
            refusals: self.refusals,
            warnings: self.warnings,
            copies_pages: self.copies_pages,
        }
    }
}

/// Returns the plan of the first engine that serves the problem, and the refusals of the engines before it.
fn first_plan<K>(
    problem: &AttentionProblem,
    device: Option<&DeviceProfile>,
    pass: Pass,
    plan: impl Fn(Engine, &DeviceProfile) -> Result<K, Refusal>,
) -> (Option<K>, Vec<(Engine, Refusal)>) {
    let Some(device) = device else {
        let widest = Engine::WITH_KERNELS.last();
        let refusals = widest.map(|engine| (*engine, Refusal::NoCubeCL));
        return (None, refusals.into_iter().collect());
    };
    let mut refusals = Vec::new();
    for engine in engines(problem, pass) {
        match answer(problem, device, pass, engine, &plan) {
            Ok(kernel) => return (Some(kernel), refusals),
            Err(refusal) => refusals.push((engine, refusal)),
        }
    }
    (None, refusals)
}

/// Returns the plan of an engine, or the reason why the engine refuses the problem.
fn answer<K>(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    pass: Pass,
    engine: Engine,
    plan: impl Fn(Engine, &DeviceProfile) -> Result<K, Refusal>,
) -> Result<K, Refusal> {
    if device.disabled_engines.contains(&engine) {
        return Err(Refusal::LeftOut);
    }
    check_quantized(engine, problem, pass)?;
    if_built(engine, device, plan(engine, device))
}

/// Replaces a plan by a refusal if the plan's kernels are not compiled into this build.
///
/// Without the Cargo feature `cuda`, CubeCL compiles through LLVM, which has neither asynchronous copies nor TMA. A
/// missing Cargo feature can therefore look like a missing device feature. In this case, the function replaces
/// [`Refusal::MissingFeature`] by [`Refusal::NotBuilt`].
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
