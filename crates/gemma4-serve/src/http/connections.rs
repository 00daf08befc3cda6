//! The open connections of a server, and how they are closed.

use super::listener::LimitedListener;
use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::time::Duration;
use tokio::task::{JoinHandle, JoinSet};

/// The open connections of a server. Dropping this value cuts the connections, which cancels their requests.
pub(super) struct Connections {
    http: http1::Builder,
    service: TowerToHyperService<Router>,
    tasks: JoinSet<()>,
    open: GracefulShutdown,
    /// The task that ends when all connections from before the shutdown are closed. `None` until the shutdown begins.
    closing: Option<JoinHandle<()>>,
}

impl Connections {
    /// Creates a set without connections. A client has `header_timeout` to send the headers of each request.
    pub fn new(router: Router, header_timeout: Duration) -> Self {
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new())
            .header_read_timeout(header_timeout);
        Self {
            http,
            service: TowerToHyperService::new(router),
            tasks: JoinSet::new(),
            open: GracefulShutdown::new(),
            closing: None,
        }
    }

    /// Accepts connections, and serves each connection on a separate task.
    pub async fn accept(&mut self, listener: &mut LimitedListener) -> Infallible {
        loop {
            let (stream, _) = listener.accept().await;
            let connection = self
                .http
                .serve_connection(TokioIo::new(stream), self.service.clone());
            let connection = self.open.watch(connection);
            // Forget the connections that have ended.
            while self.tasks.try_join_next().is_some() {}
            self.tasks.spawn(async move {
                // An error affects only this connection: its client has disconnected, or has sent something other than
                // HTTP.
                if let Err(error) = connection.await {
                    log::debug!("connection: {error}");
                }
            });
        }
    }

    /// Closes idle connections at once. Closes every other connection after its answer in progress. A connection that
    /// is accepted later serves one request.
    pub fn close_after_answers(&mut self) {
        self.http.keep_alive(false);
        let before = std::mem::replace(&mut self.open, GracefulShutdown::new());
        self.closing = Some(tokio::spawn(before.shutdown()));
    }

    /// Waits until all connections have their answers and are closed.
    pub async fn closed(self) {
        self.open.shutdown().await;
        if let Some(closing) = self.closing {
            // Ignore the result: the task neither panics nor is cancelled.
            let _ = closing.await;
        }
    }
}
