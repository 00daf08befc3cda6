//! A flag that cancels running generations.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// A flag by which another thread stops generations. All clones share one flag.
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
    /// Creates a flag that is not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the flag. All generations with this flag in their options stop as soon as possible. Later generations with
    /// this flag also stop, until [`reset`](Self::reset) clears the flag.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// True if the flag is set.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Clears the flag, so that generations can run again.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// Two `Cancellation` values are equal if they are clones of one flag.
impl PartialEq for Cancellation {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
