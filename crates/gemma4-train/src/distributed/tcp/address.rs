//! Finds the address of the first process. The first process listens on this address, and the other processes connect to it.

use crate::Error;
use std::{
    env,
    io::{self, ErrorKind},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, ToSocketAddrs},
    thread,
    time::{Duration, Instant},
};

/// The longest time to wait for an answer from one address of a host name. After this time, the name's next address is tried.
const ANSWER: Duration = Duration::from_secs(5);
/// The pause between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(200);
/// PyTorch's default port.
const PORT: u16 = 29500;

/// Reads the address of the first process from `MASTER_ADDR` and `MASTER_PORT`, as torchrun sets them. The address
/// defaults to `127.0.0.1` if Slurm uses only one machine. The port defaults to PyTorch's default port.
///
/// # Errors
/// Returns an error if the address is missing and has no default, or if the port is not valid.
pub fn broadcast() -> Result<(String, u16), Error> {
    let one_machine = || {
        let nodes = ["SLURM_STEP_NUM_NODES", "SLURM_NNODES"];
        let nodes = nodes.iter().find_map(|name| env::var(name).ok());
        nodes.is_some_and(|nodes| nodes == "1")
    };
    let host = match env::var("MASTER_ADDR") {
        Ok(host) => without_brackets(&host).to_owned(),
        Err(_) if one_machine() => "127.0.0.1".into(),
        Err(_) => {
            return Err(
                "MASTER_ADDR is not set; expected the address of the machine of the first process"
                    .into(),
            );
        }
    };
    let port = match env::var("MASTER_PORT") {
        Ok(port) => port
            .parse()
            .map_err(|_| format!("MASTER_PORT is {port:?}; expected a port number"))?,
        Err(_) => PORT,
    };
    // If torchrun's agent itself listens on the port in `MASTER_PORT`, the processes use the next port.
    let is_taken = env::var("TORCHELASTIC_USE_AGENT_STORE").is_ok_and(|value| value == "True");
    match port.checked_add(u16::from(is_taken)) {
        Some(port) => Ok((host, port)),
        None => Err(format!(
            "MASTER_PORT is {port}; expected a smaller port, because the next one is used"
        )
        .into()),
    }
}

/// Removes the brackets around an IPv6 address. The brackets are needed only in front of a port.
fn without_brackets(host: &str) -> &str {
    let inner = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    inner.unwrap_or(host)
}

/// Formats the address and the port as text for messages.
pub fn format_address(host: &str, port: u16) -> String {
    match host.contains(':') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    }
}

/// Opens the listeners of the first process. If `host` is `localhost` or a loopback address, the listeners use only the
/// loopback interface. Otherwise, they use every interface, by IPv4 and IPv6.
///
/// # Errors
/// Returns an error if another program uses the port.
pub fn listeners(host: &str, port: u16) -> io::Result<Vec<TcpListener>> {
    if host.eq_ignore_ascii_case("localhost") {
        let own = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
        // An error of the IPv6 listener is ignored, because a machine may lack IPv6.
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
        // Ignore an error of the IPv4 listener. On some systems, the IPv6 listener also accepts IPv4 connections and
        // occupies the IPv4 port.
        Ok(listener) => Ok([listener].into_iter().chain(by_4()).collect()),
        Err(error) if error.kind() == ErrorKind::AddrInUse => Err(error),
        // The IPv6 listener has failed, so the machine has no IPv6. Only the IPv4 listener is used.
        Err(_) => Ok(vec![by_4()?]),
    }
}

/// Connects to the first address of `name` that answers. Tries again until `patience` has passed, because the name may be
/// unknown at first, or the port closed.
///
/// # Errors
/// Returns the error of the last address.
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
    let mut outcome = Err(io::Error::new(
        ErrorKind::NotFound,
        "the name has no address",
    ));
    for address in name.to_socket_addrs()? {
        outcome = TcpStream::connect_timeout(&address, ANSWER).and_then(refuse_itself);
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

/// Refuses a TCP connection of a socket with itself. If no process listens on the target port, the system may choose
/// this port as the connection's local port. The connection would then occupy the port, and the first process could not
/// listen on it.
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
    fn listeners_for_loopback_host_bind_loopback_only() {
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
    fn ipv6_addresses_are_accepted_with_and_without_brackets() {
        assert_eq!(without_brackets("[fd00::1]"), "fd00::1");
        assert_eq!(without_brackets("fd00::1"), "fd00::1");
        assert_eq!(format_address("fd00::1", 29500), "[fd00::1]:29500");
        assert_eq!(format_address("node-1", 29500), "node-1:29500");
    }

    /// Checks that `reach` tries all addresses of a name. Only the second address has a listener.
    #[test]
    fn reach_with_several_addresses_connects_to_the_answering_one() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("a port").port();
        let closed = TcpListener::bind("127.0.0.1:0").expect("a port");
        let nobody = closed.local_addr().expect("a port");
        drop(closed);
        let addresses = [nobody, ([127, 0, 0, 1], port).into()];
        reach(&addresses[..], Duration::ZERO).expect("a connection");
        reach(&addresses[..1], Duration::ZERO).expect_err("the address has no listener");
    }
}
