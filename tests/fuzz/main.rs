//! Fuzzes all file formats that this project reads. Reading a broken file must give a result or an error. It must not
//! panic, abort, allocate more than 1 GB, or take more than half a minute.
//!
//! A target is a format with a corpus in `tests/fuzz/corpus`. Each target runs in its own process. The process reads the
//! files of the corpus, and then reads randomly mutated files for `--seconds`. The value of `--seconds` is 0 under `cargo
//! test`, and larger under `cargo xtask fuzz`.
//!
//! If an input causes a crash, the input is kept in Cargo's target folder. The developer who fixes the crash adds the input
//! to the corpus.

#[cfg(not(feature = "flex"))]
compile_error!("models are loaded on Burn's flex backend: enable the feature `flex`");

mod memory;
mod mutation;
mod supervision;
mod targets;
mod worker;

use clap::Parser;
use std::{path::PathBuf, process::ExitCode, sync::Mutex, thread};
use targets::{TARGETS, Target};

#[global_allocator]
static ALLOCATOR: memory::Bounded = memory::Bounded;

/// Read broken files of every format, and report crashes, hangs and excessive memory
#[derive(Parser)]
struct Arguments {
    /// Read only formats whose names contain one of these texts
    formats: Vec<String>,
    /// Seconds to fuzz each format after reading its corpus
    #[arg(long, default_value_t = 0)]
    seconds: u64,
    /// Seed of the random mutations
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Run as the worker process that reads broken files of this format
    #[arg(long, hide = true, requires = "state")]
    worker: Option<String>,
    /// File in which the worker records its input
    #[arg(long, hide = true)]
    state: Option<PathBuf>,
    #[command(flatten)]
    harness: Harness,
}

/// The arguments that `cargo test` may pass to every test program. They have no effect in this program.
#[derive(clap::Args)]
struct Harness {
    #[arg(long, hide = true)]
    list: bool,
    #[arg(long, hide = true)]
    nocapture: bool,
    #[arg(long, hide = true)]
    no_capture: bool,
    #[arg(long, hide = true)]
    show_output: bool,
    #[arg(long, hide = true)]
    exact: bool,
    #[arg(long, hide = true)]
    ignored: bool,
    #[arg(long, hide = true)]
    include_ignored: bool,
    #[arg(long, short, hide = true)]
    quiet: bool,
    #[arg(long, hide = true)]
    test_threads: Option<usize>,
    #[arg(long, hide = true)]
    skip: Vec<String>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.harness.list || arguments.harness.ignored {
        return ExitCode::SUCCESS;
    }
    if let (Some(name), Some(state)) = (&arguments.worker, &arguments.state) {
        let target = TARGETS.iter().find(|target| target.name == name);
        let target = target.unwrap_or_else(|| panic!("there is no format {name:?}"));
        worker::run(target, state, arguments.seconds, arguments.seed);
        return ExitCode::SUCCESS;
    }
    let is_wanted = |target: &&Target| {
        let names = &arguments.formats;
        names.is_empty() || names.iter().any(|name| target.name.contains(name.as_str()))
    };
    let wanted: Vec<&Target> = TARGETS.iter().filter(is_wanted).collect();
    if supervise(&wanted, &arguments) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Fuzzes the targets (formats), with one thread per CPU core. Returns true if no target failed.
fn supervise(targets: &[&Target], arguments: &Arguments) -> bool {
    let waiting = Mutex::new(targets.iter());
    let next = || {
        let mut waiting = waiting.lock().expect("no thread panics with the lock");
        waiting.next().copied()
    };
    let one_by_one = || {
        let mut all_hold = true;
        while let Some(target) = next() {
            all_hold &= supervision::run(target, arguments.seconds, arguments.seed);
        }
        all_hold
    };
    let cores = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(one_by_one)).collect();
        // `Iterator::all` stops at the first failed thread. The results of all threads are collected first, so that every
        // thread is joined.
        let held: Vec<bool> = threads
            .into_iter()
            .map(|thread| thread.join().expect("the supervisor does not panic"))
            .collect();
        held.into_iter().all(|held| held)
    })
}
