//! The number of CTAs that run at once on a multiprocessor. Registers and shared memory limit this number.

/// Returns the number of CTAs that run at once on a multiprocessor. Each CTA has `units` threads and takes `bytes`
/// bytes of shared memory. `shared_memory` is the largest number of bytes that the device allows per CTA.
pub(super) fn cubes_per_multiprocessor(units: usize, bytes: usize, shared_memory: usize) -> usize {
    let by_registers = REGISTERS / (REGISTERS_PER_THREAD * units);
    by_registers
        .min(cubes_that_fit(bytes, shared_memory))
        .max(1)
}

/// Two numbers: the registers per multiprocessor, and the largest number of registers per thread. The plan assumes that
/// every thread uses this largest number.
const REGISTERS: usize = 65_536;
const REGISTERS_PER_THREAD: usize = 256;

/// The bytes of shared memory that the driver reserves per CTA.
const DRIVERS_BYTES: usize = 1024;

/// Returns how many CTAs fit the shared memory of a multiprocessor. Each CTA takes `bytes` bytes. `shared_memory` is
/// the device's limit per CTA. The function assumes that one CTA with `shared_memory` bytes fills the multiprocessor.
pub(super) const fn cubes_that_fit(bytes: usize, shared_memory: usize) -> usize {
    (shared_memory + DRIVERS_BYTES) / (bytes + DRIVERS_BYTES)
}
