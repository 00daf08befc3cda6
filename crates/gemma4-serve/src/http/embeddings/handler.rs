//! The handler of `/v1/embeddings`.

use super::super::body::read_growing;
use super::super::body_memory::{BodyMemory, GrowingMemory, LONG_BODY};
use super::super::client_state::ClientGuard;
use super::super::form::Form;
use super::super::request_log::RequestLog;
use super::app::EmbeddingApp;
use super::request::{EmbeddingsRequest, EncodedRequest, Encoding};
use crate::engine::{EmbeddingRequest, Embeddings};
use crate::error::{ErrorKind, RequestError};
use axum::{
    Extension,
    body::{Body, Bytes},
    extract::State,
    http::{Request, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::Serialize;
use std::sync::Arc;
use tokio::time::timeout;

/// The memory of an element of an embedding in bytes: 4 as f32, and about 12 as JSON.
const ELEMENT_BYTES: usize = 16;

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
    Form::OpenAi.reply(answer(app, log, request).await)
}

async fn answer(
    app: Arc<EmbeddingApp>,
    log: RequestLog,
    request: Request<Body>,
) -> Result<Response, RequestError> {
    let (request, memory) = read_growing::<EmbeddingsRequest>(request, &*app).await?;
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
    let dimensions_sent = dimensions.unwrap_or(app.engine.model().config().embedding_dim);
    let memory = reserve(&app, memory, texts.len() * dimensions_sent).await?;
    let embeddings = app.engine.submit(EmbeddingRequest {
        texts,
        dimensions,
        memory: memory.clone(),
    })?;
    log.submitted(prompt_tokens, 1);
    let embeddings = embeddings.await?;
    log.ended(Default::default());
    let model = app.options.model.clone();
    let written = tokio::task::spawn_blocking(move || {
        let answer = answer_of(embeddings, encoding, model, prompt_tokens);
        serde_json::to_vec(&answer)
    });
    let failed = |error: &dyn std::fmt::Display| {
        let message = format!("the writing of the answer failed: {error}");
        RequestError::new(ErrorKind::Internal, message)
    };
    let json = written.await.map_err(|error| failed(&error))?;
    let json = json.map_err(|error| failed(&error))?;
    let body = Bytes::from_owner(Sent {
        json,
        _memory: memory,
    });
    Ok(([(CONTENT_TYPE, "application/json")], body).into_response())
}

/// The text of an answer. Its memory is reserved until the text is sent.
struct Sent {
    json: Vec<u8>,
    _memory: BodyMemory,
}

impl AsRef<[u8]> for Sent {
    fn as_ref(&self) -> &[u8] {
        &self.json
    }
}

/// Reserves the memory of an answer with `elements` elements, besides that of the request's body. As for bodies, a
/// short answer does not count.
async fn reserve(
    app: &EmbeddingApp,
    mut memory: GrowingMemory,
    elements: usize,
) -> Result<BodyMemory, RequestError> {
    let bytes = elements.saturating_mul(ELEMENT_BYTES);
    if bytes < LONG_BODY {
        return Ok(memory.finish());
    }
    let all = memory.bytes().saturating_add(bytes);
    if !app.bodies.fits(all) {
        let message = format!(
            "the body and its answer take {} MiB of memory; expected at most {} MiB; send fewer texts",
            all.div_ceil(1 << 20),
            app.bodies.largest() >> 20
        );
        return Err(RequestError::new(ErrorKind::TooLarge, message));
    }
    let grown = timeout(app.options.body_timeout, memory.grow(&app.bodies, all)).await;
    match grown {
        Ok(()) => Ok(memory.finish()),
        Err(_) => {
            let message = "the answers to other requests take all memory; try again later";
            Err(RequestError::new(ErrorKind::Busy, message))
        }
    }
}

fn answer_of(
    embeddings: Embeddings,
    encoding: Encoding,
    model: String,
    prompt_tokens: usize,
) -> Answer {
    let data = embeddings.into_iter().enumerate();
    let data = data.map(|(index, embedding)| Item {
        object: "embedding",
        index,
        embedding: match encoding {
            Encoding::Float => Embedding::Float(embedding),
            Encoding::Base64 => Embedding::Base64(base64_of(&embedding)),
        },
    });
    Answer {
        object: "list",
        data: data.collect(),
        model,
        usage: Usage {
            prompt_tokens,
            total_tokens: prompt_tokens,
        },
    }
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
