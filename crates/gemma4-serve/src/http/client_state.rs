//! The state of a request's client: it waits for the answer, or it has left.

use crate::error::{ErrorKind, RequestError};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Belongs to the handler of a request, which is dropped when the client leaves.
#[derive(Debug, Default)]
pub(crate) struct ClientGuard(ClientState);

/// Tells work on another thread whether the client has left. Clones share the state.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClientState(Arc<AtomicBool>);

impl ClientGuard {
    /// Returns the state of the client.
    pub fn state(&self) -> ClientState {
        self.0.clone()
    }
}

impl Drop for ClientGuard {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}

impl ClientState {
    /// Returns an error if the client has left.
    pub fn check(&self) -> Result<(), RequestError> {
        match self.0.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(RequestError::new(ErrorKind::Timeout, "the client has left")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_fails_after_the_guard_is_dropped() {
        let guard = ClientGuard::default();
        let state = guard.state();
        assert_eq!(state.check(), Ok(()));
        drop(guard);
        assert!(state.check().is_err());
    }
}
