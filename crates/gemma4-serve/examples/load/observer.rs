//! The state of a server from outside: its metrics, and the memory of its process.

use crate::client::{PATIENCE, get, receive};
use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

/// The gauges of a server's load. An idle server has zeros.
const LOAD: [&str; 3] = [
    "gemma4_queued_requests",
    "gemma4_prefilling_requests",
    "gemma4_running_answers",
];
/// The time after which an idle server has updated all its gauges.
const SETTLED: Duration = Duration::from_millis(500);
/// The limit of the growth of resident memory, as a share. The growth is the difference of two means: of the last third
/// and of the first third of the soak.
const GROWTH: f64 = 0.05;
/// The number of MiB by which memory may grow in addition, for the allocator.
const GROWTH_MIB: f64 = 16.0;
/// The smallest number of samples of memory, one for each third.
const LEAST_SAMPLES: usize = 3;
/// The gauge of the prefix cache, which stays full after the last request.
const PREFIX_CACHE: &str = "gemma4_prefix_cache_bytes";

/// The metrics of a server at one time. A metric of several devices or outcomes is the sum of its values.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// The gauges by name, without [`PREFIX_CACHE`].
    pub gauges: BTreeMap<String, f64>,
    /// The numbers of requests by outcome.
    pub outcomes: BTreeMap<String, f64>,
    /// The size of the prefix cache, in bytes.
    pub prefix_bytes: f64,
    /// The numbers of read, cached and generated tokens.
    pub tokens: [f64; 3],
}

impl Metrics {
    /// Reads the metrics of a server.
    pub fn read(address: SocketAddr) -> Result<Self, String> {
        let response = receive(address, &get("/metrics"), usize::MAX, PATIENCE);
        let response = response.map_err(|error| format!("/metrics: {error}"))?;
        match response.status {
            200 => Ok(Self::parse(&response.body)),
            status => Err(format!("/metrics: status {status}: {}", response.body)),
        }
    }

    fn parse(text: &str) -> Self {
        let mut metrics = Self::default();
        let types: BTreeMap<&str, &str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '))
            .collect();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((series, value)) = line.rsplit_once(' ') else {
                continue;
            };
            let value: f64 = value.parse().unwrap_or(f64::NAN);
            let name = series.split('{').next().unwrap_or(series);
            match name {
                PREFIX_CACHE => metrics.prefix_bytes += value,
                "gemma4_requests_total" => {
                    let outcome = series.split("outcome=\"").nth(1).unwrap_or_default();
                    let outcome = outcome.split('"').next().unwrap_or_default();
                    *metrics.outcomes.entry(outcome.into()).or_default() += value;
                }
                "gemma4_prompt_tokens_total" => metrics.tokens[0] += value,
                "gemma4_cached_prompt_tokens_total" => metrics.tokens[1] += value,
                "gemma4_generated_tokens_total" => metrics.tokens[2] += value,
                name if types.get(name) == Some(&"gauge") => {
                    *metrics.gauges.entry(name.into()).or_default() += value;
                }
                _ => (),
            }
        }
        metrics
    }
}

/// The resources of a process at one time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Process {
    /// The resident memory, in MiB.
    pub memory: f64,
    /// The number of threads.
    pub threads: usize,
    /// The number of open files and connections.
    pub files: usize,
}

impl Process {
    /// Reads the resources of the process with this id. Works on Linux only.
    pub fn read(id: u32) -> Result<Self, String> {
        let wrong = |error: std::io::Error| format!("process {id}: {error}");
        let status = std::fs::read_to_string(format!("/proc/{id}/status")).map_err(wrong)?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let value = line.and_then(|line| line.split_whitespace().next());
            let value = value.and_then(|value| value.parse::<usize>().ok());
            value.ok_or_else(|| format!("process {id}: has no {name:?} in its status"))
        };
        let files = std::fs::read_dir(format!("/proc/{id}/fd")).map_err(wrong)?;
        Ok(Self {
            memory: field("VmRSS:")? as f64 / 1024.0,
            threads: field("Threads:")?,
            files: files.count(),
        })
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            memory,
            threads,
            files,
        } = self;
        write!(f, "{memory:.1} MiB, {threads} threads, {files} files")
    }
}

/// Waits until all gauges have the values of `expected`, or until the server is idle if `expected` is `None`.
pub fn idle(address: SocketAddr, expected: Option<&Metrics>) -> Result<Metrics, String> {
    let started = Instant::now();
    loop {
        let metrics = Metrics::read(address)?;
        let is_zero = |name: &str| metrics.gauges.get(name) == Some(&0.0);
        let is_idle = match expected {
            Some(expected) => metrics.gauges == expected.gauges,
            None => LOAD.iter().all(|name| is_zero(name)),
        };
        if is_idle && (expected.is_some() || started.elapsed() > SETTLED) {
            return Ok(metrics);
        }
        if started.elapsed() > PATIENCE {
            let expected = expected.map(|expected| &expected.gauges);
            return Err(format!(
                "the gauges are {:?}; expected {expected:?}",
                metrics.gauges
            ));
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Checks the growth of memory, and waits until all connections are closed and additional threads have ended.
pub fn check_process(id: u32, before: Process, memory: &[f64]) -> Result<(), String> {
    if memory.len() < LEAST_SAMPLES {
        return Err(format!(
            "memory has {} samples, one a second; expected at least {LEAST_SAMPLES}, so soak for longer",
            memory.len()
        ));
    }
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let third = memory.len() / 3;
    let (first, last) = (
        mean(&memory[..third]),
        mean(&memory[memory.len() - third..]),
    );
    let peak = memory.iter().copied().fold(0.0, f64::max);
    let started = Instant::now();
    let after = loop {
        let after = Process::read(id)?;
        let is_back = after.files <= before.files && after.threads <= before.threads;
        if is_back || started.elapsed() > PATIENCE {
            break after;
        }
        thread::sleep(Duration::from_millis(100));
    };
    println!("process before: {before}\nprocess after:  {after}");
    println!(
        "resident memory: first third {first:.1} MiB, last third {last:.1} MiB, peak {peak:.1} MiB"
    );
    for (name, after, before) in [
        ("files", after.files, before.files),
        ("threads", after.threads, before.threads),
    ] {
        if after > before {
            return Err(format!("the process has {after} {name}; expected {before}"));
        }
    }
    match last - first > first * GROWTH + GROWTH_MIB {
        true => Err(format!("memory has grown from {first:.1} to {last:.1} MiB")),
        false => Ok(()),
    }
}
