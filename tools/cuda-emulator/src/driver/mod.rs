//! The functions of CUDA's driver that CubeCL calls. Device memory is host memory, and an operation on a stream has
//! completed when its call returns. As on a GPU, a kernel's fault is permanent: every later call fails.
//!
//! The emulated library lacks every driver function that is not defined here.
#![allow(non_snake_case)]

mod device;
mod launch;
mod memory;
mod modules;
mod streams;
mod tensor_map;

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CString, c_int};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::ptx::Module;

/// The result code of a driver function.
type Status = c_int;

const SUCCESS: Status = 0;
const INVALID_VALUE: Status = 1;
const OUT_OF_MEMORY: Status = 2;
const INVALID_IMAGE: Status = 218;
const INVALID_HANDLE: Status = 400;
const NOT_FOUND: Status = 500;
const LAUNCH_FAILED: Status = 719;
const NOT_SUPPORTED: Status = 801;

/// The state that all driver calls share.
#[derive(Default)]
struct State {
    /// The size in bytes of each allocation, by the allocation's address.
    allocations: BTreeMap<u64, usize>,
    modules: Vec<Arc<Module>>,
    /// The module and the name of each kernel, by the kernel's handle.
    kernels: HashMap<usize, (Arc<Module>, String)>,
    /// The first fault. As on a GPU, every later call fails with this fault.
    fault: Option<CString>,
}

impl State {
    fn status(&self) -> Status {
        match self.fault {
            None => SUCCESS,
            Some(_) => LAUNCH_FAILED,
        }
    }

    /// Records `fault` unless an earlier fault is recorded.
    fn fail(&mut self, fault: &str) -> Status {
        let text = CString::new(fault.replace('\0', " ")).unwrap_or_default();
        self.fault.get_or_insert(text);
        LAUNCH_FAILED
    }

    /// Returns true if all bytes of a range are in one allocation.
    fn holds(&self, address: u64, bytes: usize) -> bool {
        let found = self.allocations.range(..=address).next_back();
        found.is_some_and(|(start, size)| {
            let at = (address - start) as usize;
            at <= *size && bytes <= size - at
        })
    }
}

fn state() -> MutexGuard<'static, State> {
    static STATE: OnceLock<Mutex<State>> = OnceLock::new();
    let state = STATE.get_or_init(Mutex::default);
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes a result of a driver call to the caller's memory.
///
/// # Safety
/// The pointer is null or may be written.
unsafe fn give<T>(place: *mut T, value: T) -> Status {
    if place.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller guarantees that the pointer is null or writable, and it is not null here.
    unsafe { place.write(value) };
    SUCCESS
}
