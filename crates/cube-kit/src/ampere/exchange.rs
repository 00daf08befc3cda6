//! Registers of a warp in shared memory, through which warps with the same fragments add theirs up: every four of them are 512 bytes, 16 a
//! lane, so that no two lanes meet in a bank.

use crate::hopper::ptx::value_of;
use crate::hopper::wgmma::registers;
use cubecl::prelude::*;

/// Registers that a lane moves at once.
const FOUR: usize = 4;

/// Bytes of four registers of all lanes.
pub const FOURS_BYTES: usize = 32 * 4 * FOUR;

/// Where this lane's registers lie, of those that start at `start`.
#[cube]
pub fn exchange_address(start: u32) -> u32 {
    start + UNIT_POS % 32u32 * comptime!(4 * FOUR as u32)
}

/// The lane's address, and its registers, of which `count` from the `first` on are stored.
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

/// Registers | the lane's address.
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

/// Stores `count` of a vector's registers, from the `first` on, whole fours, at [`exchange_address`].
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

/// Loads a vector's registers, whole fours, from where another warp stored them and a barrier showed them.
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
