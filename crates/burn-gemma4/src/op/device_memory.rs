//! The memory of a device.

#[cfg(feature = "cube")]
use crate::op;
use burn::tensor::Device;

/// The sizes of a device's memory. Each size is `None` if the device does not report it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// The size of the largest possible buffer, in bytes.
    pub largest_buffer: Option<usize>,
    /// The total size of the memory, in bytes.
    pub total: Option<usize>,
}

impl DeviceMemory {
    /// Returns the memory sizes of `device`. A CPU reports no sizes.
    pub fn of(device: &Device) -> Self {
        let _ = device;
        #[cfg(feature = "cube")]
        if let Some(memory) = op::memory(device) {
            return memory;
        }
        Self::default()
    }

    /// True if the device can allocate one buffer of `bytes`, or does not report its limit.
    pub(crate) fn has_buffer(self, bytes: usize) -> bool {
        self.largest_buffer.is_none_or(|largest| bytes <= largest)
    }

    /// True if weights of `bytes` leave at least an eighth of the memory free, or if the memory size is unknown.
    pub(crate) fn holds(self, bytes: usize) -> bool {
        self.total.is_none_or(|total| bytes <= total / 8 * 7)
    }
}
