//! How processes add up numbers.

use crate::Error;
use burn::tensor::Tensor;

/// A way to add up numbers of all processes. They call it in the same order, with as many numbers of the same dtype.
pub trait Exchange: Send + Sync {
    /// The sums of `[count]` numbers, bit by bit the same in every process.
    ///
    /// # Errors
    /// Where a process is gone, or the numbers are of a dtype that is not served.
    fn sum(&self, numbers: Tensor<1>) -> Result<Tensor<1>, Error>;

    /// Ends what is under way, whichever thread waits for it, which does not go on: the process ends.
    fn abort(&self) {}
}
