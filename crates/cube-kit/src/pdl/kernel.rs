//! Device functions for kernels that take part in programmatic dependent launch (PDL). See the module `pdl`.

#![allow(
    missing_docs,
    reason = "CubeCL's macros generate public items without docs"
)]

use cubecl::prelude::*;

/// The number of bytes that [`load_now()`] loads.
pub const LOAD_BYTES: usize = 16;

/// Allows the next launch to begin. The next launch begins once every cube of this launch has ended or has called this
/// function from at least one unit.
#[cube]
pub fn launch_dependents(#[comptime] pdl: bool) {
    if pdl {
        text(comptime!("griddepcontrol.launch_dependents;".to_string()));
    }
}

/// Calls [`launch_dependents()`] in those units in which `is_time` is true.
#[cube]
pub fn launch_dependents_if(is_time: bool, #[comptime] pdl: bool) {
    if is_time {
        launch_dependents(pdl);
    }
}

/// Waits until the previous launch has ended and its writes are visible.
#[cube]
pub fn wait_prior_launch(#[comptime] pdl: bool) {
    if pdl {
        text(comptime!("griddepcontrol.wait;".to_string()));
    }
}

/// Calls [`launch_dependents()`], and then [`wait_prior_launch()`], in kernels that do no work before the wait.
#[cube]
pub fn launch_dependents_and_wait(#[comptime] pdl: bool) {
    launch_dependents(pdl);
    wait_prior_launch(pdl);
}

#[cfg(feature = "cuda")]
#[cube]
fn text(#[comptime] text: String) {
    gpu_asm!("{text}");
}

/// Does nothing, because no device supports PDL without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
#[cube]
fn text(#[comptime] _text: String) {}

/// Marks a tensor as volatile, because an earlier launch may have written it. Call this function after
/// [`wait_prior_launch()`].
///
/// Compilers assume that a tensor is constant if the kernel never writes the tensor. A compiler may therefore move the
/// tensor's loads before the wait, or use the read-only cache, which is not coherent.
#[cube]
pub fn mark_volatile<T: CubePrimitive>(tensor: &Tensor<T>, #[comptime] pdl: bool) {
    if pdl {
        tell::<T>(tensor);
    }
}

/// Calls [`mark_volatile()`] for the tensor, if the tensor is present.
#[cube]
pub fn mark_volatile_if_present<T: CubePrimitive>(
    tensor: ComptimeOption<&Tensor<T>>,
    #[comptime] pdl: bool,
) {
    #[comptime]
    match tensor {
        ComptimeOption::Some(tensor) => mark_volatile::<T>(tensor, pdl),
        ComptimeOption::None => {}
    }
}

/// Calls [`mark_volatile()`] for a tensor inside a struct of kernel arguments, if the tensor is present.
#[cube]
pub fn mark_owned_volatile_if_present<T: CubePrimitive>(
    tensor: &ComptimeOption<OwnedTensor<T>>,
    #[comptime] pdl: bool,
) {
    #[comptime]
    match tensor {
        ComptimeOption::Some(tensor) => mark_volatile::<T>(tensor, pdl),
        ComptimeOption::None => {}
    }
}

/// Emits inline PTX that is only a comment with the tensor's address. The compiler must assume that the PTX changes the
/// tensor.
#[cfg(feature = "cuda")]
#[cube]
fn tell<T: CubePrimitive>(tensor: &Tensor<T>) {
    // SAFETY: this expression only takes the address of `tensor` and reads no memory.
    let start = unsafe { tensor.as_slice().as_ptr_unchecked() };
    gpu_asm!("// {start}\n", start = in(_) crate::nvidia::ptx::number_of::<T>(start));
}

/// Does nothing, because no device supports PDL without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
#[cube]
fn tell<T: CubePrimitive>(_tensor: &Tensor<T>) {}

/// Loads the vector at `index` of a tensor that no launch writes.
///
/// If `now` is true, the load is issued before all later instructions of the kernel, and the vector must have
/// [`LOAD_BYTES`] bytes. Otherwise the compiler may delay the load until the first use of the vector, after the wait
/// for the previous launch.
#[cube]
pub fn load_now<E: Float, N: Size>(
    tensor: &Tensor<Vector<E, N>>,
    index: usize,
    #[comptime] now: bool,
) -> Vector<E, N> {
    if now {
        ordered::<E, N>(tensor, index)
    } else {
        tensor[index]
    }
}

#[cfg(feature = "cuda")]
#[cube]
fn ordered<E: Float, N: Size>(tensor: &Tensor<Vector<E, N>>, index: usize) -> Vector<E, N> {
    // SAFETY: this expression only takes the address of `tensor`. The load below reads the vector at `index`, which is
    // inside the tensor, as in `tensor[index]`.
    let start = unsafe { tensor.as_slice().as_ptr_unchecked() };
    let source =
        crate::nvidia::ptx::element_address::<Vector<E, N>>(start, index as u64, LOAD_BYTES);
    let text = comptime!("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];".to_string());
    let words: Vector<u32, Const<4>>;
    gpu_asm!(
        "{text} // {words} {source}\n",
        words = out(_) words,
        source = in(_) crate::nvidia::ptx::value_of::<u64>(source)
    );
    Vector::<E, N>::reinterpret(words)
}

/// Loads the vector at `index` with an ordinary load, because no device supports PDL without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
#[cube]
fn ordered<E: Float, N: Size>(tensor: &Tensor<Vector<E, N>>, index: usize) -> Vector<E, N> {
    tensor[index]
}

/// Loads the element of 2 or 4 bytes at `index` of a slice that no launch writes. If `now` is true, the load is issued
/// before all later instructions, as in [`load_now()`].
#[cube]
pub fn load_element_now<T: CubePrimitive>(
    elements: &[T],
    index: usize,
    #[comptime] now: bool,
) -> T {
    if now {
        ordered_element::<T>(elements, index)
    } else {
        elements[index]
    }
}

#[cfg(feature = "cuda")]
#[cube]
fn ordered_element<T: CubePrimitive>(elements: &[T], index: usize) -> T {
    let bytes = bytes_of::<T>(elements);
    // SAFETY: this expression only takes the address of `elements`. The load below reads the element at `index`, which
    // is inside the slice, as in `elements[index]`.
    let start = unsafe { elements.as_ptr_unchecked() };
    let source = crate::nvidia::ptx::element_address::<T>(start, index as u64, bytes);
    if comptime!(bytes == 2) {
        let bits: u16;
        gpu_asm!(
            "ld.global.u16 {bits}, [{source}];",
            bits = out(_) bits,
            source = in(_) crate::nvidia::ptx::value_of::<u64>(source)
        );
        T::reinterpret(bits)
    } else {
        let bits: u32;
        gpu_asm!(
            "ld.global.u32 {bits}, [{source}];",
            bits = out(_) bits,
            source = in(_) crate::nvidia::ptx::value_of::<u64>(source)
        );
        T::reinterpret(bits)
    }
}

#[cfg(feature = "cuda")]
#[cube]
fn bytes_of<T: CubePrimitive>(_elements: &[T]) -> comptime_type!(usize) {
    intrinsic!(|scope| T::__expand_size(scope))
}

/// Loads the element at `index` with an ordinary load, because no device supports PDL without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
#[cube]
fn ordered_element<T: CubePrimitive>(elements: &[T], index: usize) -> T {
    elements[index]
}
