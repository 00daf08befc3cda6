//! Runs the training of a model with Burn's learner.

use crate::{
    Error, InvalidArgument,
    args::TrainingArguments,
    checkpoint::{
        checkpoints::{self, KEPT, Records},
        stop::{AfterCheckpoint, Stop},
    },
    data::loader::{Data, TrainingLoader, ValidationLoader},
    distributed::{
        ProcessGroup,
        all_reduce::{AllReduce, Processes, Workers},
    },
    graph_capture,
    optim::{master_weights::Memory, optimizer::optimizer, skipped_steps::SkippedSteps},
    progress_lines::ProgressLines,
    report::note,
    train_step::{TrainableModel, gradients_in_f32},
};
use burn::{
    lr_scheduler::{
        LrSchedulerConfig, LrSchedulerRecord, cosine::CosineAnnealingLrSchedulerConfig,
        linear::LinearLrSchedulerConfig, module_lr_scheduler::ModuleLrScheduler,
        sequential::SequentialLrSchedulerConfig,
    },
    tensor::{
        Device,
        distributed::{DistributedConfig, ReduceOperation},
    },
    train::{
        ExecutionStrategy, Learner, MultiDeviceOptim, SupervisedTraining, TrainingStrategy,
        checkpoint::{Checkpointer, CheckpointerError, KeepLastNCheckpoints},
        metric::{IterationSpeedMetric, LearningRateMetric, LossMetric},
    },
};
use burn_gemma4::{Gemma4Model, MediaTowers};
use std::{
    io::{IsTerminal, stdout},
    path::Path,
    sync::Arc,
};

/// The learning rate at the last step, as a fraction of the peak learning rate.
const LAST_RATE: f64 = 0.1;

/// A training run: its arguments, devices and folder.
pub struct Run<'a> {
    /// The arguments of the run.
    pub arguments: &'a TrainingArguments,
    /// The peak learning rate.
    pub learning_rate: f64,
    /// The devices, with autodiff enabled. The model must be on the first device.
    pub devices: Vec<Device>,
    /// True if the devices copy memory to one another directly. In this case, an all-reduce sums the gradients. Otherwise
    /// the first device gathers the gradients and updates the weights.
    pub has_transport: bool,
    /// The folder for checkpoints and for the history of the metrics.
    pub folder: &'a Path,
    /// The step of the checkpoint to resume from, which
    /// [`find_checkpoint`](crate::checkpoint::resume::find_checkpoint) returns.
    pub resume: Option<usize>,
    /// All processes that train the model.
    pub group: &'a Arc<ProcessGroup>,
    /// The towers that compute the soft tokens of images and audio clips. Parameters that are not frozen are trained with
    /// the model. `None` for a data set of texts.
    pub towers: Option<MediaTowers>,
    /// A function that runs before the first step, for example to install signal handlers that call [`Stop::ask`]. An error
    /// of the function ends the run.
    pub before_first_step: Option<&'a dyn Fn(Stop) -> Result<(), Error>>,
}

/// The result of a run.
pub struct Outcome {
    /// The trained model, without autodiff.
    pub model: Gemma4Model,
    /// The towers of [`Run::towers`] after training, without autodiff.
    pub towers: Option<MediaTowers>,
    /// True if the run was stopped before its last step.
    pub is_interrupted: bool,
}

/// Advances the learning rate schedule `rates` by `steps` steps, and returns its record for a checkpoint.
fn after(mut rates: ModuleLrScheduler, steps: usize) -> LrSchedulerRecord {
    for _ in 0..steps {
        rates.step();
    }
    rates.to_record()
}

/// Reads and writes the state of the learning rate schedule in checkpoints. A resumed run uses `restored` instead of the
/// checkpoint's state, because the checkpoint may come from a run with fewer steps.
struct RatesRecords {
    records: Records,
    restored: Option<LrSchedulerRecord>,
}

impl Checkpointer<LrSchedulerRecord> for RatesRecords {
    fn save(&self, epoch: usize, record: LrSchedulerRecord) -> Result<(), CheckpointerError> {
        self.records.save(epoch, record)
    }

    fn delete(&self, epoch: usize) -> Result<(), CheckpointerError> {
        Checkpointer::<LrSchedulerRecord>::delete(&self.records, epoch)
    }

    fn restore(&self, epoch: usize) -> Result<LrSchedulerRecord, CheckpointerError> {
        match &self.restored {
            Some(record) => Ok(record.clone()),
            None => self.records.restore(epoch),
        }
    }
}

/// Checks that a run with images or audio has one process and one device. Programs may call this function before they
/// load towers; [`Run::train`] calls it too.
///
/// # Errors
/// Returns [`InvalidArgument`] for several processes or devices.
pub fn check_one_device(group: &ProcessGroup, devices: &[Device]) -> Result<(), Error> {
    match group.has_others() || devices.len() > 1 {
        true => {
            let reason = "images and audio are trained on one device only; expected one process and one device, or a data set of texts";
            Err(InvalidArgument(reason.into()).into())
        }
        false => Ok(()),
    }
}

impl Run<'_> {
    /// Trains a model.
    ///
    /// # Errors
    /// Returns an error if a checkpoint cannot be written or read, if a device fails, or if an image or an audio clip
    /// cannot be decoded. Returns [`InvalidArgument`] for images or audio on several devices or in several processes.
    pub fn train(
        &self,
        model: Gemma4Model,
        training: Data,
        validation: Data,
    ) -> Result<Outcome, Error> {
        let (group, rank) = (self.group, self.group.rank());
        if self.towers.is_some() {
            check_one_device(group, &self.devices)?;
        }
        let schedule = self.arguments.schedule(self.resume.unwrap_or(0), rank);
        let first = &self.devices[0];
        let size = [training.batch, training.positions];
        let in_f32 = gradients_in_f32(self.arguments, model.dtype());
        let parts = self.arguments.optimizer_parts(rank);
        let trained = (model.clone(), self.towers.clone());
        let memory = Memory::of(&trained, self.arguments.step.optimizer, in_f32);
        drop(trained);
        note(memory.in_parts(parts));
        group.connect(first)?;
        let model = group.broadcast_model(model, first)?;
        let stop = match group.has_others() {
            true => Stop::among_processes(),
            false => Stop::default(),
        };
        let loader = TrainingLoader::new(Arc::new(training), schedule, stop.clone(), first);
        let plain = first.clone().inner();
        // Only the first process keeps its validation rows, because the other processes do not validate.
        let validation = match rank.is_first() {
            true => validation,
            false => validation.without_rows(),
        };
        let validation = ValidationLoader::new(Arc::new(validation), stop.clone(), &plain);
        let checkpoints = self.folder.join(checkpoints::FOLDER);
        let [of_model, of_optimizer, of_schedule] =
            Records::all(&checkpoints, schedule, &stop, parts)?;
        let rates = self.rates()?;
        let of_schedule = RatesRecords {
            records: of_schedule,
            restored: self.resume.map(|done| after(rates.clone(), done)),
        };
        let skipped = SkippedSteps::default();
        // Only the first process writes the history of the metrics into the run's folder. All other processes write it
        // to a temporary folder.
        let scratch = tempfile::tempdir()?;
        let history = match rank.is_first() {
            true => self.folder,
            false => scratch.path(),
        };
        let mut learning: SupervisedTraining<TrainableModel> =
            SupervisedTraining::new(history, Arc::new(loader), Arc::new(validation))
                .metric_train_numeric(LossMetric::new())
                .metric_valid_numeric(LossMetric::new())
                .metric_train_numeric(LearningRateMetric::new())
                .metric_train_numeric(IterationSpeedMetric::new())
                .num_epochs(schedule.intervals())
                .with_checkpointing_strategy(KeepLastNCheckpoints::new(KEPT))
                .with_custom_checkpointers(of_model, of_optimizer, of_schedule)
                .early_stopping(AfterCheckpoint {
                    stop: stop.clone(),
                    schedule,
                })
                .with_training_strategy(TrainingStrategy::Default(self.strategy()))
                // Burn's application logger is disabled, because this logger would replace the messages of panics.
                .with_application_logger(None);
        if self.resume.is_some() {
            learning = learning.checkpoint(schedule.first_interval());
        }
        // With several processes, lines replace the dashboard, because the launcher's output may look like a terminal
        // without being one.
        if group.has_others() || self.arguments.lines || !stdout().is_terminal() {
            let lines = ProgressLines::new(
                schedule,
                stop.clone(),
                skipped.clone(),
                self.arguments.log_every,
                size,
            );
            learning = learning.renderer(Box::new(lines));
        }
        let all_reduce = if group.has_others() {
            let in_parts = self.arguments.shard_optimizer;
            let processes = Processes::new(group.clone(), stop.clone(), in_parts);
            Some(AllReduce::Processes(processes))
        } else if self.has_transport && self.devices.len() > 1 {
            let devices = self.devices.iter().cloned().map(Device::inner);
            let workers = Workers::new(devices.collect(), learning.interrupter());
            Some(AllReduce::Workers(workers))
        } else {
            None
        };
        let learner = Learner::new(
            TrainableModel::new(model, self.arguments, all_reduce)
                .with_towers(self.towers.clone())
                .counting(&skipped),
            optimizer(&self.arguments.step),
            rates,
        );
        if let Some(before_first_step) = self.before_first_step {
            before_first_step(stop.clone())?;
        }
        graph_capture::release();
        let result = learning.launch(learner);
        graph_capture::release();
        if let Some(summary) = skipped.summary() {
            note(summary);
        }
        match result.error {
            Some(error) => Err(error.to_string().into()),
            None => Ok(Outcome {
                model: result.model.model,
                towers: result.model.towers,
                is_interrupted: result.interrupted.is_some() || stop.end() < schedule.steps,
            }),
        }
    }

    fn strategy(&self) -> ExecutionStrategy {
        match &self.devices[..] {
            [device] => ExecutionStrategy::single(device.clone()),
            _ if self.has_transport => {
                let config = DistributedConfig {
                    all_reduce_op: ReduceOperation::Mean,
                };
                ExecutionStrategy::ddp(self.devices.clone(), config)
            }
            _ => {
                let optimizer = MultiDeviceOptim::OptimMainDevice;
                ExecutionStrategy::multi(self.devices.clone(), optimizer)
            }
        }
    }

    /// Returns the learning rate schedule: a linear warmup, followed by a cosine decay.
    fn rates(&self) -> Result<ModuleLrScheduler, Error> {
        let (highest, steps) = (self.learning_rate, self.arguments.steps);
        let warmup = self.arguments.warmup.unwrap_or(steps / 20).min(steps);
        let cosine = CosineAnnealingLrSchedulerConfig::new(highest, (steps - warmup).max(1))
            .with_min_lr(highest * LAST_RATE);
        if warmup == 0 {
            return Ok(cosine.init()?);
        }
        let rise = LinearLrSchedulerConfig::new(highest / warmup as f64, highest, warmup);
        let rates = vec![
            LrSchedulerConfig::Linear(rise),
            LrSchedulerConfig::Cosine(cosine),
        ];
        Ok(SequentialLrSchedulerConfig::new(rates, vec![warmup]).init()?)
    }
}
