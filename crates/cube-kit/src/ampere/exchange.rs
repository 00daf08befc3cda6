//! Exchanges registers between warps through shared memory, to add the partial sums of several warps.
//!
//! Four registers of all 32 lanes occupy 512 bytes, 16 consecutive bytes per lane, so bank conflicts do not occur.

use crate::hopper::wgmma::registers;
use crate::nvidia::ptx::value_of;
use cubecl::prelude::*;

/// The number of registers that a lane stores or loads with one instruction.
const FOUR: usize = 4;

/// The size in bytes of four registers of all 32 lanes.
pub const FOURS_BYTES: usize = 32 * 4 * FOUR;

/// Returns the shared-memory address for this lane's registers, in an exchange area that starts at `start`.
#[cube]
pub fn exchange_address(start: u32) -> u32 {
    start + UNIT_POS % 32u32 * comptime!(4 * FOUR as u32)
}

/// Returns PTX that stores `count` registers, starting at register `first`. Inputs: the lane's address, and the
/// registers.
fn store_text(first: usize, count: usize) -> String {
    (0..count / FOUR)
        .map(|four| {
            let values = registers(1 + first + FOUR * four, FOUR);
            format!(
                "st.shared.v4.b32 [%0+{}], {{{values}}};\n",
                four * FOURS_BYTES
            )
        })
        .collect()
}

/// Returns PTX that loads `count` registers. Outputs: the registers. Input: the lane's address.
fn load_text(count: usize) -> String {
    (0..count / FOUR)
        .map(|four| {
            let values = registers(FOUR * four, FOUR);
            format!(
                "ld.shared.v4.b32 {{{values}}}, [%{count}+{}];\n",
                four * FOURS_BYTES
            )
        })
        .collect()
}

/// Stores `count` registers of a register vector, starting at register `first`, at the lane's [`exchange_address()`].
/// `count` is a multiple of 4.
#[cube]
pub fn store_registers<N: Size>(
    address: u32,
    values: Vector<f32, N>,
    #[comptime] first: usize,
    #[comptime] count: usize,
) {
    let text = comptime!(store_text(first, count));
    gpu_asm!(
        "{text} // {address} {values}\n",
        address = in(_) value_of::<u32>(address),
        values = in(_) value_of::<Vector<f32, N>>(values)
    );
}

/// Loads `count` registers that another warp has stored. `count` is a multiple of 4. There must be a barrier between
/// the store and the load.
#[cube]
pub fn load_registers<N: Size>(address: u32, #[comptime] count: usize) -> Vector<f32, N> {
    let text = comptime!(load_text(count));
    let values: Vector<f32, N>;
    gpu_asm!(
        "{text} // {values} {address}\n",
        values = out(_) values,
        address = in(_) value_of::<u32>(address)
    );
    values
}
