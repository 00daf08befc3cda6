//! Files from elsewhere, broken at random: whatever they hold, reading them ends with a result or an error, never in a panic, an
//! abort, more than 1 GB or more than half a minute.
//!
//! A format is a target with a corpus in `tests/fuzz/corpus`. Each runs in a process of its own, first over the corpus, which is
//! all that `cargo test` does, then for `--seconds` over what a seed makes of it; `cargo xtask fuzz` sets the time. The process
//! writes down each input before it reads it, so that the one it dies of is known: it is kept in the target folder, to be added to the corpus with the mend.

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

/// Reads broken files of every format, to see that nothing but errors comes of them.
#[derive(Parser)]
struct Arguments {
    /// Only formats whose names have one of these in them.
    formats: Vec<String>,
    /// How long to break files of each format, after its corpus.
    #[arg(long, default_value_t = 0)]
    seconds: u64,
    /// What the broken files are drawn by.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Reads broken files of this format, in this process.
    #[arg(long, hide = true, requires = "state")]
    worker: Option<String>,
    /// Where the worker writes its input down.
    #[arg(long, hide = true)]
    state: Option<PathBuf>,
    #[command(flatten)]
    harness: Harness,
}

/// What `cargo test` may hand to every test program. It makes no difference here.
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

/// Runs the targets, as many at once as there are cores. Whether all of them held.
fn supervise(targets: &[&Target], arguments: &Arguments) -> bool {
    let waiting = Mutex::new(targets.iter());
    let next = || {
        let mut waiting = waiting.lock().expect("no thread panics with it");
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
        // Every thread is waited for.
        let held: Vec<bool> = threads
            .into_iter()
            .map(|thread| thread.join().expect("a supervisor that does not panic"))
            .collect();
        held.into_iter().all(|held| held)
    })
}
