//! A client that sends raw bytes over TCP, so that it can disconnect at any byte. The load generator uses it, too.

use serde_json::{Value, json};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// The longest time for a whole response.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// The part of a response that has arrived so far.
#[derive(Clone, Debug)]
pub struct Response {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Response {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// Returns the data of each complete server-sent event. Data that is not JSON is returned as a JSON string.
    pub fn data(&self) -> Vec<Value> {
        let complete = self.body.rsplit_once("\n\n").map_or("", |(text, _)| text);
        let lines = complete
            .lines()
            .filter_map(|line| line.strip_prefix("data: "));
        lines
            .map(|data| serde_json::from_str(data).unwrap_or_else(|_| json!(data)))
            .collect()
    }
}

/// Returns a POST request with a JSON body, which closes its connection after the response.
pub fn post(path: &str, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// Returns a GET request that closes its connection after the response.
pub fn get(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").into_bytes()
}

/// Sends a request and reads the response. Closes the connection after `most` bytes, or when no byte arrives for the
/// time `patience`. A connection that the server cuts ends the response.
///
/// # Errors
/// Returns an error if the connection fails before the request is sent. Returns [`io::ErrorKind::TimedOut`] if the
/// response takes longer than [`PATIENCE`] in total.
pub fn receive(
    address: SocketAddr,
    request: &[u8],
    most: usize,
    patience: Duration,
) -> io::Result<Response> {
    let end = Instant::now() + PATIENCE;
    let mut stream = connect(address)?;
    stream.write_all(request)?;
    let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
    while bytes.len() < most {
        stream.set_read_timeout(Some(remaining(end)?.min(patience)))?;
        let room = buffer.len().min(most - bytes.len());
        match stream.read(&mut buffer[..room]) {
            Ok(count) if count > 0 => bytes.extend_from_slice(&buffer[..count]),
            ended => {
                if ended.is_err() {
                    remaining(end)?;
                }
                break;
            }
        }
    }
    Ok(parse(&bytes))
}

/// Opens a connection, whose writes fail after [`PATIENCE`].
pub fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Returns the time until `end`.
///
/// # Errors
/// Returns [`io::ErrorKind::TimedOut`] if `end` has passed.
pub fn remaining(end: Instant) -> io::Result<Duration> {
    let remaining = end.saturating_duration_since(Instant::now());
    match remaining.is_zero() {
        false => Ok(remaining),
        true => Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("the response takes longer than {} s", PATIENCE.as_secs()),
        )),
    }
}

/// Parses the bytes of a response. The status of an incomplete head is 0.
pub fn parse(bytes: &[u8]) -> Response {
    let end = bytes.windows(4).position(|part| part == b"\r\n\r\n");
    let (head, body) = bytes.split_at(end.map_or(bytes.len(), |end| end + 4));
    let head = String::from_utf8_lossy(head).to_lowercase();
    // The status of a head that is cut off may be cut off, too.
    let status = end.and_then(|_| head.split(' ').nth(1)?.parse().ok());
    let body = match head.contains("transfer-encoding: chunked") {
        true => unchunked(body),
        false => body.to_vec(),
    };
    Response {
        status: status.unwrap_or(0),
        head,
        body: String::from_utf8_lossy(&body).into_owned(),
    }
}

/// Joins the chunks of a body in chunked encoding. If the last chunk is incomplete, its received bytes are kept.
fn unchunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = bytes.windows(2).position(|part| part == b"\r\n") {
        let size = std::str::from_utf8(&bytes[..end]).expect("a size");
        let size = usize::from_str_radix(size, 16).expect("a size");
        let rest = &bytes[end + 2..];
        body.extend_from_slice(&rest[..size.min(rest.len())]);
        bytes = rest.get(size + 2..).unwrap_or_default();
    }
    body
}
