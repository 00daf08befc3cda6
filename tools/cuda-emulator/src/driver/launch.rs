//! Kernel launches. The call that launches a kernel returns after the kernel has completed.

use std::ffi::{c_uint, c_void};
use std::time::Instant;

use super::{INVALID_HANDLE, INVALID_VALUE, SUCCESS, Status, state};
use crate::card::Settings;
use crate::cube::{Allocation, Launch};
use crate::ptx::Function;

/// The maximum number of data races that are printed per launch.
const PRINTED: usize = 8;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    kernel: usize,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    cube_x: c_uint,
    cube_y: c_uint,
    cube_z: c_uint,
    dynamic_shared: c_uint,
    _stream: usize,
    arguments: *const *const c_void,
    _extra: *const *const c_void,
) -> Status {
    let (module, name, allocations) = {
        let state = state();
        if state.fault.is_some() {
            return state.status();
        }
        let Some((module, name)) = state.kernels.get(&kernel).cloned() else {
            return INVALID_HANDLE;
        };
        let allocations = state.allocations.iter().map(|(start, bytes)| Allocation {
            start: *start,
            bytes: *bytes as u64,
        });
        (module, name, allocations.collect::<Vec<_>>())
    };
    let function = &module.functions[&name];
    let Some(arguments) = (unsafe {
        // SAFETY: the caller passes one pointer for each parameter of the kernel.
        gather(function, arguments)
    }) else {
        return INVALID_VALUE;
    };
    let launch = Launch {
        function,
        grid: [grid_x, grid_y, grid_z],
        cube_size: [cube_x, cube_y, cube_z],
        dynamic_shared: dynamic_shared as usize,
        arguments: &arguments,
        allocations: &allocations,
    };
    let limit = Settings::get().card.shared_memory as usize;
    let shared = function.static_shared + launch.dynamic_shared;
    if shared > limit || launch.threads() == 0 || launch.threads() > 1024 {
        return INVALID_VALUE;
    }
    run(&launch)
}

/// Copies a kernel's arguments to the offsets that the kernel expects. Returns `None` if an argument is missing.
///
/// # Safety
/// `arguments` is null, or is an array of one pointer per parameter. Each pointer points to the bytes of the argument.
unsafe fn gather(function: &Function, arguments: *const *const c_void) -> Option<Vec<u8>> {
    let mut bytes = vec![0; function.parameter_bytes];
    for (k, parameter) in function.parameters.iter().enumerate() {
        if arguments.is_null() {
            return None;
        }
        // SAFETY: the caller guarantees one pointer per parameter, to the bytes of the argument.
        let argument = unsafe {
            let start: *const u8 = (*arguments.add(k)).cast();
            std::slice::from_raw_parts(start, parameter.bytes)
        };
        bytes[parameter.offset..][..parameter.bytes].copy_from_slice(argument);
    }
    Some(bytes)
}

fn run(launch: &Launch) -> Status {
    let settings = Settings::get();
    let start = Instant::now();
    let outcome = match launch.run(settings.threads) {
        Ok(outcome) => outcome,
        Err(fault) => {
            eprintln!("emulator: {fault}");
            return state().fail(&fault.to_string());
        }
    };
    let time = start.elapsed();
    if let Some(limit) = settings.slow_launch
        && time.as_millis() >= limit.into()
    {
        eprintln!(
            "emulator: {:.3} s, {:.1} million instructions, {:?} × {:?}: {}",
            time.as_secs_f64(),
            outcome.steps as f64 * 1e-6,
            launch.grid,
            launch.cube_size,
            launch.function.name
        );
    }
    for race in outcome.races.iter().take(PRINTED) {
        eprintln!("emulator: {race}");
    }
    match outcome.races.first() {
        Some(race) if settings.races_fail => state().fail(race),
        _ => SUCCESS,
    }
}
