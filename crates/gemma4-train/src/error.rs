//! Errors of training.

use std::fmt;

/// An error with a message for the user.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// An error in the user's settings, as opposed to a failure of the machine.
///
/// Programs can find this error by `downcast_ref`, for example to choose their exit code.
#[derive(Debug)]
pub struct InvalidArgument(pub String);

impl fmt::Display for InvalidArgument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for InvalidArgument {}
