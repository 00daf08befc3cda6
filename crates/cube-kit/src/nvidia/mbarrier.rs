//! Barriers in shared memory (mbarriers) with the instructions of sm_80 (Ampere). A warp can arrive at a barrier,
//! continue its work, and wait at the barrier later. For Hopper's instructions see [`ptx`](crate::hopper::ptx).

use crate::nvidia::ptx::{value_of, with_one};
use cubecl::prelude::*;

/// Initializes the barrier at `address`. Each phase of the barrier is complete after `arrivals` arrivals.
#[cube]
pub fn barrier_init(address: u32, #[comptime] arrivals: usize) {
    with_one(
        address,
        comptime!(format!("mbarrier.init.shared::cta.b64 [%0], {arrivals};\n")),
    );
}

/// Makes this thread arrive at the barrier at `address` as soon as all copies that the thread has started are complete.
/// Other threads that wait at the barrier then see the copied data.
#[cube]
pub fn arrive_with_copies(address: u32) {
    gpu_asm!(
        "cp.async.mbarrier.arrive.noinc.shared.b64 [{address}];",
        address = in(_) value_of::<u32>(address)
    );
}

/// Makes the warp arrive at the barrier at `address` once, through its first lane. All lanes must have finished their
/// accesses to shared memory before the call.
#[cube]
pub fn arrive_as_warp(address: u32) {
    let text = comptime!(arrive_text());
    gpu_asm!(
        "{text} // {address} {lane}\n",
        address = in(_) value_of::<u32>(address),
        lane = in(_) value_of::<u32>(UNIT_POS % 32u32)
    );
}

/// Waits until the barrier has completed its phase of parity `parity`. The phase before a barrier's first phase has
/// parity 1 and counts as complete.
#[cube]
pub fn await_phase(address: u32, parity: u32) {
    let text = comptime!(wait_text());
    gpu_asm!(
        "{text} // {address} {parity}\n",
        address = in(_) value_of::<u32>(address),
        parity = in(_) value_of::<u32>(parity)
    );
}

/// Returns the PTX of [`arrive_as_warp()`]. Inputs: the address, and the lane.
fn arrive_text() -> String {
    String::from(
        "{\n.reg .pred first;\n.reg .b64 state;\nsetp.eq.u32 first, %1, 0;\n\
         @first mbarrier.arrive.shared.b64 state, [%0];\n}\n",
    )
}

/// Returns the PTX of [`await_phase()`]. Inputs: the address, and the parity.
fn wait_text() -> String {
    String::from(
        "{\n.reg .pred complete;\nW:\nmbarrier.test_wait.parity.shared.b64 complete, [%0], %1;\n\
         @complete bra D;\nbra W;\nD:\n}\n",
    )
}
