//! Tests many random requests at once. Each answer must equal the answer that the server gives if it processes only
//! this request, even while other clients disconnect. Afterwards, the engine must hold no requests and no KV cache.

use crate::cases::{Case, case, compare};
use crate::harness::Harness;
use crate::socket::{Listening, Response, exchange, post, receive};
use gemma4_serve::engine::{EngineOptions, Metrics};
use rand::{SeedableRng, rngs::StdRng};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// The number of requests. A run with 1,000 requests takes some minutes.
const REQUESTS: usize = 250;
/// The number of clients that send requests at the same time.
const CLIENTS: usize = 20;

/// Sends all requests from [`CLIENTS`] threads.
fn send_together(address: SocketAddr, cases: &[Case]) -> Vec<Response> {
    let next = AtomicUsize::new(0);
    let send = || {
        let mut responses = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(case) = cases.get(index) else {
                return responses;
            };
            std::thread::sleep(Duration::from_millis(case.delay));
            let request = post(case.path, &case.body);
            let response = match case.leaves {
                Some((most, wait)) => receive(address, &request, most, Duration::from_millis(wait)),
                None => exchange(address, &request),
            };
            responses.push((index, response));
        }
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(send)).collect();
        let responses = clients
            .into_iter()
            .flat_map(|client| client.join().expect("a client"));
        let mut responses: Vec<_> = responses.collect();
        responses.sort_by_key(|(index, _)| *index);
        responses
            .into_iter()
            .map(|(_, response)| response)
            .collect()
    })
}

/// Sends the requests of `cases` again, one after the other, and compares the new responses with `responses`. Returns
/// the number of complete answers, and the number of answers that ended early because the client disconnected.
fn check_alone(address: SocketAddr, cases: &[Case], responses: &[Response]) -> (usize, usize) {
    let (mut whole, mut cut) = (0, 0);
    for (index, (case, found)) in cases.iter().zip(responses).enumerate() {
        if case.leaves.is_some() && (found.status == 0 || case.body["stream"] == false) {
            continue;
        }
        let alone = exchange(address, &post(case.path, &case.body));
        let is_whole =
            compare(case, &alone, found).unwrap_or_else(|error| panic!("{index}: {error}"));
        match is_whole {
            true => whole += 1,
            false => cut += 1,
        }
    }
    (whole, cut)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_requests_of_all_apis_equal_the_same_requests_alone() {
    check_random(1, REQUESTS, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_requests_to_two_engines_equal_the_same_requests_alone() {
    check_random(2, REQUESTS / 2, 2).await;
}

/// Sends random requests to a server with some engines, and compares the responses with those to the requests alone.
async fn check_random(engines: usize, requests: usize, seed: u64) {
    let options = EngineOptions {
        max_running: 9,
        max_queue: requests,
        context: 2048,
        // Only few requests fit into the KV cache together, so that some must wait.
        kv_tokens: Some(9 * 1024),
        prefill_chunk: Some(50),
        ..EngineOptions::default()
    };
    let server = Listening::start(Harness::with_tools_and(engines, options).server).await;
    let mut rng = StdRng::seed_from_u64(seed);
    let cases: Vec<Case> = (0..requests).map(|_| case(&mut rng)).collect();
    let (address, metrics) = (server.address, server.metrics());
    let all = cases.clone();
    let responses = tokio::task::spawn_blocking(move || send_together(address, &all));
    let responses = responses.await.expect("the clients end");
    let gauges = || {
        let gauges = |one: &Metrics| {
            [
                &one.queued,
                &one.prefilling,
                &one.running,
                &one.reserved_tokens,
                &one.cache_bytes,
            ]
            .map(|gauge| gauge.get())
        };
        metrics.iter().map(gauges).collect::<Vec<_>>()
    };
    let started = std::time::Instant::now();
    while gauges().iter().flatten().any(|value| *value != 0) {
        assert!(
            started.elapsed() < Duration::from_secs(20),
            "{:?}",
            gauges()
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let outcome = |name: &str| -> u64 {
        let counts = metrics
            .iter()
            .map(|one| one.requests.with_label_values(&[name]).get());
        counts.sum()
    };
    assert_eq!((outcome("failed"), outcome("refused")), (0, 0));
    assert!(outcome("cancelled") > 0, "no request was cancelled");
    let compared = tokio::task::spawn_blocking(move || check_alone(address, &cases, &responses));
    let (whole, cut) = compared.await.expect("each answer equals the answer alone");
    println!(
        "{whole} whole answers, {cut} streams whose clients left, {} cancelled",
        outcome("cancelled")
    );
    assert!(whole > requests / 2 && cut > 0, "{whole} {cut}");
    assert_eq!(server.stop().await.expect("the server ends"), Ok(()));
}
