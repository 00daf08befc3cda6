//! Errors of requests. The OpenAI and Anthropic APIs write an error in different JSON formats.

use burn_gemma4::Gemma4Error;
use std::fmt;

/// The reason why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request is malformed, or asks for something that the server does not support.
    Invalid,
    /// The prompt and the answer do not fit into the context.
    ContextLength,
    /// The API key is missing or wrong.
    Authentication,
    /// The requested model or path does not exist.
    NotFound,
    /// The path does not support the HTTP method of the request.
    MethodNotAllowed,
    /// The body of the request is larger than the limit.
    TooLarge,
    /// The body did not arrive within the time limit.
    Timeout,
    /// The request's content type is not JSON.
    MediaType,
    /// The server lacks a resource that other requests have: a place in the queue, or memory for images, audio or an
    /// adapter. The same request may succeed later.
    Busy,
    /// The server is shutting down and refuses new requests.
    Draining,
    /// The server failed.
    Internal,
}

/// An error that is reported to the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestError {
    /// The kind of the error.
    pub kind: ErrorKind,
    /// A message for the user, which names the field and the expected value.
    pub message: String,
    /// The field of the request that caused the error.
    pub field: Option<String>,
}

impl RequestError {
    /// Creates an error that concerns no single field.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            field: None,
        }
    }

    /// Creates an error about a field of the request. The message is `field: reason`.
    pub fn field(field: impl Into<String>, reason: impl fmt::Display) -> Self {
        let field = field.into();
        Self {
            kind: ErrorKind::Invalid,
            message: format!("{field}: {reason}"),
            field: Some(field),
        }
    }

    /// The HTTP status code of the response.
    pub fn status(&self) -> u16 {
        match self.kind {
            ErrorKind::Invalid | ErrorKind::ContextLength => 400,
            ErrorKind::Authentication => 401,
            ErrorKind::NotFound => 404,
            ErrorKind::MethodNotAllowed => 405,
            ErrorKind::Timeout => 408,
            ErrorKind::TooLarge => 413,
            ErrorKind::MediaType => 415,
            ErrorKind::Busy => 429,
            ErrorKind::Draining => 503,
            ErrorKind::Internal => 500,
        }
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for RequestError {}

impl From<Gemma4Error> for RequestError {
    fn from(error: Gemma4Error) -> Self {
        match &error {
            Gemma4Error::Argument { argument, reason } => Self::field(*argument, reason),
            Gemma4Error::ChatTemplate(_) => Self::field("messages", &error),
            Gemma4Error::Tokenizer(_) => Self::new(ErrorKind::Invalid, error.to_string()),
            _ => Self::new(ErrorKind::Internal, error.to_string()),
        }
    }
}
