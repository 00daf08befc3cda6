//! A soak of a server: random requests for a given time, and checks of answers and resources.

use crate::answers::Sent;
use crate::cases::{Case, case, compare};
use crate::client::{PATIENCE, Response, connect, get, parse, post, receive, remaining};
use crate::observer::{Metrics, Process, check_process, idle};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The number of requests whose answers are known before the soak. Clients send each of them many times.
const KNOWN: usize = 200;
/// The paths and fields of malformed requests.
const MALFORMED: [(&str, &str, &str); 4] = [
    ("/v1/chat/completions", "temperature", "\"hot\""),
    ("/v1/completions", "prompt", "[[]]"),
    ("/v1/responses", "input", "7"),
    ("/v1/messages", "max_tokens", "-1"),
];

/// The arguments of a soak.
pub struct Soak {
    pub time: Duration,
    pub address: SocketAddr,
    pub model: String,
    pub clients: usize,
    /// The id of the server's process on this machine.
    pub process: Option<u32>,
}

/// A request with its response.
struct Answered {
    case: Case,
    response: Response,
}

/// The shared state of a soak's clients.
struct State<'a> {
    soak: &'a Soak,
    known: &'a [Answered],
    /// The names that requests can give as their model: the model, and the model with each adapter.
    models: &'a [String],
    end: Instant,
    has_failed: AtomicBool,
    seed: AtomicU64,
    /// The responses to compare after the soak.
    new: Mutex<Vec<Answered>>,
    counts: Mutex<BTreeMap<&'static str, usize>>,
    sent: Sent,
}

impl State<'_> {
    fn count(&self, name: &'static str) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(name).or_default() += 1;
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.end || self.has_failed.load(Ordering::Relaxed)
    }
}

/// Soaks a server, and prints what was sent and found.
///
/// # Errors
/// Returns the reason if a response is wrong, or if the server does not return to its state from before the soak.
pub fn run(soak: &Soak) -> Result<(), String> {
    let models = models(soak)?;
    let mut rng = StdRng::seed_from_u64(rand::random());
    let known = (0..KNOWN).map(|_| {
        let case = draw(&mut rng, &models);
        let response = whole(soak, &case)?;
        Ok(Answered { case, response })
    });
    let known = known.collect::<Result<Vec<_>, String>>()?;
    let metrics = idle(soak.address, None)?;
    let process = soak.process.map(Process::read).transpose()?;
    println!("{KNOWN} requests were answered alone; the soak begins, with the models {models:?}");
    let state = State {
        soak,
        known: &known,
        models: &models,
        end: Instant::now() + soak.time,
        has_failed: AtomicBool::new(false),
        seed: AtomicU64::new(rng.random()),
        new: Mutex::default(),
        counts: Mutex::default(),
        sent: Sent::default(),
    };
    let memory = thread::scope(|scope| {
        let clients: Vec<_> = (0..soak.clients)
            .map(|_| scope.spawn(|| client(&state)))
            .collect();
        let memory = observe(&state);
        for client in clients {
            let outcome = client.join();
            outcome.unwrap_or_else(|_| Err("a client has panicked".into()))?;
        }
        memory
    })?;
    let after = idle(soak.address, Some(&metrics))?;
    let new = state
        .new
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    for Answered { case, response } in &new {
        compare(case, &whole(soak, case)?, response)?;
    }
    idle(soak.address, Some(&metrics))?;
    let counts = state
        .counts
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    println!(
        "sent: {counts:?}; {} new answers were compared after the soak",
        new.len()
    );
    println!("outcomes: {:?}", after.outcomes);
    let [read, cached, generated] = after.tokens;
    println!("tokens: {read} read, {cached} from the prefix cache, {generated} generated");
    println!(
        "gauges before: {:?}\ngauges after:  {:?}",
        metrics.gauges, after.gauges
    );
    println!("prefix cache: {:.1} MiB", after.prefix_bytes / 1048576.0);
    if let Some(outcome) = ["failed", "refused"].iter().find(|name| {
        after.outcomes.get(**name).unwrap_or(&0.0) != metrics.outcomes.get(**name).unwrap_or(&0.0)
    }) {
        return Err(format!(
            "some requests were {outcome}: {:?}",
            after.outcomes
        ));
    }
    state.sent.check(&metrics.outcomes, &after.outcomes)?;
    match (soak.process, process) {
        (Some(id), Some(before)) => check_process(id, before, &memory),
        _ => Ok(()),
    }
}

/// Returns the names of the models that the server lists.
fn models(soak: &Soak) -> Result<Vec<String>, String> {
    let response = receive(soak.address, &get("/v1/models"), usize::MAX, PATIENCE);
    let response = response.map_err(|error| format!("{}: {error}", soak.address))?;
    let list: Value = serde_json::from_str(&response.body)
        .map_err(|error| format!("/v1/models: {error}: {}", response.body))?;
    let data = list["data"].as_array().into_iter().flatten();
    let names: Vec<String> = data
        .filter_map(|model| model["id"].as_str().map(str::to_owned))
        .collect();
    match names.contains(&soak.model) {
        true => Ok(names),
        false => Err(format!(
            "the server has no model {:?}: {names:?}",
            soak.model
        )),
    }
}

/// Draws a request to one of the models. Its client reads the whole response.
fn draw(rng: &mut StdRng, models: &[String]) -> Case {
    let mut case = case(rng);
    case.body["model"] = json!(models.choose(rng));
    case.leaves = None;
    case
}

/// Sends a request and returns the whole response.
fn whole(soak: &Soak, case: &Case) -> Result<Response, String> {
    let response = receive(
        soak.address,
        &post(case.path, &case.body),
        usize::MAX,
        PATIENCE,
    );
    let response = response.map_err(|error| format!("{case:?}: {error}"))?;
    match response.status {
        200 => Ok(response),
        status => Err(format!("{case:?}: status {status}: {}", response.body)),
    }
}

/// Sends requests until the end of the soak.
fn client(state: &State<'_>) -> Result<(), String> {
    while !state.is_over() {
        let seed = state.seed.fetch_add(1, Ordering::Relaxed);
        let step = AssertUnwindSafe(|| step(state, &mut StdRng::seed_from_u64(seed)));
        // The message of a panic is on standard error.
        let outcome = catch_unwind(step).unwrap_or_else(|_| Err("the client panicked".into()));
        if outcome.is_err() {
            state.has_failed.store(true, Ordering::Relaxed);
            return outcome.map_err(|error| format!("request with the seed {seed}: {error}"));
        }
    }
    Ok(())
}

/// Sends one random request, and checks its response.
fn step(state: &State<'_>, rng: &mut StdRng) -> Result<(), String> {
    let soak = state.soak;
    let known = state.known.choose(rng).ok_or("no request is known")?;
    thread::sleep(Duration::from_millis(known.case.delay));
    match rng.random_range(0..100) {
        0..50 => {
            compare(&known.case, &known.response, &whole(soak, &known.case)?)?;
            state.sent.whole(&known.case);
            state.count("known");
        }
        50..60 => {
            let case = draw(rng, state.models);
            let response = whole(soak, &case)?;
            state.sent.whole(&case);
            let mut new = state.new.lock().unwrap_or_else(PoisonError::into_inner);
            new.push(Answered { case, response });
            state.count("new");
        }
        60..75 => leave(state, rng, known)?,
        75..80 => {
            // The connection is lost while the request is sent.
            let request = post(known.case.path, &known.case.body);
            let sent = rng.random_range(0..request.len());
            let written = connect(soak.address).and_then(|mut one| one.write_all(&request[..sent]));
            written.map_err(|error| error.to_string())?;
            state.count("lost before the request was complete");
        }
        80..85 => malformed(state, rng)?,
        85..88 => {
            let response = read_slowly(soak, rng, &known.case)?;
            compare(&known.case, &known.response, &response)?;
            state.sent.whole(&known.case);
            state.count("read slowly");
        }
        88..95 => {
            let mut case = draw(rng, state.models);
            case.body["temperature"] = json!(rng.random_range(0.1..1.0));
            case.body["top_p"] = json!(0.9);
            if matches!(case.path, "/v1/chat/completions" | "/v1/completions") {
                case.body["top_k"] = json!(40);
                case.body["seed"] = json!(rng.random::<u32>());
            }
            whole(soak, &case)?;
            state.sent.whole(&case);
            state.count("sampled");
        }
        _ => {
            let path = ["/health", "/v1/models", "/metrics", "/"]
                .choose(rng)
                .ok_or("no path")?;
            let response = receive(soak.address, &get(path), usize::MAX, PATIENCE);
            let response = response.map_err(|error| format!("{path}: {error}"))?;
            if response.status != 200 {
                return Err(format!(
                    "{path}: status {}: {}",
                    response.status, response.body
                ));
            }
            state.count("get");
        }
    }
    Ok(())
}

/// Sends a known request, and disconnects early.
fn leave(state: &State<'_>, rng: &mut StdRng, known: &Answered) -> Result<(), String> {
    let case = Case {
        leaves: Some((rng.random_range(0..3000), rng.random_range(1..60))),
        ..known.case.clone()
    };
    let (most, wait) = case.leaves.unwrap_or_default();
    let request = post(case.path, &case.body);
    let response = receive(
        state.soak.address,
        &request,
        most,
        Duration::from_millis(wait),
    );
    let response = response.map_err(|error| format!("{case:?}: {error}"))?;
    state.count("cancelled");
    state.sent.left(&case, response.status != 0);
    // A body that is not streamed can be compared only if all of it has arrived.
    if response.status != 0 && case.body["stream"] == true {
        compare(&case, &known.response, &response)?;
    }
    Ok(())
}

/// Sends a malformed request, which must be refused.
fn malformed(state: &State<'_>, rng: &mut StdRng) -> Result<(), String> {
    let (path, field, value) = MALFORMED.choose(rng).ok_or("no malformed request")?;
    let value: Value = serde_json::from_str(value).map_err(|error| error.to_string())?;
    let mut body = json!({"model": state.soak.model});
    body[*field] = value;
    let response = receive(state.soak.address, &post(path, &body), usize::MAX, PATIENCE);
    let response = response.map_err(|error| format!("{path}: {error}"))?;
    state.count("malformed");
    match response.status {
        400 => Ok(()),
        status => Err(format!("{path} {body}: status {status}: {}", response.body)),
    }
}

/// Sends a request, and reads the response in small pieces with pauses.
fn read_slowly(soak: &Soak, rng: &mut StdRng, case: &Case) -> Result<Response, String> {
    let failed = |error: std::io::Error| format!("{case:?}: {error}");
    let end = Instant::now() + PATIENCE;
    let mut stream = connect(soak.address).map_err(failed)?;
    stream
        .write_all(&post(case.path, &case.body))
        .map_err(failed)?;
    let (mut bytes, mut buffer) = (Vec::new(), [0; 512]);
    loop {
        thread::sleep(Duration::from_millis(rng.random_range(0..40)));
        let timeout = remaining(end).and_then(|time| stream.set_read_timeout(Some(time)));
        timeout.map_err(failed)?;
        match stream.read(&mut buffer).map_err(failed)? {
            0 => return Ok(parse(&bytes)),
            count => bytes.extend_from_slice(&buffer[..count]),
        }
    }
}

/// Reads the memory of the process every second, until the end of the soak. Prints the state once a minute.
fn observe(state: &State<'_>) -> Result<Vec<f64>, String> {
    let mut memory = Vec::new();
    let mut peak = BTreeMap::<String, f64>::new();
    let started = Instant::now();
    let mut printed = 0;
    while !state.is_over() {
        thread::sleep(Duration::from_secs(1));
        let read = || -> Result<(Metrics, Option<Process>), String> {
            let process = state.soak.process.map(Process::read).transpose()?;
            Ok((Metrics::read(state.soak.address)?, process))
        };
        let (metrics, process) = read().inspect_err(|_| {
            state.has_failed.store(true, Ordering::Relaxed);
        })?;
        memory.extend(process.map(|process| process.memory));
        for (name, value) in &metrics.gauges {
            let peak = peak.entry(name.clone()).or_default();
            *peak = peak.max(*value);
        }
        let minutes = started.elapsed().as_secs() / 60;
        if minutes > printed {
            printed = minutes;
            println!(
                "{minutes} min: {}, prefix cache {:.1} MiB, {:?}",
                process.unwrap_or_default(),
                metrics.prefix_bytes / 1048576.0,
                metrics.outcomes
            );
        }
    }
    println!("peaks of gauges, sampled each second: {peak:?}");
    Ok(memory)
}
