//! The server: a listener, its engine, and the shutdown of both.

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
    /// Starts the engine of a model.
    ///
    /// # Errors
    /// Passes on the errors of [`Engine::start`].
    pub fn new(
        gemma: Gemma4,
        engine: EngineOptions,
        options: ServerOptions,
    ) -> Result<Self, Gemma4Error> {
        Self::with_template(gemma, engine, options, None)
    }

    /// Starts the engine of a model, and renders conversations with another template than the checkpoint's.
    ///
    /// # Errors
    /// Passes on the errors of [`Engine::start`].
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

    /// The paths of the server as a service, for tests and for programs with other paths beside these.
    pub fn router(&self) -> Router {
        router(self.app.clone())
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.app.engine
    }

    /// Serves requests until `shutdown` completes. The server then takes no more requests, and gives the requests in progress
    /// the time of [`ServerOptions::drain_timeout`].
    ///
    /// # Errors
    /// Returns the reason if the engine fails, or if the listener fails.
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
                        // Give the open connections a moment to receive the error.
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

/// The time that a client has for the headers of a request. A silent connection would otherwise hold its place for ever.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// Serves connections until `shutdown` completes, and then waits until the open connections have their answers.
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
                    // An error concerns only this connection: its client has left or sent no HTTP.
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

/// Completes when the drain timeout has passed since the engine began to drain.
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
