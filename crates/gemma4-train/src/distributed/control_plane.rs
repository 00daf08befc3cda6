//! The interface for control messages among the processes of a run.

use crate::Error;

/// A connection among all processes. All processes must call its methods in the same order.
pub trait ControlPlane: Send + Sync {
    /// Returns the bytes of all processes, in the order of their ranks. `own` are the bytes of this process.
    ///
    /// # Errors
    /// Returns an error if a process is gone.
    fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Error>;

    /// Reports `message`, the error of this process, and ends all other processes. With MPI, this call also ends this
    /// process with the exit code `code`.
    fn fail(&self, message: &str, code: i32);

    /// Tells the other processes that this process ends without an error.
    fn end(&self);
}

/// The control plane of a run with a single process.
pub struct SingleProcess;

impl ControlPlane for SingleProcess {
    fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        Ok(vec![own.to_vec()])
    }

    fn fail(&self, _message: &str, _code: i32) {}

    fn end(&self) {}
}
