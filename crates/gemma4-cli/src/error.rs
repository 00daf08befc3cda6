//! The error type of programs.

/// An error that is printed before the program exits.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
