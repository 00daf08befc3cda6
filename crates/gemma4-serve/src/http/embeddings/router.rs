//! The paths of a server of an embedding model.

use super::super::form::Form;
use super::super::request_log::log_request;
use super::super::router::{check_key, health_of, metrics_of, not_found, wrong_method};
use super::app::EmbeddingApp;
use super::handler;
use crate::error::{ErrorKind, RequestError};
use axum::{
    Json, Router,
    body::Body,
    extract::{Path, State},
    http::Request,
    middleware::from_fn_with_state,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde_json::{Value, json};
use std::sync::Arc;

/// The paths that need a model that generates text.
const CHAT_PATHS: [&str; 5] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
];

/// Returns the router of all paths.
pub(super) fn router(app: Arc<EmbeddingApp>) -> Router {
    let mut router = Router::new()
        .route("/v1/embeddings", post(handler::handle))
        .route("/v1/models", get(list))
        .route("/v1/models/{*name}", get(one))
        .route("/metrics", get(metrics));
    for path in CHAT_PATHS {
        router = router.route(path, post(refuse_chat));
    }
    router
        .layer(from_fn_with_state(app.clone(), check_key::<EmbeddingApp>))
        .route("/health", get(health))
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), log_request::<EmbeddingApp>))
        .with_state(app)
}

/// Refuses a request for text, which an embedding model does not generate.
async fn refuse_chat(request: Request<Body>) -> Response {
    let path = request.uri().path();
    let message = format!(
        "{path}: this server's model computes embeddings and generates no text; it serves /v1/embeddings"
    );
    let error = RequestError::new(ErrorKind::NotFound, message);
    Form::of_path(path).response(&error)
}

/// Describes the model.
fn model(app: &EmbeddingApp) -> Value {
    let model = app.engine.model();
    json!({
        "id": app.options.model, "object": "model", "created": app.started, "owned_by": "gemma4",
        "max_model_len": model.max_tokens(), "embedding_dim": model.config().embedding_dim,
    })
}

async fn list(State(app): State<Arc<EmbeddingApp>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [model(&app)]}))
}

async fn one(State(app): State<Arc<EmbeddingApp>>, Path(name): Path<String>) -> Response {
    match app.check_model(&name) {
        Ok(()) => Json(model(&app)).into_response(),
        Err(error) => Form::OpenAi.response(&error),
    }
}

async fn health(State(app): State<Arc<EmbeddingApp>>) -> Response {
    let engine = &app.engine;
    health_of(
        engine.failure().is_some(),
        engine.is_draining(),
        engine.devices(),
    )
}

async fn metrics(State(app): State<Arc<EmbeddingApp>>) -> Response {
    metrics_of(app.engine.metrics_text())
}
