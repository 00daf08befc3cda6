//! The functions of CUDA's driver that CubeCL calls. Device memory is the host's, streams run at once, and a kernel's fault is kept:
//! as on a card, every call after it fails.
//!
//! Functions that are not here are missing to the program that looks for them, which says their name.
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

/// A driver's result.
type Status = c_int;

const SUCCESS: Status = 0;
const INVALID_VALUE: Status = 1;
const OUT_OF_MEMORY: Status = 2;
const INVALID_IMAGE: Status = 218;
const INVALID_HANDLE: Status = 400;
const NOT_FOUND: Status = 500;
const LAUNCH_FAILED: Status = 719;
const NOT_SUPPORTED: Status = 801;

/// What calls share.
#[derive(Default)]
struct State {
    /// Bytes of what is allocated, by address.
    allocations: BTreeMap<u64, usize>,
    modules: Vec<Arc<Module>>,
    /// Kernels by handle.
    kernels: HashMap<usize, (Arc<Module>, String)>,
    /// The first fault, which nothing after it recovers from.
    fault: Option<CString>,
}

impl State {
    fn status(&self) -> Status {
        match self.fault {
            None => SUCCESS,
            Some(_) => LAUNCH_FAILED,
        }
    }

    /// Keeps the first fault.
    fn fail(&mut self, fault: &str) -> Status {
        let text = CString::new(fault.replace('\0', " ")).unwrap_or_default();
        self.fault.get_or_insert(text);
        LAUNCH_FAILED
    }

    /// Whether all of these bytes are in one allocation.
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

/// Writes what a call returns.
///
/// # Safety
/// The place is null or may be written.
unsafe fn give<T>(place: *mut T, value: T) -> Status {
    if place.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's.
    unsafe { place.write(value) };
    SUCCESS
}
