//! Streams and events. A call that puts work on a stream returns only after this work has completed.

use std::ffi::{c_int, c_uint};

use super::{SUCCESS, Status, give, state};

/// The handle of every stream. The value is arbitrary, because no function of the emulator reads the handle of a stream
/// or of an event.
const STREAM: usize = 0x20;
const EVENT: usize = 0x30;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut usize, _flags: c_uint) -> Status {
    // SAFETY: the caller's pointer is null or writable.
    unsafe { give(stream, STREAM) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(
    stream: *mut usize,
    _flags: c_uint,
    _priority: c_int,
) -> Status {
    // SAFETY: the caller's pointer is null or writable.
    unsafe { give(stream, STREAM) }
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(_stream: usize) -> Status {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(_stream: usize) -> Status {
    state().status()
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(_stream: usize) -> Status {
    state().status()
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(_stream: usize, _event: usize, _flags: c_uint) -> Status {
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut usize, _flags: c_uint) -> Status {
    // SAFETY: the caller's pointer is null or writable.
    unsafe { give(event, EVENT) }
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(_event: usize, _stream: usize) -> Status {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(_event: usize) -> Status {
    state().status()
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(_event: usize) -> Status {
    state().status()
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(_event: usize) -> Status {
    SUCCESS
}

/// Reports 1 ms for every pair of events, because times in the emulator say nothing about times on a GPU.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventElapsedTime(time: *mut f32, _start: usize, _end: usize) -> Status {
    // SAFETY: the caller's pointer is null or writable.
    unsafe { give(time, 1.0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventElapsedTime_v2(time: *mut f32, _start: usize, _end: usize) -> Status {
    // SAFETY: the caller's pointer is null or writable.
    unsafe { give(time, 1.0) }
}
