//! The interface for sums of tensors over all processes.

use crate::Error;
use burn::tensor::Tensor;

/// An all-reduce (sum) over all processes. All processes must make the same calls in the same order, with equal numbers of
/// elements and equal dtypes.
pub trait Collective: Send + Sync {
    /// Returns the elementwise sums of `numbers`, `[count]`, over all processes. The sums are bitwise equal in all
    /// processes.
    ///
    /// # Errors
    /// Returns an error if a process is gone, or if the dtype is not supported.
    fn sum(&self, numbers: Tensor<1>) -> Result<Tensor<1>, Error>;

    /// Aborts pending sums. Any thread may call this method. The process must end afterwards, so a thread that waits
    /// for a sum need not continue.
    fn abort(&self) {}
}
