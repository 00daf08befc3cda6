//! The control plane over TCP. The first process listens. All other processes connect to the first process and stay
//! connected.
//!
//! A process that disconnects without a farewell message has failed. All other processes end too, because they would
//! wait forever for the failed process's gradients. TCP's keepalive detects within [`SILENCE`] that a machine has
//! disappeared.
//!
//! The first process rejects connections of unrelated programs, and processes whose run has another id or size.
//! Rejections do not stop the rendezvous, the phase in which processes connect.

mod address;
mod arrival;
mod message;

use crate::{
    Error,
    distributed::{
        control_plane::ControlPlane,
        rank::{Rank, run_id},
    },
    report::note,
};
use arrival::{Caller, Hello};
use message::{LARGEST, Message, receive, send};
use std::{
    collections::BTreeMap,
    io::{self, ErrorKind},
    net::{Shutdown, TcpListener, TcpStream, ToSocketAddrs},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

/// The longest time that processes wait until all of them are connected.
const PATIENCE: Duration = Duration::from_secs(300);
/// If a machine does not answer for this time, its processes are treated as gone.
const SILENCE: Duration = Duration::from_secs(60);
/// The number of TCP keepalive probes within [`SILENCE`]. The first probe is sent after half of [`SILENCE`].
const PROBES: u32 = 3;
/// The largest number of open connections without a complete hello (a process's first message). Further connections wait in
/// the operating system's queue.
const CALLERS: usize = 256;
/// The largest number of reasons for rejections that an error message lists.
const REASONS: usize = 4;
/// The pause before the first process checks again for new connections.
const PAUSE: Duration = Duration::from_millis(20);

/// A callback that is called with the error of another process.
pub type OnFailure = Arc<dyn Fn(&str) + Send + Sync>;

/// The TCP connections of a process. The first process has a connection to every other process. Each other process has only
/// a connection to the first process.
pub struct Tcp {
    own_rank: Rank,
    peers: Vec<Peer>,
}

struct Peer {
    stream: Arc<Mutex<TcpStream>>,
    data: Mutex<Receiver<Vec<u8>>>,
}

impl Tcp {
    /// Waits until all processes are connected. The callback `end` ends this process if another process later fails or
    /// disappears.
    ///
    /// # Errors
    /// Returns an error if a process does not connect, or belongs to another run.
    pub fn join(own_rank: Rank, end: OnFailure) -> Result<Self, Error> {
        let (host, port) = address::broadcast()?;
        let address = address::format_address(&host, port);
        match own_rank.is_first() {
            true => match address::listeners(&host, port) {
                Ok(listeners) => Self::listen(own_rank, &run_id(), &listeners, PATIENCE, end),
                Err(error) => Err(error.into()),
            },
            false => Self::connect(own_rank, &run_id(), (host, port), PATIENCE, end),
        }
        .map_err(|error| format!("{address}: {error}").into())
    }

    fn listen(
        own_rank: Rank,
        run: &str,
        listeners: &[TcpListener],
        patience: Duration,
        end: OnFailure,
    ) -> Result<Self, Error> {
        for listener in listeners {
            listener.set_nonblocking(true)?;
        }
        let until = Instant::now() + patience;
        let mut streams = BTreeMap::new();
        let mut callers: Vec<Caller> = Vec::new();
        let mut sent_away: Vec<String> = Vec::new();
        while streams.len() + 1 < own_rank.size {
            if Instant::now() > until {
                let missing: Vec<_> = (1..own_rank.size)
                    .filter(|rank| !streams.contains_key(rank))
                    .map(|rank| rank.to_string())
                    .collect();
                let (missing, seconds) = (missing.join(", "), patience.as_secs());
                let away = match sent_away.is_empty() {
                    true => String::new(),
                    false => format!("; rejected: {}", sent_away.join(", ")),
                };
                return Err(format!("no process {missing} within {seconds} s{away}").into());
            }
            let known = callers.len();
            // An error of one connection is ignored, so that the error does not affect the other connections.
            let arrivals = listeners
                .iter()
                .take(CALLERS.saturating_sub(known))
                .filter_map(|listener| listener.accept().ok());
            callers.extend(arrivals.filter_map(|(stream, _)| Caller::new(stream).ok()));
            let is_quiet = callers.len() == known;
            for caller in std::mem::take(&mut callers) {
                match caller.recv_hello() {
                    // A connection without a valid hello is dropped without an answer.
                    None => {}
                    Some(Err(caller)) => callers.push(caller),
                    Some(Ok((hello, stream))) => {
                        let rank = hello.rank;
                        if let Some(reason) = reason_to_send_away(&hello, own_rank, run) {
                            let _ = send(&stream, &Message::Failure(reason.clone()));
                            if sent_away.len() < REASONS && !sent_away.contains(&reason) {
                                note(format_args!("rejected: {reason}"));
                                sent_away.push(reason);
                            }
                            continue;
                        }
                        // If another connected process has the same rank, the run ends with an error. If the other
                        // process has disconnected, the new process takes the rank.
                        if streams.get(&rank).is_some_and(is_there) {
                            let refusal = format!("two processes have the rank {rank}");
                            for stream in streams.values().chain([&stream]) {
                                let _ = send(stream, &Message::Failure(refusal.clone()));
                            }
                            return Err(refusal.into());
                        }
                        streams.insert(rank, stream);
                    }
                }
            }
            if is_quiet {
                thread::sleep(PAUSE);
            }
        }
        let streams: Vec<_> = streams
            .into_iter()
            .map(|(rank, stream)| (rank, Arc::new(Mutex::new(stream))))
            .collect();
        let all: Arc<[_]> = streams.iter().map(|(_, stream)| stream.clone()).collect();
        let relay: OnFailure = Arc::new(move |message: &str| {
            for stream in all.iter() {
                let stream = stream.lock().unwrap_or_else(PoisonError::into_inner);
                // The result is ignored, because a peer that is gone needs no message.
                let _ = send(&stream, &Message::Failure(message.into()));
            }
            end(message);
        });
        let peer = |(rank, stream)| Peer::new(rank, stream, relay.clone());
        let peers = streams.into_iter().map(peer).collect::<Result<_, _>>()?;
        Ok(Self { own_rank, peers })
    }

    fn connect(
        own_rank: Rank,
        run: &str,
        address: impl ToSocketAddrs,
        patience: Duration,
        end: OnFailure,
    ) -> Result<Self, Error> {
        let stream = address::reach(address, patience)?;
        keep_alive(&stream)?;
        let hello = Hello::of(own_rank, run);
        send(&stream, &Message::Data(serde_json::to_vec(&hello)?))?;
        let peer = Peer::new(0, Arc::new(Mutex::new(stream)), end)?;
        Ok(Self {
            own_rank,
            peers: vec![peer],
        })
    }

    fn send_all(&self, message: &Message) -> Result<(), Error> {
        for peer in &self.peers {
            peer.send(message)?;
        }
        Ok(())
    }

    /// Sends a message to all peers that are still connected.
    fn tell_all(&self, message: &Message) {
        for peer in &self.peers {
            let _ = peer.send(message);
        }
    }
}

/// Returns the reason to reject a process that connects, or `None` if the process belongs to the run.
fn reason_to_send_away(hello: &Hello, own_rank: Rank, run: &str) -> Option<String> {
    let Hello { rank, size, .. } = *hello;
    if hello.run != run {
        let (found, expected) = (&hello.run, run);
        return Some(format!(
            "process {rank} is of the run {found:?}, and the first process of {expected:?}"
        ));
    }
    if size != own_rank.size {
        let expected = own_rank.size;
        return Some(format!(
            "process {rank} is one of {size}, and the first one of {expected}"
        ));
    }
    (!(1..size).contains(&rank)).then(|| format!("the rank {rank} is out of range"))
}

/// True if the peer has not closed the connection.
fn is_there(stream: &TcpStream) -> bool {
    let peeked = stream
        .set_nonblocking(true)
        .and_then(|()| stream.peek(&mut [0]));
    let is_there = match peeked {
        Ok(count) => count > 0,
        Err(error) => error.kind() == ErrorKind::WouldBlock,
    };
    is_there && stream.set_nonblocking(false).is_ok()
}

/// Disables Nagle's algorithm, which delays small messages. Enables keepalive, which detects within [`SILENCE`] that a
/// machine has disappeared.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = socket2::SockRef::from(stream);
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(SILENCE / 2)
        .with_interval(SILENCE / 2 / PROBES);
    // The number of probes is set except on Windows, which always sends ten probes.
    #[cfg(any(target_os = "linux", target_os = "macos"))]
    let keepalive = keepalive.with_retries(PROBES);
    socket.set_tcp_keepalive(&keepalive)?;
    // The user timeout covers connections with unacknowledged data, because keepalive sends probes only on an idle connection.
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(SILENCE))?;
    Ok(())
}

impl Peer {
    /// Creates the link to the process with this rank, and starts a thread that receives the messages of that process.
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
        Ok(data
            .recv()
            .map_err(|_| "the connection to another process has ended")?)
    }
}

/// Receives messages until a farewell or a failure.
fn read(rank: usize, stream: &TcpStream, data: &Sender<Vec<u8>>, end: &dyn Fn(&str)) {
    loop {
        match receive(stream, LARGEST) {
            Ok(Message::Data(bytes)) => {
                // The result is ignored, because the receiving side of the channel may be dropped already.
                let _ = data.send(bytes);
            }
            Ok(Message::Farewell) => return,
            Ok(Message::Failure(message)) => return end(&message),
            Err(_) => return end(&format!("process {rank} is gone")),
        }
    }
}

impl ControlPlane for Tcp {
    fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        if !self.own_rank.is_first() {
            let first = &self.peers[0];
            first.send(&Message::Data(own.to_vec()))?;
            return (0..self.own_rank.size).map(|_| first.receive()).collect();
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
        let message = format!("process {} failed: {message}", self.own_rank.global);
        // Send errors are ignored. A peer that is gone has already failed, so it does not need the message.
        self.tell_all(&Message::Failure(message));
    }

    fn end(&self) {
        // Ignore send errors. A send fails if the peer is gone, and this peer has already sent its own farewell.
        self.tell_all(&Message::Farewell);
    }
}

impl Drop for Tcp {
    /// Closes the sending side of each connection. The peers' receiving threads then end.
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
    use std::{
        io::Write,
        sync::atomic::{AtomicBool, Ordering},
    };

    const SHORT: Duration = Duration::from_secs(20);
    const RUN: &str = "a run";

    fn rank_of(rank: usize, size: usize) -> Rank {
        Rank {
            global: rank,
            local: rank,
            size,
        }
    }

    /// Returns a callback that sends the errors of other processes to a channel, and the receiver of that channel.
    fn ear() -> (OnFailure, Receiver<String>) {
        let (sender, receiver) = channel();
        let sender = Mutex::new(sender);
        let end = move |message: &str| {
            let sender = sender.lock().expect("no panic");
            let _ = sender.send(message.to_owned());
        };
        (Arc::new(end), receiver)
    }

    /// Returns a listener on a free port of this machine, and the listener's address.
    fn listening() -> ([TcpListener; 1], std::net::SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("a port");
        ([listener], address)
    }

    /// Returns `size` connected processes. Each process comes with a receiver of the other processes' errors.
    fn all(size: usize) -> Vec<(Tcp, Receiver<String>)> {
        let (listeners, address) = listening();
        thread::scope(|scope| {
            let joined: Vec<_> = (0..size)
                .rev()
                .map(|rank| {
                    let listeners = &listeners;
                    scope.spawn(move || {
                        let (end, heard) = ear();
                        let own_rank = rank_of(rank, size);
                        let link = match rank {
                            0 => Tcp::listen(own_rank, RUN, listeners, SHORT, end),
                            _ => Tcp::connect(own_rank, RUN, address, SHORT, end),
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
    fn all_gather_returns_the_bytes_of_every_process() {
        let all = all(4);
        thread::scope(|scope| {
            for (link, _) in &all {
                scope.spawn(move || {
                    for round in 0..50 {
                        let own = format!("{round} of {}", link.own_rank.global);
                        let heard = link
                            .all_gather(own.as_bytes())
                            .expect("all processes are connected");
                        for (rank, heard) in heard.iter().enumerate() {
                            assert_eq!(heard, format!("{round} of {rank}").as_bytes());
                        }
                    }
                });
            }
        });
        // A process that has sent its farewell may end before the other processes, without an error in any of them.
        let mut all = all.into_iter();
        let (gone, _) = all.next_back().expect("there are four processes");
        gone.end();
        drop(gone);
        for (link, heard) in all {
            link.end();
            assert!(heard.recv_timeout(Duration::from_millis(100)).is_err());
        }
    }

    #[test]
    fn failed_process_ends_all_others() {
        for speaks in [true, false] {
            let mut all = all(3);
            let (failed, _) = all.remove(1);
            if speaks {
                failed.fail("no memory", 1);
            }
            drop(failed);
            for (_, heard) in &all {
                let heard = heard.recv_timeout(SHORT).expect("the failure is reported");
                let expected = match speaks {
                    true => "process 1 failed: no memory",
                    false => "process 1 is gone",
                };
                assert_eq!(heard, expected);
            }
        }
    }

    /// Checks that a message is sent to all peers, even if one connection is broken. The first process cannot send to the
    /// second process, and the third process must still get the message.
    #[test]
    fn message_reaches_other_peers_if_one_is_gone() {
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
            let (_, heard) = all.nth(1).expect("there are three processes");
            match (fails, heard.recv_timeout(Duration::from_secs(1))) {
                (true, Ok(message)) => assert_eq!(message, "process 0 failed: no memory"),
                (false, Err(_)) => (),
                (_, other) => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn listen_with_two_processes_of_one_rank_fails() {
        let (listeners, address) = listening();
        thread::scope(|scope| {
            let first = scope.spawn(|| {
                let joined = Tcp::listen(rank_of(0, 3), RUN, &listeners, SHORT, ear().0);
                joined
                    .map(|_| ())
                    .expect_err("two processes have the same rank")
                    .to_string()
            });
            let mut stranger = TcpStream::connect(address).expect("a connection");
            let _ = stranger.write_all(b"GET / HTTP/1.1\r\n\r\n");
            let (end, heard) = ear();
            let second = Tcp::connect(rank_of(2, 3), RUN, address, SHORT, end).expect("a link");
            let (end, _) = ear();
            let double = Tcp::connect(rank_of(2, 3), RUN, address, SHORT, end).expect("a link");
            assert_eq!(
                first.join().expect("no panic"),
                "two processes have the rank 2"
            );
            assert_eq!(
                heard.recv_timeout(SHORT).expect("the failure is reported"),
                "two processes have the rank 2"
            );
            drop((second, double));
        });
    }

    #[test]
    fn process_of_another_run_is_rejected_and_the_rendezvous_continues() {
        let (listeners, address) = listening();
        thread::scope(|scope| {
            let first = scope.spawn(|| Tcp::listen(rank_of(0, 2), RUN, &listeners, SHORT, ear().0));
            for (own_rank, run, words) in [
                (rank_of(1, 2), "an earlier attempt", "of the run"),
                (rank_of(1, 2), "", "of the run"),
                (
                    rank_of(3, 4),
                    RUN,
                    "process 3 is one of 4, and the first one of 2",
                ),
                (rank_of(0, 2), RUN, "the rank 0 is out of range"),
                (rank_of(2, 2), RUN, "the rank 2 is out of range"),
            ] {
                let (end, heard) = ear();
                let away = Tcp::connect(own_rank, run, address, SHORT, end).expect("a connection");
                let reason = heard
                    .recv_timeout(SHORT)
                    .expect("the rejection is reported");
                assert!(reason.contains(words), "{reason}");
                drop(away);
            }
            // The first process must close a connection that sends an older version's greeting, another protocol's bytes, or
            // a length above the limit.
            let old = br#"{"greeting": "attention-cube 1", "rank": 1, "size": 2}"#;
            let mut greeting = vec![0];
            greeting.extend((old.len() as u64).to_le_bytes());
            greeting.extend(old);
            for bytes in [&greeting[..], b"GET / HTTP/1.1\r\n\r\n", &[0xff; 64]] {
                let mut stranger = TcpStream::connect(address).expect("a connection");
                let _ = stranger.write_all(bytes);
                // The read fails or returns no bytes, because the first process closes or resets the connection.
                let read = std::io::Read::read(&mut stranger, &mut [0]);
                assert!(!matches!(read, Ok(1..)), "{read:?}");
            }
            let second = Tcp::connect(rank_of(1, 2), RUN, address, SHORT, ear().0);
            let first = first.join().expect("no panic");
            drop((first.expect("a link"), second.expect("a link")));
        });
    }

    #[test]
    fn process_that_is_gone_leaves_its_rank_to_another() {
        let (listeners, address) = listening();
        thread::scope(|scope| {
            let first = scope.spawn(|| Tcp::listen(rank_of(0, 3), RUN, &listeners, SHORT, ear().0));
            let join = |rank| {
                Tcp::connect(rank_of(rank, 3), RUN, address, SHORT, ear().0).expect("a connection")
            };
            drop(join(1));
            let all = [join(1), join(2)];
            drop((first.join().expect("no panic").expect("a link"), all));
        });
    }

    #[test]
    fn connection_to_a_vanished_machine_ends_within_the_bound() {
        let (listeners, address) = listening();
        let stream = TcpStream::connect(address).expect("a connection");
        let (accepted, _) = listeners[0].accept().expect("a connection");
        let _caller = Caller::new(accepted.try_clone().expect("a copy")).expect("a caller");
        keep_alive(&stream).expect("options");
        for stream in [&stream, &accepted] {
            let socket = socket2::SockRef::from(stream);
            assert!(socket.keepalive().expect("an option"));
            #[cfg(target_os = "linux")]
            {
                let idle = socket.tcp_keepalive_time().expect("an option");
                let interval = socket.tcp_keepalive_interval().expect("an option");
                let retries = socket.tcp_keepalive_retries().expect("an option");
                assert!(idle + interval * retries <= SILENCE);
                let timeout = socket.tcp_user_timeout().expect("an option");
                assert_eq!(timeout, Some(SILENCE));
            }
        }
    }

    /// Checks that processes can connect while two slow connections are open. The first connection sends nothing, and the
    /// second sends a byte every 50 ms.
    #[test]
    fn slow_connections_do_not_delay_the_rendezvous() {
        let (listeners, address) = listening();
        let is_joined = AtomicBool::new(false);
        thread::scope(|scope| {
            let silent = TcpStream::connect(address).expect("a connection");
            let mut slow = TcpStream::connect(address).expect("a connection");
            let is_joined = &is_joined;
            let dripping = scope.spawn(move || {
                // The bytes form a message: a header that announces 1,024 bytes of contents, and then the contents.
                let mut all = vec![0, 0, 4, 0, 0, 0, 0, 0, 0];
                all.resize(9 + 1024, b' ');
                let mut written = all.iter().map(|byte| slow.write_all(&[*byte]).is_ok());
                let until = Instant::now() + SHORT / 2;
                while !is_joined.load(Ordering::Relaxed) && Instant::now() < until {
                    // The result is ignored, because the first process closes the connection at some point.
                    let _ = written.next();
                    thread::sleep(Duration::from_millis(50));
                }
                is_joined.load(Ordering::Relaxed)
            });
            let first = scope.spawn(|| {
                let joined = Tcp::listen(rank_of(0, 2), RUN, &listeners, SHORT, ear().0);
                is_joined.store(true, Ordering::Relaxed);
                joined.expect("a link")
            });
            // The pause lets the first process accept the slow connections before the connection of the second process.
            thread::sleep(Duration::from_millis(200));
            let second = Tcp::connect(rank_of(1, 2), RUN, address, SHORT, ear().0).expect("a link");
            assert!(
                dripping.join().expect("no panic"),
                "the rendezvous waited for the slow connection"
            );
            drop((first.join().expect("no panic"), second, silent));
        });
    }

    /// Checks that processes can connect by IPv4 and by IPv6, because another machine may resolve the first process's name
    /// to either kind of address.
    #[test]
    fn listen_accepts_ipv4_and_ipv6() {
        let Ok(free) = TcpListener::bind("[::1]:0") else {
            println!("this machine has no IPv6");
            return;
        };
        let port = free.local_addr().expect("a port").port();
        drop(free);
        let listeners = address::listeners("::", port).expect("a port");
        thread::scope(|scope| {
            let first = scope.spawn(|| Tcp::listen(rank_of(0, 3), RUN, &listeners, SHORT, ear().0));
            let others = [(1, "::1"), (2, "127.0.0.1")].map(|(rank, host)| {
                Tcp::connect(rank_of(rank, 3), RUN, (host, port), SHORT, ear().0).expect("a link")
            });
            drop((first.join().expect("no panic").expect("a link"), others));
        });
    }

    #[test]
    fn listen_timeout_names_the_missing_processes() {
        let (listeners, _) = listening();
        let brief = Duration::from_millis(50);
        let joined = Tcp::listen(rank_of(0, 3), RUN, &listeners, brief, ear().0);
        let error = joined
            .map(|_| ())
            .expect_err("no process connects")
            .to_string();
        assert!(error.contains("no process 1, 2 within"), "{error}");
    }
}
