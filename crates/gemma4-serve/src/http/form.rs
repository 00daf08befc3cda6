//! The JSON formats in which OpenAI's and Anthropic's APIs return errors.

use crate::error::{ErrorKind, RequestError};
use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

/// The value of the header `Retry-After` in seconds, if the queue is full or the server is shutting down.
const RETRY_AFTER: &str = "1";

/// The error message of a response, which is attached to the response for the log of requests.
#[derive(Clone, Debug)]
pub(crate) struct ErrorText(pub String);

/// The API of a request, which determines the form of its errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    OpenAi,
    Anthropic,
}

impl Form {
    /// Returns the API that a path belongs to.
    pub fn of_path(path: &str) -> Self {
        match path.starts_with("/v1/messages") {
            true => Self::Anthropic,
            false => Self::OpenAi,
        }
    }

    /// Returns the JSON body of an error's response.
    pub fn body(self, error: &RequestError) -> Value {
        match self {
            Self::OpenAi => json!({"error": {
                "message": error.message,
                "type": openai_type(error.kind),
                "param": error.field,
                "code": openai_code(error.kind),
            }}),
            Self::Anthropic => json!({"type": "error", "error": {
                "type": anthropic_type(error.kind),
                "message": error.message,
            }}),
        }
    }

    /// Returns the response of a handler, or the error's response.
    pub fn reply(self, answer: Result<Response, RequestError>) -> Response {
        answer.unwrap_or_else(|error| self.response(&error))
    }

    /// The name of the header with the request's id.
    pub fn id_header(self) -> &'static str {
        match self {
            Self::OpenAi => "x-request-id",
            Self::Anthropic => "request-id",
        }
    }

    /// Returns the HTTP response for an error. The error's message is attached to the response for the log of requests.
    pub fn response(self, error: &RequestError) -> Response {
        let status = StatusCode::from_u16(error.status());
        let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(self.body(error))).into_response();
        let text = ErrorText(error.message.clone());
        response.extensions_mut().insert(text);
        if matches!(error.kind, ErrorKind::Busy | ErrorKind::Draining) {
            let value = HeaderValue::from_static(RETRY_AFTER);
            response.headers_mut().insert(header::RETRY_AFTER, value);
        }
        response
    }
}

fn openai_type(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Authentication => "authentication_error",
        ErrorKind::Busy => "rate_limit_error",
        ErrorKind::Draining => "service_unavailable_error",
        ErrorKind::Internal => "server_error",
        _ => "invalid_request_error",
    }
}

fn openai_code(kind: ErrorKind) -> Option<&'static str> {
    match kind {
        ErrorKind::ContextLength => Some("context_length_exceeded"),
        ErrorKind::Authentication => Some("invalid_api_key"),
        ErrorKind::NotFound => Some("not_found"),
        ErrorKind::Busy => Some("queue_full"),
        _ => None,
    }
}

fn anthropic_type(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Authentication => "authentication_error",
        ErrorKind::NotFound => "not_found_error",
        ErrorKind::TooLarge => "request_too_large",
        ErrorKind::Busy => "rate_limit_error",
        ErrorKind::Draining => "overloaded_error",
        ErrorKind::Internal => "api_error",
        _ => "invalid_request_error",
    }
}
