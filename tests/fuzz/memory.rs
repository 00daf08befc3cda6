//! An allocator that fails if the program would hold more than 1 GB of memory.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
};

/// The maximum number of bytes that are allocated at the same time, 1 GB.
const LIMIT: usize = 1 << 30;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator with the limit [`LIMIT`]. An allocation beyond the limit fails.
pub struct Bounded;

/// Adds `size` to the number of allocated bytes if the sum stays within the limit. Returns true on success.
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

// SAFETY: every block comes from the system allocator, and counting the bytes does not touch the blocks.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller upholds the contract of `alloc`.
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
        // SAFETY: the caller upholds the contract of `alloc_zeroed`.
        let block = unsafe { System.alloc_zeroed(layout) };
        if block.is_null() {
            give_back(layout.size());
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        give_back(layout.size());
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !take(size) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller upholds the contract of `realloc`.
        let moved = unsafe { System.realloc(block, layout, size) };
        give_back(if moved.is_null() { size } else { layout.size() });
        moved
    }
}
