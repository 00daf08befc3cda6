//! Who connects to the first process, and has not said yet who it is. Nobody waits for it: it may be a stranger.

use super::{
    super::place::Place,
    keep_alive,
    message::{HEAD, Message, receive},
};
use serde::{Deserialize, Serialize};
use std::{
    io::{self, ErrorKind},
    net::TcpStream,
    time::{Duration, Instant},
};

/// How long whoever connects may take to say who it is.
const TIME: Duration = Duration::from_secs(5);
/// Bytes that say it, at most.
const LONGEST: usize = 1 << 12;
/// What a stranger does not begin with.
const GREETING: &str = "attention-cube 2";

/// Who connects.
#[derive(Deserialize, Serialize)]
pub struct Introduction {
    greeting: String,
    pub rank: usize,
    pub size: usize,
    /// The run and its attempt, as the launcher names them.
    pub run: String,
}

impl Introduction {
    pub fn of(place: Place, run: &str) -> Self {
        Self {
            greeting: GREETING.into(),
            rank: place.rank,
            size: place.size,
            run: run.to_owned(),
        }
    }
}

/// One that has connected.
pub struct Caller {
    stream: TcpStream,
    until: Instant,
}

impl Caller {
    pub fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        keep_alive(&stream)?;
        Ok(Self {
            stream,
            until: Instant::now() + TIME,
        })
    }

    /// Who it is, or itself, as long as it has not said that; nothing of a stranger.
    pub fn hear(self) -> Option<Result<(Introduction, TcpStream), Self>> {
        let mut ahead = [0; HEAD + LONGEST];
        // It is left there until it is whole.
        let heard = match self.stream.peek(&mut ahead) {
            Ok(0) => return None,
            Ok(count) => receive(&ahead[..count], LONGEST),
            Err(error) => Err(error),
        };
        match heard {
            Ok(Message::Data(data)) => {
                let introduction: Introduction = serde_json::from_slice(&data).ok()?;
                receive(&self.stream, LONGEST).ok()?;
                self.stream.set_nonblocking(false).ok()?;
                let is_ours = introduction.greeting == GREETING;
                is_ours.then_some(Ok((introduction, self.stream)))
            }
            Ok(_) => None,
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::UnexpectedEof | ErrorKind::Interrupted => {
                    (Instant::now() < self.until).then_some(Err(self))
                }
                _ => None,
            },
        }
    }
}
