//! A server on a TCP port, and requests to it over connections of their own.

use crate::client;
pub use crate::client::{Response, get};
use crate::harness::MODEL;
use gemma4_serve::Server;
use gemma4_serve::engine::{EnginePool, Metrics};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A server that listens on a free port.
pub struct Listening {
    pub address: SocketAddr,
    engines: EnginePool,
    shutdown: oneshot::Sender<()>,
    serving: JoinHandle<Result<(), String>>,
}

impl Listening {
    pub async fn start(server: Server) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let engines = server.engines().clone();
        let (shutdown, stopped) = oneshot::channel();
        let serving = tokio::spawn(server.serve(listener, async {
            let _ = stopped.await;
        }));
        Self {
            address,
            engines,
            shutdown,
            serving,
        }
    }

    /// Returns the metrics of each engine.
    pub fn metrics(&self) -> Vec<Metrics> {
        self.engines.metrics().cloned().collect()
    }

    /// Begins the shutdown. The result completes when the server has ended.
    pub fn stop(self) -> JoinHandle<Result<(), String>> {
        self.shutdown.send(()).expect("the server runs");
        self.serving
    }
}

/// Returns a POST request that closes its connection after the response. The model's name is added to the body.
pub fn post(path: &str, body: &Value) -> Vec<u8> {
    let mut body = body.clone();
    body["model"] = json!(MODEL);
    client::post(path, &body)
}

/// Sends a request and returns the whole response.
pub fn exchange(address: SocketAddr, request: &[u8]) -> Response {
    receive(address, request, usize::MAX, client::PATIENCE)
}

/// Sends a request and reads the response. Closes the connection after `most` bytes, or when no byte arrives for the
/// time `patience`.
pub fn receive(address: SocketAddr, request: &[u8], most: usize, patience: Duration) -> Response {
    client::receive(address, request, most, patience).expect("a connection")
}
