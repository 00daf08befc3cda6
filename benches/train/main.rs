//! Benchmarks training steps of models with random weights: `cargo bench --features training --bench train`.
//!
//! The rate in tokens per second is measured by the wall clock over whole steps: forward, backward and optimizer. The loss
//! covers only the last positions of each sequence, as in training on long documents. Gradient clipping, the optimizer and
//! `--checkpointing` have the defaults of the programs `train` and `finetune`.
//!
//! The reported memory is the peak over the warm-up steps and one untimed step, polled every few milliseconds. The first run
//! of the benchmark also tunes kernels, which takes more memory than a step. Use the peak that a second run reports.
//!
//! The parts of a step, such as attention, are timed separately, without a CUDA graph. The benchmark compares the times of
//! the parts with the time of a whole step without a CUDA graph. The rest of the step is norms, activations, embeddings and
//! recomputation.

mod flops;
mod memory;
mod parts;
mod training;

use attention_workspace::mesa_layer::leave_out_device_selection;
use attention_workspace::{
    Dtype, Error,
    device::{Chosen, DeviceName, choose},
    model::{Table, WeightForm},
    random::random_model,
};
use burn::tensor::{Device, DeviceConfig};
use burn_gemma4::{Adapter, catch_panic};
use clap::{Parser, ValueEnum};
use gemma4_train::{args::StepArguments, presets::Preset};
use memory::Watch;
use parts::Parts;
use serde::Serialize;
use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};
use training::{Text, Training, median};

/// Times training steps
#[derive(Parser)]
struct Cli {
    /// The shapes of the models [default: e2b on a GPU, 1m on a CPU]
    #[arg(long, value_enum, value_delimiter = ',')]
    config: Vec<Preset>,
    /// The number of tokens per sequence [default: 4096 to 131072 on a GPU, 256 on a CPU]
    #[arg(long, value_delimiter = ',')]
    lengths: Vec<usize>,
    /// The number of sequences per step
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// The number of positions at the end of each sequence that the loss covers
    #[arg(long, default_value_t = 1024)]
    last: usize,
    /// The device to run on
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    /// The dtype of weights and activations [default: bf16 or f16 on a GPU that supports it, otherwise f32]
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// Train a LoRA adapter of this rank, as `finetune` does, instead of all weights
    #[arg(long)]
    rank: Option<usize>,
    /// The LoRA alpha of the adapter, which scales the adapter's output by alpha / rank
    #[arg(long, default_value_t = 32.0, requires = "rank")]
    alpha: f64,
    /// Quantize the frozen weights under an adapter to this form, as `finetune` does
    #[arg(long, value_enum, value_name = "FORM", requires = "rank")]
    quantize: Option<WeightForm>,
    /// The memory that holds the table of per-layer embeddings; with `host`, the benchmark first saves the whole model
    /// to files, leaves the table in these files, and does not train the table
    #[arg(long, value_enum, value_name = "PLACE", default_value = "device")]
    per_layer_table: Table,
    #[command(flatten)]
    step: StepArguments,
    /// The number of warm-up steps, in which Burn compiles and tunes kernels and explores fusions
    #[arg(long, value_name = "STEPS", default_value_t = 3)]
    warmup: usize,
    /// The number of timed steps; the median of their times is reported
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// Do not measure the parts of a step
    #[arg(long)]
    no_parts: bool,
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
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The results for one model and one sequence length.
#[derive(Serialize)]
struct Row {
    config: String,
    length: usize,
    #[serde(flatten)]
    outcome: Outcome,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Measured {
        seconds: f64,
        tokens_per_second: f64,
        /// The peak number of bytes in use on the device, or `None` if the device does not report this number.
        peak_bytes: Option<u64>,
        /// The number of bytes that Burn has reserved on the device, or `None` if the device does not report this number.
        reserved_bytes: Option<u64>,
        loss: f32,
        /// The number of floating-point operations per step, without recomputation.
        flops: Option<f64>,
        parts: Option<Parts>,
    },
    Failed(String),
}

fn run(cli: &Cli) -> Result<(), Error> {
    let chosen = choose(cli.device)?;
    let dtype = chosen.dtype(cli.dtype)?;
    let device = chosen.device.clone();
    device
        .clone()
        .configure(DeviceConfig::default().float_dtype(dtype.burn()))?;
    println!("{chosen}, {dtype}, {}", settings(cli));
    println!(
        "{:10} {:>8} {:>10} {:>12} {:>10} {:>10} {:>8} {:>8}",
        "model", "length", "s/step", "tokens/s", "peak GB", "taken GB", "TFLOP", "TFLOP/s"
    );
    let tracked = cli.step.checkpointing.tracked(device);
    let mut rows = Vec::new();
    for config in configs(cli, &chosen) {
        let files = tempfile::tempdir()?;
        let mut training = None;
        for length in lengths(cli, &chosen) {
            let mut measured = || -> Result<Outcome, Error> {
                let begun = match training.take() {
                    Some(training) => training,
                    None => begin(cli, config, files.path(), &tracked)?,
                };
                let (outcome, after) = measure(cli, begun.begin_anew(&cli.step), length)?;
                training = Some(after);
                Ok(outcome)
            };
            let outcome = catch_panic(&mut measured)
                .unwrap_or_else(|panic| Err(panic.into()))
                .unwrap_or_else(|error| Outcome::Failed(error.to_string()));
            let row = Row {
                config: name(config),
                length,
                outcome,
            };
            print(&row);
            rows.push(row);
            tracked.memory_cleanup();
        }
    }
    if let Some(path) = &cli.json {
        fs::write(path, serde_json::to_string_pretty(&rows)?)
            .map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

fn settings(cli: &Cli) -> String {
    let StepArguments {
        optimizer,
        clip,
        checkpointing,
        ..
    } = cli.step;
    let trained = match (cli.rank, cli.quantize) {
        (None, _) => "all weights".to_owned(),
        (Some(rank), None) => format!("an adapter of rank {rank}"),
        (Some(rank), Some(form)) => format!("an adapter of rank {rank}, quantize {form:?}"),
    };
    let (batch, last) = (cli.batch, cli.last);
    format!(
        "{trained}, optimizer {optimizer:?}, clip {clip}, batch {batch}, loss on the last {last}, checkpointing {checkpointing:?}",
    )
    .to_lowercase()
}

fn configs(cli: &Cli, chosen: &Chosen) -> Vec<Preset> {
    match cli.config.is_empty() {
        false => cli.config.clone(),
        true if chosen.software => vec![Preset::M1],
        true => vec![Preset::E2b],
    }
}

fn lengths(cli: &Cli, chosen: &Chosen) -> Vec<usize> {
    match cli.lengths.is_empty() {
        false => cli.lengths.clone(),
        true if chosen.software => vec![256],
        true => vec![4096, 16_384, 32_768, 131_072],
    }
}

fn name(preset: Preset) -> String {
    let value = preset.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}

fn print(row: &Row) {
    let gigabytes = |bytes: &Option<u64>| {
        bytes.map_or_else(|| "–".into(), |bytes| format!("{:.1}", bytes as f64 / 1e9))
    };
    let (name, length) = (&row.config, row.length);
    match &row.outcome {
        Outcome::Failed(reason) => println!("{name:10} {length:>8} {reason}"),
        Outcome::Measured {
            seconds,
            tokens_per_second,
            peak_bytes,
            reserved_bytes,
            flops,
            parts,
            ..
        } => {
            let tera = |number: Option<f64>| {
                number.map_or_else(|| "–".into(), |number| format!("{:.1}", number / 1e12))
            };
            println!(
                "{name:10} {length:>8} {seconds:>10.3} {tokens_per_second:>12.0} {:>10} {:>10} {:>8} {:>8}",
                gigabytes(peak_bytes),
                gigabytes(reserved_bytes),
                tera(*flops),
                tera(flops.map(|flops| flops / seconds)),
            );
            if let Some(parts) = parts {
                println!("{:19} {}", "", parts.line());
            }
        }
    }
}

/// Creates a model with random weights, and the optimizer that trains it.
fn begin(cli: &Cli, preset: Preset, folder: &Path, device: &Device) -> Result<Training, Error> {
    device.clone().inner().seed(1);
    let start = Instant::now();
    let config = preset.config(preset.vocabulary());
    let table = cli.per_layer_table;
    let mut model = random_model(&config, cli.quantize, table, folder, device)?;
    if let Some(rank) = cli.rank {
        model = Adapter::new(rank, cli.alpha).attach(model)?;
    }
    let training = Training::new(model, &cli.step);
    device.sync()?;
    // The cleanup frees the memory of the unquantized weights.
    device.memory_cleanup();
    println!(
        "{:10} created in {:.1} s: {}",
        name(preset),
        start.elapsed().as_secs_f64(),
        training.memory(&cli.step)
    );
    Ok(training)
}

/// Measures training steps over sequences of `length` tokens. Returns the results and the trained model.
fn measure(cli: &Cli, mut training: Training, length: usize) -> Result<(Outcome, Training), Error> {
    let last = cli.last.min(length);
    let plain = training.model().device().inner();
    let text = Text::random(training.model().config(), [cli.batch, length, last], &plain);
    // Poll the memory only during untimed steps, because polling slows a step down. The peak is still complete, because
    // timed steps need no more memory than untimed steps.
    let watch = Watch::start(&plain);
    for _ in 0..cli.warmup {
        (training, _) = training.step(&text)?;
    }
    let peak_bytes = watch.stop();
    let mut times = Vec::new();
    for _ in 0..cli.steps.max(1) {
        let step;
        (training, step) = training.step(&text)?;
        times.push(step.seconds);
    }
    let seconds = median(times);
    let watch = Watch::start(&plain);
    let (mut training, step) = training.step(&text)?;
    let peak_bytes = peak_bytes.max(watch.stop());
    let reserved_bytes = plain.memory_pool_usage().map(|usage| usage.bytes_reserved);
    let shape = [cli.batch, length, last];
    let flops = flops::flops(training.model(), shape, cli.rank.is_some());
    let parts = match cli.no_parts {
        true => None,
        false => {
            let parts;
            (parts, training) = Parts::measure(training, &text, shape, &cli.step)?;
            Some(parts)
        }
    };
    let outcome = Outcome::Measured {
        seconds,
        tokens_per_second: (cli.batch * length) as f64 / seconds,
        peak_bytes,
        reserved_bytes,
        loss: step.loss,
        flops,
        parts,
    };
    Ok((outcome, training))
}
