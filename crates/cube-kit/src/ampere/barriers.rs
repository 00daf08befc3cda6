//! Barriers in shared memory as sm_80 (Ampere) has them: a warp arrives and goes on, and waits later, if at all. What
//! [`ptx`](crate::hopper::ptx) has of them arrives and waits by Hopper's instructions.

use crate::hopper::ptx::value_of;
use cubecl::prelude::*;

/// Arrives at the barrier at `address` once all copies that this thread has started are there; others that wait for it see them.
#[cube]
pub fn arrive_with_copies(address: u32) {
    gpu_asm!(
        "cp.async.mbarrier.arrive.noinc.shared.b64 [{address}];",
        address = in(_) value_of::<u32>(address)
    );
}

/// The warp arrives at the barrier at `address`, once, when it has read what it was to read.
#[cube]
pub fn arrive_as_warp(address: u32) {
    let text = comptime!(arrive_text());
    gpu_asm!(
        "{text} // {address} {lane}\n",
        address = in(_) value_of::<u32>(address),
        lane = in(_) value_of::<u32>(UNIT_POS % 32u32)
    );
}

/// Waits until the barrier's phase of this parity is complete; that before a barrier's first has parity 1, and is.
#[cube]
pub fn await_phase(address: u32, parity: u32) {
    let text = comptime!(wait_text());
    gpu_asm!(
        "{text} // {address} {parity}\n",
        address = in(_) value_of::<u32>(address),
        parity = in(_) value_of::<u32>(parity)
    );
}

/// The address, and the lane.
fn arrive_text() -> String {
    String::from(
        "{\n.reg .pred first;\n.reg .b64 state;\nsetp.eq.u32 first, %1, 0;\n\
         @first mbarrier.arrive.shared.b64 state, [%0];\n}\n",
    )
}

/// The address, and the parity.
fn wait_text() -> String {
    String::from(
        "{\n.reg .pred complete;\nW:\nmbarrier.test_wait.parity.shared.b64 complete, [%0], %1;\n\
         @complete bra D;\nbra W;\nD:\n}\n",
    )
}
