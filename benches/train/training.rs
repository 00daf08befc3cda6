//! The training steps that the benchmark times. The programs `train` and `finetune` run the same steps.

use attention_workspace::Error;
use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::{GradientsParams, ModuleOptimizer},
    tensor::{DType, Device, Distribution, Int, Tensor},
    train::TrainStep,
};
use burn_gemma4::{Gemma4Config, Gemma4Model, GradientRecorder, TrainBatch};
use gemma4_train::{
    args::StepArguments,
    optim::{master_weights::Memory, optimizer::optimizer},
    train_step::TrainableModel,
};
use std::time::Instant;

/// The learning rate. A small rate ensures that the weights hardly change.
const LEARNING_RATE: f64 = 1e-5;

/// A model with the optimizer that trains it.
pub struct Training {
    model: TrainableModel,
    optimizer: ModuleOptimizer,
    recorder: GradientRecorder,
}

/// The input tokens and the target tokens of a training step.
pub struct Text {
    input: Tensor<2, Int>,
    /// The target tokens of the last positions, which the loss covers.
    targets: Tensor<2, Int>,
}

/// The loss and the time of a training step.
#[derive(Default)]
pub struct Step {
    pub loss: f32,
    pub seconds: f64,
}

impl Text {
    /// Creates random tokens for the sizes `[batch, length, last]`. The target of each of the last `last` positions is the
    /// next token.
    pub fn random(
        config: &Gemma4Config,
        [batch, length, last]: [usize; 3],
        device: &Device,
    ) -> Self {
        let highest = (config.vocab_size - 1) as f64;
        let shape = [batch, length + 1];
        let numbers = Distribution::Uniform(0.0, highest);
        let tokens = Tensor::<2>::random(shape, numbers, (device, DType::F32)).int();
        Self {
            input: tokens.clone().narrow(1, 0, length),
            targets: tokens.narrow(1, length + 1 - last, last),
        }
    }
}

/// Returns the median of the given times.
pub fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// A visitor that initializes all weights at once. Otherwise, Burn would initialize a weight only when the weight is
/// first read.
struct Draw;

impl ModuleVisitor for Draw {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        param.base();
    }
}

fn recorder(arguments: &StepArguments) -> GradientRecorder {
    let recorder = GradientRecorder::new().by_layer(arguments.checkpointing.is_by_layer());
    match arguments.no_graph {
        true => recorder.without_graph_capture(),
        false => recorder,
    }
}

impl Training {
    /// Creates the training of `model`, and initializes all weights that are not initialized yet.
    pub fn new(model: Gemma4Model, arguments: &StepArguments) -> Self {
        model.visit(&mut Draw);
        Self {
            model: TrainableModel::alone(model, arguments),
            optimizer: optimizer(arguments),
            recorder: recorder(arguments),
        }
    }

    /// Discards the captured CUDA graph, so that steps with other shapes can follow.
    pub fn begin_anew(self, arguments: &StepArguments) -> Self {
        Self {
            recorder: recorder(arguments),
            ..self
        }
    }

    pub fn model(&self) -> &Gemma4Model {
        &self.model.model
    }

    /// Returns the bytes of weights, gradients and optimizer state.
    pub fn memory(&self, arguments: &StepArguments) -> Memory {
        let is_f16 = self.model().dtype() == DType::F16;
        Memory::of(self.model(), arguments.optimizer, is_f16)
    }

    /// Runs one training step. The step consumes `self`, because a second handle would keep the old weights in memory.
    pub fn step(mut self, text: &Text) -> Result<(Self, Step), Error> {
        let Text { input, targets } = text;
        let model = &self.model.model;
        let device = model.device().inner();
        device.sync()?;
        let start = Instant::now();
        let lesson = TrainBatch {
            tokens: input.clone(),
            packing: None,
            media: None,
            targets: targets.clone(),
        };
        let (loss, gradients) = self.recorder.gradients(model, lesson, 1.0)?;
        let training = self.optimize(gradients);
        let loss = loss.into_scalar::<f32>();
        device.sync()?;
        let seconds = start.elapsed().as_secs_f64();
        Ok((training, Step { loss, seconds }))
    }

    /// Clips the gradients, and lets the optimizer update the weights.
    pub fn optimize(mut self, gradients: GradientsParams) -> Self {
        let rate = LEARNING_RATE.into();
        let model = self.model.optimize(&mut self.optimizer, rate, gradients);
        Self { model, ..self }
    }
}
