//! A test server with the small model that `burn-gemma4` embeds. Tests send requests to the router without a socket.

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use burn::tensor::Device;
use burn_gemma4::{ChatTemplate, Gemma4, LoadOptions};
use gemma4_serve::engine::EngineOptions;
use gemma4_serve::{Server, ServerOptions};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tower::ServiceExt;

/// The model name in the tests' requests.
pub const MODEL: &str = "tiny";

/// A chat template that supports tools and thoughts, in Gemma's syntax.
const TEMPLATE: &str = include_str!("tools.jinja");

/// Returns the small model that `burn-gemma4` embeds, on the CPU.
pub fn gemma() -> Gemma4 {
    Gemma4::embedded(&Device::flex(), LoadOptions::new()).expect("the embedded model loads")
}

/// A test server, and the router of its paths.
pub struct Harness {
    pub server: Server,
    router: Router,
}

/// A complete response.
pub struct Answer {
    pub status: StatusCode,
    pub headers: axum::http::HeaderMap,
    pub text: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// Returns the JSON body of a response. Panics if the status is not 200.
    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text);
        self.json()
    }

    /// Returns the server-sent events of a streamed response: the name and the data of each event.
    #[track_caller]
    pub fn messages(&self) -> Vec<(Option<String>, String)> {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text);
        let blocks = self.text.split("\n\n").filter(|block| !block.is_empty());
        let message = |block: &str| {
            let field = |name: &str| {
                let mut lines = block.lines();
                let line = lines.find_map(|line| line.strip_prefix(name));
                line.map(|value| value.trim().to_owned())
            };
            field("data:").map(|data| (field("event:"), data))
        };
        blocks.filter_map(message).collect()
    }

    /// Returns the JSON objects in a stream of OpenAI's API, without the last event `[DONE]`.
    #[track_caller]
    pub fn chunks(&self) -> Vec<Value> {
        let mut messages = self.messages();
        let (_, last) = messages.pop().expect("the stream has messages");
        assert_eq!(last, "[DONE]");
        let parse = |(_, data): (_, String)| serde_json::from_str(&data).expect("JSON");
        messages.into_iter().map(parse).collect()
    }
}

impl Harness {
    /// Creates a server with the given options and the chat template of the checkpoint.
    pub fn new(engine: EngineOptions, options: ServerOptions) -> Self {
        Self::with_template(1, engine, options, None)
    }

    /// Creates a server with several engines on the CPU, whose devices are called `flex:0`, `flex:1`, and so on.
    pub fn with_engines(engines: usize, engine: EngineOptions, options: ServerOptions) -> Self {
        Self::with_template(engines, engine, options, None)
    }

    fn with_template(
        engines: usize,
        engine: EngineOptions,
        options: ServerOptions,
        template: Option<ChatTemplate>,
    ) -> Self {
        let models = (0..engines).map(|_| gemma()).collect();
        Self::of_models(models, engine, options, template)
    }

    /// Creates a server with an engine for each model.
    pub fn of_models(
        models: Vec<Gemma4>,
        engine: EngineOptions,
        options: ServerOptions,
        template: Option<ChatTemplate>,
    ) -> Self {
        let options = ServerOptions {
            model: MODEL.into(),
            ..options
        };
        let models = models.into_iter().enumerate();
        let models = models.map(|(number, gemma)| (format!("flex:{number}"), gemma));
        let server = Server::of_devices(models.collect(), engine, options, template);
        let server = server.expect("the options fit the model");
        let router = server.router();
        Self { server, router }
    }

    /// Creates a server with the default options.
    pub fn plain() -> Self {
        Self::new(EngineOptions::default(), ServerOptions::default())
    }

    /// Creates a server whose chat template supports tools and thoughts.
    pub fn with_tools() -> Self {
        Self::with_tools_and(1, EngineOptions::default())
    }

    /// Creates a server whose chat template supports tools and thoughts, and whose engines have the options `engine`.
    pub fn with_tools_and(engines: usize, engine: EngineOptions) -> Self {
        let template = ChatTemplate::from_source(TEMPLATE).expect("the template parses");
        Self::with_template(engines, engine, ServerOptions::default(), Some(template))
    }

    pub fn router(&self) -> Router {
        self.router.clone()
    }

    pub async fn send(&self, request: Request<Body>) -> Answer {
        let response = self
            .router
            .clone()
            .oneshot(request)
            .await
            .expect("infallible");
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.expect("the body ends").to_bytes();
        Answer {
            status: parts.status,
            headers: parts.headers,
            text: String::from_utf8(bytes.to_vec()).expect("UTF-8"),
        }
    }

    pub async fn get(&self, path: &str) -> Answer {
        let request = Request::get(path).body(Body::empty());
        self.send(request.expect("the request is valid")).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send(post(path, body)).await
    }

    pub async fn chat(&self, body: Value) -> Answer {
        self.post("/v1/chat/completions", &with_model(body)).await
    }

    pub async fn complete(&self, body: Value) -> Answer {
        self.post("/v1/completions", &with_model(body)).await
    }

    pub async fn messages(&self, body: Value) -> Answer {
        self.post("/v1/messages", &with_model(body)).await
    }

    /// Returns the value of a metric. `name` includes the labels, if any.
    pub async fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").await.text;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(&format!("{name} ")));
        line.map_or(0.0, |value| value.parse().expect("a number"))
    }

    /// Waits until a metric has the given value. Panics after 2000 reads of the metric.
    pub async fn wait_for(&self, name: &str, value: f64) {
        for _ in 0..2000 {
            if self.metric(name).await == value {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        panic!("{name} is {}; expected {value}", self.metric(name).await);
    }
}

/// Adds the field `model` to a request.
pub fn with_model(mut body: Value) -> Value {
    body["model"] = json!(MODEL);
    body
}

/// Creates a POST request with a JSON body.
pub fn post(path: &str, body: &Value) -> Request<Body> {
    Request::post(path)
        .header("content-type", "application/json")
        .body(Body::from(body.to_string()))
        .expect("the request is valid")
}

/// Returns a conversation with one user message.
pub fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}
