//! Device memory, which the emulator allocates in host memory, and the functions that copy from, to and within device
//! memory.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::c_int;

use super::{INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS, Status, give, state};
use crate::card::Settings;

/// The alignment of allocations in bytes.
const ALIGNMENT: usize = 512;

/// Allocations of at least this size in bytes are not filled with NaN. Filling a large allocation would touch every
/// page, so the operating system would have to provide physical memory for the whole allocation.
const POISONED: usize = 64 << 20;

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.max(1), ALIGNMENT).ok()
}

/// Allocates device memory, and fills the memory with bytes that are NaN in every float type. Allocations of at least
/// `POISONED` bytes are not filled.
///
/// # Safety
/// The pointer `place` is null or may be written.
unsafe fn allocate(place: *mut u64, bytes: usize) -> Status {
    let Some(layout) = layout(bytes) else {
        return OUT_OF_MEMORY;
    };
    // SAFETY: the layout has a size above zero.
    let memory = unsafe { alloc(layout) };
    if memory.is_null() {
        return OUT_OF_MEMORY;
    }
    if bytes < POISONED {
        // SAFETY: the memory was allocated just now, with this size.
        unsafe { memory.write_bytes(0xff, bytes) };
    }
    state().allocations.insert(memory as u64, bytes);
    // SAFETY: the caller guarantees that `place` is null or writable.
    unsafe { give(place, memory as u64) }
}

fn free(address: u64) -> Status {
    if address == 0 {
        return SUCCESS;
    }
    let Some(bytes) = state().allocations.remove(&address) else {
        return INVALID_VALUE;
    };
    let Some(layout) = layout(bytes) else {
        return INVALID_VALUE;
    };
    // SAFETY: `allocate` allocated the memory with this layout. The record of the allocation is removed, so the memory
    // is freed only once.
    unsafe { dealloc(address as *mut u8, layout) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Status {
    let total_bytes = Settings::get().memory;
    let used: usize = state().allocations.values().sum();
    // SAFETY: the caller's pointers are null or writable.
    unsafe {
        give(free, total_bytes.saturating_sub(used));
        give(total, total_bytes)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(place: *mut u64, bytes: usize) -> Status {
    // SAFETY: the caller's pointer is null or writable.
    unsafe { allocate(place, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(place: *mut u64, bytes: usize, _stream: usize) -> Status {
    // SAFETY: the caller's pointer is null or writable.
    unsafe { allocate(place, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocHost_v2(place: *mut u64, bytes: usize) -> Status {
    // SAFETY: the caller's pointer is null or writable.
    unsafe { allocate(place, bytes) }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> Status {
    free(address)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(address: u64, _stream: usize) -> Status {
    free(address)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(address: u64) -> Status {
    free(address)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const u8,
    bytes: usize,
    _stream: usize,
) -> Status {
    if !state().holds(to, bytes) {
        return INVALID_VALUE;
    }
    // SAFETY: the caller guarantees that the source can be read, and the target is in an allocation.
    unsafe { std::ptr::copy_nonoverlapping(from, to as *mut u8, bytes) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut u8,
    from: u64,
    bytes: usize,
    _stream: usize,
) -> Status {
    let state = state();
    if !state.holds(from, bytes) {
        return INVALID_VALUE;
    }
    // SAFETY: the caller guarantees that the target can be written, and the source is in an allocation.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to, bytes) };
    state.status()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoDAsync_v2(
    to: u64,
    from: u64,
    bytes: usize,
    _stream: usize,
) -> Status {
    let state = state();
    if !state.holds(to, bytes) || !state.holds(from, bytes) {
        return INVALID_VALUE;
    }
    // SAFETY: source and target are each in an allocation.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD8Async(to: u64, value: u8, bytes: usize, _stream: usize) -> Status {
    if !state().holds(to, bytes) {
        return INVALID_VALUE;
    }
    // SAFETY: the bytes are in an allocation.
    unsafe { (to as *mut u8).write_bytes(value, bytes) };
    SUCCESS
}

/// The source or the target in a `CUDA_MEMCPY2D`.
#[repr(C)]
struct End {
    x: usize,
    y: usize,
    memory: c_int,
    host: *mut u8,
    device: u64,
    array: usize,
    pitch: usize,
}

impl End {
    /// Returns the address of the first row, or `None` for a memory type without addresses, such as a CUDA array.
    fn start(&self) -> Option<*mut u8> {
        let base = match self.memory {
            1 => self.host,
            2 | 4 => self.device as *mut u8,
            _ => return None,
        };
        Some(base.wrapping_add(self.y * self.pitch + self.x))
    }

    /// Returns true if all rows are in one allocation of device memory. Returns true without a check if the rows are in
    /// host memory.
    fn holds(&self, width: usize, height: usize) -> bool {
        let (Some(start), true) = (self.start(), self.memory != 1) else {
            return self.memory == 1;
        };
        let bytes = height.saturating_sub(1) * self.pitch + width;
        height == 0 || state().holds(start as u64, bytes)
    }
}

/// The description of a two-dimensional copy, `CUDA_MEMCPY2D`.
#[repr(C)]
struct Copy2d {
    from: End,
    to: End,
    width: usize,
    height: usize,
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpy2DAsync_v2(copy: *const Copy2d, _stream: usize) -> Status {
    // SAFETY: the caller's pointer is null or points to a `CUDA_MEMCPY2D`.
    let Some(copy) = (unsafe { copy.as_ref() }) else {
        return INVALID_VALUE;
    };
    let (Some(from), Some(to)) = (copy.from.start(), copy.to.start()) else {
        return NOT_SUPPORTED;
    };
    if !copy.from.holds(copy.width, copy.height) || !copy.to.holds(copy.width, copy.height) {
        return INVALID_VALUE;
    }
    for row in 0..copy.height {
        let (from, to) = (
            from.wrapping_add(row * copy.from.pitch),
            to.wrapping_add(row * copy.to.pitch),
        );
        // SAFETY: the caller guarantees the rows in host memory, and the rows in device memory are in allocations.
        unsafe { std::ptr::copy(from, to, copy.width) };
    }
    state().status()
}
