//! The handler of `/v1/embeddings`.

use super::super::body::read_json;
use super::super::client_state::ClientGuard;
use super::super::form::Form;
use super::super::request_log::RequestLog;
use super::app::EmbeddingApp;
use super::request::{EmbeddingsRequest, EncodedRequest, Encoding};
use crate::engine::EmbeddingRequest;
use crate::error::{ErrorKind, RequestError};
use axum::{
    Extension, Json,
    body::Body,
    extract::State,
    http::Request,
    response::{IntoResponse, Response},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::Serialize;
use std::sync::Arc;

/// The response.
#[derive(Serialize)]
struct Answer {
    object: &'static str,
    data: Vec<Item>,
    model: String,
    usage: Usage,
}

/// The embedding of a text.
#[derive(Serialize)]
struct Item {
    object: &'static str,
    index: usize,
    embedding: Embedding,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Embedding {
    Float(Vec<f32>),
    Base64(String),
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: usize,
    total_tokens: usize,
}

/// Handles a request to `/v1/embeddings`.
pub(super) async fn handle(
    State(app): State<Arc<EmbeddingApp>>,
    Extension(log): Extension<RequestLog>,
    request: Request<Body>,
) -> Response {
    match answer(app, log, request).await {
        Ok(answer) => Json(answer).into_response(),
        Err(error) => Form::OpenAi.response(&error),
    }
}

async fn answer(
    app: Arc<EmbeddingApp>,
    log: RequestLog,
    request: Request<Body>,
) -> Result<Answer, RequestError> {
    let (request, memory) = read_json::<EmbeddingsRequest>(request, &*app).await?;
    app.check_model(&request.model)?;
    // Refuse early, because the encoding of many texts takes long.
    app.engine.check_open()?;
    let EncodedRequest {
        texts,
        dimensions,
        encoding,
    } = encode(app.clone(), request).await?;
    let prompt_tokens = texts.iter().map(Vec::len).sum();
    // The tokens take about as much memory as the body, so the request keeps the body's memory until its end.
    let embeddings = app.engine.submit(EmbeddingRequest {
        texts,
        dimensions,
        memory,
    })?;
    log.submitted(prompt_tokens, 1);
    let embeddings = embeddings.await?;
    log.ended(Default::default());
    let data = embeddings.into_iter().enumerate();
    let data = data.map(|(index, embedding)| Item {
        object: "embedding",
        index,
        embedding: match encoding {
            Encoding::Float => Embedding::Float(embedding),
            Encoding::Base64 => Embedding::Base64(base64_of(&embedding)),
        },
    });
    Ok(Answer {
        object: "list",
        data: data.collect(),
        model: app.options.model.clone(),
        usage: Usage {
            prompt_tokens,
            total_tokens: prompt_tokens,
        },
    })
}

/// Encodes the texts of a request on a thread for blocking work, which stops when the client leaves.
async fn encode(
    app: Arc<EmbeddingApp>,
    request: EmbeddingsRequest,
) -> Result<EncodedRequest, RequestError> {
    let guard = ClientGuard::default();
    let client = guard.state();
    let encoded =
        tokio::task::spawn_blocking(move || request.encode(app.engine.model(), || client.check()));
    let encoded = encoded.await;
    drop(guard);
    encoded.unwrap_or_else(|error| {
        let message = format!("the preparation of the request failed: {error}");
        Err(RequestError::new(ErrorKind::Internal, message))
    })
}

/// Returns the base64 of an embedding's elements in little-endian f32.
fn base64_of(embedding: &[f32]) -> String {
    let bytes: Vec<u8> = embedding
        .iter()
        .copied()
        .flat_map(f32::to_le_bytes)
        .collect();
    STANDARD.encode(bytes)
}
