//! The number of CTAs that run at once on a multiprocessor. Registers and shared memory limit this number.

/// The number of CTAs that run at once on a multiprocessor. A CTA has `units` threads and takes `bytes` of shared memory, and may
/// take at most `shared_memory` bytes.
pub(super) fn cubes_per_multiprocessor(units: usize, bytes: usize, shared_memory: usize) -> usize {
    let by_registers = REGISTERS / (REGISTERS_PER_THREAD * units);
    by_registers
        .min(cubes_that_fit(bytes, shared_memory))
        .max(1)
}

/// The number of registers per multiprocessor, and the largest number of registers per thread. The plan counts every thread
/// with this largest number, since the kernels may need nearly as many.
const REGISTERS: usize = 65_536;
const REGISTERS_PER_THREAD: usize = 256;

/// Bytes of shared memory that the driver reserves per CTA.
const DRIVERS_BYTES: usize = 1024;

/// The number of CTAs whose shared memory fits a multiprocessor. A CTA takes `bytes` bytes, and may take at most `shared_memory`.
pub(super) const fn cubes_that_fit(bytes: usize, shared_memory: usize) -> usize {
    (shared_memory + DRIVERS_BYTES) / (bytes + DRIVERS_BYTES)
}
