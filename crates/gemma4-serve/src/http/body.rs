//! Reads the bodies of requests: checks the size, the memory, the time limit and the JSON. Error messages name the
//! request field that caused the error.

use super::app::HttpApp;
use super::body_memory::{BodyMemory, BodyPool, GrowingMemory, JsonCount, LONG_BODY};
use crate::error::{ErrorKind, RequestError};
use axum::body::{Body, BodyDataStream, HttpBody};
use axum::http::{Request, header};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use std::time::Duration;
use tokio::time::{Instant, timeout, timeout_at};

/// The largest number of characters of a value that an error of the parser shows. The value may be the data of an
/// image.
const LONGEST_VALUE: usize = 40;

/// The largest number of characters of an error of the parser. The names of all fields that a request may have are
/// fewer.
const LONGEST_REASON: usize = 1000;

/// The largest number of characters of a field's path in an error. A client chooses the names of some fields.
const LONGEST_PATH: usize = 200;

/// The largest number of bytes of a body that is too large which are read and dropped. A client that is still sending
/// would not see the error, because the connection would be reset.
const DISCARDED: usize = 128 << 20;

/// The part of a body's time that remains after it has taken the last part of the memory, for which other bodies wait.
const LAST_PART_SHARE: u32 = 6;

/// Reads the body of a request, and parses the body as JSON. The memory of the body is to be freed when the request has
/// been prepared.
pub(crate) async fn read_json<T: DeserializeOwned + Send + 'static>(
    request: Request<Body>,
    app: &impl HttpApp,
) -> Result<(T, BodyMemory), RequestError> {
    let (parsed, memory) = read_growing(request, app).await?;
    Ok((parsed, memory.finish()))
}

/// Reads a body as [`read_json`] does. The memory can grow, such as by that of the answer.
pub(crate) async fn read_growing<T: DeserializeOwned + Send + 'static>(
    request: Request<Body>,
    app: &impl HttpApp,
) -> Result<(T, GrowingMemory), RequestError> {
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
    let (limit, seconds) = (app.options().max_body, app.options().body_timeout);
    // A client that waits for "100 Continue" does not send a body that is refused.
    let waits = request.headers().contains_key(header::EXPECT);
    let body = request.into_body();
    let length = body.size_hint().exact();
    let length = length.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    let mut rest = body.into_data_stream();
    let is_too_large = length.is_some_and(|bytes| bytes > limit);
    let collected = match is_too_large {
        true => Err(too_large(limit)),
        false => {
            let expected = length.unwrap_or(limit);
            collect(&mut rest, expected, limit, seconds, app.bodies()).await
        }
    };
    let error = match collected {
        Ok((bytes, memory)) if bytes.len() < LONG_BODY => return Ok((parse(&bytes)?, memory)),
        Ok((bytes, memory)) => {
            // A thread for blocking work parses a long body.
            let parsed = tokio::task::spawn_blocking(move || Ok((parse(&bytes)?, memory))).await;
            return parsed.unwrap_or_else(|error| {
                Err(RequestError::new(ErrorKind::Internal, error.to_string()))
            });
        }
        Err(error) => error,
    };
    // Read the rest, because a client may read the answer only after it has sent the body. A client that sends for
    // longer sees a reset connection.
    let is_sending = matches!(error.kind, ErrorKind::TooLarge | ErrorKind::Busy);
    if is_sending && !(is_too_large && waits) {
        let _ = timeout(seconds, discard(rest)).await;
    }
    Err(error)
}

/// Collects a body that probably has `expected` bytes, and at most `limit` bytes, within the time `longest`. Reserves
/// the memory of the body and of its parsed form.
async fn collect(
    body: &mut BodyDataStream,
    expected: usize,
    limit: usize,
    longest: Duration,
    pool: &BodyPool,
) -> Result<(Vec<u8>, GrowingMemory), RequestError> {
    let mut deadline = Instant::now() + longest;
    let (mut bytes, mut memory) = (Vec::new(), GrowingMemory::default());
    let mut values = JsonCount::default();
    // The deadline of a body that has the last part of the memory.
    let mut last_deadline = None;
    loop {
        let next_deadline = last_deadline.map_or(deadline, |last: Instant| last.min(deadline));
        let chunk = match timeout_at(next_deadline, body.next()).await {
            Ok(Some(Ok(chunk))) => chunk,
            Ok(Some(Err(error))) => {
                let message = format!("the body cannot be read: {error}");
                return Err(RequestError::new(ErrorKind::Invalid, message));
            }
            Ok(None) => break,
            Err(_) if next_deadline < deadline => {
                let message = "the bodies of other requests wait for the memory of this one, which arrives slowly; try \
                               again later";
                return Err(RequestError::new(ErrorKind::Busy, message));
            }
            Err(_) => {
                let message = format!("the body did not arrive within {} s", longest.as_secs());
                return Err(RequestError::new(ErrorKind::Timeout, message));
            }
        };
        let count = bytes.len() + chunk.len();
        if count > limit {
            return Err(too_large(limit));
        }
        if count >= LONG_BODY && count > bytes.capacity() {
            // The buffer doubles, so that a client holds at most twice the memory of the bytes that it has sent.
            let capacity = count.saturating_mul(2).min(expected.max(count));
            grow(&mut memory, capacity, &mut deadline, pool).await?;
            bytes.reserve_exact(capacity - bytes.len());
            if memory.has_last() {
                last_deadline.get_or_insert_with(|| Instant::now() + longest / LAST_PART_SHARE);
            }
        }
        values.add(&chunk);
        bytes.extend_from_slice(&chunk);
    }
    let parsed = values.parsed_bytes();
    let all = bytes.capacity().saturating_add(parsed);
    if bytes.len() >= LONG_BODY || parsed >= 2 * LONG_BODY {
        grow(&mut memory, all, &mut deadline, pool).await?;
    }
    Ok((bytes, memory))
}

/// Waits for memory until the deadline, which moves by the wait, because the client does not answer for the wait.
/// Refuses a body that would need more memory than a body may have.
async fn grow(
    memory: &mut GrowingMemory,
    bytes: usize,
    deadline: &mut Instant,
    pool: &BodyPool,
) -> Result<(), RequestError> {
    if !pool.fits(bytes) {
        let message = format!(
            "the body takes {} MiB of memory with its values; expected at most {} MiB",
            bytes.div_ceil(1 << 20),
            pool.largest() >> 20
        );
        return Err(RequestError::new(ErrorKind::TooLarge, message));
    }
    let before = Instant::now();
    let grown = timeout_at(*deadline, memory.grow(pool, bytes)).await;
    *deadline += before.elapsed();
    grown.map_err(|_| {
        let message = "the bodies of other requests take all memory; try again later";
        RequestError::new(ErrorKind::Busy, message)
    })
}

fn too_large(limit: usize) -> RequestError {
    let message = format!("the body is too large; expected at most {limit} bytes");
    RequestError::new(ErrorKind::TooLarge, message)
}

/// Reads and drops up to [`DISCARDED`] bytes.
async fn discard(mut body: BodyDataStream) {
    let mut left = DISCARDED;
    while let Some(Ok(chunk)) = body.next().await {
        match left.checked_sub(chunk.len()) {
            Some(less) => left = less,
            None => return,
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

    async fn collected(
        body: Vec<u8>,
        pool: &BodyPool,
    ) -> Result<(Vec<u8>, GrowingMemory), RequestError> {
        let (length, longest) = (body.len(), Duration::from_millis(20));
        let mut body = Body::from(body).into_data_stream();
        collect(&mut body, length, length, longest, pool).await
    }

    #[tokio::test]
    async fn collect_without_memory_is_refused_at_its_deadline() {
        let pool = BodyPool::new(4 << 20, 1 << 20);
        let body = vec![b' '; LONG_BODY];
        let (_, memory) = collected(body.clone(), &pool)
            .await
            .expect("the memory is free");
        let error = collected(body.clone(), &pool)
            .await
            .expect_err("the memory is taken");
        assert_eq!(error.kind, ErrorKind::Busy, "{error}");
        drop(memory);
        let (bytes, _) = collected(body, &pool).await.expect("the memory is free");
        assert_eq!(bytes.len(), LONG_BODY);
    }

    /// A slow client that has the last part of the memory gives it to others.
    #[tokio::test]
    async fn collect_of_a_slow_body_gives_the_last_part_back() {
        let pool = BodyPool::new(4 << 20, 1 << 20);
        let begin = futures_util::stream::iter([Ok::<_, std::io::Error>(vec![b' '; LONG_BODY])]);
        let slow = Body::from_stream(begin.chain(futures_util::stream::pending()));
        let (mut slow, longest) = (slow.into_data_stream(), Duration::from_secs(3));
        let slow = collect(&mut slow, 1 << 20, 1 << 20, longest, &pool);
        let other = collected(vec![b' '; LONG_BODY], &pool);
        let (slow, early) = tokio::join!(slow, other);
        assert_eq!(
            early.expect_err("the memory is taken").kind,
            ErrorKind::Busy
        );
        let error = slow.expect_err("the body does not arrive");
        assert_eq!(error.kind, ErrorKind::Busy, "{error}");
        assert!(error.message.contains("arrives slowly"), "{error}");
        assert!(collected(vec![b' '; LONG_BODY], &pool).await.is_ok());
    }

    #[tokio::test]
    async fn collect_of_too_many_values_is_refused() {
        let pool = BodyPool::new(8 << 20, 1 << 20);
        let error = collected(b"{},".repeat(5000), &pool).await;
        let error = error.expect_err("the values take more than 4 MiB");
        assert_eq!(error.kind, ErrorKind::TooLarge, "{error}");
        assert!(error.message.contains("with its values"), "{error}");
        // A text has one value.
        let text = [b"\"", &b"{},".repeat(5000)[..], b"\""].concat();
        assert!(collected(text, &pool).await.is_ok());
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
