//! Generations that end before they are done.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// Ends generations from elsewhere. Clones are one and the same.
///
/// # Examples
/// ```no_run
/// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
/// # let gemma = burn_gemma4::Gemma4::from_pretrained("gemma-4-E2B-it", &burn::tensor::Device::default())?;
/// use burn_gemma4::{Cancellation, GenerateOptions};
/// use std::{ops::ControlFlow, thread, time::Duration};
///
/// let cancellation = Cancellation::new();
/// let options = GenerateOptions { cancellation: Some(cancellation.clone()), ..gemma.options() };
/// thread::spawn(move || {
///     thread::sleep(Duration::from_secs(10));
///     cancellation.cancel();
/// });
/// gemma.generate("A long prompt", &options, |_| ControlFlow::Continue(()))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Cancellation(Arc<AtomicBool>);

impl Cancellation {
    /// One that cancels nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends the generations that have this among their options as soon as they can, and those that begin later, until
    /// [`reset`](Self::reset).
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether they are to end.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Lets generations begin again.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// One and the same, not two in the same state.
impl PartialEq for Cancellation {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
