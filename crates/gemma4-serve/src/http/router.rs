//! Routes paths to handlers, and checks API keys.

use super::app::{App, HttpApp};
use super::form::Form;
use super::request_log::log_request;
use super::{adapters, anthropic, openai, page};
use crate::error::{ErrorKind, RequestError};
use axum::{
    Json, Router,
    body::Body,
    extract::State,
    http::{HeaderMap, Request, StatusCode, header},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde_json::json;
use std::sync::Arc;
use subtle::ConstantTimeEq;

/// Returns the router of all paths.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(openai::chat::handle))
        .route("/v1/completions", post(openai::completions::handle))
        .route("/v1/responses", post(openai::responses::handle))
        .route("/v1/models", get(openai::models::list))
        .route("/v1/models/{*name}", get(openai::models::one))
        .route("/v1/messages", post(anthropic::messages::handle))
        .route(
            "/v1/messages/count_tokens",
            post(anthropic::messages::count),
        )
        .route("/v1/embeddings", post(embeddings))
        .route("/v1/load_lora_adapter", post(adapters::load))
        .route("/v1/unload_lora_adapter", post(adapters::unload))
        .route("/metrics", get(metrics))
        .layer(from_fn_with_state(app.clone(), check_key::<App>))
        .route("/health", get(health))
        .route("/", get(page::page))
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), log_request::<App>))
        .with_state(app)
}

/// Refuses a request without an accepted API key.
pub(super) async fn check_key<A: HttpApp>(
    State(app): State<Arc<A>>,
    request: Request<Body>,
    next: Next,
) -> Response {
    let keys = &app.options().api_keys;
    if keys.is_empty() || has_key(request.headers(), keys) {
        return next.run(request).await;
    }
    let message =
        "API key: missing or wrong; expected `Authorization: Bearer KEY` or `x-api-key: KEY`";
    let error = RequestError::new(ErrorKind::Authentication, message);
    Form::of_path(request.uri().path()).response(&error)
}

fn has_key(headers: &HeaderMap, keys: &[String]) -> bool {
    let bearer = headers.get(header::AUTHORIZATION);
    let bearer = bearer.and_then(|value| value.to_str().ok());
    let bearer = bearer.and_then(|value| value.strip_prefix("Bearer "));
    let direct = headers.get("x-api-key");
    let direct = direct.and_then(|value| value.to_str().ok());
    let given: Vec<&str> = [bearer, direct].into_iter().flatten().collect();
    // Compare with all keys in constant time, so that the response time does not reveal parts of a key.
    let equal = |given: &&str| {
        let matches = keys
            .iter()
            .map(|key| given.as_bytes().ct_eq(key.as_bytes()));
        matches.fold(false, |found, matches| found | bool::from(matches))
    };
    given.iter().any(equal)
}

async fn health(State(app): State<Arc<App>>) -> Response {
    let engines = &app.engines;
    health_of(
        engines.failure().is_some(),
        engines.is_draining(),
        engines.devices(),
    )
}

/// Returns the response of `/health`.
pub(super) fn health_of(has_failed: bool, is_draining: bool, devices: &[String]) -> Response {
    let (status, text) = match (has_failed, is_draining) {
        (true, _) => (StatusCode::INTERNAL_SERVER_ERROR, "failed"),
        (false, true) => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
        (false, false) => (StatusCode::OK, "ok"),
    };
    let mut health = json!({"status": text});
    if let devices @ [_, _, ..] = devices {
        health["devices"] = json!(devices);
    }
    (status, Json(health)).into_response()
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    metrics_of(app.engines.metrics_text())
}

/// Returns the response of `/metrics`.
pub(super) fn metrics_of(text: String) -> Response {
    let media_type = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    (media_type, text).into_response()
}

/// Refuses embeddings, which a model that generates text does not compute.
async fn embeddings() -> Response {
    let message = "/v1/embeddings: this server's model generates text; embeddings need a server with an embedding model";
    Form::OpenAi.response(&RequestError::new(ErrorKind::NotFound, message))
}

pub(super) async fn not_found(request: Request<Body>) -> Response {
    let path = request.uri().path();
    let message = format!("path: {path:?} does not exist");
    let error = RequestError::new(ErrorKind::NotFound, message);
    Form::of_path(path).response(&error)
}

pub(super) async fn wrong_method(request: Request<Body>) -> Response {
    let path = request.uri().path();
    let message = format!("method: {path:?} does not serve {}", request.method());
    let error = RequestError::new(ErrorKind::MethodNotAllowed, message);
    Form::of_path(path).response(&error)
}
