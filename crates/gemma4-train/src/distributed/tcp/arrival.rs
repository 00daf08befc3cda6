//! Polls each incoming connection of the first process until its hello message is complete, so that a slow connection does
//! not block the others. A connection may also come from an unrelated program.

use super::{
    keep_alive,
    message::{HEAD, Message, receive},
};
use crate::distributed::rank::Rank;
use serde::{Deserialize, Serialize};
use std::{
    io::{self, ErrorKind},
    net::TcpStream,
    time::{Duration, Instant},
};

/// The longest time from the connection to a complete hello.
const TIME: Duration = Duration::from_secs(5);
/// The largest size of a hello in bytes.
const LONGEST: usize = 1 << 12;
/// The protocol name and version at the beginning of a hello.
const GREETING: &str = "attention-cube 2";

/// The hello: the first message of a process that connects.
#[derive(Deserialize, Serialize)]
pub struct Hello {
    greeting: String,
    pub rank: usize,
    pub size: usize,
    /// The id of the run, with the number of its restarts, from the launcher's variables.
    pub run: String,
}

impl Hello {
    pub fn of(rank: Rank, run: &str) -> Self {
        Self {
            greeting: GREETING.into(),
            rank: rank.global,
            size: rank.size,
            run: run.to_owned(),
        }
    }
}

/// A connection whose hello is not complete yet.
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

    /// Returns the hello and the connection, or `self` in `Err` if the hello is still incomplete. Returns `None` if the
    /// connection closed, timed out or sent an invalid hello.
    pub fn recv_hello(self) -> Option<Result<(Hello, TcpStream), Self>> {
        let mut ahead = [0; HEAD + LONGEST];
        // `peek` leaves the bytes in the socket until the message is complete.
        let heard = match self.stream.peek(&mut ahead) {
            Ok(0) => return None,
            Ok(count) => receive(&ahead[..count], LONGEST),
            Err(error) => Err(error),
        };
        match heard {
            Ok(Message::Data(data)) => {
                let hello: Hello = serde_json::from_slice(&data).ok()?;
                receive(&self.stream, LONGEST).ok()?;
                self.stream.set_nonblocking(false).ok()?;
                let is_ours = hello.greeting == GREETING;
                is_ours.then_some(Ok((hello, self.stream)))
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
