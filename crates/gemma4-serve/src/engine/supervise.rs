//! The supervision of the engine's thread: errors and panics become the reason of the engine's failure.

use super::shared::Shared;
use burn_gemma4::Gemma4Error;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs the work of the engine's thread, and reports a failure at once. The caller still owns the requests then, so the
/// engine does not look idle while the requests are dropped.
pub(super) fn report_failure(
    shared: &Shared,
    work: impl FnOnce() -> Result<(), Gemma4Error>,
) -> Result<(), String> {
    let outcome = supervise(work);
    if outcome.is_err() {
        shared.end(outcome.clone());
    }
    outcome
}

/// Runs the work of the engine's thread. Returns the reason if the work fails or panics.
pub(super) fn supervise<E: ToString>(work: impl FnOnce() -> Result<(), E>) -> Result<(), String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(outcome) => outcome.map_err(|error| error.to_string()),
        Err(panic) => Err(text(&*panic)),
    }
}

/// Returns the message of a panic.
fn text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()))
        .unwrap_or_else(|| "a panic without a message".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn supervise_gives_the_reason_of_an_error_or_panic() {
        assert_eq!(supervise(|| Ok::<(), String>(())), Ok(()));
        let failed = supervise(|| Err(Gemma4Error::Device("out of memory".into())));
        assert_eq!(failed, Err("device: out of memory".into()));
        let number = 3;
        let panicked = supervise::<String>(|| panic!("kernel {number} failed"));
        assert_eq!(panicked, Err("kernel 3 failed".into()));
    }
}
