//! Modules, which contain kernels. A module's image is always PTX, because [`nvrtc`](crate::nvrtc) compiles to PTX
//! only.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::Arc;

use super::{INVALID_HANDLE, INVALID_IMAGE, NOT_FOUND, SUCCESS, Status, give, state};
use crate::ptx::Module;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: *mut usize, image: *const c_char) -> Status {
    // SAFETY: the image is PTX text that ends with a zero.
    let text = unsafe { CStr::from_ptr(image) }.to_string_lossy();
    let parsed = match Module::parse(&text) {
        Ok(parsed) => parsed,
        Err(fault) => {
            eprintln!("emulator: {fault}");
            return INVALID_IMAGE;
        }
    };
    let mut state = state();
    for variable in &parsed.variables {
        state
            .allocations
            .insert(variable.as_ptr() as u64, variable.len());
    }
    state.modules.push(Arc::new(parsed));
    // SAFETY: the caller's pointer is null or writable.
    unsafe { give(module, state.modules.len()) }
}

/// Does nothing. The module stays loaded, because its variables may still be in use.
#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(_module: usize) -> Status {
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(
    kernel: *mut usize,
    module: usize,
    name: *const c_char,
) -> Status {
    // SAFETY: a kernel's name is a text that ends with a zero.
    let name = unsafe { CStr::from_ptr(name) }
        .to_string_lossy()
        .into_owned();
    let mut state = state();
    let Some(module) = state.modules.get(module.wrapping_sub(1)).cloned() else {
        return INVALID_HANDLE;
    };
    if !module.functions.contains_key(&name) {
        return NOT_FOUND;
    }
    let handle = state.kernels.len() + 1;
    state.kernels.insert(handle, (module, name));
    // SAFETY: the caller's pointer is null or writable.
    unsafe { give(kernel, handle) }
}

/// Does nothing. CubeCL uses this function only to set the size of dynamic shared memory, and each launch passes that
/// size anyway.
#[unsafe(no_mangle)]
extern "C" fn cuFuncSetAttribute(_kernel: usize, _attribute: c_uint, _value: c_int) -> Status {
    SUCCESS
}
