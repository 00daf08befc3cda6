//! The handler of `/v1/responses`.

use super::super::app::App;
use super::super::body::read_json;
use super::super::form::Form;
use super::super::request_log::RequestLog;
use super::super::stream::{StreamWriter, respond};
use super::responses_request::ResponsesRequest;
use super::responses_writer::ResponseWriter;
use crate::engine::Event;
use crate::error::RequestError;
use axum::{
    Extension, Json,
    body::Body,
    extract::State,
    http::Request,
    response::{IntoResponse, Response},
};
use std::sync::Arc;

/// Handles a request to `/v1/responses`.
pub(crate) async fn handle(
    State(app): State<Arc<App>>,
    Extension(log): Extension<RequestLog>,
    request: Request<Body>,
) -> Response {
    Form::OpenAi.reply(answer(app, log, request).await)
}

async fn answer(
    app: Arc<App>,
    log: RequestLog,
    request: Request<Body>,
) -> Result<Response, RequestError> {
    let (request, memory) = read_json::<ResponsesRequest>(request, &*app).await?;
    let (mut events, prompt_tokens, context) = app
        .submit(&log, memory, |app, client| request.prepare(app, client))
        .await?;
    let stream = context.stream;
    let mut writer = ResponseWriter::new(log.id("resp_"), context, prompt_tokens);
    if stream {
        return Ok(respond(app.options.heartbeat, events, writer));
    }
    while let Some(event) = events.next().await {
        match event {
            Event::Failed(error) => return Err(error),
            event => drop(writer.event(event)),
        }
    }
    Ok(Json(writer.response()).into_response())
}
