//! `cp.async`: asynchronous copies from global to shared memory that bypass the registers.

use crate::nvidia::ROW_BYTES;
use crate::nvidia::ptx::value_of;
use cubecl::prelude::*;

/// The number of bytes in a *piece*, which is the largest amount that one `cp.async` copies.
pub const PIECE_BYTES: usize = 16;

/// The number of columns in a 16-byte piece, in half precision (f16 or bf16).
pub const PIECE: usize = PIECE_BYTES / 2;

/// Returns the global address of the element at `index` of a tensor in half precision, to read from it.
#[cube]
pub fn half_address<E: Float>(tensor: &Tensor<E>, index: u64) -> u64 {
    // SAFETY: this expression only takes the address of `tensor` and reads no memory. A caller that reads from the
    // result must pass an `index` inside the tensor.
    crate::nvidia::ptx::element_address::<E>(
        unsafe { tensor.as_slice().as_ptr_unchecked() },
        index,
        2usize,
    )
}

/// Copies `bytes` bytes from `source` to the 16 bytes at the shared-memory address `target`, and fills the rest of the
/// 16 bytes with zeros. The address `source` must be a multiple of 16.
#[cube]
pub fn copy_piece(target: u32, source: u64, bytes: u32) {
    gpu_asm!(
        "cp.async.cg.shared.global [{target}], [{source}], 16, {bytes};",
        target = in(_) value_of::<u32>(target),
        source = in(_) value_of::<u64>(source),
        bytes = in(_) value_of::<u32>(bytes)
    );
}

/// Copies `bytes` bytes from `source` to the `size` bytes at the shared-memory address `target`, and fills the rest
/// with zeros. `size` is 4 or 8, and both addresses must be multiples of it. Unlike [`copy_piece()`], the copy goes
/// through the L1 cache.
#[cube]
pub fn copy_small(target: u32, source: u64, bytes: u32, #[comptime] size: usize) {
    gpu_asm!(
        "cp.async.ca.shared.global [{target}], [{source}], {size}, {bytes};",
        target = in(_) value_of::<u32>(target),
        source = in(_) value_of::<u64>(source),
        bytes = in(_) value_of::<u32>(bytes)
    );
}

/// Copies 16 bytes from the shared-memory address `source` to the global address `target`, through registers.
#[cube]
pub fn store_piece(target: u64, source: u32) {
    let text = comptime!(store_text());
    gpu_asm!(
        "{text} // {target} {source}\n",
        target = in(_) value_of::<u64>(target),
        source = in(_) value_of::<u32>(source)
    );
}

/// Returns the PTX of [`store_piece()`]. Inputs: the global address and the shared-memory address.
fn store_text() -> String {
    "{\n.reg .b32 w<4>;\nld.shared.v4.b32 {w0, w1, w2, w3}, [%1];\n\
     st.global.v4.b32 [%0], {w0, w1, w2, w3};\n}\n"
        .into()
}

/// Stores two f32 values at a global address, which must be a multiple of 8.
#[cube]
pub fn store_pair(target: u64, first: f32, second: f32) {
    let text = comptime!("st.global.v2.f32 [%0], {%1, %2};".to_string());
    gpu_asm!(
        "{text} // {target} {first} {second}\n",
        target = in(_) value_of::<u64>(target),
        first = in(_) value_of::<f32>(first),
        second = in(_) value_of::<f32>(second)
    );
}

/// Closes a group that consists of all copies that this thread has started since its previous group.
#[cube]
pub fn commit_copies() {
    gpu_asm!("cp.async.commit_group;");
}

/// Waits until at most the latest `pending` of this thread's groups of copies are incomplete. Other threads see the
/// copied data only after a sync.
#[cube]
pub fn await_copies(#[comptime] pending: usize) {
    gpu_asm!("cp.async.wait_group {pending};");
}

/// The number of bytes of a narrow row: four pieces.
pub const NARROW_ROW_BYTES: usize = 4 * PIECE_BYTES;

/// Returns the offset of the 16-byte piece with the index `piece` in the narrow row `row`. The pieces of a row are
/// permuted, so that the 8 rows of an `ldmatrix` lie in different banks.
#[cube]
pub fn narrow_piece_offset(row: u32, piece: u32) -> u32 {
    row * comptime!(NARROW_ROW_BYTES as u32)
        + (piece ^ (row / 2u32 % 4u32)) * comptime!(PIECE_BYTES as u32)
}

/// Returns the address of the 16-byte piece with the index `piece` in row `row`. The rows are stored in swizzled
/// subtiles of `rows` rows and 64 columns. The first subtile starts at `start`.
#[cube]
pub fn piece_address(start: u32, row: u32, piece: u32, #[comptime] rows: usize) -> u32 {
    let subtile = start + (piece / 8u32) * comptime!((rows * ROW_BYTES) as u32);
    subtile + row * comptime!(ROW_BYTES as u32) + (((piece ^ row) % 8u32) << 4u32)
}
