//! The adapters that requests can select by name, and the messages that load them.

use super::shared::Message;
use super::{Engine, handle::draining};
use crate::error::{ErrorKind, RequestError};
use burn_gemma4::AdapterWeights;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};

/// The longest name of an adapter, in bytes.
const LONGEST_NAME: usize = 128;

/// An adapter that a request selects. The engines keep the adapter on their devices as long as a clone of this value
/// exists. A request that has selected an adapter can therefore finish after the adapter was unloaded.
#[derive(Clone, Debug)]
pub struct ServedAdapter(Arc<Entry>);

#[derive(Debug)]
struct Entry {
    name: String,
    /// The number of the load. A name can be loaded again, but no two loads have the same number.
    load: u64,
    /// The inboxes of the engines that have the adapter.
    inboxes: Vec<mpsc::Sender<Message>>,
}

impl Drop for Entry {
    /// Wakes the engines' threads, which then free the adapter.
    fn drop(&mut self) {
        for inbox in &self.inboxes {
            // An error means that the thread has ended already.
            let _ = inbox.send(Message::Wake);
        }
    }
}

impl ServedAdapter {
    /// The name of the adapter.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The number of the load, which no other load of the engines has.
    pub(super) fn load(&self) -> u64 {
        self.0.load
    }

    /// Returns the use of the adapter, which does not keep the adapter on the device.
    pub(super) fn usage(&self) -> AdapterUse {
        AdapterUse(Arc::downgrade(&self.0))
    }
}

/// The use of an adapter by requests and by its name.
#[derive(Debug)]
pub(super) struct AdapterUse(Weak<Entry>);

impl AdapterUse {
    /// True if the adapter is unloaded and all requests that selected it have ended.
    pub fn has_ended(&self) -> bool {
        self.0.strong_count() == 0
    }

    pub fn is_of(&self, adapter: &ServedAdapter) -> bool {
        std::ptr::eq(self.0.as_ptr(), Arc::as_ptr(&adapter.0))
    }
}

/// One of the `max_adapters` places. An adapter has its place until its memory is free on all devices.
#[derive(Debug)]
pub(super) struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// An adapter on its way to the engine's thread.
pub(super) struct Load {
    pub adapter: ServedAdapter,
    pub place: Arc<Place>,
    pub weights: AdapterWeights,
    pub outcome: mpsc::Sender<Result<(), RequestError>>,
}

/// The named adapters of one engine, or of all engines of a pool.
#[derive(Debug)]
pub(super) struct AdapterRegistry {
    /// The largest number of adapters.
    most: usize,
    count: Arc<AtomicUsize>,
    /// The number of loads so far.
    loads: AtomicU64,
    /// The adapters by name. An adapter is `None` while it is being loaded.
    named: Mutex<BTreeMap<String, Option<ServedAdapter>>>,
}

impl AdapterRegistry {
    pub fn new(most: usize) -> Self {
        Self {
            most,
            count: Arc::new(AtomicUsize::new(0)),
            loads: AtomicU64::new(0),
            named: Mutex::default(),
        }
    }

    fn named(&self) -> MutexGuard<'_, BTreeMap<String, Option<ServedAdapter>>> {
        // Ignore a poisoned lock: each change of the map is a single insertion or removal.
        self.named.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves a name and a place for a new adapter. Requests cannot select the adapter yet.
    fn reserve(
        &self,
        name: &str,
        engines: &[Engine],
    ) -> Result<(Reserved<'_>, Place), RequestError> {
        let refuse = |reason: String| Err(RequestError::field("lora_name", reason));
        let is_allowed = |char: char| char.is_ascii_alphanumeric() || "._-".contains(char);
        if name.is_empty() || name.len() > LONGEST_NAME || !name.chars().all(is_allowed) {
            return refuse(format!(
                "is {name:?}; expected 1 to {LONGEST_NAME} letters, digits, dots, dashes and underscores"
            ));
        }
        let mut named = self.named();
        if named.contains_key(name) {
            return refuse(format!("{name:?} is loaded already; unload it first"));
        }
        let most = self.most;
        let counted = self
            .count
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| {
                (count < most).then_some(count + 1)
            });
        if counted.is_err() {
            return refuse(format!(
                "{name:?} exceeds the limit of {most} adapters; unload an adapter, and wait for its requests"
            ));
        }
        named.insert(name.to_owned(), None);
        let place = Place(self.count.clone());
        let adapter = ServedAdapter(Arc::new(Entry {
            name: name.to_owned(),
            load: self.loads.fetch_add(1, Ordering::SeqCst),
            inboxes: engines.iter().map(|engine| engine.inbox.clone()).collect(),
        }));
        let reserved = Reserved {
            registry: self,
            adapter,
            is_published: false,
        };
        Ok((reserved, place))
    }
}

/// The reserved name of an adapter that is being loaded. Dropping this value frees the name, unless the adapter was
/// published.
struct Reserved<'a> {
    registry: &'a AdapterRegistry,
    adapter: ServedAdapter,
    is_published: bool,
}

impl Reserved<'_> {
    /// Lets requests select the adapter.
    fn publish(mut self) {
        let name = self.adapter.name().to_owned();
        self.registry
            .named()
            .insert(name, Some(self.adapter.clone()));
        self.is_published = true;
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        if !self.is_published {
            self.registry.named().remove(self.adapter.name());
        }
    }
}

impl Engine {
    /// Loads an adapter, which requests to this engine can then select. The call waits until the engine's thread has
    /// uploaded the adapter between two decode steps. The call must therefore not run in an asynchronous task.
    ///
    /// # Errors
    /// Returns an error if the name is malformed or taken, or if the number of adapters has reached
    /// [`max_adapters`](super::EngineOptions::max_adapters). Returns an error if the adapter was read for another
    /// model, if the device fails, or if the engine is draining or has failed.
    pub fn load_adapter(&self, name: &str, weights: AdapterWeights) -> Result<(), RequestError> {
        let mut weights = Some(weights);
        // The closure is called once, because there is one engine.
        let weights = |_| weights.take().ok_or_else(draining);
        load(std::slice::from_ref(self), name, weights)
    }

    /// Unloads an adapter. Requests that have selected the adapter finish with it. New requests cannot select it.
    ///
    /// # Errors
    /// Returns [`ErrorKind::NotFound`] if no adapter with this name is loaded.
    pub fn unload_adapter(&self, name: &str) -> Result<(), RequestError> {
        let mut named = self.adapters.named();
        if !matches!(named.get(name), Some(Some(_))) {
            return Err(RequestError {
                kind: ErrorKind::NotFound,
                message: format!("lora_name: {name:?} is not loaded"),
                field: Some("lora_name".into()),
            });
        }
        named.remove(name);
        Ok(())
    }

    /// Returns the loaded adapter with this name, or `None` if no such adapter is loaded.
    pub fn adapter(&self, name: &str) -> Option<ServedAdapter> {
        self.adapters.named().get(name).cloned().flatten()
    }

    /// The names of the loaded adapters in alphabetical order.
    pub fn adapter_names(&self) -> Vec<String> {
        let named = self.adapters.named();
        let loaded = named.iter().filter(|(_, adapter)| adapter.is_some());
        loaded.map(|(name, _)| name.clone()).collect()
    }
}

/// Loads an adapter on all engines, which share one registry. Requests can select the adapter after all engines have
/// it. If an engine fails to load the adapter, the other engines free it. `weights` returns the weights for the engine
/// with the given index.
///
/// # Errors
/// Returns the errors of [`Engine::load_adapter`] and of `weights`.
pub(super) fn load(
    engines: &[Engine],
    name: &str,
    mut weights: impl FnMut(usize) -> Result<AdapterWeights, RequestError>,
) -> Result<(), RequestError> {
    let Some(first) = engines.first() else {
        return Ok(());
    };
    if engines.iter().any(Engine::is_draining) {
        return Err(draining());
    }
    // An adapter that is not published is freed on all engines when `reserved` and its clones are dropped.
    let (reserved, place) = first.adapters.reserve(name, engines)?;
    let place = Arc::new(place);
    for (index, engine) in engines.iter().enumerate() {
        let (outcome, loaded) = mpsc::channel();
        let load = Load {
            adapter: reserved.adapter.clone(),
            place: place.clone(),
            weights: weights(index)?,
            outcome,
        };
        let ended = || engine.failure().unwrap_or_else(draining);
        engine
            .inbox
            .send(Message::Load(Box::new(load)))
            .map_err(|_| ended())?;
        loaded.recv().unwrap_or_else(|_| Err(ended()))?;
    }
    reserved.publish();
    Ok(())
}
