//! Benchmarks attention against Burn's own attention and plain operators: `cargo bench --bench attention`.
//!
//! The FLOP/s of the forward assume `2 · visible pairs · (head_dim + value_dim)` operations. The FLOP/s of the backward
//! assume 2.5 times as many operations. A visible pair is a query with a key that the query sees. The rate of decoding
//! is the size of all keys and values in bytes, divided by the time in seconds.
//!
//! The loss is `Σ output · g` with a random tensor `g`. The time of the backward excludes the time to differentiate
//! this loss.
//!
//! The sustained time is the time per launch when launches follow each other without a pause. For the backward, it is
//! the time of a training step (forward and backward) minus the times of the forward and of the loss.
//!
//! The module `cliffs` lists cases in which attention was once many times slower than in a similar case.

mod bench;
mod cases;
mod ceilings;
mod cliffs;
mod measure;
mod peers;
mod report;

use attention_workspace::mesa_layer::leave_out_device_selection;
use attention_workspace::{
    Dtype, Error,
    device::{DeviceName, choose},
};
use bench::Bench;
use cases::{CASES, Case, Scale};
use clap::Parser;
use cliffs::{CLIFFS, Cliff};
use report::{Pass, print_cliff_header, print_header};
use std::{env, path::PathBuf, process::ExitCode};

/// The names of the environment variables that the options `--engine` and `--shared-memory` set.
const ENGINES: &str = "ATTENTION_ENGINES";
const SHARED_MEMORY: &str = "ATTENTION_SHARED_MEMORY";

/// Times attention, and checks its results against the reference implementation
#[derive(Parser)]
struct Cli {
    /// Run only the cases whose name contains one of these texts [default: all]
    filters: Vec<String>,
    /// The device to run on
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    /// Engines that the operator may use, such as `unit` or `wgmma,unit`; the reference implementation always remains as the
    /// last choice [default: all]
    #[arg(long)]
    engine: Option<String>,
    /// The maximum shared memory of a cube in bytes, such as 101376 for a consumer GPU [default: the device's maximum]
    #[arg(long)]
    shared_memory: Option<usize>,
    /// The dtype of the tensors [default: bf16 or f16 on a GPU that supports it, otherwise f32]
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// The passes to time, forward or backward
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["forward", "backward"])]
    passes: Vec<Pass>,
    /// The size of the cases [default: full on a GPU, small on a CPU]
    #[arg(long, value_enum)]
    scale: Option<Scale>,
    /// Run fewer launches, and do not measure the device's peak rates
    #[arg(long)]
    quick: bool,
    /// The number of launches that are timed one by one; their median is reported [default: 20, quick: 5]
    #[arg(long)]
    launches: Option<usize>,
    /// The number of launches that are timed back to back; their mean is reported [default: 150, quick: 10]
    #[arg(long)]
    sustained: Option<usize>,
    /// Leave out the peers: Burn's own attention and plain operators [default: true on a software driver, where Burn takes
    /// minutes to tune them]
    #[arg(long, default_missing_value = "true", num_args = 0..=1)]
    only_ours: Option<bool>,
    /// The maximum memory in GB for the scores of a peer; a case whose scores need more memory runs without that peer
    /// [default: 40 on a GPU, 4 on a CPU]
    #[arg(long)]
    peer_memory: Option<f64>,
    /// Print the kernel of each case, and the reason why each faster kernel refused the case
    #[arg(long)]
    explain: bool,
    /// List the cases instead of running them
    #[arg(long)]
    list: bool,
    /// Write all results to this file, as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// Ignored. `cargo bench` passes this flag
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    leave_out_device_selection();
    let cli = Cli::parse();
    restrict(&cli);
    match run(&cli) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Sets the operator's environment variables from the options. The operator reads these variables when a device is first used.
fn restrict(cli: &Cli) {
    let shared_memory = cli.shared_memory.map(|bytes| bytes.to_string());
    for (name, value) in [(ENGINES, &cli.engine), (SHARED_MEMORY, &shared_memory)] {
        if let Some(value) = value {
            // SAFETY: the program has no other thread yet.
            unsafe { env::set_var(name, value) };
        }
    }
}

/// Returns a text for the first line of the output. The text lists the allowed engines and states the shared memory
/// limit.
fn restriction() -> String {
    let said = |name| env::var(name).ok();
    let engines = said(ENGINES).map(|engines| format!(", engines {engines}"));
    let bytes = said(SHARED_MEMORY).map(|bytes| format!(", {bytes} bytes of shared memory"));
    engines.unwrap_or_default() + &bytes.unwrap_or_default()
}

/// Runs the benchmark. Returns true if every result of this project's attention was measured and is accurate.
fn run(cli: &Cli) -> Result<bool, Error> {
    let is_chosen = |name: &str| {
        cli.filters.is_empty() || cli.filters.iter().any(|filter| name.contains(filter))
    };
    let chosen: Vec<&Case> = CASES.iter().filter(|case| is_chosen(case.name)).collect();
    let cliffs: Vec<&Cliff> = CLIFFS
        .iter()
        .filter(|cliff| is_chosen(cliff.name) && cli.passes.contains(&cliff.pass))
        .collect();
    if chosen.is_empty() && cliffs.is_empty() {
        return Err("no case has such a name; --list prints all names".into());
    }
    if cli.list {
        let cliffs = cliffs.iter().map(|cliff| cliff.name);
        let mut names: Vec<&str> = chosen.iter().map(|case| case.name).chain(cliffs).collect();
        names.dedup();
        names.iter().for_each(|name| println!("{name}"));
        return Ok(true);
    }
    let mut bench = Bench::new(cli, choose(cli.device)?)?;
    if !chosen.is_empty() {
        print_header();
    }
    for case in chosen {
        bench.case(case)?;
    }
    // The cliffs run at full scale only, because their sizes are meant for a GPU.
    if !cliffs.is_empty() && bench.report.scale == Scale::Full {
        print_cliff_header();
        for cliff in cliffs {
            bench.cliff(cliff)?;
        }
    }
    Ok(bench.good)
}
