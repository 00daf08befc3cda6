//! The driver functions for the single emulated device and its context.

use std::ffi::{c_char, c_int, c_uint};

use super::{INVALID_VALUE, SUCCESS, Status, give, state};
use crate::card::Settings;
use crate::nvrtc;

/// The handle of the only context.
const CONTEXT: usize = 0x10;

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> Status {
    SUCCESS
}

/// Reports the CUDA version of NVRTC, the runtime compiler, as the driver's version.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> Status {
    let (major, minor) = nvrtc::version();
    // SAFETY: the caller's pointer is null or writable.
    unsafe { give(version, 1000 * major + 10 * minor) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Status {
    // SAFETY: the caller's pointer is null or writable.
    unsafe { give(count, 1) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Status {
    // SAFETY: the caller's pointer is null or writable.
    unsafe { give(device, ordinal) }
}

/// Writes a text and its terminating zero to a buffer of `length` bytes. If the text does not fit, the function
/// truncates it.
///
/// # Safety
/// The pointer is null, or `length` bytes may be written at the pointer.
unsafe fn give_text(to: *mut c_char, length: c_int, text: &str) -> Status {
    let room = usize::try_from(length)
        .ok()
        .and_then(|length| length.checked_sub(1));
    let (Some(room), false) = (room, to.is_null()) else {
        return INVALID_VALUE;
    };
    let bytes = &text.as_bytes()[..text.len().min(room)];
    // SAFETY: the caller guarantees `length` writable bytes. The text takes at most `length` − 1 of them, so the
    // terminating zero fits too.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast(), bytes.len());
        to.add(bytes.len()).write(0);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, _device: c_int) -> Status {
    let card = Settings::get().card.name;
    // SAFETY: the caller's buffer has `length` writable bytes.
    unsafe { give_text(name, length, &format!("Emulated {card}")) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetPCIBusId(
    name: *mut c_char,
    length: c_int,
    _device: c_int,
) -> Status {
    // SAFETY: the caller's buffer has `length` writable bytes.
    unsafe { give_text(name, length, "0000:00:00.0") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], _device: c_int) -> Status {
    // SAFETY: the caller's pointer is null or writable.
    unsafe { give(uuid, *b"emulated by cube") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) -> Status {
    // SAFETY: the caller's pointer is null or writable.
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
    // The attribute numbers come from `cuda.h`. Every attribute that is not listed here is 0.
    let of_card = match attribute {
        // Attributes 1 to 4 are the maximum threads per block, in total and along each axis.
        1..=3 => 1024,
        4 => 64,
        // Attributes 5 to 7 are the maximum blocks per grid along each axis.
        5 => c_int::MAX,
        6 | 7 => 65535,
        // Attributes 8, 10 and 12 are the shared memory per block without opt-in, the threads per warp, and the
        // registers per block. Attribute 16 is the number of multiprocessors.
        8 => 48 << 10,
        10 => 32,
        12 => 65536,
        16 => settings.multiprocessors,
        // Attributes 39, 81, 82 and 106 are the threads, shared memory, registers and blocks per multiprocessor.
        // Attributes 75 and 76 are the compute capability. Attribute 97 is the maximum shared memory per block with
        // opt-in.
        39 => card.multiprocessor_threads,
        81 => card.multiprocessor_memory,
        82 => 65536,
        106 => 32,
        75 => card.capability.0,
        76 => card.capability.1,
        97 => card.shared_memory,
        // Attribute 115 is 1 if the device supports memory pools.
        115 => 1,
        _ => 0,
    };
    // SAFETY: the caller's pointer is null or writable.
    unsafe { give(value, of_card) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, _device: c_int) -> Status {
    // SAFETY: the caller's pointer is null or writable.
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
    // SAFETY: the caller's pointer is null or writable.
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
            // SAFETY: the caller's pointer is null or writable.
            unsafe { place.write(0) };
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(_status: Status, name: *mut *const c_char) -> Status {
    // SAFETY: the caller's pointer is null or writable.
    unsafe { give(name, c"CUDA_ERROR_EMULATED".as_ptr()) }
}

/// Returns the text of the recorded fault, whatever status the caller passes.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(_status: Status, text: *mut *const c_char) -> Status {
    let fault = state().fault.as_ref().map(|fault| fault.as_ptr());
    // The first fault is never replaced, so the pointer to its text stays valid.
    let fault = fault.unwrap_or(c"an error of the emulated driver".as_ptr());
    // SAFETY: the caller's pointer is null or writable.
    unsafe { give(text, fault) }
}
