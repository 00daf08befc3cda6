//! Where the first process listens, and how others come there.

use crate::Error;
use std::{
    env,
    io::{self, ErrorKind},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, ToSocketAddrs},
    thread,
    time::{Duration, Instant},
};

/// How long an address may take to answer before the name's next one is tried.
const ANSWER: Duration = Duration::from_secs(5);
/// How long a process waits before it tries again to connect.
const PAUSE: Duration = Duration::from_millis(200);
/// PyTorch's.
const PORT: u16 = 29500;

/// `MASTER_ADDR` and `MASTER_PORT`, as torchrun sets them.
///
/// # Errors
/// Where they say no address.
pub fn of_first() -> Result<(String, u16), Error> {
    let one_machine = || {
        let nodes = ["SLURM_STEP_NUM_NODES", "SLURM_NNODES"];
        let nodes = nodes.iter().find_map(|name| env::var(name).ok());
        nodes.is_some_and(|nodes| nodes == "1")
    };
    let host = match env::var("MASTER_ADDR") {
        Ok(host) => without_brackets(&host).to_owned(),
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

/// An address of IPv6 as it is beside no port.
fn without_brackets(host: &str) -> &str {
    let inner = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    inner.unwrap_or(host)
}

/// For people.
pub fn told(host: &str, port: u16) -> String {
    match host.contains(':') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    }
}

/// Listens at `localhost` or a loopback address only where `host` is that. Else it listens on every interface, by both protocols:
/// the name may be that of one that others see.
///
/// # Errors
/// Where the port is another's.
pub fn listeners(host: &str, port: u16) -> io::Result<Vec<TcpListener>> {
    if host.eq_ignore_ascii_case("localhost") {
        let own = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
        // A machine may lack IPv6.
        let by_6 = TcpListener::bind((Ipv6Addr::LOCALHOST, port));
        return Ok([own].into_iter().chain(by_6).collect());
    }
    if let Ok(address) = host.parse::<IpAddr>()
        && address.is_loopback()
    {
        return Ok(vec![TcpListener::bind((address, port))?]);
    }
    let by_4 = || TcpListener::bind((Ipv4Addr::UNSPECIFIED, port));
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)) {
        // Where one listens for both, the port is taken for the other.
        Ok(listener) => Ok([listener].into_iter().chain(by_4()).collect()),
        Err(error) if error.kind() == ErrorKind::AddrInUse => Err(error),
        // Without IPv6.
        Err(_) => Ok(vec![by_4()?]),
    }
}

/// Connects to the first address of a name that answers, for as long as there is patience: the name may not be known yet, nor the port open.
///
/// # Errors
/// Of the last address.
pub fn reach(name: impl ToSocketAddrs, patience: Duration) -> io::Result<TcpStream> {
    let until = Instant::now() + patience;
    loop {
        match reach_once(&name) {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() > until => return Err(error),
            Err(_) => thread::sleep(PAUSE),
        }
    }
}

fn reach_once(name: &impl ToSocketAddrs) -> io::Result<TcpStream> {
    let mut outcome = Err(io::Error::new(ErrorKind::NotFound, "it has no address"));
    for address in name.to_socket_addrs()? {
        outcome = TcpStream::connect_timeout(&address, ANSWER).and_then(refuse_itself);
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

/// A connection may be of a socket with itself: the system chose the port that it connects to as the port that it comes from.
/// It would keep the first process from listening.
fn refuse_itself(stream: TcpStream) -> io::Result<TcpStream> {
    match stream.local_addr()? == stream.peer_addr()? {
        true => Err(ErrorKind::ConnectionRefused.into()),
        false => Ok(stream),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rendezvous_of_this_machine_listens_there_only() {
        for (host, is_local) in [
            ("127.0.0.1", true),
            ("localhost", true),
            ("node-1", false),
            ("10.0.0.1", false),
        ] {
            let listeners = listeners(host, 0).expect("a port");
            for listener in &listeners {
                let address = listener.local_addr().expect("an address").ip();
                assert_eq!(address.is_loopback(), is_local, "{host}: {address}");
            }
        }
    }

    #[test]
    fn addresses_of_ipv6_come_with_brackets_or_without() {
        assert_eq!(without_brackets("[fd00::1]"), "fd00::1");
        assert_eq!(without_brackets("fd00::1"), "fd00::1");
        assert_eq!(told("fd00::1", 29500), "[fd00::1]:29500");
        assert_eq!(told("node-1", 29500), "node-1:29500");
    }

    /// The first address of a name may be one that nobody listens at.
    #[test]
    fn the_address_that_answers_is_taken() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("a port").port();
        let closed = TcpListener::bind("127.0.0.1:0").expect("a port");
        let nobody = closed.local_addr().expect("a port");
        drop(closed);
        let addresses = [nobody, ([127, 0, 0, 1], port).into()];
        reach(&addresses[..], Duration::ZERO).expect("a connection");
        reach(&addresses[..1], Duration::ZERO).expect_err("nobody");
    }
}
