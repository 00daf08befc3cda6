//! The command line arguments of a training run, with their defaults.

use crate::{
    Error, InvalidArgument,
    data::{packing::Row, schedule::Schedule},
    distributed::Rank,
};
use burn::tensor::Device;
use serde_json::{Value, json};
use std::hash::{DefaultHasher, Hash, Hasher};

/// The arguments of a run: its number of steps, its data layout and its optimizer.
#[derive(clap::Args, Clone, Debug)]
pub struct TrainingArguments {
    /// Number of optimizer steps.
    #[arg(long, default_value_t = 1000, value_parser = positive)]
    pub steps: usize,
    /// Tokens per row. Documents are packed into rows of this length.
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = positive)]
    pub length: usize,
    /// Rows per batch, on each device.
    #[arg(long, value_name = "ROWS", default_value_t = 8, value_parser = positive)]
    pub batch: usize,
    /// Batches per step, on each device. The gradient of a step is the mean over all tokens of the step.
    #[arg(long, value_name = "BATCHES", default_value_t = 1, value_parser = positive)]
    pub accumulate: usize,
    /// Peak learning rate, reached at the end of the warmup. A cosine decay lowers the rate to a tenth of the peak at the
    /// last step [default: depends on the model's shape; to fine-tune, 2e-4 for an adapter and 1e-5 for all weights].
    #[arg(long, value_parser = learning_rate)]
    pub learning_rate: Option<f64>,
    /// Steps of the linear warmup [default: a twentieth of the steps].
    #[arg(long, value_name = "STEPS")]
    pub warmup: Option<usize>,
    /// The arguments of a single step.
    #[command(flatten)]
    pub step: StepArguments,
    /// Steps between two validations. Each validation also writes a checkpoint [default: a tenth of the steps].
    #[arg(long, value_name = "STEPS", value_parser = positive)]
    pub checkpoint_every: Option<usize>,
    /// Resume from the last checkpoint of the run. --steps may be larger than before. The remaining steps have the learning
    /// rates of a run that had the larger --steps from its beginning.
    #[arg(long)]
    pub resume: bool,
    /// Seed of the initial weights and of the data order.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Train on several devices of one kind at once, such as 0,1. Each device computes a part of every step.
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',')]
    pub devices: Vec<usize>,
    /// Shard the optimizer's state and the f32 master weights among processes (ZeRO-1).
    #[arg(long)]
    pub shard_optimizer: bool,
    /// Print lines instead of a dashboard. Lines are the default if the output is not a terminal, and with several processes.
    #[arg(long)]
    pub lines: bool,
    /// Steps between two printed lines of progress.
    #[arg(long, value_name = "STEPS", default_value_t = 10, value_parser = positive)]
    pub log_every: usize,
}

/// The arguments of a single step: optimizer, clipping and recomputation.
#[derive(clap::Args, Clone, Debug)]
pub struct StepArguments {
    /// Optimizer that updates the weights.
    #[arg(long, value_enum, default_value_t)]
    pub optimizer: OptimizerName,
    /// Weight decay of AdamW. It does not apply to norms and scales.
    #[arg(long, default_value_t = 0.1, value_parser = not_negative)]
    pub weight_decay: f32,
    /// Largest global norm of the gradients. 0 disables clipping.
    #[arg(long, value_name = "NORM", default_value_t = 1.0, value_parser = not_negative)]
    pub clip: f32,
    /// Which activations the backward pass recomputes (gradient checkpointing).
    #[arg(long, value_enum, default_value_t)]
    pub checkpointing: Checkpointing,
    /// Launch kernels one by one. By default, a CUDA graph captures the launches of short steps, if the run has one device
    /// and one batch per step. The graph keeps the memory of a step allocated.
    #[arg(long)]
    pub no_graph: bool,
}

/// The values of `--checkpointing`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Checkpointing {
    /// Recompute no expensive activations (most memory).
    #[default]
    None,
    /// Recompute the outputs of the gate and up projections of each dense MLP. Three fifths of the activations stay in memory.
    /// This value has an effect only for an adapter on a GPU.
    Mlp,
    /// Use Burn's checkpointing: recompute memory-bound operations, such as norms and activation functions, and keep the outputs
    /// of GEMMs.
    Operations,
    /// Recompute whole layers: keep only the input of each layer, and the activations of one layer at a time.
    Layers,
    /// Recompute whole layers and, within a layer, also the memory-bound operations (least memory).
    Both,
}

impl Checkpointing {
    /// Returns `device` with autodiff, and with Burn's checkpointing if this value of `--checkpointing` includes it.
    pub fn tracked(self, device: Device) -> Device {
        match self {
            Self::None | Self::Mlp | Self::Layers => device.autodiff(),
            Self::Operations | Self::Both => device.autodiff().gradient_checkpointing(),
        }
    }

    /// True if the backward pass recomputes the gate and up projections of the dense MLPs.
    pub fn is_of_mlp(self) -> bool {
        self == Self::Mlp
    }

    /// True if the backward pass recomputes whole layers.
    pub fn is_by_layer(self) -> bool {
        matches!(self, Self::Layers | Self::Both)
    }
}

/// The values of `--optimizer`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum OptimizerName {
    /// AdamW (Loshchilov and Hutter 2019), which keeps two moments per parameter in addition to its gradient.
    #[default]
    Adamw,
    /// Plain gradient descent, without optimizer state.
    Sgd,
}

impl TrainingArguments {
    /// Returns the schedule of the process with the rank `rank`. `done` is the number of steps that earlier processes
    /// of the run have finished.
    pub fn schedule(&self, done: usize, rank: Rank) -> Schedule {
        Schedule {
            steps: self.steps,
            done,
            interval: self
                .checkpoint_every
                .unwrap_or(self.steps.div_ceil(10))
                .min(self.steps),
            accumulation: self.accumulate,
            devices: self.devices.len().max(1) * rank.size,
            part: (rank.global, rank.size),
            seed: self.seed,
        }
    }

    /// Returns the number of shards of the optimizer's state: the number of processes with ZeRO-1, and 1 otherwise.
    pub fn optimizer_parts(&self, rank: Rank) -> usize {
        match self.shard_optimizer {
            true => rank.size,
            false => 1,
        }
    }

    /// Returns the index of the shard of the optimizer's state that the process with this rank writes and restores.
    pub fn optimizer_part(&self, rank: Rank) -> usize {
        match self.shard_optimizer {
            true => rank.global,
            false => 0,
        }
    }

    /// Returns the settings of the run: these arguments, and the caller's settings `others`. A resumed run compares its
    /// settings with the settings that its folder contains.
    pub fn settings(&self, rows: &[Row], rank: Rank, others: Value) -> Value {
        let mut hasher = DefaultHasher::new();
        for row in rows {
            row.tokens.hash(&mut hasher);
            row.targets.hash(&mut hasher);
            // A run of texts keeps the hash of versions without images and audio.
            if !row.media.is_empty() {
                row.media.hash(&mut hasher);
            }
        }
        let schedule = self.schedule(0, rank);
        let mut settings = json!({
            "steps": self.steps,
            "length": self.length,
            "rows of a step": self.batch * schedule.batches(),
            "learning-rate": self.learning_rate,
            "warmup": self.warmup,
            "optimizer": format!("{:?}", self.step.optimizer),
            "weight-decay": self.step.weight_decay,
            "clip": self.step.clip,
            "checkpoint-every": schedule.interval,
            "seed": self.seed,
            "data": format!("{:016x}", hasher.finish()),
            "parts of the optimizer": self.optimizer_parts(rank),
        });
        if let (Some(settings), Value::Object(others)) = (settings.as_object_mut(), others) {
            settings.extend(others);
        }
        settings
    }

    /// Returns the index of the device on which this process trains. `available` counts the devices of the chosen kind.
    /// If the run has only one process, returns `None`, because this process may use any device.
    ///
    /// # Errors
    /// Returns [`InvalidArgument`] if an option does not suit the number of processes. Returns another error if the
    /// machine has too few devices for its processes.
    pub fn device_number(
        &self,
        rank: Rank,
        available: impl FnOnce() -> usize,
    ) -> Result<Option<usize>, Error> {
        if self.shard_optimizer && rank.size == 1 {
            let reason = "--shard-optimizer: the run has one process; expected several";
            return Err(InvalidArgument(reason.into()).into());
        }
        match (rank.size, &self.devices[..]) {
            (1, _) => Ok(None),
            (_, []) => rank.device(available()).map(Some),
            _ => {
                let reason = "--devices: the run has several processes, and each takes the device of its local rank; expected one process";
                Err(InvalidArgument(reason.into()).into())
            }
        }
    }
}

/// The defaults equal those of the command line.
impl Default for TrainingArguments {
    fn default() -> Self {
        Self {
            steps: 1000,
            length: 512,
            batch: 8,
            accumulate: 1,
            learning_rate: None,
            warmup: None,
            step: StepArguments::default(),
            checkpoint_every: None,
            resume: false,
            seed: 1,
            devices: Vec::new(),
            shard_optimizer: false,
            lines: false,
            log_every: 10,
        }
    }
}

/// The defaults equal those of the command line.
impl Default for StepArguments {
    fn default() -> Self {
        Self {
            optimizer: OptimizerName::default(),
            weight_decay: 0.1,
            clip: 1.0,
            checkpointing: Checkpointing::default(),
            no_graph: false,
        }
    }
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("expected a whole number of at least 1".into()),
        Ok(number) => Ok(number),
    }
}

fn not_negative(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("expected a finite number of at least 0".into()),
    }
}

fn learning_rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if rate > 0.0 && rate <= 1.0 => Ok(rate),
        _ => Err("expected a number above 0 and at most 1".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        arguments: TrainingArguments,
    }

    #[test]
    fn default_arguments_equal_those_of_the_command_line() {
        let parsed = Cli::parse_from(["train"]).arguments;
        let default = TrainingArguments::default();
        assert_eq!(format!("{parsed:?}"), format!("{default:?}"));
    }
}
