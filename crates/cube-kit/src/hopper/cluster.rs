//! Clusters of cubes, which can write to each other's shared memory (distributed shared memory).
//!
//! A cluster barrier has two halves: arriving and waiting. A thread arrives, continues, and waits later. Every thread
//! of the cluster must call the two halves alternately.

use crate::nvidia::ptx::{plain, value_of};
use cubecl::prelude::*;

/// Arrives at the cluster's barrier. The thread's earlier writes are visible to every thread that has passed the
/// matching [`cluster_wait()`].
#[cube]
pub fn cluster_arrive() {
    plain(comptime!("barrier.cluster.arrive.release;\n".to_string()));
}

/// Arrives at the cluster's barrier, without publishing the thread's writes. The release of writes would be a fence for
/// the whole GPU, which also waits for unrelated memory operations of the thread.
#[cube]
pub fn cluster_arrive_relaxed() {
    plain(comptime!("barrier.cluster.arrive.relaxed;\n".to_string()));
}

/// Waits until all threads of the cluster have arrived at the cluster's barrier.
#[cube]
pub fn cluster_wait() {
    plain(comptime!("barrier.cluster.wait.acquire;\n".to_string()));
}

/// Returns the cluster-wide address of a location in the shared memory of cube `rank`. This location has the same
/// offset as `address` has in the shared memory of this cube.
#[cube]
pub fn remote_address(address: u32, rank: u32) -> u32 {
    let remote: u32;
    gpu_asm!(
        "mapa.shared::cluster.u32 {remote}, {address}, {rank};",
        remote = out(_) remote,
        address = in(_) value_of::<u32>(address),
        rank = in(_) value_of::<u32>(rank)
    );
    remote
}

/// Writes an f32 number to a cluster-wide address of shared memory.
#[cube]
pub fn store_remote(address: u32, value: f32) {
    gpu_asm!(
        "st.shared::cluster.f32 [{address}], {value};",
        address = in(_) value_of::<u32>(address),
        value = in(_) value_of::<f32>(value)
    );
}

/// Writes an f32 number to shared memory of a cube of the cluster, and adds 4 bytes to those that the barrier of that
/// cube has received. Threads that have waited for the barrier see the number. `address` and `barrier` are cluster-wide
/// addresses of the same cube.
#[cube]
pub fn store_remote_async(address: u32, value: f32, barrier: u32) {
    gpu_asm!(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [{address}], {value}, [{barrier}];",
        address = in(_) value_of::<u32>(address),
        value = in(_) value_of::<u32>(u32::reinterpret(value)),
        barrier = in(_) value_of::<u32>(barrier)
    );
}
