//! A link through TCP: the first process listens, the others connect to it and stay connected.
//!
//! Whoever is gone without a farewell has failed, and takes all others with it: they would wait for its gradients forever.

use super::{link::Link, place::Place};
use crate::{Error, terminal::fault};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    env,
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream, ToSocketAddrs},
    process,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

/// How long processes wait for the last one to come.
const PATIENCE: Duration = Duration::from_secs(300);
/// How long whoever connects may take to say who it is.
const INTRODUCTION: Duration = Duration::from_secs(5);
/// How long a process waits before it tries again to connect.
const PAUSE: Duration = Duration::from_millis(200);
/// The most that one sends at once: a tokenizer is 30 MB.
const LARGEST: usize = 1 << 28;
/// What a stranger does not begin with.
const GREETING: &str = "attention-cube 1";
/// PyTorch's.
const PORT: u16 = 29500;

/// Who connects.
#[derive(Deserialize, Serialize)]
struct Introduction {
    greeting: String,
    rank: usize,
    size: usize,
}

/// What is sent: a byte that says which, the length, the bytes.
#[derive(Debug, PartialEq, Eq)]
enum Message {
    Data(Vec<u8>),
    /// Why all have to end.
    Failure(String),
    Farewell,
}

/// What to do where another process fails.
type OnFailure = Arc<dyn Fn(&str) + Send + Sync>;

/// A connection to every other process for the first one, and to the first one for the others.
pub struct Tcp {
    place: Place,
    peers: Vec<Peer>,
}

struct Peer {
    stream: Arc<Mutex<TcpStream>>,
    data: Mutex<Receiver<Vec<u8>>>,
}

/// Where the first process listens: `MASTER_ADDR` and `MASTER_PORT`, as torchrun sets them.
fn address() -> Result<(String, u16), Error> {
    let one_machine = || {
        let nodes = ["SLURM_STEP_NUM_NODES", "SLURM_NNODES"];
        let nodes = nodes.iter().find_map(|name| env::var(name).ok());
        nodes.is_some_and(|nodes| nodes == "1")
    };
    let host = match env::var("MASTER_ADDR") {
        Ok(host) => host,
        Err(_) if one_machine() => "127.0.0.1".into(),
        Err(_) => {
            return Err("MASTER_ADDR is not set: it names the machine of the first process".into());
        }
    };
    let port = match env::var("MASTER_PORT") {
        Ok(port) => port
            .parse()
            .map_err(|_| format!("MASTER_PORT is {port:?}, and no port"))?,
        Err(_) => PORT,
    };
    // There torchrun listens itself.
    let is_taken = env::var("TORCHELASTIC_USE_AGENT_STORE").is_ok_and(|value| value == "True");
    match port.checked_add(u16::from(is_taken)) {
        Some(port) => Ok((host, port)),
        None => Err(format!("MASTER_PORT is {port}, and there is no port after it").into()),
    }
}

impl Tcp {
    /// Waits until all processes are there.
    ///
    /// # Errors
    /// Where they do not come, or are of another run.
    pub fn join(place: Place) -> Result<Self, Error> {
        let (host, port) = address()?;
        let end: OnFailure = Arc::new(|message: &str| {
            fault(message);
            process::exit(1);
        });
        let address = format!("{host}:{port}");
        match place.is_first() {
            true => {
                // On every interface: the name may be that of one that others see.
                let listener = TcpListener::bind(("0.0.0.0", port))
                    .map_err(|error| format!("{address}: {error}"))?;
                Self::listen(place, &listener, PATIENCE, end)
            }
            false => Self::connect(place, (host, port), PATIENCE, end),
        }
        .map_err(|error| format!("{address}: {error}").into())
    }

    fn listen(
        place: Place,
        listener: &TcpListener,
        patience: Duration,
        end: OnFailure,
    ) -> Result<Self, Error> {
        listener.set_nonblocking(true)?;
        let until = Instant::now() + patience;
        let mut streams = BTreeMap::new();
        while streams.len() + 1 < place.size {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if Instant::now() > until {
                        let missing: Vec<_> = (1..place.size)
                            .filter(|rank| !streams.contains_key(rank))
                            .map(|rank| rank.to_string())
                            .collect();
                        let (missing, seconds) = (missing.join(", "), patience.as_secs());
                        let reason = format!("no process {missing} came within {seconds} s");
                        return Err(reason.into());
                    }
                    thread::sleep(PAUSE / 10);
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            stream.set_nonblocking(false)?;
            // A stranger is not answered.
            let Some(introduction) = introduction(&stream) else {
                continue;
            };
            let Introduction { rank, size, .. } = introduction;
            let refusal = match (size == place.size, streams.contains_key(&rank)) {
                (false, _) => format!(
                    "process {rank} is of {size}, and the first of {}",
                    place.size
                ),
                (true, true) => format!("two processes are number {rank}"),
                (true, false) if (1..size).contains(&rank) => {
                    streams.insert(rank, stream);
                    continue;
                }
                _ => format!("no process is number {rank}"),
            };
            for stream in streams.values().chain([&stream]) {
                let _ = send(stream, &Message::Failure(refusal.clone()));
            }
            return Err(refusal.into());
        }
        let streams: Vec<_> = streams
            .into_iter()
            .map(|(rank, stream)| (rank, Arc::new(Mutex::new(stream))))
            .collect();
        let all: Arc<[_]> = streams.iter().map(|(_, stream)| stream.clone()).collect();
        let relay: OnFailure = Arc::new(move |message: &str| {
            for stream in all.iter() {
                let stream = stream.lock().unwrap_or_else(PoisonError::into_inner);
                // One that is gone has no more to hear.
                let _ = send(&stream, &Message::Failure(message.into()));
            }
            end(message);
        });
        let peer = |(rank, stream)| Peer::new(rank, stream, relay.clone());
        let peers = streams.into_iter().map(peer).collect::<Result<_, _>>()?;
        Ok(Self { place, peers })
    }

    fn connect(
        place: Place,
        address: impl ToSocketAddrs + Clone,
        patience: Duration,
        end: OnFailure,
    ) -> Result<Self, Error> {
        let until = Instant::now() + patience;
        let stream = loop {
            // The name may not be known yet, nor the port open.
            match TcpStream::connect(address.clone()) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > until => return Err(error.into()),
                Err(_) => thread::sleep(PAUSE),
            }
        };
        stream.set_nodelay(true)?;
        let introduction = Introduction {
            greeting: GREETING.into(),
            rank: place.rank,
            size: place.size,
        };
        send(&stream, &Message::Data(serde_json::to_vec(&introduction)?))?;
        let peer = Peer::new(0, Arc::new(Mutex::new(stream)), end)?;
        Ok(Self {
            place,
            peers: vec![peer],
        })
    }

    fn send_all(&self, message: &Message) -> Result<(), Error> {
        for peer in &self.peers {
            peer.send(message)?;
        }
        Ok(())
    }

    /// What everybody is to hear who is still there.
    fn tell_all(&self, message: &Message) {
        for peer in &self.peers {
            let _ = peer.send(message);
        }
    }
}

/// Who connects, if it is one of the run.
fn introduction(stream: &TcpStream) -> Option<Introduction> {
    stream.set_nodelay(true).ok()?;
    stream.set_read_timeout(Some(INTRODUCTION)).ok()?;
    let message = receive(stream, 1 << 10).ok()?;
    stream.set_read_timeout(None).ok()?;
    let Message::Data(data) = message else {
        return None;
    };
    let introduction: Introduction = serde_json::from_slice(&data).ok()?;
    (introduction.greeting == GREETING).then_some(introduction)
}

impl Peer {
    /// Reads what the process sends from now on.
    fn new(rank: usize, stream: Arc<Mutex<TcpStream>>, end: OnFailure) -> Result<Self, Error> {
        let guard = stream.lock().unwrap_or_else(PoisonError::into_inner);
        let reader = guard.try_clone()?;
        drop(guard);
        let (sender, data) = channel();
        thread::spawn(move || read(rank, &reader, &sender, &*end));
        Ok(Self {
            stream,
            data: Mutex::new(data),
        })
    }

    fn send(&self, message: &Message) -> Result<(), Error> {
        let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(send(&stream, message)?)
    }

    fn receive(&self) -> Result<Vec<u8>, Error> {
        let data = self.data.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(data.recv().map_err(|_| "another process has ended")?)
    }
}

/// Until the process takes leave, or fails.
fn read(rank: usize, stream: &TcpStream, data: &Sender<Vec<u8>>, end: &dyn Fn(&str)) {
    loop {
        match receive(stream, LARGEST) {
            Ok(Message::Data(bytes)) => {
                // Nobody may want it any more.
                let _ = data.send(bytes);
            }
            Ok(Message::Farewell) => return,
            Ok(Message::Failure(message)) => return end(&message),
            Err(_) => return end(&format!("process {rank} is gone")),
        }
    }
}

fn send(mut stream: &TcpStream, message: &Message) -> io::Result<()> {
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

fn receive(mut stream: &TcpStream, largest: usize) -> io::Result<Message> {
    let mut head = [0; 9];
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

impl Link for Tcp {
    fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        if !self.place.is_first() {
            let first = &self.peers[0];
            first.send(&Message::Data(own.to_vec()))?;
            return (0..self.place.size).map(|_| first.receive()).collect();
        }
        let mut all = vec![own.to_vec()];
        for peer in &self.peers {
            all.push(peer.receive()?);
        }
        for part in &all {
            self.send_all(&Message::Data(part.clone()))?;
        }
        Ok(all)
    }

    fn fail(&self, message: &str, _code: i32) {
        let message = format!("process {} failed: {message}", self.place.rank);
        // Who is gone has failed itself.
        self.tell_all(&Message::Failure(message));
    }

    fn end(&self) {
        // Who is gone has said so.
        self.tell_all(&Message::Farewell);
    }
}

impl Drop for Tcp {
    /// The threads that read end.
    fn drop(&mut self) {
        for peer in &self.peers {
            let stream = peer.stream.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = stream.shutdown(Shutdown::Write);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_secs(20);

    fn place(rank: usize, size: usize) -> Place {
        Place {
            rank,
            size,
            local_rank: rank,
        }
    }

    /// What a process of a test hears of others that fail.
    fn ear() -> (OnFailure, Receiver<String>) {
        let (sender, receiver) = channel();
        let sender = Mutex::new(sender);
        let end = move |message: &str| {
            let sender = sender.lock().expect("no panic");
            let _ = sender.send(message.to_owned());
        };
        (Arc::new(end), receiver)
    }

    /// As many linked processes, and what each hears.
    fn all(size: usize) -> Vec<(Tcp, Receiver<String>)> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("a port");
        thread::scope(|scope| {
            let joined: Vec<_> = (0..size)
                .rev()
                .map(|rank| {
                    let listener = &listener;
                    scope.spawn(move || {
                        let (end, heard) = ear();
                        let place = place(rank, size);
                        let link = match rank {
                            0 => Tcp::listen(place, listener, SHORT, end),
                            _ => Tcp::connect(place, address, SHORT, end),
                        };
                        (link.expect("a link"), heard)
                    })
                })
                .collect();
            let joined = joined.into_iter().rev();
            joined.map(|one| one.join().expect("no panic")).collect()
        })
    }

    #[test]
    fn everybody_hears_everybody() {
        let all = all(4);
        thread::scope(|scope| {
            for (link, _) in &all {
                scope.spawn(move || {
                    for round in 0..50 {
                        let own = format!("{round} of {}", link.place.rank);
                        let heard = link.all_gather(own.as_bytes()).expect("all are there");
                        for (rank, heard) in heard.iter().enumerate() {
                            assert_eq!(heard, format!("{round} of {rank}").as_bytes());
                        }
                    }
                });
            }
        });
        // One that has taken leave may end before the others.
        let mut all = all.into_iter();
        let (gone, _) = all.next_back().expect("four");
        gone.end();
        drop(gone);
        for (link, heard) in all {
            link.end();
            assert!(heard.recv_timeout(Duration::from_millis(100)).is_err());
        }
    }

    #[test]
    fn who_fails_takes_all_along() {
        for speaks in [true, false] {
            let mut all = all(3);
            let (failed, _) = all.remove(1);
            if speaks {
                failed.fail("no memory", 1);
            }
            drop(failed);
            for (_, heard) in &all {
                let heard = heard.recv_timeout(SHORT).expect("it is told");
                let expected = match speaks {
                    true => "process 1 failed: no memory",
                    false => "process 1 is gone",
                };
                assert_eq!(heard, expected);
            }
        }
    }

    /// What one cannot be told any more the others are.
    #[test]
    fn who_is_gone_keeps_no_message_from_others() {
        for fails in [true, false] {
            let all = all(3);
            let (first, _) = &all[0];
            let stream = first.peers[0].stream.lock().expect("no panic");
            stream.shutdown(Shutdown::Write).expect("a connection");
            drop(stream);
            match fails {
                true => first.fail("no memory", 1),
                false => first.end(),
            }
            let mut all = all.into_iter();
            drop(all.next());
            let (_, heard) = all.nth(1).expect("three");
            match (fails, heard.recv_timeout(Duration::from_secs(1))) {
                (true, Ok(message)) => assert_eq!(message, "process 0 failed: no memory"),
                (false, Err(_)) => (),
                (_, other) => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn strangers_and_doubles() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("a port");
        thread::scope(|scope| {
            let first = scope.spawn(|| {
                let joined = Tcp::listen(place(0, 3), &listener, SHORT, ear().0);
                joined.map(|_| ()).expect_err("a double").to_string()
            });
            let mut stranger = TcpStream::connect(address).expect("a connection");
            let _ = stranger.write_all(b"GET / HTTP/1.1\r\n\r\n");
            let (end, heard) = ear();
            let second = Tcp::connect(place(2, 3), address, SHORT, end).expect("a link");
            let (end, _) = ear();
            let double = Tcp::connect(place(2, 3), address, SHORT, end).expect("a link");
            assert_eq!(
                first.join().expect("no panic"),
                "two processes are number 2"
            );
            assert_eq!(
                heard.recv_timeout(SHORT).expect("it is told"),
                "two processes are number 2"
            );
            drop((second, double));
        });
    }

    #[test]
    fn who_does_not_come_is_named() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let brief = Duration::from_millis(50);
        let joined = Tcp::listen(place(0, 3), &listener, brief, ear().0);
        let error = joined.map(|_| ()).expect_err("nobody").to_string();
        assert!(error.contains("no process 1, 2 came"), "{error}");
    }
}
