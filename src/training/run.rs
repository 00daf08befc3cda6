//! A run of Burn's learner.

use super::{
    arguments::TrainingArguments,
    averaging::{Averaging, Processes, Workers},
    checkpoints::{self, KEPT, Records},
    lines::Lines,
    loader::{Data, TrainingLoader, ValidationLoader},
    masters::Memory,
    optimizer::optimizer,
    recorder,
    skipped::Skipped,
    stop::{AfterCheckpoint, Stop},
    trainee::{Trainee, gradients_in_f32},
    world::World,
};
use crate::{
    Error,
    signals::{self, Signal},
    terminal::note,
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
use burn_gemma4::Gemma4Model;
use std::{
    io::{IsTerminal, stdout},
    path::Path,
    sync::Arc,
};

/// The share of the learning rate that is left at the end.
const LAST_RATE: f64 = 0.1;

/// What is trained, and where.
pub struct Run<'a> {
    /// How.
    pub arguments: &'a TrainingArguments,
    /// The highest learning rate.
    pub learning_rate: f64,
    /// With autodiff; the model is on the first one.
    pub devices: Vec<Device>,
    /// Each of several devices has an optimizer, and they add up their gradients; else the first one gathers these.
    pub averages: bool,
    /// For checkpoints and the history of the metrics.
    pub folder: &'a Path,
    /// The steps of the checkpoint to go on from.
    pub resume: Option<usize>,
    /// All processes that train the model.
    pub world: &'a Arc<World>,
}

/// What a run came to.
pub struct Outcome {
    /// The model, without autodiff.
    pub model: Gemma4Model,
    /// Somebody stopped it before its last step.
    pub is_interrupted: bool,
}

/// A signal ends the run after the step that is under way, with a checkpoint. A Ctrl-C after another signal ends the program at
/// once. Other signals come more than once without a person's wish: a shell and the kernel both send `SIGHUP`.
fn stop_on_signal(stop: Stop) -> Result<(), Error> {
    signals::handle(move |signal| {
        if !stop.ask() && signal == Signal::Interrupt {
            std::process::exit(signal.exit_code().into());
        }
    })
}

/// A schedule's record after so many steps.
fn after(mut rates: ModuleLrScheduler, steps: usize) -> LrSchedulerRecord {
    for _ in 0..steps {
        rates.step();
    }
    rates.to_record()
}

/// The checkpoints' records of the learning rates' schedule. A run goes on with the rates that a run of all its steps has, and not
/// with those of the record, which may be of a shorter run.
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

impl Run<'_> {
    /// Trains a model.
    ///
    /// # Errors
    /// What ended the run: a checkpoint that cannot be written or read, a device that failed.
    pub fn train(
        &self,
        model: Gemma4Model,
        training: Data,
        validation: Data,
    ) -> Result<Outcome, Error> {
        let (world, place) = (self.world, self.world.place());
        let schedule = self.arguments.schedule(self.resume.unwrap_or(0), place);
        let first = &self.devices[0];
        let size = [training.batch, training.positions];
        let in_f32 = gradients_in_f32(self.arguments, model.dtype());
        let parts = self.arguments.optimizer_parts(place);
        let memory = Memory::of(&model, self.arguments.step.optimizer, in_f32);
        note(memory.in_parts(parts));
        world.connect(first)?;
        let model = world.of_first_process(model, first)?;
        let stop = match world.has_others() {
            true => Stop::among_processes(),
            false => Stop::default(),
        };
        let loader = TrainingLoader::new(Arc::new(training), schedule, stop.clone(), first);
        let plain = first.clone().inner();
        // The first process validates.
        let validation = match place.is_first() {
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
        let skipped = Skipped::default();
        // The history of the metrics is the first process's.
        let scratch = tempfile::tempdir()?;
        let history = match place.is_first() {
            true => self.folder,
            false => scratch.path(),
        };
        let mut learning: SupervisedTraining<Trainee> =
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
                // It would take over the messages of panics.
                .with_application_logger(None);
        if self.resume.is_some() {
            learning = learning.checkpoint(schedule.first_interval());
        }
        // A launcher passes on what processes print, and may look like a terminal.
        if world.has_others() || self.arguments.lines || !stdout().is_terminal() {
            let lines = Lines::new(
                schedule,
                stop.clone(),
                skipped.clone(),
                self.arguments.log_every,
                size,
            );
            learning = learning.renderer(Box::new(lines));
        }
        let averaging = if world.has_others() {
            let in_parts = self.arguments.shard_optimizer;
            let processes = Processes::new(world.clone(), stop.clone(), in_parts);
            Some(Averaging::Processes(processes))
        } else if self.averages && self.devices.len() > 1 {
            let devices = self.devices.iter().cloned().map(Device::inner);
            let workers = Workers::new(devices.collect(), learning.interrupter());
            Some(Averaging::Workers(workers))
        } else {
            None
        };
        let learner = Learner::new(
            Trainee::new(model, self.arguments, averaging).counting(&skipped),
            optimizer(&self.arguments.step),
            rates,
        );
        stop_on_signal(stop.clone())?;
        recorder::release();
        let result = learning.launch(learner);
        recorder::release();
        if let Some(told) = skipped.told() {
            note(told);
        }
        match result.error {
            Some(error) => Err(error.to_string().into()),
            None => Ok(Outcome {
                model: result.model.model,
                is_interrupted: result.interrupted.is_some() || stop.end() < schedule.steps,
            }),
        }
    }

    fn strategy(&self) -> ExecutionStrategy {
        match &self.devices[..] {
            [device] => ExecutionStrategy::single(device.clone()),
            _ if self.averages => {
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

    /// A linear rise, then a cosine.
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
