//! Benchmarks ring attention over several devices of one process: `cargo bench --bench ring`.
//!
//! The sequence is divided among the devices in zigzag order, which balances the work of a causal mask. The keys and
//! values travel around the ring while the devices compute. The reference is one device that computes the whole
//! sequence in one call.
//!
//! All times are by the wall clock, from devices without work to devices without work. The FLOP/s of the forward assume
//! `4 · visible pairs · head_dim` operations. The FLOP/s of the backward assume 2.5 times as many operations.
//!
//! The backward starts from the output, the logsumexp and the gradient of the output. It excludes the forward and the
//! loss.

mod measure;
mod report;

use attention_workspace::mesa_layer::leave_out_device_selection;
use attention_workspace::{
    Dtype, Error,
    device::{DeviceName, choose, count, several},
    report::{now, save},
    workload::{Workload, backward_operations, forward_operations},
};
use clap::Parser;
use measure::{DividedProblem, measure_one_device, relative_errors};
use report::{Operations, Report};
use std::{path::PathBuf, process::ExitCode};

/// Times causal ring attention over several devices, and compares the results with those of one device
#[derive(Parser)]
struct Cli {
    /// The kind of devices to run on
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    /// The number of ranks of the ring; rank 0 runs on device 0, and so on. If the machine has fewer devices, ranks share
    /// devices
    #[arg(long, default_value_t = 2)]
    devices: usize,
    /// The dtype of the tensors [default: bf16 or f16 on a GPU that supports it, otherwise f32]
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// The number of sequences
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// The number of query heads
    #[arg(long, default_value_t = 8)]
    q_heads: usize,
    /// The number of key and value heads
    #[arg(long, default_value_t = 1)]
    kv_heads: usize,
    /// The number of columns of queries, keys and values
    #[arg(long, default_value_t = 512)]
    head_dim: usize,
    /// The number of tokens per sequence, a multiple of twice the number of ranks [default: 65536 on a GPU, 512 on a CPU]
    #[arg(long)]
    tokens: Option<usize>,
    /// The number of timed runs of each pass, after two warm-up runs; the median of their times is reported
    #[arg(long, default_value_t = 5)]
    repeats: usize,
    /// Write all results to this file, as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// Ignored. `cargo bench` passes this flag
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    leave_out_device_selection();
    match run(&Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("error: the ring's results differ from those of one device");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the benchmark. Returns true if the ring's results are accurate.
fn run(cli: &Cli) -> Result<bool, Error> {
    let chosen = choose(cli.device)?;
    let workload = workload(cli, chosen.dtype(cli.dtype)?, chosen.software);
    let available = count(&chosen).max(1);
    let numbers: Vec<usize> = (0..cli.devices).map(|rank| rank % available).collect();
    let devices = several(&chosen, &numbers)?;
    let device = devices
        .first()
        .ok_or("devices: found 0; expected at least 1")?;
    let copies = match (available.min(devices.len()), chosen.has_transport()) {
        (0 | 1, _) => "",
        (_, true) => ", direct copies between devices",
        (_, false) => ", copies between devices through the host",
    };
    println!(
        "{chosen}, {workload} {} causal, ring of {}{copies}",
        workload.dtype, cli.devices
    );
    if devices.len() > available {
        eprintln!("note: several ranks share a device; the speedup is not that of several devices");
    }

    let inputs = workload.inputs(device)?;
    let problem = workload.problem(&inputs)?;
    let divided = DividedProblem::new(&inputs, devices.clone())?;
    let (one_device, expected) = measure_one_device(&inputs, cli.repeats)?;
    let (ring, found) = divided.measure(cli.repeats)?;
    let report = Report {
        date: now(),
        device: chosen.to_string(),
        ranks: devices.len(),
        operations: Operations {
            forward: forward_operations(&problem),
            backward: backward_operations(&problem),
        },
        one_device,
        ring,
        errors: relative_errors(found, expected)?,
        workload,
    };
    report.print();
    if let Some(path) = &cli.json {
        save(&report, path)?;
    }
    Ok(report.is_good())
}

fn workload(cli: &Cli, dtype: Dtype, software: bool) -> Workload {
    let tokens = cli.tokens.unwrap_or(if software { 512 } else { 65_536 });
    Workload {
        batch: cli.batch,
        q_heads: cli.q_heads,
        kv_heads: cli.kv_heads,
        q_len: tokens,
        kv_len: tokens,
        head_dim: cli.head_dim,
        dtype,
        causal: true,
        window: None,
        scale: None,
        softcap: None,
        mask: false,
        bias: false,
        codes: None,
        kv_length: None,
    }
}
