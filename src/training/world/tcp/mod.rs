//! A link through TCP: the first process listens, the others connect to it and stay connected.
//!
//! A process that is gone without a farewell has failed, and takes all others with it: they would wait for its gradients forever.
//! A machine that vanishes says nothing at all: TCP's keepalive ends its connections within [`SILENCE`].
//!
//! A process that greets with another run's id or size is sent away, and so is a stranger. Neither ends the gathering.

mod address;
mod arrival;
mod message;

use super::{
    link::Link,
    place::{Place, run_id},
};
use crate::{Error, terminal::note};
use arrival::{Caller, Introduction};
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

/// How long processes wait for the last one to come.
const PATIENCE: Duration = Duration::from_secs(300);
/// After which silence of a machine its processes count as gone.
const SILENCE: Duration = Duration::from_secs(60);
/// Questions of TCP within that time, the first one after half of it.
const PROBES: u32 = 3;
/// Connections that have not said who they are. More wait in the system's queue.
const CALLERS: usize = 256;
/// Reasons of processes that were sent away, as far as they are told.
const REASONS: usize = 4;
/// How long the first process waits before it looks again who has come.
const PAUSE: Duration = Duration::from_millis(20);

/// What to do where another process fails.
pub type OnFailure = Arc<dyn Fn(&str) + Send + Sync>;

/// A connection to every other process for the first one, and to the first one for the others.
pub struct Tcp {
    place: Place,
    peers: Vec<Peer>,
}

struct Peer {
    stream: Arc<Mutex<TcpStream>>,
    data: Mutex<Receiver<Vec<u8>>>,
}

impl Tcp {
    /// Waits until all processes are there. Afterwards `end` ends this one with the error of another, or because that is gone.
    ///
    /// # Errors
    /// Where they do not come, or are of another run.
    pub fn join(place: Place, end: OnFailure) -> Result<Self, Error> {
        let (host, port) = address::of_first()?;
        let address = address::told(&host, port);
        match place.is_first() {
            true => match address::listeners(&host, port) {
                Ok(listeners) => Self::listen(place, &run_id(), &listeners, PATIENCE, end),
                Err(error) => Err(error.into()),
            },
            false => Self::connect(place, &run_id(), (host, port), PATIENCE, end),
        }
        .map_err(|error| format!("{address}: {error}").into())
    }

    fn listen(
        place: Place,
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
        while streams.len() + 1 < place.size {
            if Instant::now() > until {
                let missing: Vec<_> = (1..place.size)
                    .filter(|rank| !streams.contains_key(rank))
                    .map(|rank| rank.to_string())
                    .collect();
                let (missing, seconds) = (missing.join(", "), patience.as_secs());
                let away = match sent_away.is_empty() {
                    true => String::new(),
                    false => format!("; sent away: {}", sent_away.join(", ")),
                };
                return Err(format!("no process {missing} came within {seconds} s{away}").into());
            }
            let known = callers.len();
            // What goes wrong with one who comes is nothing to the others.
            let arrivals = listeners
                .iter()
                .take(CALLERS.saturating_sub(known))
                .filter_map(|listener| listener.accept().ok());
            callers.extend(arrivals.filter_map(|(stream, _)| Caller::new(stream).ok()));
            let is_quiet = callers.len() == known;
            for caller in std::mem::take(&mut callers) {
                match caller.hear() {
                    // A stranger is not answered.
                    None => {}
                    Some(Err(caller)) => callers.push(caller),
                    Some(Ok((introduction, stream))) => {
                        let rank = introduction.rank;
                        if let Some(reason) = reason_to_send_away(&introduction, place, run) {
                            let _ = send(&stream, &Message::Failure(reason.clone()));
                            if sent_away.len() < REASONS && !sent_away.contains(&reason) {
                                note(format_args!("sent away: {reason}"));
                                sent_away.push(reason);
                            }
                            continue;
                        }
                        // A process that is gone leaves its rank to another.
                        if streams.get(&rank).is_some_and(is_there) {
                            let refusal = format!("two processes are number {rank}");
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
        run: &str,
        address: impl ToSocketAddrs,
        patience: Duration,
        end: OnFailure,
    ) -> Result<Self, Error> {
        let stream = address::reach(address, patience)?;
        keep_alive(&stream)?;
        let introduction = Introduction::of(place, run);
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

/// Why a process that connects is not one of the run.
fn reason_to_send_away(introduction: &Introduction, place: Place, run: &str) -> Option<String> {
    let Introduction { rank, size, .. } = *introduction;
    if introduction.run != run {
        let (found, expected) = (&introduction.run, run);
        return Some(format!(
            "process {rank} is of the run {found:?}, and the first of {expected:?}"
        ));
    }
    if size != place.size {
        let expected = place.size;
        return Some(format!(
            "process {rank} is of {size}, and the first of {expected}"
        ));
    }
    (!(1..size).contains(&rank)).then(|| format!("no process is number {rank}"))
}

/// True if the process at the other end has not closed the connection.
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

/// Sends small messages at once, and notices a machine that vanishes, within [`SILENCE`].
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = socket2::SockRef::from(stream);
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(SILENCE / 2)
        .with_interval(SILENCE / 2 / PROBES);
    // Windows asks ten times whatever a program says.
    #[cfg(any(target_os = "linux", target_os = "macos"))]
    let keepalive = keepalive.with_retries(PROBES);
    socket.set_tcp_keepalive(&keepalive)?;
    // Keepalive asks only where nothing is on its way.
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(SILENCE))?;
    Ok(())
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
    use std::{
        io::Write,
        sync::atomic::{AtomicBool, Ordering},
    };

    const SHORT: Duration = Duration::from_secs(20);
    const RUN: &str = "a run";

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

    /// One who listens, and where.
    fn listening() -> ([TcpListener; 1], std::net::SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("a port");
        ([listener], address)
    }

    /// As many linked processes, and what each hears.
    fn all(size: usize) -> Vec<(Tcp, Receiver<String>)> {
        let (listeners, address) = listening();
        thread::scope(|scope| {
            let joined: Vec<_> = (0..size)
                .rev()
                .map(|rank| {
                    let listeners = &listeners;
                    scope.spawn(move || {
                        let (end, heard) = ear();
                        let place = place(rank, size);
                        let link = match rank {
                            0 => Tcp::listen(place, RUN, listeners, SHORT, end),
                            _ => Tcp::connect(place, RUN, address, SHORT, end),
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
        let (listeners, address) = listening();
        thread::scope(|scope| {
            let first = scope.spawn(|| {
                let joined = Tcp::listen(place(0, 3), RUN, &listeners, SHORT, ear().0);
                joined.map(|_| ()).expect_err("a double").to_string()
            });
            let mut stranger = TcpStream::connect(address).expect("a connection");
            let _ = stranger.write_all(b"GET / HTTP/1.1\r\n\r\n");
            let (end, heard) = ear();
            let second = Tcp::connect(place(2, 3), RUN, address, SHORT, end).expect("a link");
            let (end, _) = ear();
            let double = Tcp::connect(place(2, 3), RUN, address, SHORT, end).expect("a link");
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
    fn process_of_another_run_is_sent_away_and_the_gathering_goes_on() {
        let (listeners, address) = listening();
        thread::scope(|scope| {
            let first = scope.spawn(|| Tcp::listen(place(0, 2), RUN, &listeners, SHORT, ear().0));
            for (place, run, words) in [
                (place(1, 2), "an earlier attempt", "of the run"),
                (place(1, 2), "", "of the run"),
                (place(3, 4), RUN, "process 3 is of 4, and the first of 2"),
                (place(0, 2), RUN, "no process is number 0"),
                (place(2, 2), RUN, "no process is number 2"),
            ] {
                let (end, heard) = ear();
                let away = Tcp::connect(place, run, address, SHORT, end).expect("a connection");
                let reason = heard.recv_timeout(SHORT).expect("it is told");
                assert!(reason.contains(words), "{reason}");
                drop(away);
            }
            // A greeting of an older version, garbage, and a length beyond all memory.
            let old = br#"{"greeting": "attention-cube 1", "rank": 1, "size": 2}"#;
            let mut greeting = vec![0];
            greeting.extend((old.len() as u64).to_le_bytes());
            greeting.extend(old);
            for bytes in [&greeting[..], b"GET / HTTP/1.1\r\n\r\n", &[0xff; 64]] {
                let mut stranger = TcpStream::connect(address).expect("a connection");
                let _ = stranger.write_all(bytes);
                // It is closed, and a reset is as good.
                let read = std::io::Read::read(&mut stranger, &mut [0]);
                assert!(!matches!(read, Ok(1..)), "{read:?}");
            }
            let second = Tcp::connect(place(1, 2), RUN, address, SHORT, ear().0);
            let first = first.join().expect("no panic");
            drop((first.expect("a link"), second.expect("a link")));
        });
    }

    #[test]
    fn process_that_is_gone_leaves_its_rank_to_another() {
        let (listeners, address) = listening();
        thread::scope(|scope| {
            let first = scope.spawn(|| Tcp::listen(place(0, 3), RUN, &listeners, SHORT, ear().0));
            let join = |rank| {
                Tcp::connect(place(rank, 3), RUN, address, SHORT, ear().0).expect("a connection")
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

    /// One who says nothing, and one who says it a byte at a time: as long as they stay, the others come.
    #[test]
    fn who_is_slow_keeps_nobody_waiting() {
        let (listeners, address) = listening();
        let is_joined = AtomicBool::new(false);
        thread::scope(|scope| {
            let silent = TcpStream::connect(address).expect("a connection");
            let mut slow = TcpStream::connect(address).expect("a connection");
            let is_joined = &is_joined;
            let dripping = scope.spawn(move || {
                // The beginning of a message of a kilobyte.
                let mut all = vec![0, 0, 4, 0, 0, 0, 0, 0, 0];
                all.resize(9 + 1024, b' ');
                let mut written = all.iter().map(|byte| slow.write_all(&[*byte]).is_ok());
                let until = Instant::now() + SHORT / 2;
                while !is_joined.load(Ordering::Relaxed) && Instant::now() < until {
                    // It is sent away at some time.
                    let _ = written.next();
                    thread::sleep(Duration::from_millis(50));
                }
                is_joined.load(Ordering::Relaxed)
            });
            let first = scope.spawn(|| {
                let joined = Tcp::listen(place(0, 2), RUN, &listeners, SHORT, ear().0);
                is_joined.store(true, Ordering::Relaxed);
                joined.expect("a link")
            });
            // They are there before it is.
            thread::sleep(Duration::from_millis(200));
            let second = Tcp::connect(place(1, 2), RUN, address, SHORT, ear().0).expect("a link");
            assert!(dripping.join().expect("no panic"), "it was waited for");
            drop((first.join().expect("no panic"), second, silent));
        });
    }

    /// By either protocol, whichever the first process's name means to another.
    #[test]
    fn addresses_are_of_both_protocols() {
        let Ok(free) = TcpListener::bind("[::1]:0") else {
            println!("this machine has no IPv6");
            return;
        };
        let port = free.local_addr().expect("a port").port();
        drop(free);
        let listeners = address::listeners("::", port).expect("a port");
        thread::scope(|scope| {
            let first = scope.spawn(|| Tcp::listen(place(0, 3), RUN, &listeners, SHORT, ear().0));
            let others = [(1, "::1"), (2, "127.0.0.1")].map(|(rank, host)| {
                Tcp::connect(place(rank, 3), RUN, (host, port), SHORT, ear().0).expect("a link")
            });
            drop((first.join().expect("no panic").expect("a link"), others));
        });
    }

    #[test]
    fn who_does_not_come_is_named() {
        let (listeners, _) = listening();
        let brief = Duration::from_millis(50);
        let joined = Tcp::listen(place(0, 3), RUN, &listeners, brief, ear().0);
        let error = joined.map(|_| ()).expect_err("nobody").to_string();
        assert!(error.contains("no process 1, 2 came"), "{error}");
    }
}
