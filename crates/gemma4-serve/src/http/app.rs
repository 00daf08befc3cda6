//! The state that all HTTP handlers share, and the options of the server.

use super::body_memory::{BodyMemory, BodyPool};
use super::client_state::{ClientGuard, ClientState};
use super::events::Events;
use super::media::{MediaOptions, MediaStore, shown};
use super::request_log::RequestLog;
use crate::engine::{Constraint, EnginePool, Grammar, Grammars, Request, ServedAdapter};
use crate::error::{ErrorKind, RequestError};
use crate::text::TextModel;
use burn_gemma4::AdapterTargets;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, TryLockError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The options of the server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The name of the model. Requests to the APIs must give this name.
    pub model: String,
    /// The accepted API keys. If the list is empty, the server accepts requests without a key.
    pub api_keys: Vec<String>,
    /// The largest size of a request's body, in bytes.
    pub max_body: usize,
    /// The memory for the bodies of requests that are being read and prepared, in bytes. A body of at least 256 KiB
    /// takes memory as it arrives, then that of its values, and waits for memory within `body_timeout`. A body may take
    /// four times `max_body` with its values.
    pub body_memory: usize,
    /// The largest number of open connections. Further connections wait in the operating system's queue.
    pub max_connections: usize,
    /// The longest time for the headers of a request to arrive. Without this limit, a silent connection would take one
    /// of the `max_connections` forever.
    pub header_timeout: Duration,
    /// The longest time for the body of a request to arrive.
    pub body_timeout: Duration,
    /// The interval between the heartbeats of a stream. Heartbeats keep the connection open while no token arrives.
    pub heartbeat: Duration,
    /// The time that running requests get after a shutdown has begun. After this time, the server cancels the requests
    /// that are still running.
    pub drain_timeout: Duration,
    /// The folder from whose subfolders clients can load adapters. `None` refuses to load and unload adapters over
    /// HTTP.
    pub adapter_root: Option<PathBuf>,
    /// The limits of images and audio.
    pub media: MediaOptions,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            model: "gemma4".into(),
            api_keys: Vec::new(),
            max_body: 32 << 20,
            body_memory: 512 << 20,
            max_connections: 1024,
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(30),
            heartbeat: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(30),
            adapter_root: None,
            media: MediaOptions::default(),
        }
    }
}

/// The state that the handlers of every kind of server need.
pub(crate) trait HttpApp: Send + Sync + 'static {
    /// The options of the server.
    fn options(&self) -> &ServerOptions;

    /// The memory of the bodies of requests.
    fn bodies(&self) -> &BodyPool;
}

impl HttpApp for App {
    fn options(&self) -> &ServerOptions {
        &self.options
    }

    fn bodies(&self) -> &BodyPool {
        &self.bodies
    }
}

/// The state that all HTTP handlers share.
#[derive(Debug)]
pub(crate) struct App {
    pub engines: EnginePool,
    pub text: TextModel,
    pub media: MediaStore,
    pub bodies: BodyPool,
    pub options: ServerOptions,
    pub started: u64,
    /// The projections of each engine's model to which adapters apply.
    targets: Vec<AdapterTargets>,
    /// Held while an adapter is read, so that the host holds the weights of one adapter only.
    reading: Mutex<()>,
    grammars: OnceLock<Result<Grammars, RequestError>>,
}

impl App {
    pub fn new(
        engines: EnginePool,
        text: TextModel,
        targets: Vec<AdapterTargets>,
        options: ServerOptions,
    ) -> Self {
        Self {
            engines,
            text,
            media: MediaStore::new(options.media.clone()),
            bodies: BodyPool::new(options.body_memory, options.max_body),
            targets,
            reading: Mutex::new(()),
            options,
            started: now().as_secs(),
            grammars: OnceLock::new(),
        }
    }

    /// Returns the adapter that the model name of a request selects: `None` for the model alone, or the adapter `NAME`
    /// for `MODEL:NAME`.
    ///
    /// # Errors
    /// Returns [`ErrorKind::NotFound`] for any other name.
    pub fn select_adapter(&self, name: &str) -> Result<Option<ServedAdapter>, RequestError> {
        let model = &self.options.model;
        if name == model {
            return Ok(None);
        }
        let adapter = name.strip_prefix(model.as_str());
        let adapter = adapter.and_then(|rest| rest.strip_prefix(':'));
        if let Some(adapter) = adapter.and_then(|adapter| self.engines.adapter(adapter)) {
            return Ok(Some(adapter));
        }
        let names = self.model_names();
        let expected = match names.as_slice() {
            [model] => format!("{model:?}"),
            names => format!("one of {names:?}"),
        };
        Err(RequestError {
            kind: ErrorKind::NotFound,
            message: format!(
                "model: {:?} does not exist; expected {expected}",
                shown(name)
            ),
            field: Some("model".into()),
        })
    }

    /// The names that requests can give as their model: the model, then the model with each adapter.
    pub fn model_names(&self) -> Vec<String> {
        let model = &self.options.model;
        let adapters = self.engines.adapter_names().into_iter();
        let adapted = adapters.map(|adapter| format!("{model}:{adapter}"));
        std::iter::once(model.clone()).chain(adapted).collect()
    }

    /// Reads the adapter in `folder`, and loads it under `name` on all engines. The call blocks until requests can select
    /// the adapter. The adapter is read once for each engine, because each engine's weights have ids of their own.
    ///
    /// # Errors
    /// Returns an error if the adapter does not fit the model, and the errors of [`EnginePool::load_adapter`]. Returns
    /// [`ErrorKind::Busy`] while another adapter is being loaded, so that waiting calls do not occupy all threads.
    pub fn load_adapter(&self, name: &str, folder: &Path) -> Result<(), RequestError> {
        let reading = match self.reading.try_lock() {
            Ok(reading) => reading,
            // The lock guards no data, so its state is right even if a thread panicked.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                let message = "another adapter is being loaded; try again later";
                return Err(RequestError::new(ErrorKind::Busy, message));
            }
        };
        self.engines.load_adapter(name, |engine| {
            let weights = self.targets[engine].read(folder);
            let weights = weights.map_err(|error| RequestError::field("lora_path", error))?;
            // The warnings are the same for all engines.
            if engine == 0 {
                for warning in weights.warnings() {
                    log::warn!("adapter {name}: {warning}");
                }
            }
            Ok(weights)
        })?;
        drop(reading);
        Ok(())
    }

    /// Compiles a grammar. The first call also builds the grammar compiler's vocabulary.
    pub fn compile(
        &self,
        field: &str,
        grammar: &Grammar,
        may_think: bool,
    ) -> Result<Constraint, RequestError> {
        let grammars = self.grammars.get_or_init(|| {
            Grammars::new(&self.text.tokenizer, self.text.end_token()).map_err(RequestError::from)
        });
        let thought = self.text.thought_tokens().filter(|_| may_think);
        let grammars = grammars.as_ref().map_err(Clone::clone)?;
        grammars.compile(field, grammar, thought)
    }

    /// Runs `prepare` on a thread for blocking work, and submits the resulting request. Chat templates, the tokenizer,
    /// grammars, images and audio may take long, and must not delay other connections. `memory` is the memory of the
    /// request's body, which is free after the preparation.
    pub async fn submit<T: Send + 'static>(
        self: &Arc<Self>,
        log: &RequestLog,
        memory: BodyMemory,
        prepare: impl FnOnce(&Self, &ClientState) -> Result<(Request, T), RequestError> + Send + 'static,
    ) -> Result<(Events, usize, T), RequestError> {
        // Refuse early, because the preparation may take long.
        self.engines.check_open()?;
        let (app, log) = (self.clone(), log.clone());
        let guard = ClientGuard::default();
        let client = guard.state();
        let prepared = tokio::task::spawn_blocking(move || {
            let (request, context) = prepare(&app, &client)?;
            drop(memory);
            let (prompt_tokens, choices) = (request.prompt.len(), request.choices);
            if let Some(adapter) = &request.adapter {
                log.selected(&format!("{}:{}", app.options.model, adapter.name()));
            }
            let events = app.engines.submit(request)?;
            log.submitted(prompt_tokens, choices);
            let events = Events::new(events, log);
            Ok((events, prompt_tokens, context))
        });
        let prepared = prepared.await;
        drop(guard);
        prepared.unwrap_or_else(|error| {
            let message = format!("the preparation of the request failed: {error}");
            Err(RequestError::new(ErrorKind::Internal, message))
        })
    }
}

/// The time since 1970.
pub(crate) fn now() -> Duration {
    // A clock before 1970 gives 0.
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// Returns a new identifier with a prefix, such as `chatcmpl-`.
pub(crate) fn new_id(prefix: &str) -> String {
    format!("{prefix}{:032x}", rand::random::<u128>())
}
