//! CubeCL devices: says how a problem's tensors lie, and hands them to the engine that [`select`](crate::select) chose.

use super::*;
use crate::arguments::{is_in_vectors, is_tma_readable, tma_operands};
use crate::engine::Kernel;
use crate::restriction::Restriction;
use crate::select::{BackwardRequest, DeviceProfile, Layouts, Pass, select};
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::{
    CubeBackend,
    kernel::{into_contiguous, untile},
};
use cube_kit::hopper::is_hopper;
use cubecl::client::Client;
use cubecl::ir::features::TypeUsage;
use std::{num::NonZero, sync::OnceLock, thread::available_parallelism};

/// The profile of a device, if it runs CubeCL kernels.
pub(crate) fn device_profile(device: &Device) -> Option<DeviceProfile> {
    let device = device.clone().without_autodiff();
    match device.as_dispatch() {
        burn::backend::DispatchDevice::Cube(device) => Some(profile(&device.client())),
        #[allow(
            unreachable_patterns,
            reason = "without other backends it is the only device"
        )]
        _ => None,
    }
}

fn profile(client: &Client) -> DeviceProfile {
    let properties = client.properties();
    let hardware = &properties.hardware;
    let restriction = Restriction::of_environment();
    let dtypes = [DType::F32, DType::F16, DType::BF16]
        .into_iter()
        .filter(|dtype| {
            let usage = properties.type_usage(dtype_to_storage_type(*dtype));
            usage.contains(TypeUsage::Buffer) && usage.contains(TypeUsage::Conversion)
        })
        .collect();
    DeviceProfile {
        name: client.name().to_string(),
        dtypes,
        shared_memory: restriction.shared_memory(hardware.max_shared_memory_size),
        units_per_cube: hardware.max_units_per_cube as usize,
        bindings: hardware.max_bindings as usize,
        largest_buffer: usize::try_from(properties.memory.max_page_size).unwrap_or(usize::MAX),
        cube_count: hardware.max_cube_count.0,
        // Of all that runtimes list, only a processor is no card.
        processors: properties.identity.physical.is_none().then(processors),
        multiprocessors: hardware
            .num_streaming_multiprocessors
            .map(|count| count as usize),
        hopper: is_hopper(client),
        left_out: restriction.left_out(),
    }
}

/// Threads of this machine's processor.
fn processors() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| available_parallelism().map_or(1, NonZero::get))
}

impl AttentionBackend for CubeBackend {
    fn attention_forward(
        inputs: AttentionInputs<Self>,
        problem: AttentionProblem,
    ) -> AttentionOutput<Self> {
        if problem.is_empty() {
            return reference::forward_in_parts::<Self>(inputs, &problem);
        }
        let inputs = rows_of(inputs);
        let layouts = Layouts {
            vectors: [&inputs.query, &inputs.key, &inputs.value]
                .into_iter()
                .all(|tensor| is_in_vectors(tensor, 4)),
            tma: tma_operands(&inputs, None),
            tma_bias: inputs
                .bias
                .as_option()
                .is_some_and(|bias| is_tma_readable(bias, 2)),
        };
        choose(&inputs.query.client, &problem, layouts, Pass::Forward).forward(inputs, &problem)
    }

    fn attention_backward(
        inputs: AttentionInputs<Self>,
        saved: AttentionSaved<Self>,
        problem: AttentionProblem,
        request: BackwardRequest,
    ) -> AttentionGradients<Self> {
        if problem.is_empty() {
            return reference::backward_of_nothing::<Self>(inputs, saved, &problem, request);
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
        let kernel = choose(&inputs.query.client, &problem, layouts, Pass::Backward);
        kernel.backward(inputs, saved, &problem, request)
    }
}

fn choose(client: &Client, problem: &AttentionProblem, layouts: Layouts, pass: Pass) -> Kernel {
    let selection = select(problem, Some(&profile(client)), layouts, pass);
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
