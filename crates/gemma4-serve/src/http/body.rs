//! Reads the bodies of requests: checks the size, the time limit and the JSON. Error messages name the request field
//! that caused the error.

use super::app::ServerOptions;
use crate::error::{ErrorKind, RequestError};
use axum::body::{Body, to_bytes};
use axum::http::{Request, header};
use serde::de::DeserializeOwned;
use std::error::Error;

/// The number of bytes from which a thread for blocking work parses the body. Bodies with images have megabytes.
const LONG_BODY: usize = 1 << 18;

/// The largest number of characters of a value that an error of the parser shows. The value may be the data of an
/// image.
const LONGEST_VALUE: usize = 40;

/// The largest number of characters of an error of the parser. The names of all fields that a request may have are
/// fewer.
const LONGEST_REASON: usize = 1000;

/// The largest number of characters of a field's path in an error. A client chooses the names of some fields.
const LONGEST_PATH: usize = 200;

/// Reads the body of a request, and parses the body as JSON.
pub(crate) async fn read_json<T: DeserializeOwned + Send + 'static>(
    request: Request<Body>,
    options: &ServerOptions,
) -> Result<T, RequestError> {
    let media_type = request.headers().get(header::CONTENT_TYPE);
    let media_type = media_type.and_then(|value| value.to_str().ok());
    let is_json = media_type.is_some_and(|value| {
        let name = value.split(';').next().unwrap_or_default().trim();
        name.eq_ignore_ascii_case("application/json")
    });
    if !is_json {
        let message = "Content-Type: expected application/json";
        return Err(RequestError::new(ErrorKind::MediaType, message));
    }
    let bytes = to_bytes(request.into_body(), options.max_body);
    let Ok(bytes) = tokio::time::timeout(options.body_timeout, bytes).await else {
        let message = format!(
            "the body did not arrive within {} s",
            options.body_timeout.as_secs()
        );
        return Err(RequestError::new(ErrorKind::Timeout, message));
    };
    let bytes = bytes.map_err(|error| refused_body(&error, options.max_body))?;
    if bytes.len() < LONG_BODY {
        return parse(&bytes);
    }
    let parsed = tokio::task::spawn_blocking(move || parse(&bytes)).await;
    parsed.unwrap_or_else(|error| Err(RequestError::new(ErrorKind::Internal, error.to_string())))
}

fn refused_body(error: &axum::Error, limit: usize) -> RequestError {
    let is_limit = error
        .source()
        .is_some_and(|source| source.to_string().contains("length limit"));
    match is_limit {
        true => {
            let message = format!("the body is too large; expected at most {limit} bytes");
            RequestError::new(ErrorKind::TooLarge, message)
        }
        false => {
            let message = format!("the body cannot be read: {error}");
            RequestError::new(ErrorKind::Invalid, message)
        }
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, RequestError> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let parsed = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = first(&error.path().to_string(), LONGEST_PATH);
        let reason = error.into_inner();
        let (is_eof, reason) = (reason.is_eof(), shortened(reason.to_string()));
        // `path` ends with a dot or a question mark if the error is not in a named field. If the body ends early, do
        // not name the field that was read last, because this field is not at fault.
        match path.trim_end_matches(['.', '?']) {
            field if !field.is_empty() && !is_eof => RequestError::field(field, reason),
            _ => RequestError::new(ErrorKind::Invalid, format!("the body: {reason}")),
        }
    })?;
    json.end()
        .map_err(|error| RequestError::new(ErrorKind::Invalid, format!("the body: {error}")))?;
    Ok(parsed)
}

/// Shortens an error of the parser, which quotes the whole value of a field that has another type.
fn shortened(reason: String) -> String {
    let quotes = reason.find('"').zip(reason.rfind('"'));
    let reason = match quotes {
        Some((start, end)) if start < end => {
            let value = first(&reason[start + 1..end], LONGEST_VALUE);
            format!("{}{value}{}", &reason[..=start], &reason[end..])
        }
        _ => reason,
    };
    first(&reason, LONGEST_REASON)
}

/// Returns the first `count` characters of a text, with a mark if there are more.
fn first(text: &str, count: usize) -> String {
    let mut first: String = text.chars().take(count).collect();
    if first.len() < text.len() {
        first.push('…');
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortened_error_keeps_what_the_parser_expected() {
        let short = "invalid type: string \"a\", expected u64 at line 1 column 2";
        assert_eq!(shortened(short.into()), short);
        let value = "A".repeat(5000);
        let long = format!("invalid type: string \"{value}\", expected u64");
        let expected = format!("invalid type: string \"{}…\", expected u64", "A".repeat(40));
        assert_eq!(shortened(long), expected);
        let name = shortened(format!("unknown field `{value}`"));
        assert_eq!(name.chars().count(), 1001);
    }

    #[test]
    fn parse_shortens_the_name_of_a_field() {
        type Numbers = std::collections::HashMap<String, u32>;
        let body = format!("{{\"{}\": \"a\"}}", "K".repeat(5000));
        let error = parse::<Numbers>(body.as_bytes()).expect_err("a text is no number");
        assert!(error.message.starts_with("KKK"), "{error}");
        assert!(error.message.len() < 400, "{error}");
    }
}
