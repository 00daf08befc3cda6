//! The server: accepts connections, and shuts down together with its engine.

use super::app::{App, ServerOptions};
use super::router::router;
use super::serving::serve_until;
use crate::engine::{EngineOptions, EnginePool, PoolEnd};
use crate::error::RequestError;
use crate::text::TextModel;
use axum::Router;
use burn_gemma4::{AdapterTargets, ChatTemplate, Gemma4, Gemma4Error};
use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use tokio::net::TcpListener;

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
    end: PoolEnd,
}

impl Server {
    /// Starts the engine for a model.
    ///
    /// # Errors
    /// Returns the errors of [`EnginePool::start`].
    pub fn new(
        gemma: Gemma4,
        engine: EngineOptions,
        options: ServerOptions,
    ) -> Result<Self, Gemma4Error> {
        Self::with_template(gemma, engine, options, None)
    }

    /// Starts the engine for a model. If `template` is not `None`, `template` replaces the checkpoint's chat template.
    ///
    /// # Errors
    /// Returns the errors of [`EnginePool::start`].
    pub fn with_template(
        gemma: Gemma4,
        engine: EngineOptions,
        options: ServerOptions,
        template: Option<ChatTemplate>,
    ) -> Result<Self, Gemma4Error> {
        // The name of a single device is never shown.
        let models = vec![("device".to_owned(), gemma)];
        Self::of_devices(models, engine, options, template)
    }

    /// Starts an engine for each device. `models` holds the name of each device, and the model on that device. All models
    /// have been loaded from the same checkpoint. The limits in `engine` hold for each engine. If `template` is not
    /// `None`, `template` replaces the checkpoint's chat template.
    ///
    /// # Errors
    /// Returns the errors of [`EnginePool::start`].
    pub fn of_devices(
        models: Vec<(String, Gemma4)>,
        engine: EngineOptions,
        options: ServerOptions,
        template: Option<ChatTemplate>,
    ) -> Result<Self, Gemma4Error> {
        let targets = models
            .iter()
            .map(|(_, gemma)| AdapterTargets::of(gemma.model()));
        let targets = targets.collect();
        let text = models.first().map(|(_, gemma)| TextModel::new(gemma));
        let (engines, end) = EnginePool::start(models, &engine)?;
        // A pool has started, so there is at least one model.
        let mut text = text.expect("a pool has at least one model");
        if let Some(template) = template {
            text = text.with_template(template);
        }
        let text = text.with_context(engines.context());
        Ok(Self {
            app: Arc::new(App::new(engines, text, targets, options)),
            end,
        })
    }

    /// Returns the router of the server's paths. Tests call the router without a socket, and programs can add further paths.
    pub fn router(&self) -> Router {
        router(self.app.clone())
    }

    /// Loads the LoRA adapter in `folder`, in PEFT's format. Requests select it by the model name `MODEL:NAME`. The
    /// call blocks until the adapter is loaded, so it must not run in an asynchronous task.
    ///
    /// # Errors
    /// Returns an error if the adapter does not fit the model, and the errors of [`EnginePool::load_adapter`].
    pub fn load_adapter(&self, name: &str, folder: impl AsRef<Path>) -> Result<(), RequestError> {
        self.app.load_adapter(name, folder.as_ref())
    }

    /// Returns the handle to the engines, one for each device.
    pub fn engines(&self) -> &EnginePool {
        &self.app.engines
    }

    /// Serves requests until `shutdown` completes or an engine ends. During the shutdown, new requests are refused,
    /// and the requests in progress may continue for [`ServerOptions::drain_timeout`].
    ///
    /// # Errors
    /// Returns the reason if an engine fails.
    pub async fn serve(
        self,
        listener: TcpListener,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), String> {
        let Self { app, end } = self;
        let engines = app.engines.clone();
        let drain = || engines.drain();
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

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::engine::Engine;
    use crate::testing::gemma;
    use axum::body::Body;
    use axum::http::{Request, StatusCode};
    use http_body_util::BodyExt;
    use serde_json::json;
    use tower::ServiceExt;

    async fn send(router: Router, path: &str, stream: bool) -> (StatusCode, String) {
        let body = json!({
            "model": "gemma4", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "stream": stream,
        });
        let request = Request::post(path)
            .header("content-type", "application/json")
            .body(Body::from(body.to_string()))
            .expect("a request");
        let response = router.oneshot(request).await.expect("infallible");
        let status = response.status();
        let body = response.into_body().collect().await.expect("a body");
        let text = String::from_utf8(body.to_bytes().to_vec());
        (status, text.expect("UTF-8"))
    }

    #[tokio::test]
    async fn panic_of_the_engine_ends_all_requests_and_the_server_with_its_reason() {
        const REASON: &str = "kernel 3 failed";
        let gemma = gemma();
        let targets = vec![AdapterTargets::of(gemma.model())];
        let text = TextModel::new(&gemma);
        let (engine, outcome) = Engine::that_panics(4, REASON);
        let pool = EnginePool::of(vec![("device".into(), engine, outcome)]);
        let (engines, end) = pool.expect("one engine has no metrics of its own");
        let server = Server {
            app: Arc::new(App::new(engines, text, targets, ServerOptions::default())),
            end,
        };
        let router = server.router();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let served = tokio::spawn(server.serve(listener, std::future::pending()));
        let (chat, messages) = ("/v1/chat/completions", "/v1/messages");
        let answers = tokio::join!(
            send(router.clone(), chat, false),
            send(router.clone(), chat, true),
            send(router.clone(), messages, false),
            send(router.clone(), messages, true),
        );
        for (index, (status, text)) in [answers.0, answers.1, answers.2, answers.3]
            .into_iter()
            .enumerate()
        {
            // Streamed responses have begun before the panic, so their status is already 200.
            let expected = match index % 2 {
                0 => StatusCode::INTERNAL_SERVER_ERROR,
                _ => StatusCode::OK,
            };
            assert_eq!(status, expected, "{text}");
            assert!(text.contains(REASON), "{text}");
            assert!(
                !text.contains("[DONE]") && !text.contains("message_stop"),
                "{text}"
            );
        }
        let (status, text) = send(router, chat, false).await;
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
        assert!(text.contains(REASON), "{text}");
        assert_eq!(served.await.expect("the server ends"), Err(REASON.into()));
    }

    #[tokio::test]
    async fn panic_of_one_engine_ends_the_requests_of_all_engines_and_the_server() {
        let gemma = gemma();
        let targets = vec![AdapterTargets::of(gemma.model()); 2];
        let text = TextModel::new(&gemma);
        let (healthy, healthy_outcome) =
            Engine::start(gemma, EngineOptions::default()).expect("the engine starts");
        let (broken, broken_outcome) = Engine::that_panics(1, "kernel 3 failed");
        let pool = EnginePool::of(vec![
            ("a".into(), healthy, healthy_outcome),
            ("b".into(), broken, broken_outcome),
        ]);
        let (engines, end) = pool.expect("the metrics are valid");
        let app = App::new(engines, text, targets, ServerOptions::default());
        let server = Server {
            app: Arc::new(app),
            end,
        };
        let router = server.router();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let served = tokio::spawn(server.serve(listener, std::future::pending()));
        // The first request goes to the healthy engine, which would answer for long. The second request breaks the other
        // engine.
        let long = json!({
            "model": "gemma4", "prompt": "x", "max_tokens": 8000, "ignore_eos": true, "stream": true,
        });
        let request = Request::post("/v1/completions")
            .header("content-type", "application/json")
            .body(Body::from(long.to_string()))
            .expect("a request");
        let long = router.clone().oneshot(request).await.expect("infallible");
        assert_eq!(long.status(), StatusCode::OK);
        const REASON: &str = "the engine of b has failed: kernel 3 failed";
        let (status, text) = send(router.clone(), "/v1/chat/completions", false).await;
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
        assert!(text.contains(REASON), "{text}");
        let body = long.into_body().collect().await.expect("a body");
        let text = String::from_utf8(body.to_bytes().to_vec()).expect("UTF-8");
        assert!(text.contains(REASON) && !text.contains("[DONE]"), "{text}");
        let (status, text) = send(router, "/v1/chat/completions", false).await;
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
        assert!(text.contains(REASON), "{text}");
        let ended = served.await.expect("the server ends");
        assert_eq!(ended, Err("b: kernel 3 failed".into()));
    }
}
