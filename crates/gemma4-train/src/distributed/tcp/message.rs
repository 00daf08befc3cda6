//! The format of a message: one byte for its kind, then its length, then its contents.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
};

/// The largest size of a message in bytes. A tokenizer, the largest text that is sent, has 30 MB.
pub const LARGEST: usize = 1 << 28;
/// The size of a message's header in bytes.
pub const HEAD: usize = 9;

/// A message from one process to another.
#[derive(Debug, PartialEq, Eq)]
pub enum Message {
    Data(Vec<u8>),
    /// The error that ends all processes.
    Failure(String),
    Farewell,
}

pub fn send(mut stream: &TcpStream, message: &Message) -> io::Result<()> {
    let (kind, bytes) = match message {
        Message::Data(bytes) => (0, &bytes[..]),
        Message::Failure(text) => (1, text.as_bytes()),
        Message::Farewell => (2, &[][..]),
    };
    let mut frame = vec![kind];
    frame.extend(u64::to_le_bytes(bytes.len() as u64));
    frame.extend(bytes);
    stream.write_all(&frame)
}

pub fn receive(mut stream: impl Read, largest: usize) -> io::Result<Message> {
    let mut head = [0; HEAD];
    stream.read_exact(&mut head)?;
    let [kind, length @ ..] = head;
    let length = u64::from_le_bytes(length);
    if length > largest as u64 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; length as usize];
    stream.read_exact(&mut bytes)?;
    match kind {
        0 => Ok(Message::Data(bytes)),
        1 => Ok(Message::Failure(
            String::from_utf8_lossy(&bytes).into_owned(),
        )),
        2 => Ok(Message::Farewell),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}
