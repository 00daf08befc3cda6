//! `cp.async`: copies from global to shared memory, past the registers, that a thread starts and later waits for.

use crate::hopper::ROW_BYTES;
use crate::hopper::ptx::value_of;
use cubecl::prelude::*;

/// Bytes of a piece, the most that one copy brings.
pub const PIECE_BYTES: usize = 16;

/// Columns of a piece, in half precision.
pub const PIECE: usize = PIECE_BYTES / 2;

/// Where the element at `index` of a tensor of half precision lies in global memory.
#[cube]
pub fn half_address<E: Float>(tensor: &Tensor<E>, index: u64) -> u64 {
    // SAFETY: only the address is taken.
    crate::hopper::ptx::element_address::<E>(
        unsafe { tensor.as_slice().as_ptr_unchecked() },
        index,
        2usize,
    )
}

/// Copies `bytes` of the 16 at `source`, and zeros behind them, to `target` in the shared window. `source` is a multiple of 16.
#[cube]
pub fn copy_piece(target: u32, source: u64, bytes: u32) {
    gpu_asm!(
        "cp.async.cg.shared.global [{target}], [{source}], 16, {bytes};",
        target = in(_) value_of::<u32>(target),
        source = in(_) value_of::<u64>(source),
        bytes = in(_) value_of::<u32>(bytes)
    );
}

/// Ends a group of this thread's copies.
#[cube]
pub fn commit_copies() {
    gpu_asm!("cp.async.commit_group;");
}

/// Waits until at most `pending` of this thread's last groups are on their way. Others see what came after a sync.
#[cube]
pub fn await_copies(#[comptime] pending: usize) {
    gpu_asm!("cp.async.wait_group {pending};");
}

/// Where the `piece`-th 16 bytes of a `row` lie, of subtiles of `rows` rows that start at `start`.
#[cube]
pub fn piece_address(start: u32, row: u32, piece: u32, #[comptime] rows: usize) -> u32 {
    let subtile = start + (piece / 8u32) * comptime!((rows * ROW_BYTES) as u32);
    subtile + row * comptime!(ROW_BYTES as u32) + (((piece ^ row) % 8u32) << 4u32)
}
