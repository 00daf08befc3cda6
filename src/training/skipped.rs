//! Steps whose gradients were NaN or infinite, and which the optimizer left out. They are counted on the device, and the count is
//! read where a line of the log is printed, so that no step waits for the device.

use burn::tensor::{DType, Device, Tensor};
use std::sync::{Arc, Mutex, PoisonError};

/// The count of one run. Copies share it; each device's copy counts the same steps.
#[derive(Clone, Debug, Default)]
pub struct Skipped {
    /// `[1]` in f32: this copy's count.
    own: Option<Tensor<1>>,
    shared: Arc<Mutex<Option<Tensor<1>>>>,
}

impl Skipped {
    /// Counts a step by `is_skipped`, `[1]` in f32: 1 where the step is left out, else 0.
    pub fn count(&mut self, is_skipped: Tensor<1>) {
        let count = match self.own.take() {
            Some(own) => own + is_skipped,
            None => is_skipped,
        };
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        *shared = Some(count.clone());
        self.own = Some(count);
    }

    /// Counts a step that the host knows is left out.
    pub fn count_one(&mut self, device: &Device) {
        self.count(Tensor::ones([1], (device, DType::F32)));
    }

    /// The same count for another device.
    pub fn to_device(self, device: &Device) -> Self {
        let own = self.own.map(|own| own.to_device(device));
        Self { own, ..self }
    }

    /// The steps that were left out, read from the device.
    pub fn value(&self) -> usize {
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let count = shared.clone();
        // The next step may be counted while this count is read.
        drop(shared);
        count.map_or(0, |count| count.into_scalar::<f32>() as usize)
    }

    /// The note about steps that were left out, if there are any.
    pub fn told(&self) -> Option<String> {
        match self.value() {
            0 => None,
            1 => Some("1 step was left out: its gradients were NaN or infinite".into()),
            count => Some(format!(
                "{count} steps were left out: their gradients were NaN or infinite"
            )),
        }
    }
}
