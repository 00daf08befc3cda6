//! Counts skipped steps, that is, steps with a NaN or infinite gradient. The count stays in device memory, so that the host
//! does not wait for the device at every step.

use burn::tensor::{DType, Device, Tensor};
use std::sync::{Arc, Mutex, PoisonError};

/// The count of skipped steps of a run. Each device has its own clone of this value. Every clone counts all skipped
/// steps of the run, and keeps its count in the memory of its device. All clones also share one copy of the latest
/// count, which the host reads.
#[derive(Clone, Debug, Default)]
pub struct SkippedSteps {
    /// The count of this clone, `[1]` in f32, in device memory.
    own: Option<Tensor<1>>,
    shared: Arc<Mutex<Option<Tensor<1>>>>,
}

impl SkippedSteps {
    /// Adds `is_skipped` to the count. `is_skipped`, `[1]` in f32, is 1 if the step is skipped and 0 otherwise.
    pub fn count(&mut self, is_skipped: Tensor<1>) {
        let count = match self.own.take() {
            Some(own) => own + is_skipped,
            None => is_skipped,
        };
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        *shared = Some(count.clone());
        self.own = Some(count);
    }

    /// Adds 1 to the count. The host calls this method when it skips a step itself, which it does for a model with a
    /// loss scale.
    pub fn count_one(&mut self, device: &Device) {
        self.count(Tensor::ones([1], (device, DType::F32)));
    }

    /// Moves the count of this clone to another device. The shared copy stays unchanged.
    pub fn to_device(self, device: &Device) -> Self {
        let own = self.own.map(|own| own.to_device(device));
        Self { own, ..self }
    }

    /// Reads the number of skipped steps from the device.
    pub fn value(&self) -> usize {
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let count = shared.clone();
        // The lock is released before the count is read, so that the next step can be counted during the read.
        drop(shared);
        count.map_or(0, |count| count.into_scalar::<f32>() as usize)
    }

    /// Returns a note about skipped steps, or `None` if no step was skipped.
    pub fn summary(&self) -> Option<String> {
        match self.value() {
            0 => None,
            1 => Some("1 step was left out: its gradients were NaN or infinite".into()),
            count => Some(format!(
                "{count} steps were left out: their gradients were NaN or infinite"
            )),
        }
    }
}
