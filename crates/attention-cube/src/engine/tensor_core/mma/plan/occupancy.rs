//! The number of CTAs that run at once on a multiprocessor. Registers and shared memory limit this number.

/// Returns the number of CTAs that run at once on a multiprocessor. A CTA has `units` threads and `bytes` bytes of shared
/// memory. The device allows at most `shared_memory` bytes per CTA.
pub(super) fn cubes_per_multiprocessor(units: usize, bytes: usize, shared_memory: usize) -> usize {
    let by_registers = REGISTERS / (REGISTERS_PER_THREAD * units);
    by_registers
        .min(cubes_that_fit(bytes, shared_memory))
        .max(1)
}

/// The number of registers per multiprocessor, and the largest number of registers per thread. The plan assumes that
/// every thread uses the largest number.
const REGISTERS: usize = 65_536;
const REGISTERS_PER_THREAD: usize = 256;

/// The bytes of shared memory that the driver reserves per CTA.
const DRIVERS_BYTES: usize = 1024;

/// Returns the number of CTAs whose shared memory (`bytes` bytes each) fits a multiprocessor. The function assumes that a CTA
/// of `shared_memory` bytes, the device's limit, fills the multiprocessor.
pub(super) const fn cubes_that_fit(bytes: usize, shared_memory: usize) -> usize {
    (shared_memory + DRIVERS_BYTES) / (bytes + DRIVERS_BYTES)
}
