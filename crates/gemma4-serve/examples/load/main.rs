//! Loads a running server: measures its throughput, or soaks it with random requests.
//!
//! ```sh
//! gemma4 serve --name tiny &
//! cargo run --release -p gemma4-serve --example load -- 127.0.0.1:8080 tiny 8 64 100 64
//! ```
//!
//! The arguments of a measurement, in order:
//!
//! - the server's address
//! - the model's name
//! - the number of clients
//! - the total number of requests
//! - the number of tokens of each prompt
//! - the number of tokens of each answer
//! - the number of first tokens that all prompts share, of those of each prompt [default: 0]. Another number makes
//!   other tokens, which the server's prefix cache does not have
//!
//! A soak sends random requests of all APIs for some minutes. Clients cancel, lose their connections, read slowly and
//! send malformed requests. Every greedy answer must equal the answer to the same request alone. At the end, the queue,
//! the batch and the KV cache must be as empty as before. Each answer that was sent must have been finished, cancelled
//! or refused. The process must have no more threads and open files than before, and its memory must not have grown.
//!
//! ```sh
//! gemma4 serve --name tiny --chat-template crates/gemma4-serve/tests/serve/tools.jinja --prefix-cache 16 &
//! cargo run --release -p gemma4-serve --example load -- --soak 30 127.0.0.1:8080 tiny 16 $!
//! ```
//!
//! The arguments of a soak, after its minutes: the address, the model's name, the number of clients, and the id of the
//! server's process. Without the process id, memory is not checked. The chat template must support tools. The prefix
//! cache must be small, because memory grows until this cache is full.

mod answers;
#[path = "../../tests/serve/cases.rs"]
mod cases;
#[path = "../../tests/serve/client.rs"]
#[allow(dead_code, reason = "the tests read the heads of responses, too")]
mod client;
mod observer;
mod soak;
mod throughput;

use soak::Soak;
use std::net::ToSocketAddrs;
use std::process::ExitCode;
use std::time::Duration;
use throughput::Load;

const USAGE: &str = "usage: load ADDRESS MODEL CLIENTS REQUESTS PROMPT_TOKENS TOKENS [SHARED_TOKENS]\n       \
                     load --soak MINUTES ADDRESS MODEL CLIENTS [PROCESS]";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments.as_slice() {
        ["--soak", minutes, rest @ ..] => {
            soak_arguments(minutes, rest).and_then(|soak| soak::run(&soak))
        }
        rest => load_arguments(rest).and_then(|load| throughput::run(&load)),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn load_arguments(arguments: &[&str]) -> Result<Load, String> {
    let [address, model, numbers @ ..] = arguments else {
        return Err(USAGE.into());
    };
    let numbers: Result<Vec<usize>, _> = numbers.iter().map(|number| number.parse()).collect();
    let numbers = numbers.map_err(|_| USAGE)?;
    let [clients, requests, prompt, tokens, rest @ ..] = numbers.as_slice() else {
        return Err(USAGE.into());
    };
    let shared = match rest {
        [] => 0,
        [shared] => *shared,
        _ => return Err(USAGE.into()),
    };
    match *tokens > 0 && *prompt > shared {
        true => Ok(Load {
            address: (*address).into(),
            model: (*model).into(),
            clients: *clients,
            requests: *requests,
            prompt: *prompt,
            tokens: *tokens,
            shared,
        }),
        false => Err(USAGE.into()),
    }
}

fn soak_arguments(minutes: &str, arguments: &[&str]) -> Result<Soak, String> {
    let [address, model, clients, process @ ..] = arguments else {
        return Err(USAGE.into());
    };
    let minutes: f64 = minutes.parse().map_err(|_| USAGE)?;
    let clients: usize = clients.parse().map_err(|_| USAGE)?;
    let process = match process {
        [] => None,
        [process] => Some(process.parse::<u32>().map_err(|_| USAGE)?),
        _ => return Err(USAGE.into()),
    };
    let time = Duration::try_from_secs_f64(minutes * 60.0).map_err(|_| USAGE)?;
    let mut addresses = address
        .to_socket_addrs()
        .map_err(|error| format!("{address}: {error}"))?;
    let address = addresses
        .next()
        .ok_or_else(|| format!("{address}: is not an address"))?;
    match clients > 0 && !time.is_zero() {
        true => Ok(Soak {
            time,
            address,
            model: (*model).into(),
            clients,
            process,
        }),
        false => Err(USAGE.into()),
    }
}
