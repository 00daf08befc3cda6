//! Times of attention, beside Burn's own and beside plain operators: `cargo bench --bench attention`.
//!
//! Forward: `2 · visible pairs · (head_dim + value_dim)` operations; backward 2.5 times as many;
//! decoding: bytes of keys and values. The backward is timed alone, under the loss `Σ output · g`,
//! less the time of that loss on a leaf. The sustained backward is what a step of forward and backward
//! takes back to back, less the forward and that loss.
//!
//! `cliffs`: what once cost many times its counterpart, beside it.

mod bench;
mod cases;
mod ceilings;
mod cliffs;
mod measure;
mod peers;
mod report;

use attention_workspace::layers::leave_out_device_selection;
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

/// Read by the operator: see `--engine` and `--shared-memory`.
const ENGINES: &str = "ATTENTION_ENGINES";
const SHARED_MEMORY: &str = "ATTENTION_SHARED_MEMORY";

/// Times attention, and checks it on the way.
#[derive(Parser)]
struct Cli {
    /// Cases whose name contains one of these; all without.
    filters: Vec<String>,
    /// Where to run.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    /// Engines that may serve, such as `unit` or `wgmma,unit`; the reference comes last in any case [default: all].
    #[arg(long)]
    engine: Option<String>,
    /// Bytes of shared memory that a cube may take at most, such as 101376, a consumer card's [default: the device's].
    #[arg(long)]
    shared_memory: Option<usize>,
    /// Of the tensors [default: bf16 or f16 on a GPU that has it, else f32].
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// What to time.
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["forward", "backward"])]
    passes: Vec<Pass>,
    /// How large the cases are [default: full on a GPU, small on a processor].
    #[arg(long, value_enum)]
    scale: Option<Scale>,
    /// Fewer launches, and no ceilings.
    #[arg(long)]
    quick: bool,
    /// Single launches to take the median of [default: 20, quick: 5].
    #[arg(long)]
    launches: Option<usize>,
    /// Launches back to back to take the mean of [default: 150, quick: 10].
    #[arg(long)]
    sustained: Option<usize>,
    /// Leave out Burn's own attention and plain operators [default: on a software driver, where Burn
    /// takes minutes to tune them].
    #[arg(long, default_missing_value = "true", num_args = 0..=1)]
    only_ours: Option<bool>,
    /// GB that the scores of one of those may take [default: 40 on a GPU, 4 on a processor].
    #[arg(long)]
    peer_memory: Option<f64>,
    /// Print which kernel serves each case, and why faster ones refuse.
    #[arg(long)]
    explain: bool,
    /// List the cases.
    #[arg(long)]
    list: bool,
    /// Write all rows to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Given by `cargo bench`.
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

/// Tells the operator what the device is restricted to, by the environment, which it reads when a device is first asked.
fn restrict(cli: &Cli) {
    let shared_memory = cli.shared_memory.map(|bytes| bytes.to_string());
    for (name, value) in [(ENGINES, &cli.engine), (SHARED_MEMORY, &shared_memory)] {
        if let Some(value) = value {
            // SAFETY: the program has no other thread yet.
            unsafe { env::set_var(name, value) };
        }
    }
}

/// What the device is restricted to, by options or by the environment, as the first line says it.
fn restriction() -> String {
    let said = |name| env::var(name).ok();
    let engines = said(ENGINES).map(|engines| format!(", engines {engines}"));
    let bytes = said(SHARED_MEMORY).map(|bytes| format!(", {bytes} bytes of shared memory"));
    engines.unwrap_or_default() + &bytes.unwrap_or_default()
}

/// Whether every row of ours is measured and right.
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
        return Err("no case has such a name: --list names them all".into());
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
    // They are sized for a GPU.
    if !cliffs.is_empty() && bench.report.scale == Scale::Full {
        print_cliff_header();
        for cliff in cliffs {
            bench.cliff(cliff)?;
        }
    }
    Ok(bench.good)
}
