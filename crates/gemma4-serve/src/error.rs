//! The errors of requests. Each API writes them in its own form.

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
    /// No model or path has the requested name.
    NotFound,
    /// The path does not serve the request's method.
    MethodNotAllowed,
    /// The body of the request is larger than the limit.
    TooLarge,
    /// The body did not arrive in time.
    Timeout,
    /// The body is not declared as JSON.
    MediaType,
    /// The queue is full.
    Busy,
    /// The server shuts down and takes no more requests.
    Draining,
    /// The server failed.
    Internal,
}

/// An error that is reported to the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestError {
    /// The reason.
    pub kind: ErrorKind,
    /// A text for the user, which names the field and what is expected.
    pub message: String,
    /// The field of the request at fault.
    pub field: Option<String>,
}

impl RequestError {
    /// Creates an error without a field.
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

    /// The status code of the response.
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
