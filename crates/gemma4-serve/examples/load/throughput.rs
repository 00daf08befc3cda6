//! The throughput of a server: prompts of random tokens, as in vLLM's `bench serve`.

use serde_json::json;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The arguments of a measurement.
pub struct Load {
    pub address: String,
    pub model: String,
    pub clients: usize,
    pub requests: usize,
    pub prompt: usize,
    pub tokens: usize,
    /// The number of first tokens that all prompts have in common.
    pub shared: usize,
}

/// The time until the first token of a request's answer, and the time until the end of the answer.
struct Times {
    first: Duration,
    all: Duration,
}

/// Sends all requests, and prints the rates and latencies.
///
/// # Errors
/// Returns the reason if a request fails.
pub fn run(load: &Load) -> Result<(), String> {
    let next = AtomicUsize::new(0);
    let start = Instant::now();
    let results: Vec<Result<Vec<Times>, String>> = thread::scope(|scope| {
        let client = || {
            let mut times = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= load.requests {
                    return Ok(times);
                }
                times.push(
                    request(load, number).map_err(|error| format!("request {number}: {error}"))?,
                );
            }
        };
        let threads: Vec<_> = (0..load.clients).map(|_| scope.spawn(client)).collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined
            .map(|result| result.unwrap_or_else(|_| Err("a client has panicked".into())))
            .collect()
    });
    let seconds = start.elapsed().as_secs_f64();
    let mut times = Vec::new();
    for result in results {
        times.extend(result?);
    }
    let mut first: Vec<f64> = times
        .iter()
        .map(|time| time.first.as_secs_f64() * 1e3)
        .collect();
    let between = |time: &Times| {
        let steps = (load.tokens - 1).max(1) as f64;
        (time.all - time.first).as_secs_f64() * 1e3 / steps
    };
    let mut steps: Vec<f64> = times.iter().map(between).collect();
    println!(
        "{} clients: {:.1} output tokens/s, {:.1} prompt tokens/s; first token {:.1} / {:.1} ms, between tokens {:.2} / {:.2} ms \
         (median / 99 %)",
        load.clients,
        (load.requests * load.tokens) as f64 / seconds,
        (load.requests * load.prompt) as f64 / seconds,
        percentile(&mut first, 0.5),
        percentile(&mut first, 0.99),
        percentile(&mut steps, 0.5),
        percentile(&mut steps, 0.99),
    );
    Ok(())
}

/// Sends a request and reads its stream.
fn request(load: &Load, number: usize) -> Result<Times, String> {
    let failed = |error: std::io::Error| error.to_string();
    // Compute pseudorandom token ids by a multiplicative hash. The request's number makes each prompt different.
    // Prompts of another length differ from those of an earlier measurement, and so do shared tokens of another number.
    let token = |index: usize| {
        let seed = match index < load.shared {
            true => load.shared * 104_729,
            false => number * 7919 + load.prompt,
        };
        100 + (seed + index).wrapping_mul(2_654_435_761) % 1900
    };
    let prompt: Vec<usize> = (0..load.prompt).map(token).collect();
    let body = json!({
        "model": load.model, "prompt": prompt, "max_tokens": load.tokens, "ignore_eos": true, "temperature": 0,
        "stream": true,
    });
    let body = body.to_string();
    let mut stream = TcpStream::connect(&load.address).map_err(failed)?;
    let start = Instant::now();
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n{body}",
        load.address,
        body.len()
    )
    .map_err(failed)?;
    let mut first = None;
    let (mut is_ok, mut has_ended) = (false, false);
    for (index, line) in BufReader::new(stream).lines().enumerate() {
        let line = line.map_err(failed)?;
        match index {
            0 if !line.contains(" 200 ") => return Err(line),
            0 => is_ok = true,
            _ => (),
        }
        if line.starts_with("data: {") && first.is_none() {
            first = Some(start.elapsed());
        }
        has_ended |= line.starts_with("data: [DONE]");
    }
    match (is_ok && has_ended, first) {
        (true, Some(first)) => Ok(Times {
            first,
            all: start.elapsed(),
        }),
        _ => Err("the stream has ended early".into()),
    }
}

fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    values
        .get((last as f64 * share).round() as usize)
        .copied()
        .unwrap_or(0.0)
}
