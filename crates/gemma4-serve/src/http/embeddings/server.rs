//! The server of an embedding model.

use super::super::app::ServerOptions;
use super::super::serving::serve_until;
use super::app::EmbeddingApp;
use super::router::router;
use crate::engine::{EmbeddingEngine, EmbeddingEngineOptions};
use axum::Router;
use burn_gemma4::{EmbeddingGemma, Gemma4Error};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use tokio::net::TcpListener;

/// A server of one embedding model, with OpenAI's `/v1/embeddings`.
///
/// ```no_run
/// use burn_gemma4::EmbeddingGemma;
/// use gemma4_serve::engine::EmbeddingEngineOptions;
/// use gemma4_serve::{EmbeddingServer, ServerOptions};
///
/// # async fn serve() -> Result<(), Box<dyn std::error::Error>> {
/// let model = EmbeddingGemma::from_pretrained("embeddinggemma-2", &Default::default())?;
/// let engine = EmbeddingEngineOptions::default();
/// let server = EmbeddingServer::new(model, engine, ServerOptions::default())?;
/// let listener = tokio::net::TcpListener::bind("127.0.0.1:8080").await?;
/// server.serve(listener, std::future::pending()).await?;
/// # Ok(())
/// # }
/// ```
pub struct EmbeddingServer {
    app: Arc<EmbeddingApp>,
    end: Pin<Box<dyn Future<Output = Result<(), String>> + Send + Sync>>,
}

impl EmbeddingServer {
    /// Starts the engine for a model. The adapters and media of the options have no effect.
    ///
    /// # Errors
    /// Returns the errors of [`EmbeddingEngine::start`].
    pub fn new(
        model: EmbeddingGemma,
        engine: EmbeddingEngineOptions,
        options: ServerOptions,
    ) -> Result<Self, Gemma4Error> {
        // The name of a single device is never shown.
        Self::of_devices(vec![("device".to_owned(), model)], engine, options)
    }

    /// Starts the engine with a thread for each device, as [`new`](Self::new) does. `models` holds the name of each
    /// device, and the model on that device. All models have been loaded from the same checkpoint.
    ///
    /// # Errors
    /// Returns the errors of [`EmbeddingEngine::start`].
    pub fn of_devices(
        models: Vec<(String, EmbeddingGemma)>,
        engine: EmbeddingEngineOptions,
        options: ServerOptions,
    ) -> Result<Self, Gemma4Error> {
        let (engine, end) = EmbeddingEngine::start(models, engine)?;
        Ok(Self {
            app: Arc::new(EmbeddingApp::new(engine, options)),
            end: Box::pin(end),
        })
    }

    /// Returns the router of the server's paths. Tests call the router without a socket, and programs can add further
    /// paths.
    pub fn router(&self) -> Router {
        router(self.app.clone())
    }

    /// Returns the engine.
    pub fn engine(&self) -> &EmbeddingEngine {
        &self.app.engine
    }

    /// Serves requests until `shutdown` completes or the engine ends. During the shutdown, new requests are refused,
    /// and the requests in progress may continue for [`ServerOptions::drain_timeout`].
    ///
    /// # Errors
    /// Returns the reason if the engine fails.
    pub async fn serve(
        self,
        listener: TcpListener,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), String> {
        let Self { app, end } = self;
        let drain = || app.engine.drain();
        serve_until(
            router(app.clone()),
            &app.options,
            listener,
            shutdown,
            end,
            drain,
        )
        .await
    }
}

impl fmt::Debug for EmbeddingServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddingServer")
            .field("app", &self.app)
            .finish_non_exhaustive()
    }
}
