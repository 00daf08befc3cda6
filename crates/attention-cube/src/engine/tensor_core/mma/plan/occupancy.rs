//! The number of CTAs that run at once on a multiprocessor. Registers and shared memory limit this number.

/// Returns the number of CTAs that run at once on a multiprocessor. A CTA has `units` threads and takes `bytes` bytes of shared
/// memory. The device lets a CTA take at most `shared_memory` bytes.
pub(super) fn cubes_per_multiprocessor(units: usize, bytes: usize, shared_memory: usize) -> usize {
    let by_registers = REGISTERS / (REGISTERS_PER_THREAD * units);
    by_registers
        .min(cubes_that_fit(bytes, shared_memory))
        .max(1)
}

/// The number of registers per multiprocessor, and the largest number of registers per thread. The plan counts every thread
/// with this largest number, since the kernels may need nearly that many.
const REGISTERS: usize = 65_536;
const REGISTERS_PER_THREAD: usize = 256;

/// The bytes of shared memory that the driver reserves per CTA.
const DRIVERS_BYTES: usize = 1024;

/// Returns the number of CTAs whose shared memory fits a multiprocessor. A CTA takes `bytes` bytes. The device lets a CTA
/// take at most `shared_memory` bytes, and one CTA of this size is assumed to fill the multiprocessor.
pub(super) const fn cubes_that_fit(bytes: usize, shared_memory: usize) -> usize {
    (shared_memory + DRIVERS_BYTES) / (bytes + DRIVERS_BYTES)
}
