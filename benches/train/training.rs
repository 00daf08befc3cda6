//! What is timed: steps as `train` and `finetune` make them.

use attention_workspace::{
    Error,
    training::{arguments::StepArguments, masters::Memory, optimizer::optimizer, trainee::Trainee},
};
use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::{GradientsParams, ModuleOptimizer},
    tensor::{DType, Device, Distribution, Int, Tensor},
    train::TrainStep,
};
use burn_gemma4::{Gemma4Config, Gemma4Model, GradientRecorder, Lesson};
use std::time::Instant;

/// Small, so that the weights stay what they are.
const LEARNING_RATE: f64 = 1e-5;

/// A model and its optimizer.
pub struct Training {
    trainee: Trainee,
    optimizer: ModuleOptimizer,
    recorder: GradientRecorder,
}

/// What a model reads.
pub struct Text {
    input: Tensor<2, Int>,
    /// Of the last positions.
    targets: Tensor<2, Int>,
}

/// What a step came to.
#[derive(Default)]
pub struct Step {
    pub loss: f32,
    pub seconds: f64,
}

impl Text {
    /// `[batch, length, last]`: random tokens, of which the last ones are predicted.
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

/// The median of some times.
pub fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// Draws weights, which Burn does when they are first read.
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
    /// Of `model`, whose weights are drawn here if they are not yet.
    pub fn new(model: Gemma4Model, arguments: &StepArguments) -> Self {
        model.visit(&mut Draw);
        Self {
            trainee: Trainee::alone(model, arguments),
            optimizer: optimizer(arguments),
            recorder: recorder(arguments),
        }
    }

    /// For steps of another shape.
    pub fn begin_anew(self, arguments: &StepArguments) -> Self {
        Self {
            recorder: recorder(arguments),
            ..self
        }
    }

    pub fn model(&self) -> &Gemma4Model {
        &self.trainee.model
    }

    /// What weights and their training take.
    pub fn memory(&self, arguments: &StepArguments) -> Memory {
        let is_f16 = self.model().dtype() == DType::F16;
        Memory::of(self.model(), arguments.optimizer, is_f16)
    }

    /// One step. It takes the model, since a copy would keep the old weights.
    pub fn step(mut self, text: &Text) -> Result<(Self, Step), Error> {
        let Text { input, targets } = text;
        let model = &self.trainee.model;
        let device = model.device().inner();
        device.sync()?;
        let start = Instant::now();
        let lesson = Lesson {
            tokens: input.clone(),
            packing: None,
            targets: targets.clone(),
        };
        let (loss, gradients) = self.recorder.gradients(model, lesson, 1.0)?;
        let training = self.optimize(gradients);
        let loss = loss.into_scalar::<f32>();
        device.sync()?;
        let seconds = start.elapsed().as_secs_f64();
        Ok((training, Step { loss, seconds }))
    }

    /// The end of a step.
    pub fn optimize(mut self, gradients: GradientsParams) -> Self {
        let rate = LEARNING_RATE.into();
        let trainee = self.trainee.optimize(&mut self.optimizer, rate, gradients);
        Self { trainee, ..self }
    }
}
