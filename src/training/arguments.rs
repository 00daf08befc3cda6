//! The arguments that `train` and `finetune` have in common.

use super::{loader::Schedule, rows::Row, world::Place};
use crate::{
    Error,
    device::{Chosen, DeviceName, choose, count, several},
    terminal::WrongArgument,
};
use burn::tensor::Device;
use serde_json::{Value, json};
use std::hash::{DefaultHasher, Hash, Hasher};

/// How long to train, on what, and how.
#[derive(clap::Args, Clone, Debug)]
pub struct TrainingArguments {
    /// Steps of the optimizer.
    #[arg(long, default_value_t = 1000, value_parser = positive)]
    pub steps: usize,
    /// Tokens of a row, into which documents are packed.
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = positive)]
    pub length: usize,
    /// Rows of a batch, on each device.
    #[arg(long, value_name = "ROWS", default_value_t = 8, value_parser = positive)]
    pub batch: usize,
    /// Batches whose gradients are added up for a step, on each device: a step's gradient is the mean of its tokens.
    #[arg(long, value_name = "BATCHES", default_value_t = 1, value_parser = positive)]
    pub accumulate: usize,
    /// The highest learning rate, after the warmup; a cosine takes it down to a tenth by the last step [default: what suits
    /// the shape; to fine-tune, 2e-4 for an adapter and 1e-5 for all weights].
    #[arg(long, value_parser = learning_rate)]
    pub learning_rate: Option<f64>,
    /// Steps in which the learning rate rises [default: a twentieth of the steps].
    #[arg(long, value_name = "STEPS")]
    pub warmup: Option<usize>,
    /// What a step does.
    #[command(flatten)]
    pub step: StepArguments,
    /// Steps from one validation and checkpoint to the next [default: a tenth of the steps].
    #[arg(long, value_name = "STEPS", value_parser = positive)]
    pub checkpoint_every: Option<usize>,
    /// Goes on from the last checkpoint in the folder. With more --steps than before, the learning rates from there on are those of a
    /// run of so many steps from its beginning.
    #[arg(long)]
    pub resume: bool,
    /// Determines weights and the order of the data.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Where to train.
    #[arg(long, value_enum, default_value_t)]
    pub device: DeviceName,
    /// Trains on several devices of that kind at once, such as 0,1: each computes a part of every step.
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',')]
    pub devices: Vec<usize>,
    /// Has each of several processes keep a part of the optimizer's state, and of the weights in f32, rather than all of it: ZeRO-1.
    #[arg(long)]
    pub shard_optimizer: bool,
    /// Prints lines rather than a dashboard, as where there is no terminal, and as several processes do.
    #[arg(long)]
    pub lines: bool,
    /// Steps from one line to the next.
    #[arg(long, value_name = "STEPS", default_value_t = 10, value_parser = positive)]
    pub log_every: usize,
}

/// What a step does with a model, whatever it learns from.
#[derive(clap::Args, Clone, Debug)]
pub struct StepArguments {
    /// Which optimizer.
    #[arg(long, value_enum, default_value_t)]
    pub optimizer: OptimizerName,
    /// AdamW's decay of weights, norms and scales excepted.
    #[arg(long, default_value_t = 0.1, value_parser = not_negative)]
    pub weight_decay: f32,
    /// The largest norm of all gradients together; 0 leaves gradients as they are.
    #[arg(long, value_name = "NORM", default_value_t = 1.0, value_parser = not_negative)]
    pub clip: f32,
    /// What the backward computes anew rather than keeping it.
    #[arg(long, value_enum, default_value_t)]
    pub checkpointing: Checkpointing,
    /// Puts every launch of a step on the device by itself. Else those of short steps are captured in the first one, on one device and with
    /// one batch a step, and put there at once, which keeps the memory that a step takes.
    #[arg(long)]
    pub no_graph: bool,
}

/// The values of `--checkpointing`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Checkpointing {
    /// Nothing that takes a matrix product.
    #[default]
    None,
    /// Of an adapter on a GPU what is inside the dense networks, two of a layer's products: three fifths of the activations are kept.
    Mlp,
    /// Burn's: what is bound by memory, such as norms and activations; matrix products are kept.
    Operations,
    /// Layers: what goes into each is kept, and the activations of one at a time.
    Layers,
    /// Layers, and in the one at work what is bound by memory: the least memory.
    Both,
}

impl Checkpointing {
    /// The device with autodiff.
    pub fn tracked(self, device: Device) -> Device {
        match self {
            Self::None | Self::Mlp | Self::Layers => device.autodiff(),
            Self::Operations | Self::Both => device.autodiff().gradient_checkpointing(),
        }
    }

    /// Whether what is inside the dense networks is multiplied anew.
    pub fn is_of_mlp(self) -> bool {
        self == Self::Mlp
    }

    /// Whether layers are computed anew.
    pub fn is_by_layer(self) -> bool {
        matches!(self, Self::Layers | Self::Both)
    }
}

/// The values of `--optimizer`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum OptimizerName {
    /// AdamW (Loshchilov and Hutter 2019): two numbers a parameter beside its gradient.
    #[default]
    Adamw,
    /// Plain gradient descent: no memory.
    Sgd,
}

impl TrainingArguments {
    /// The steps, of which `done` are done, and what they are made of, for the process at `place`.
    pub fn schedule(&self, done: usize, place: Place) -> Schedule {
        Schedule {
            steps: self.steps,
            done,
            interval: self
                .checkpoint_every
                .unwrap_or(self.steps.div_ceil(10))
                .min(self.steps),
            accumulation: self.accumulate,
            devices: self.devices.len().max(1) * place.size,
            part: (place.rank, place.size),
            seed: self.seed,
        }
    }

    /// Into how many parts the optimizer's state is divided.
    pub fn optimizer_parts(&self, place: Place) -> usize {
        match self.shard_optimizer {
            true => place.size,
            false => 1,
        }
    }

    /// Which of them the process at `place` goes on with.
    pub fn optimizer_part(&self, place: Place) -> usize {
        match self.shard_optimizer {
            true => place.rank,
            false => 0,
        }
    }

    /// What has to stay the same for a run to go on where it was, but what `others` say.
    pub fn settings(&self, rows: &[Row], place: Place, others: Value) -> Value {
        let mut hasher = DefaultHasher::new();
        for row in rows {
            row.tokens.hash(&mut hasher);
            row.targets.hash(&mut hasher);
        }
        let schedule = self.schedule(0, place);
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
            "parts of the optimizer": self.optimizer_parts(place),
        });
        if let (Some(settings), Value::Object(others)) = (settings.as_object_mut(), others) {
            settings.extend(others);
        }
        settings
    }

    /// The devices of the process at `place`, the first one being where the model is made. One of several has one.
    ///
    /// # Errors
    /// Where there is no such device.
    pub fn choose(&self, place: Place) -> Result<(Chosen, Vec<Device>), Error> {
        if self.shard_optimizer && place.size == 1 {
            let reason = "--shard-optimizer is for several processes, and this one is alone";
            return Err(WrongArgument(reason.into()).into());
        }
        let mut chosen = choose(self.device)?;
        let devices = match (place.size, &self.devices[..]) {
            (1, []) => vec![chosen.device.clone()],
            (1, numbers) => several(&chosen, numbers)?,
            (_, []) => {
                let number = place.device(count(&chosen))?;
                let devices = several(&chosen, &[number])?;
                chosen.device = devices[0].clone();
                devices
            }
            _ => {
                let reason =
                    "--devices is for one process; each of several takes the device of its number";
                return Err(WrongArgument(reason.into()).into());
            }
        };
        let devices = devices
            .into_iter()
            .map(|device| self.step.checkpointing.tracked(device))
            .collect();
        Ok((chosen, devices))
    }
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("it has to be a whole number of at least 1".into()),
        Ok(number) => Ok(number),
    }
}

fn not_negative(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("it has to be a finite number from 0".into()),
    }
}

fn learning_rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if rate > 0.0 && rate <= 1.0 => Ok(rate),
        _ => Err("it has to be a number above 0 and up to 1".into()),
    }
}
