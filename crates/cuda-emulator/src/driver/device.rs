//! The one device, and its context.

use std::ffi::{c_char, c_int, c_uint};

use super::{INVALID_VALUE, SUCCESS, Status, give, state};
use crate::card::Settings;
use crate::nvrtc;

/// The context's handle.
const CONTEXT: usize = 0x10;

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> Status {
    SUCCESS
}

/// The driver knows what its compiler does.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> Status {
    let (major, minor) = nvrtc::version();
    // SAFETY: the caller's place.
    unsafe { give(version, 1000 * major + 10 * minor) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Status {
    // SAFETY: the caller's place.
    unsafe { give(count, 1) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Status {
    // SAFETY: the caller's place.
    unsafe { give(device, ordinal) }
}

/// Writes a text and its end, as much as there is room for.
///
/// # Safety
/// The place is null, or `length` bytes may be written.
unsafe fn give_text(to: *mut c_char, length: c_int, text: &str) -> Status {
    let room = usize::try_from(length)
        .ok()
        .and_then(|length| length.checked_sub(1));
    let (Some(room), false) = (room, to.is_null()) else {
        return INVALID_VALUE;
    };
    let bytes = &text.as_bytes()[..text.len().min(room)];
    // SAFETY: the caller's, with one byte left for the end.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast(), bytes.len());
        to.add(bytes.len()).write(0);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, _device: c_int) -> Status {
    let card = Settings::get().card.name;
    // SAFETY: the caller's place of this length.
    unsafe { give_text(name, length, &format!("Emulated {card}")) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetPCIBusId(
    name: *mut c_char,
    length: c_int,
    _device: c_int,
) -> Status {
    // SAFETY: the caller's place of this length.
    unsafe { give_text(name, length, "0000:00:00.0") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], _device: c_int) -> Status {
    // SAFETY: the caller's place.
    unsafe { give(uuid, *b"emulated by cube") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) -> Status {
    // SAFETY: the caller's place.
    unsafe { give(bytes, Settings::get().memory) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: c_uint,
    _device: c_int,
) -> Status {
    let settings = Settings::get();
    let card = settings.card;
    // By their numbers in `cuda.h`; what is not here the card does not have.
    let of_card = match attribute {
        // Threads of a cube, in all and by axis.
        1..=3 => 1024,
        4 => 64,
        // Cubes by axis.
        5 => c_int::MAX,
        6 | 7 => 65535,
        // Shared memory and registers of a cube, threads of a warp.
        8 => 48 << 10,
        10 => 32,
        12 => 65536,
        16 => settings.multiprocessors,
        // Threads, shared memory, registers and cubes of a multiprocessor.
        39 => card.multiprocessor_threads,
        81 => card.multiprocessor_memory,
        82 => 65536,
        106 => 32,
        75 => card.capability.0,
        76 => card.capability.1,
        97 => card.shared_memory,
        // Memory pools.
        115 => 1,
        _ => 0,
    };
    // SAFETY: the caller's place.
    unsafe { give(value, of_card) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, _device: c_int) -> Status {
    // SAFETY: the caller's place.
    unsafe { give(context, CONTEXT) }
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> Status {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(_context: usize) -> Status {
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut usize) -> Status {
    // SAFETY: the caller's place.
    unsafe { give(context, CONTEXT) }
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> Status {
    state().status()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, most: *mut c_int) -> Status {
    for place in [least, most] {
        if !place.is_null() {
            // SAFETY: the caller's place.
            unsafe { place.write(0) };
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(_status: Status, name: *mut *const c_char) -> Status {
    // SAFETY: the caller's place.
    unsafe { give(name, c"CUDA_ERROR_EMULATED".as_ptr()) }
}

/// The fault that there was, whatever error is asked for.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(_status: Status, text: *mut *const c_char) -> Status {
    let fault = state().fault.as_ref().map(|fault| fault.as_ptr());
    // The first fault is never replaced, so that its text stays where it is.
    let fault = fault.unwrap_or(c"an error of the emulated driver".as_ptr());
    // SAFETY: the caller's place.
    unsafe { give(text, fault) }
}
