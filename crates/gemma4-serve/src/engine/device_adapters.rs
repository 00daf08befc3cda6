//! The adapters on the device, which the engine's thread owns.

use super::adapters::{AdapterUse, Load, Place, ServedAdapter};
use crate::error::{ErrorKind, RequestError};
use burn_gemma4::{Gemma4Model, LoadedAdapter};
use std::sync::Arc;

/// The adapters on the device.
#[derive(Debug, Default)]
pub(super) struct DeviceAdapters {
    loaded: Vec<DeviceAdapter>,
}

#[derive(Debug)]
struct DeviceAdapter {
    usage: AdapterUse,
    tensors: Arc<LoadedAdapter>,
    /// Counts the adapter until it is freed.
    _place: Arc<Place>,
}

impl DeviceAdapters {
    /// Uploads an adapter, and reports the outcome.
    pub fn load(&mut self, load: Load, model: &Gemma4Model) {
        let outcome = match load.weights.upload(model) {
            Ok(uploaded) => {
                self.loaded.push(DeviceAdapter {
                    usage: load.adapter.usage(),
                    tensors: Arc::new(uploaded),
                    _place: load.place,
                });
                Ok(())
            }
            Err(error) => {
                // Free the place first, so that the client can load another adapter at once.
                drop(load.place);
                Err(error.into())
            }
        };
        // Ignore a failed send: the thread that waited for the adapter has ended.
        let _ = load.outcome.send(outcome);
    }

    /// Returns the device tensors of an adapter.
    ///
    /// # Errors
    /// Returns [`ErrorKind::NotFound`] if the adapter belongs to another engine.
    pub fn get(&self, adapter: &ServedAdapter) -> Result<&Arc<LoadedAdapter>, RequestError> {
        let mut loaded = self.loaded.iter();
        let found = loaded.find(|loaded| loaded.usage.is_of(adapter));
        found.map(|loaded| &loaded.tensors).ok_or_else(|| {
            let message = format!("model: the adapter {:?} is not loaded", adapter.name());
            RequestError::new(ErrorKind::NotFound, message)
        })
    }

    /// Removes the adapters that are unloaded and that no request uses. Calls `free` for each of them.
    pub fn remove_unused(&mut self, mut free: impl FnMut(&LoadedAdapter)) {
        self.loaded.retain(|loaded| {
            let has_ended = loaded.usage.has_ended();
            if has_ended {
                free(&loaded.tensors);
            }
            !has_ended
        });
    }
}
