//! An allocator of a machine with 1 GB.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
};

/// Bytes that may be allocated at a time.
const LIMIT: usize = 1 << 30;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, which has nothing left beyond [`LIMIT`]: who does not expect that aborts.
pub struct Bounded;

/// Counts `size` more bytes, if there is room for them.
fn take(size: usize) -> bool {
    let before = ALLOCATED.fetch_add(size, Ordering::Relaxed);
    let has_room = before.saturating_add(size) <= LIMIT;
    if !has_room {
        give_back(size);
    }
    has_room
}

fn give_back(size: usize) {
    ALLOCATED.fetch_sub(size, Ordering::Relaxed);
}

// SAFETY: every block is the system allocator's; the counting touches none of them.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        let block = unsafe { System.alloc(layout) };
        if block.is_null() {
            give_back(layout.size());
        }
        block
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        let block = unsafe { System.alloc_zeroed(layout) };
        if block.is_null() {
            give_back(layout.size());
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        give_back(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !take(size) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        let moved = unsafe { System.realloc(block, layout, size) };
        give_back(if moved.is_null() { size } else { layout.size() });
        moved
    }
}
