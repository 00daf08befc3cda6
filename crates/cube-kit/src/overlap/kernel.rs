//! What kernels do to take part.

#![allow(
    missing_docs,
    reason = "CubeCL's macros make public items beside those that are documented here"
)]

use cubecl::prelude::*;

/// Bytes that [`load_now()`] reads.
pub const LOAD_BYTES: usize = 16;

/// Lets the next launch's cubes begin as soon as a unit of every cube of this one has come here, or the cube has ended.
#[cube]
pub fn let_next_begin(#[comptime] overlaps: bool) {
    if overlaps {
        text(comptime!("griddepcontrol.launch_dependents;".to_string()));
    }
}

/// The same of the units where `is_time`.
#[cube]
pub fn let_next_begin_if(is_time: bool, #[comptime] overlaps: bool) {
    if is_time {
        let_next_begin(overlaps);
    }
}

/// Waits until the launch before this one has ended and what it wrote is there.
#[cube]
pub fn await_previous(#[comptime] overlaps: bool) {
    if overlaps {
        text(comptime!("griddepcontrol.wait;".to_string()));
    }
}

/// Both, for a kernel that has nothing to do before it waits.
#[cube]
pub fn take_turn(#[comptime] overlaps: bool) {
    let_next_begin(overlaps);
    await_previous(overlaps);
}

#[cfg(feature = "cuda")]
#[cube]
fn text(#[comptime] text: String) {
    gpu_asm!("{text}");
}

/// There is no device that would take it.
#[cfg(not(feature = "cuda"))]
#[cube]
fn text(#[comptime] _text: String) {}

/// Behind [`await_previous()`]: an earlier launch may have written the tensor meanwhile. Compilers take what a kernel only reads for constant, and
/// may else read it before the wait, or by way of a cache that knows nothing of it.
#[cube]
pub fn was_written<T: CubePrimitive>(tensor: &Tensor<T>, #[comptime] overlaps: bool) {
    if overlaps {
        tell::<T>(tensor);
    }
}

/// The same of a tensor that may be absent.
#[cube]
pub fn was_written_if_there<T: CubePrimitive>(
    tensor: ComptimeOption<&Tensor<T>>,
    #[comptime] overlaps: bool,
) {
    #[comptime]
    match tensor {
        ComptimeOption::Some(tensor) => was_written::<T>(tensor, overlaps),
        ComptimeOption::None => {}
    }
}

/// A text that might do anything with the tensor, and does nothing.
#[cfg(feature = "cuda")]
#[cube]
fn tell<T: CubePrimitive>(tensor: &Tensor<T>) {
    // SAFETY: only the address is taken.
    let start = unsafe { tensor.as_slice().as_ptr_unchecked() };
    gpu_asm!("// {start}\n", start = in(_) crate::hopper::ptx::number_of::<T>(start));
}

/// There is no device that would take it.
#[cfg(not(feature = "cuda"))]
#[cube]
fn tell<T: CubePrimitive>(_tensor: &Tensor<T>) {}

/// The vector at `index` of what no launch writes. Where `now`, it is of [`LOAD_BYTES`] bytes, and it is on its way before anything that the kernel
/// does later: compilers move the reads of what does not change to where it is used, which is behind a wait, and one after the other.
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
    // SAFETY: only the address is taken.
    let start = unsafe { tensor.as_slice().as_ptr_unchecked() };
    let source =
        crate::hopper::ptx::element_address::<Vector<E, N>>(start, index as u64, LOAD_BYTES);
    let text = comptime!("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];".to_string());
    let words: Vector<u32, Const<4>>;
    gpu_asm!(
        "{text} // {words} {source}\n",
        words = out(_) words,
        source = in(_) crate::hopper::ptx::value_of::<u64>(source)
    );
    Vector::<E, N>::reinterpret(words)
}

/// There is no device that would take it.
#[cfg(not(feature = "cuda"))]
#[cube]
fn ordered<E: Float, N: Size>(tensor: &Tensor<Vector<E, N>>, index: usize) -> Vector<E, N> {
    tensor[index]
}

/// The element at `index` of what no launch writes, of 2 or 4 bytes, on its way as [`load_now()`]'s are.
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
    // SAFETY: only the address is taken.
    let start = unsafe { elements.as_ptr_unchecked() };
    let source = crate::hopper::ptx::element_address::<T>(start, index as u64, bytes);
    if comptime!(bytes == 2) {
        let bits: u16;
        gpu_asm!(
            "ld.global.u16 {bits}, [{source}];",
            bits = out(_) bits,
            source = in(_) crate::hopper::ptx::value_of::<u64>(source)
        );
        T::reinterpret(bits)
    } else {
        let bits: u32;
        gpu_asm!(
            "ld.global.u32 {bits}, [{source}];",
            bits = out(_) bits,
            source = in(_) crate::hopper::ptx::value_of::<u64>(source)
        );
        T::reinterpret(bits)
    }
}

#[cfg(feature = "cuda")]
#[cube]
fn bytes_of<T: CubePrimitive>(_elements: &[T]) -> comptime_type!(usize) {
    intrinsic!(|scope| T::__expand_size(scope))
}

/// There is no device that would take it.
#[cfg(not(feature = "cuda"))]
#[cube]
fn ordered_element<T: CubePrimitive>(elements: &[T], index: usize) -> T {
    elements[index]
}
