//! Inline PTX for NVIDIA's Hopper (sm_90a): mbarriers, bulk copies by TMA, fences and register reallocation. The PTX of
//! matrix multiplications is in `hopper/wgmma.rs` and `hopper/gemm/mainloop.rs`.
//!
//! Addresses are byte addresses in the shared window (`.shared`). In a PTX text, `%N` is operand number `N`. The
//! outputs are numbered before the inputs. `gpu_asm!` requires that its text contains every operand once, so a trailing
//! PTX comment lists the operands.

use crate::nvidia::ptx::{plain, value_of, with_one, with_two};
use cubecl::prelude::*;
/// Lowers the number of registers per thread of this warpgroup to `registers`. `registers` must be below the number at
/// launch.
#[cube]
pub fn setmaxnreg_dec(#[comptime] registers: usize) {
    plain(comptime!(format!(
        "setmaxnreg.dec.sync.aligned.u32 {registers};\n"
    )));
}

/// Raises the number of registers per thread of this warpgroup to `registers`. `registers` must be above the number at
/// launch.
#[cube]
pub fn setmaxnreg_inc(#[comptime] registers: usize) {
    plain(comptime!(format!(
        "setmaxnreg.inc.sync.aligned.u32 {registers};\n"
    )));
}

/// Makes newly initialized barriers visible to TMA. The cube's other threads see these barriers only after a sync.
#[cube]
pub fn barrier_init_fence() {
    plain(comptime!(
        "fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\n".to_string()
    ));
}

/// Returns PTX that waits until the barrier at `address + offset` has completed its phase of parity `parity`.
///
/// The surrounding PTX must declare a predicate `waited`. `label` is the suffix of the jump labels, and must be unique
/// within the surrounding `{ … }` block.
pub fn wait_text(label: &str, address: &str, offset: usize, parity: &str) -> String {
    format!(
        "W{label}:\nmbarrier.try_wait.parity.shared::cta.b64 waited, [{address}+{offset}], {parity};\n\
         @waited bra D{label};\nbra W{label};\nD{label}:\n"
    )
}

/// Returns PTX that arrives `times` times at the barrier at `address`, if the predicate `elected` holds.
pub fn arrive_text(address: &str, times: usize) -> String {
    arrive_where_text("elected", address, times)
}

/// Returns PTX that arrives `times` times at the barrier at `address`, if the predicate with the given name holds.
pub fn arrive_where_text(predicate: &str, address: &str, times: usize) -> String {
    format!("@{predicate} mbarrier.arrive.release.cta.shared::cta.b64 _, [{address}], {times};\n")
}

/// Waits until the barrier's phase of parity `parity` is complete.
#[cube]
pub fn barrier_wait(address: u32, parity: u32) {
    with_two(
        address,
        parity,
        comptime!(format!(
            "{{\n.reg .pred waited;\n{}}}\n",
            wait_text("", "%0", 0, "%1")
        )),
    );
}

/// Waits at two barriers. The function tests both barriers before it waits for the first barrier, so that the two tests
/// overlap.
#[cube]
pub fn barrier_wait_both(first: u32, first_parity: u32, second: u32, second_parity: u32) {
    let text = comptime!(wait_both_text());
    gpu_asm!(
        "{text} // {first} {first_parity} {second} {second_parity}\n",
        first = in(_) value_of::<u32>(first),
        first_parity = in(_) value_of::<u32>(first_parity),
        second = in(_) value_of::<u32>(second),
        second_parity = in(_) value_of::<u32>(second_parity)
    );
}

/// Returns the PTX of [`barrier_wait_both()`]. Inputs: address and parity of the first barrier, then address and parity
/// of the second barrier.
fn wait_both_text() -> String {
    let ask = |predicate: &str, address: usize| {
        let parity = address + 1;
        format!("mbarrier.try_wait.parity.shared::cta.b64 {predicate}, [%{address}], %{parity};\n")
    };
    let wait = |predicate: &str, address: usize| {
        let text = wait_text(
            predicate,
            &format!("%{address}"),
            0,
            &format!("%{}", address + 1),
        );
        format!("@{predicate} bra {predicate}_done;\n{text}{predicate}_done:\n")
    };
    format!(
        "{{\n.reg .pred waited, first, second;\n{}{}{}{}}}\n",
        ask("first", 0),
        ask("second", 2),
        wait("first", 0),
        wait("second", 2)
    )
}

/// Arrives at a barrier if `elected` is not 0.
#[cube]
pub fn barrier_arrive(address: u32, elected: u32) {
    with_two(
        address,
        elected,
        comptime!(format!(
            "{{\n.reg .pred elected;\nsetp.ne.b32 elected, %1, 0;\n{}}}\n",
            arrive_text("%0", 1)
        )),
    );
}

/// Arrives at a barrier. The barrier's current phase then also waits for `bytes` more bytes of TMA copies.
#[cube]
pub fn barrier_expect(address: u32, #[comptime] bytes: usize) {
    with_one(
        address,
        comptime!(format!(
            "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], {bytes};\n"
        )),
    );
}

/// Does the same as [`barrier_expect()`], for a number of bytes that is known only at runtime.
#[cube]
pub fn barrier_expect_bytes(address: u32, bytes: u32) {
    with_two(
        address,
        bytes,
        comptime!(
            "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;\n".to_string()
        ),
    );
}

/// Copies a box to `target` in shared memory, and signals `barrier` when the copy is complete. `map` is the address of
/// a tensor map for a tensor `[batch, heads, length, columns]`.
#[cube]
pub fn tma_load(target: u32, map: u64, batch: u32, head: u32, row: i32, column: u32, barrier: u32) {
    gpu_asm!(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [{target}], [{map}, {{{column}, {row}, {head}, {batch}}}], [{barrier}];",
        target = in(_) value_of::<u32>(target),
        map = in(_) value_of::<u64>(map),
        column = in(_) value_of::<u32>(column),
        row = in(_) value_of::<i32>(row),
        head = in(_) value_of::<u32>(head),
        batch = in(_) value_of::<u32>(batch),
        barrier = in(_) value_of::<u32>(barrier)
    );
}

/// Copies a box to `target` in shared memory, and signals `barrier` when the copy is complete. The box begins at
/// subtile `subtile` of the tensor. `map` is the address of a tensor map for a tensor
/// `[batch, heads, subtiles, length, 64]`, where a subtile has 64 columns.
#[cube]
pub fn tma_load_subtiles(
    target: u32,
    map: u64,
    batch: u32,
    head: u32,
    row: i32,
    subtile: u32,
    barrier: u32,
) {
    gpu_asm!(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [{target}], [{map}, {{{column}, {row}, {subtile}, {head}, {batch}}}], [{barrier}];",
        target = in(_) value_of::<u32>(target),
        map = in(_) value_of::<u64>(map),
        column = in(_) 0u32,
        row = in(_) value_of::<i32>(row),
        subtile = in(_) value_of::<u32>(subtile),
        head = in(_) value_of::<u32>(head),
        batch = in(_) value_of::<u32>(batch),
        barrier = in(_) value_of::<u32>(barrier)
    );
}

/// Prefetches a box into the L2 cache. `map` is the address of a tensor map for a tensor
/// `[batch, heads, subtiles, length, 64]`, where a subtile has 64 columns.
#[cube]
pub fn tma_prefetch_subtiles(map: u64, batch: u32, head: u32, row: i32, subtile: u32) {
    gpu_asm!(
        "cp.async.bulk.prefetch.tensor.5d.L2.global.tile [{map}, {{{column}, {row}, {subtile}, {head}, {batch}}}];",
        map = in(_) value_of::<u64>(map),
        column = in(_) 0u32,
        row = in(_) value_of::<i32>(row),
        subtile = in(_) value_of::<u32>(subtile),
        head = in(_) value_of::<u32>(head),
        batch = in(_) value_of::<u32>(batch)
    );
}

/// Copies a box from `source` in shared memory to a tensor `[batch, heads, length, columns]`. `map` is the address of
/// the tensor's tensor map. Elements outside of the tensor are not written.
#[cube]
pub fn tma_store(map: u64, source: u32, batch: u32, head: u32, row: i32, column: u32) {
    gpu_asm!(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [{map}, {{{column}, {row}, {head}, {batch}}}], [{source}];\ncp.async.bulk.commit_group;",
        map = in(_) value_of::<u64>(map),
        source = in(_) value_of::<u32>(source),
        batch = in(_) value_of::<u32>(batch),
        head = in(_) value_of::<u32>(head),
        row = in(_) value_of::<i32>(row),
        column = in(_) value_of::<u32>(column)
    );
}

/// Waits until this thread's TMA stores have finished reading shared memory.
#[cube]
pub fn tma_store_wait() {
    plain(comptime!("cp.async.bulk.wait_group.read 0;\n".to_string()));
}

/// Makes this thread's writes to shared memory visible to the tensor cores and TMA (async proxy).
#[cube]
pub fn async_proxy_fence() {
    plain(comptime!("fence.proxy.async.shared::cta;\n".to_string()));
}

/// Stores four 8 × 8 matrices of half-precision elements in shared memory. Each lane passes the address of one row,
/// which has 16 bytes.
#[cube]
pub fn store_matrices(address: u32, a: u32, b: u32, c: u32, d: u32) {
    gpu_asm!(
        "stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [{x}], {{{a}, {b}, {c}, {d}}};",
        x = in(_) value_of::<u32>(address),
        a = in(_) value_of::<u32>(a),
        b = in(_) value_of::<u32>(b),
        c = in(_) value_of::<u32>(c),
        d = in(_) value_of::<u32>(d)
    );
}
