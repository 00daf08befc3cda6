//! Messages to the user through the `log` crate: notes at level `Info`, and fatal errors at level `Error`.

use log::LevelFilter;
use std::fmt::Display;

/// The target of this crate's log records, which distinguishes them from the records of other crates.
pub const LOG_TARGET: &str = "gemma4_train";

/// Logs a note about the progress or a decision of a run.
pub(crate) fn note(line: impl Display) {
    log::info!(target: LOG_TARGET, "{line}");
}

/// Logs the error that ends this process. Without a logger, the message is printed on standard error.
pub(crate) fn fatal(message: &str) {
    match log::max_level() {
        LevelFilter::Off => eprintln!("error: {message}"),
        _ => log::error!(target: LOG_TARGET, "{message}"),
    }
}
