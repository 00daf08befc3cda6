//! The life of a server: it accepts connections, and shuts down together with its engine.

use super::app::ServerOptions;
use super::connections::Connections;
use super::listener::LimitedListener;
use axum::Router;
use std::future::Future;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep_until, timeout_at};

/// After the engine has failed, open connections are cut after this time. Until then, clients can still receive the
/// reason of the failure.
const LAST_MOMENT: Duration = Duration::from_millis(200);

/// Serves requests until `shutdown` completes or the engine ends, which completes `end`. Then calls `drain`, after which
/// the engine refuses new requests. The requests in progress may continue for [`ServerOptions::drain_timeout`].
///
/// # Errors
/// Returns the reason if the engine fails.
pub(super) async fn serve_until(
    router: Router,
    options: &ServerOptions,
    listener: TcpListener,
    shutdown: impl Future<Output = ()> + Send,
    end: impl Future<Output = Result<(), String>> + Send,
    drain: impl FnOnce(),
) -> Result<(), String> {
    let mut listener = LimitedListener::new(listener, options.max_connections);
    let mut connections = Connections::new(router, options.header_timeout);
    tokio::pin!(end, shutdown);
    let ended = tokio::select! {
        never = connections.accept(&mut listener) => match never {},
        () = &mut shutdown => None,
        outcome = &mut end => Some(outcome),
    };
    // The listener stays open, so that new requests get an error that says that the server is shutting down.
    drain();
    connections.close_after_answers();
    let deadline = Instant::now() + options.drain_timeout;
    let ended = match ended {
        Some(ended) => ended,
        None => tokio::select! {
            never = connections.accept(&mut listener) => match never {},
            outcome = &mut end => outcome,
            () = sleep_until(deadline) => {
                log::warn!("the drain timeout has passed; open requests are cancelled");
                return Ok(());
            }
        },
    };
    drop(listener);
    // The last bytes of an answer, or of the error, may still be on their way to a client. Open connections
    // therefore get some time to receive these bytes.
    let moment = match ended {
        Ok(()) => deadline,
        Err(_) => Instant::now() + LAST_MOMENT,
    };
    // Connections that are still open at `moment` are cut.
    let _ = timeout_at(moment, connections.closed()).await;
    ended
}
