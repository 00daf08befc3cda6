//! A step of training, of models of random weights: `cargo bench --features training --bench train`.
//!
//! Tokens a second are those of whole steps, forward, backward and optimizer, by the wall clock; the loss is on the last
//! positions only, as in long documents that are read in full. The peak of memory is the most that was in use in one more step,
//! looked at every few milliseconds. The parts are timed apart, each with the shapes and as often as a step has it; what they
//! leave of a step is norms, activations, and waiting.

mod memory;
mod parts;

use attention_workspace::layers::leave_out_device_selection;
use attention_workspace::{
    Dtype, Error,
    device::{Chosen, DeviceName, choose},
    guarded,
    training::{
        arguments::{Checkpointing, OptimizerName},
        presets::Preset,
    },
};
use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig},
    tensor::{DType, Device, DeviceConfig, Distribution, Int, Tensor},
};
use burn_gemma4::{Gemma4Model, Logits};
use clap::{Parser, ValueEnum};
use memory::Watch;
use parts::Parts;
use serde::Serialize;
use std::{fs, path::PathBuf, process::ExitCode, time::Instant};

/// Small, so that the weights stay what they are.
const LEARNING_RATE: f64 = 1e-4;

/// Times steps of training.
#[derive(Parser)]
struct Cli {
    /// The models' shapes [default: e2b on a GPU, 1m on a processor].
    #[arg(long, value_enum, value_delimiter = ',')]
    config: Vec<Preset>,
    /// Tokens of a sequence [default: 4096 to 131072 on a GPU, 256 on a processor].
    #[arg(long, value_delimiter = ',')]
    lengths: Vec<usize>,
    /// Sequences of a step.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Positions at the end of each sequence that the loss is on.
    #[arg(long, default_value_t = 1024)]
    last: usize,
    /// Where to run.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    /// Of weights and activations [default: bf16 or f16 on a GPU that has it, else f32].
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// Which optimizer.
    #[arg(long, value_enum, default_value = "sgd")]
    optimizer: OptimizerName,
    /// What the backward computes anew.
    #[arg(long, value_enum, default_value = "layers")]
    checkpointing: Checkpointing,
    /// Steps before those that count, in which Burn compiles, tunes and explores fusions.
    #[arg(long, value_name = "STEPS", default_value_t = 3)]
    warmup: usize,
    /// Steps to take the median of.
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// Leaves out the times of the parts.
    #[arg(long)]
    no_parts: bool,
    /// Write all rows to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Given by `cargo bench`.
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

/// What was measured of a shape and a length.
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
        /// Bytes that were in use at most, where the device says.
        peak_bytes: Option<u64>,
        /// Bytes that Burn has taken from the device.
        reserved_bytes: Option<u64>,
        loss: f32,
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
        "{:10} {:>8} {:>10} {:>12} {:>10} {:>10}",
        "model", "length", "s/step", "tokens/s", "peak GB", "taken GB"
    );
    let tracked = cli.checkpointing.tracked(device);
    let mut rows = Vec::new();
    for config in configs(cli, &chosen) {
        for length in lengths(cli, &chosen) {
            let outcome = guarded(|| measure(cli, config, length, &tracked))
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
    format!(
        "optimizer {:?}, batch {}, loss on the last {}, checkpointing {:?}",
        cli.optimizer, cli.batch, cli.last, cli.checkpointing,
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
            parts,
            ..
        } => {
            println!(
                "{name:10} {length:>8} {seconds:>10.3} {tokens_per_second:>12.0} {:>10} {:>10}",
                gigabytes(peak_bytes),
                gigabytes(reserved_bytes)
            );
            if let Some(parts) = parts {
                println!("{:19} {}", "", parts.line(*seconds));
            }
        }
    }
}

/// Draws a model's weights, which Burn does when they are first read.
struct Draw;

impl ModuleVisitor for Draw {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        param.val();
    }
}

/// A model, and what it is trained on, step after step.
struct Training {
    model: Gemma4Model,
    optimizer: ModuleOptimizer,
    input: Tensor<2, Int>,
    targets: Tensor<2, Int>,
    checkpointing: Checkpointing,
    loss: f32,
    /// Of the last step.
    seconds: f64,
}

impl Training {
    /// One step. It takes the model, since a copy would keep the old weights.
    fn step(self) -> Result<Self, Error> {
        let Self {
            model,
            mut optimizer,
            input,
            targets,
            checkpointing,
            ..
        } = self;
        let device = model.device().inner();
        device.sync()?;
        let start = Instant::now();
        let asked = Logits::Last(targets.dims()[1]);
        let of_states = |hidden| model.loss(hidden, targets.clone());
        let (loss, gradients) = match checkpointing.is_by_layer() {
            true => model.gradients(input.clone(), None, asked, of_states)?,
            false => {
                let loss = of_states(model.hidden(input.clone(), asked)?)?;
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                (loss, gradients)
            }
        };
        let model = optimizer.step(LEARNING_RATE, model, gradients);
        let loss = loss.into_scalar::<f32>();
        device.sync()?;
        Ok(Self {
            model,
            optimizer,
            input,
            targets,
            checkpointing,
            loss,
            seconds: start.elapsed().as_secs_f64(),
        })
    }
}

fn measure(cli: &Cli, preset: Preset, length: usize, device: &Device) -> Result<Outcome, Error> {
    let config = preset.config(preset.vocabulary());
    let last = cli.last.min(length);
    let plain = device.clone().inner();
    plain.seed(1);
    let model = Gemma4Model::new(&config, device);
    model.visit(&mut Draw);
    let tokens = Tensor::<2>::random(
        [cli.batch, length + 1],
        Distribution::Uniform(0.0, (config.vocab_size - 1) as f64),
        (&plain, DType::F32),
    )
    .int();
    let mut training = Training {
        model,
        optimizer: optimizer(cli.optimizer),
        input: tokens.clone().narrow(1, 0, length),
        targets: tokens.narrow(1, length + 1 - last, last),
        checkpointing: cli.checkpointing,
        loss: 0.0,
        seconds: 0.0,
    };
    for _ in 0..cli.warmup {
        training = training.step()?;
    }
    let mut times = Vec::new();
    for _ in 0..cli.steps.max(1) {
        training = training.step()?;
        times.push(training.seconds);
    }
    times.sort_by(f64::total_cmp);
    let seconds = times[times.len() / 2];
    // Looking takes time, too.
    let watch = Watch::start(&plain);
    let Training {
        model,
        optimizer,
        loss,
        ..
    } = training.step()?;
    let peak_bytes = watch.stop();
    let reserved_bytes = plain.memory_pool_usage().map(|usage| usage.bytes_reserved);
    let parts = match cli.no_parts {
        true => None,
        false => Some(Parts::measure(
            model,
            optimizer,
            [cli.batch, length, last],
            device,
        )?),
    };
    Ok(Outcome::Measured {
        seconds,
        tokens_per_second: (cli.batch * length) as f64 / seconds,
        peak_bytes,
        reserved_bytes,
        loss,
        parts,
    })
}

fn optimizer(name: OptimizerName) -> ModuleOptimizer {
    match name {
        OptimizerName::Sgd => SgdConfig::new().init(),
        OptimizerName::Adamw => AdamWConfig::new().init(),
    }
}
