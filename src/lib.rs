//! What the examples, benchmarks and tests share: the choice of a device, a model and its arguments, models of random weights,
//! terminals, training, problems with random data, timing, errors against a reference in f64, and what tests are made of.

pub mod accuracy;
pub mod cache_file;
pub mod device;
pub mod hub;
pub mod layers;
#[cfg(test)]
mod manifest;
pub mod model;
pub mod random;
pub mod report;
pub mod signals;
pub mod terminal;
#[cfg(feature = "flex")]
pub mod testing;
pub mod timing;
#[cfg(feature = "training")]
pub mod training;
pub mod workload;

use burn::tensor::DType;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};

/// An error to print and exit with.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// The dtypes of attention, by the names that command lines use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    /// Burn's name for it.
    pub fn burn(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }

    /// The one that Burn calls `dtype`.
    pub fn of(dtype: DType) -> Option<Self> {
        [Self::F32, Self::F16, Self::Bf16]
            .into_iter()
            .find(|known| known.burn() == dtype)
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        })
    }
}

/// Runs `work` and turns a panic into its message. Drivers and Burn's operators panic where a device is
/// missing, out of memory, or given a problem that they cannot do.
pub fn guarded<O>(work: impl FnOnce() -> O) -> Result<O, String> {
    // The message is reported by the caller, once, so the hook would only print it a second time.
    let hook = take_hook();
    set_hook(Box::new(|_| ()));
    let result = catch_unwind(AssertUnwindSafe(work));
    set_hook(hook);
    result.map_err(|payload| {
        payload
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| payload.downcast_ref::<&str>().map(|text| text.to_string()))
            .unwrap_or_else(|| "a panic without a message".into())
    })
}
