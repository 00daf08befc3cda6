//! A run of Burn's learner.

use super::{
    arguments::{OptimizerName, TrainingArguments},
    averaging::Averaging,
    checkpoints::{KEPT, Records},
    lines::Lines,
    loader::{Data, TrainingLoader, ValidationLoader},
    trainee::Trainee,
};
use crate::{Error, terminal::INTERRUPTED};
use burn::{
    grad_clipping::GradientClippingConfig,
    lr_scheduler::{
        LrSchedulerConfig, cosine::CosineAnnealingLrSchedulerConfig,
        linear::LinearLrSchedulerConfig, module_lr_scheduler::ModuleLrScheduler,
        sequential::SequentialLrSchedulerConfig,
    },
    module::ParamGroup,
    optim::{AdamWConfig, ModuleOptimizer, SgdConfig},
    tensor::{
        Device,
        distributed::{DistributedConfig, ReduceOperation},
    },
    train::{
        ExecutionStrategy, Interrupter, Learner, MultiDeviceOptim, SupervisedTraining,
        TrainingStrategy,
        checkpoint::KeepLastNCheckpoints,
        metric::{IterationSpeedMetric, LearningRateMetric, LossMetric},
    },
};
use burn_gemma4::Gemma4Model;
use std::{
    io::{IsTerminal, stdout},
    path::Path,
    sync::Arc,
};

/// AdamW's decay of its two means, as language models are trained since GPT-3.
const BETAS: [f32; 2] = [0.9, 0.95];
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
    /// Each of several devices has an optimizer, and they average their gradients; else the first one gathers these.
    pub averages: bool,
    /// For checkpoints and the history of the metrics.
    pub folder: &'a Path,
    /// Writes checkpoints.
    pub keeps: bool,
    /// The checkpoint to go on from.
    pub resume: Option<usize>,
}

/// What a run came to.
pub struct Outcome {
    /// The model, without autodiff.
    pub model: Gemma4Model,
    /// Somebody stopped it before its last step.
    pub is_interrupted: bool,
}

/// Ctrl-C ends the run after the step that is under way; a second one ends the program.
fn stop_on_interrupt(interrupter: Interrupter) -> Result<(), Error> {
    ctrlc::set_handler(move || {
        if interrupter.should_stop() {
            std::process::exit(INTERRUPTED);
        }
        interrupter.stop(None);
    })?;
    Ok(())
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
        let schedule = self.arguments.schedule();
        let first = &self.devices[0];
        let size = [training.batch, training.positions];
        let loader = TrainingLoader::new(
            Arc::new(training),
            schedule,
            self.resume.unwrap_or(0),
            first,
        );
        let validation = ValidationLoader::new(Arc::new(validation), &first.clone().inner());
        let mut learning: SupervisedTraining<Trainee> =
            SupervisedTraining::new(self.folder, Arc::new(loader), Arc::new(validation))
                .metric_train_numeric(LossMetric::new())
                .metric_valid_numeric(LossMetric::new())
                .metric_train_numeric(LearningRateMetric::new())
                .metric_train_numeric(IterationSpeedMetric::new())
                .num_epochs(schedule.intervals())
                .grads_accumulation(schedule.accumulation)
                .with_checkpointing_strategy(KeepLastNCheckpoints::new(KEPT))
                .with_training_strategy(TrainingStrategy::Default(self.strategy()))
                // It would take over the messages of panics.
                .with_application_logger(None);
        if self.keeps {
            let [model, optimizer, schedule] = Records::all(&self.folder.join("checkpoints"))?;
            learning = learning.with_custom_checkpointers(model, optimizer, schedule);
        }
        if let Some(number) = self.resume {
            learning = learning.checkpoint(number);
        }
        if self.arguments.lines || !stdout().is_terminal() {
            let lines = Lines::new(schedule, self.arguments.log_every, size);
            learning = learning.renderer(Box::new(lines));
        }
        let averaging = (self.averages && self.devices.len() > 1).then(|| {
            let devices = self.devices.iter().cloned().map(Device::inner);
            Averaging::new(devices.collect(), learning.interrupter())
        });
        // Otherwise the learner adds up those of all devices.
        let added = match averaging {
            Some(_) => schedule.accumulation,
            None => schedule.batches(),
        };
        let learner = Learner::new(
            Trainee::new(model, added, self.arguments.checkpointing, averaging),
            self.optimizer(),
            self.rates()?,
        );
        stop_on_interrupt(learning.interrupter())?;
        let result = learning.launch(learner);
        match result.error {
            Some(error) => Err(error.to_string().into()),
            None => Ok(Outcome {
                model: result.model.model,
                is_interrupted: result.interrupted.is_some(),
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

    fn optimizer(&self) -> ModuleOptimizer {
        let arguments = self.arguments;
        let clipping =
            (arguments.clip > 0.0).then_some(GradientClippingConfig::Norm(arguments.clip));
        match arguments.optimizer {
            OptimizerName::Sgd => SgdConfig::new().with_gradient_clipping(clipping).init(),
            OptimizerName::Adamw => {
                let adamw = AdamWConfig::new()
                    .with_beta_1(BETAS[0])
                    .with_beta_2(BETAS[1])
                    .with_epsilon(1e-8)
                    .with_grad_clipping(clipping.clone());
                let norms = adamw.clone().with_weight_decay(0.0).build();
                adamw
                    .with_weight_decay(arguments.weight_decay)
                    .init()
                    .with_group(
                        ParamGroup::from_predicate("norm"),
                        norms,
                        clipping.map(|clipping| clipping.init()),
                    )
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
