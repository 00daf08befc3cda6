//! The server: accepts connections, and shuts down together with its engine.

use super::app::{App, ServerOptions};
use super::listener::LimitedListener;
use super::router::router;
use crate::engine::{Engine, EngineOptions};
use crate::text::TextModel;
use axum::Router;
use axum::serve::Listener;
use burn_gemma4::{ChatTemplate, Gemma4, Gemma4Error};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

/// A server of one model.
///
/// ```no_run
/// use burn_gemma4::Gemma4;
/// use gemma4_serve::{Server, ServerOptions, engine::EngineOptions};
///
/// # async fn serve() -> Result<(), Box<dyn std::error::Error>> {
/// let gemma = Gemma4::from_pretrained("gemma-4-E2B-it", &Default::default())?;
/// let server = Server::new(gemma, EngineOptions::default(), ServerOptions::default())?;
/// let listener = tokio::net::TcpListener::bind("127.0.0.1:8080").await?;
/// server.serve(listener, std::future::pending()).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Server {
    app: Arc<App>,
    outcome: oneshot::Receiver<Result<(), String>>,
}

impl Server {
    /// Starts the engine for a model.
    ///
    /// # Errors
    /// Returns the errors of [`Engine::start`].
    pub fn new(
        gemma: Gemma4,
        engine: EngineOptions,
        options: ServerOptions,
    ) -> Result<Self, Gemma4Error> {
        Self::with_template(gemma, engine, options, None)
    }

    /// Starts the engine for a model. `template` replaces the checkpoint's chat template if it is not `None`.
    ///
    /// # Errors
    /// Returns the errors of [`Engine::start`].
    pub fn with_template(
        gemma: Gemma4,
        engine: EngineOptions,
        options: ServerOptions,
        template: Option<ChatTemplate>,
    ) -> Result<Self, Gemma4Error> {
        let mut text = TextModel::new(&gemma);
        if let Some(template) = template {
            text = text.with_template(template);
        }
        let (engine, outcome) = Engine::start(gemma, engine)?;
        Ok(Self {
            app: Arc::new(App::new(engine, text, options)),
            outcome,
        })
    }

    /// Returns the router of the server's paths. Tests call the router without a socket, and programs can add further paths.
    pub fn router(&self) -> Router {
        router(self.app.clone())
    }

    /// Returns the handle to the engine.
    pub fn engine(&self) -> &Engine {
        &self.app.engine
    }

    /// Serves requests until `shutdown` completes. The server then refuses new requests. Running requests may continue for
    /// at most [`ServerOptions::drain_timeout`].
    ///
    /// # Errors
    /// Returns the reason if the engine or the listener fails.
    pub async fn serve(
        self,
        listener: TcpListener,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), String> {
        let Self { app, mut outcome } = self;
        let (stop, stopped) = oneshot::channel::<()>();
        let engine = app.engine.clone();
        let graceful = async move {
            tokio::select! {
                () = shutdown => (),
                _ = stopped => (),
            }
            engine.drain();
        };
        let drained = app.engine.clone();
        let drain_timeout = app.options.drain_timeout;
        let listener = LimitedListener::new(listener, app.options.max_connections);
        let mut served = tokio::spawn(serve_connections(listener, router(app), graceful));
        let timeout = wait_drained(drained.clone(), drain_timeout);
        tokio::pin!(timeout);
        let mut ended = None;
        loop {
            tokio::select! {
                result = &mut served => {
                    result.map_err(|error| error.to_string())?;
                    drained.drain();
                    return match ended {
                        Some(outcome) => outcome,
                        None => outcome.await.unwrap_or(Ok(())),
                    };
                }
                result = &mut outcome, if ended.is_none() => {
                    let result = result.unwrap_or_else(|_| Err("the engine has ended".into()));
                    if let Err(reason) = result {
                        // Wait up to 200 ms, so that the open connections can send the error to their clients.
                        let _ = stop.send(());
                        let moment = std::time::Duration::from_millis(200);
                        let _ = tokio::time::timeout(moment, &mut served).await;
                        return Err(reason);
                    }
                    ended = Some(result);
                }
                () = &mut timeout => {
                    log::warn!("the drain timeout has passed; open requests are cancelled");
                    served.abort();
                    return Ok(());
                }
            }
        }
    }
}

/// The time limit for receiving the headers of a request. Without the limit, an idle connection would count as open forever.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// Accepts connections until `shutdown` completes. Then waits until the open connections have sent their responses.
async fn serve_connections(
    mut listener: LimitedListener,
    router: Router,
    shutdown: impl Future<Output = ()>,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT);
    let service = TowerToHyperService::new(router);
    let connections = GracefulShutdown::new();
    tokio::pin!(shutdown);
    loop {
        tokio::select! {
            (stream, _) = listener.accept() => {
                let connection = http.serve_connection(TokioIo::new(stream), service.clone());
                let connection = connections.watch(connection);
                tokio::spawn(async move {
                    // Only log an error, which affects a single connection: the client has disconnected or has not sent
                    // valid HTTP.
                    if let Err(error) = connection.await {
                        log::debug!("connection: {error}");
                    }
                });
            }
            () = &mut shutdown => break,
        }
    }
    drop(listener);
    connections.shutdown().await;
}

/// Returns when `timeout` has passed since the engine began to drain.
async fn wait_drained(engine: Engine, timeout: std::time::Duration) {
    const POLL: std::time::Duration = std::time::Duration::from_millis(50);
    while !engine.is_draining() {
        tokio::time::sleep(POLL).await;
    }
    tokio::time::sleep(timeout).await;
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn_gemma4::LoadOptions;

    #[tokio::test]
    async fn serve_ends_with_the_reason_of_the_engine() {
        let device = burn::tensor::Device::flex();
        let gemma = Gemma4::embedded(&device, LoadOptions::new()).expect("the model loads");
        let server = Server::new(gemma, EngineOptions::default(), ServerOptions::default());
        let (failing, outcome) = oneshot::channel();
        let server = Server {
            outcome,
            ..server.expect("the options fit")
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let served = tokio::spawn(server.serve(listener, std::future::pending()));
        let reason = Err("device: lost".to_owned());
        failing.send(reason.clone()).expect("the server runs");
        assert_eq!(served.await.expect("the server ends"), reason);
    }
}
