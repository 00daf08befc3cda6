//! What processes of a run tell one another beside their numbers.

use crate::Error;

/// A way between all processes. They call its methods in the same order.
pub trait Link: Send + Sync {
    /// What each process gives, by their ranks.
    ///
    /// # Errors
    /// Where a process is gone.
    fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Error>;

    /// Ends the others with `message`, the error of this one; where it takes all of them, this one with `code`.
    fn fail(&self, message: &str, code: i32);

    /// Takes leave, so that the end of this process is no failure.
    fn end(&self);
}

/// Of a process that is alone.
pub struct Alone;

impl Link for Alone {
    fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        Ok(vec![own.to_vec()])
    }

    fn fail(&self, _message: &str, _code: i32) {}

    fn end(&self) {}
}
