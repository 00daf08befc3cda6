//! CubeCL devices: says how a problem's tensors lie, and hands them to the engine that [`select`](crate::select) chose.

use super::*;
use crate::arguments::{is_in_vectors, is_tma_readable, tma_operands};
use crate::device::DeviceProfile;
use crate::engine::{Engine, Kernel};
use crate::select::{BackwardRequest, Layouts, Pass, select};
use burn_cubecl::{
    CubeBackend,
    kernel::{into_contiguous, untile},
};

impl AttentionBackend for CubeBackend {
    fn attention_forward(
        inputs: AttentionInputs<Self>,
        problem: AttentionProblem,
    ) -> AttentionOutput<Self> {
        if problem.is_empty() {
            return reference::forward_in_parts::<Self>(inputs, &problem);
        }
        let inputs = rows_of(inputs);
        let layouts = forward_layouts(&inputs);
        let device = DeviceProfile::of_client(&inputs.query.client);
        choose(&device, &problem, layouts, Pass::Forward).forward(inputs, &problem)
    }

    fn attention_backward(
        inputs: AttentionInputs<Self>,
        saved: AttentionSaved<Self>,
        problem: AttentionProblem,
        request: BackwardRequest,
    ) -> AttentionGradients<Self> {
        if problem.is_empty() {
            return reference::empty::backward::<Self>(inputs, saved, &problem, request);
        }
        let inputs = rows_of(inputs);
        let saved = AttentionSaved {
            output: into_contiguous(saved.output),
            output_gradient: untile(saved.output_gradient),
            ..saved
        };
        let layouts = Layouts {
            vectors: [
                &inputs.query,
                &inputs.key,
                &inputs.value,
                &saved.output,
                &saved.output_gradient,
            ]
            .into_iter()
            .all(|tensor| is_in_vectors(tensor, 4)),
            tma: tma_operands(&inputs, Some(&saved.output_gradient)),
            // It is read by threads.
            tma_bias: false,
        };
        let device = DeviceProfile::of_client(&inputs.query.client);
        let kernel = choose(&device, &problem, layouts, Pass::Backward);
        let saved = match own_logsumexp(kernel.engine(), &inputs, &problem, &device) {
            Some(logsumexp) => AttentionSaved { logsumexp, ..saved },
            None => saved,
        };
        kernel.backward(inputs, saved, &problem, request)
    }
}

/// How the rows lie that a forward reads.
fn forward_layouts(inputs: &AttentionInputs<CubeBackend>) -> Layouts {
    Layouts {
        vectors: [&inputs.query, &inputs.key, &inputs.value]
            .into_iter()
            .all(|tensor| is_in_vectors(tensor, 4)),
        tma: tma_operands(inputs, None),
        tma_bias: inputs
            .bias
            .as_option()
            .is_some_and(|bias| is_tma_readable(bias, 2)),
    }
}

/// The logsumexp as `engine` makes it with dots added up as its backward does, where the forward is another engine's or has another order.
/// A backward makes its probabilities of that and of scores that it computes anew; where these are in the hundreds, another order changes
/// them.
fn own_logsumexp(
    engine: Engine,
    inputs: &AttentionInputs<CubeBackend>,
    problem: &AttentionProblem,
    device: &DeviceProfile,
) -> Option<FloatTensor<CubeBackend>> {
    let layouts = forward_layouts(inputs);
    let chosen = select(problem, Some(device), layouts, Pass::Forward).kernel;
    // An engine without a forward of this problem has nothing better.
    let own = engine
        .plan_forward_as_backward(problem, device, layouts)
        .ok()?;
    (own != chosen).then(|| own.forward(inputs.clone(), problem).logsumexp)
}

fn choose(
    device: &DeviceProfile,
    problem: &AttentionProblem,
    layouts: Layouts,
    pass: Pass,
) -> Kernel {
    let selection = select(problem, Some(device), layouts, pass);
    for (engine, reason) in &selection.refusals {
        log::debug!("attention {pass:?}: {engine:?} refused: {reason}");
    }
    for warning in &selection.warnings {
        log::debug!("attention {pass:?}: {warning}");
    }
    log::debug!("attention {pass:?}: {:?} for {problem:?}", selection.kernel);
    selection.kernel
}

/// The inputs with rows where storage tiles may lie.
fn rows_of(inputs: AttentionInputs<CubeBackend>) -> AttentionInputs<CubeBackend> {
    AttentionInputs {
        query: untile(inputs.query),
        key: untile(inputs.key),
        value: untile(inputs.value),
        ..inputs
    }
}
