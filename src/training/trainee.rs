//! A model as Burn's learner takes it.

use super::{arguments::Checkpointing, loader::Batch};
use burn::{
    module::Module,
    tensor::{ExecutionError, Tensor},
    train::{
        InferenceStep, ItemLazy, TrainOutput, TrainStep,
        metric::{Adaptor, LossInput},
    },
};
use burn_gemma4::{Gemma4Model, Logits};

const ONE_SHAPE: &str = "the loader makes tokens, targets and packing of one shape";

/// A model that learns to predict the next token.
#[derive(Module, Debug)]
pub struct Trainee {
    /// The model.
    pub model: Gemma4Model,
    /// What a batch's gradients count: the learner adds up those of a step.
    #[module(skip)]
    share: f64,
    /// Computes each layer anew in the backward.
    #[module(skip)]
    by_layer: bool,
}

impl Trainee {
    /// `model`, where the learner adds up the gradients of so many batches for a step.
    pub fn new(model: Gemma4Model, batches: usize, checkpointing: Checkpointing) -> Self {
        Self {
            model,
            share: 1.0 / batches as f64,
            by_layer: checkpointing.is_by_layer(),
        }
    }

    /// The mean loss of a batch.
    fn loss(&self, batch: &Batch) -> Tensor<1> {
        let hidden = self
            .model
            .hidden_packed(batch.tokens.clone(), &batch.packing);
        hidden
            .and_then(|hidden| self.model.loss(hidden, batch.targets.clone()))
            .expect(ONE_SHAPE)
    }
}

/// The loss of a batch.
pub struct Loss(Tensor<1>);

impl Adaptor<LossInput> for Loss {
    fn adapt(&self) -> LossInput {
        LossInput::new(self.0.clone())
    }
}

impl ItemLazy for Loss {
    fn sync(self) -> Result<Self, ExecutionError> {
        self.0.device().flush()?;
        Ok(Self(self.0.without_autodiff()))
    }
}

impl TrainStep for Trainee {
    type Input = Batch;
    type Output = Loss;

    fn step(&self, batch: Batch) -> TrainOutput<Loss> {
        if !self.by_layer {
            let loss = self.loss(&batch);
            let gradients = (loss.clone() * self.share).backward();
            return TrainOutput::new(self, gradients, Loss(loss.detach()));
        }
        let Batch {
            tokens,
            targets,
            packing,
        } = batch;
        let share = |hidden| Ok(self.model.loss(hidden, targets)? * self.share);
        let outcome = self
            .model
            .gradients(tokens, Some(&packing), Logits::All, share);
        let (loss, grads) = outcome.expect(ONE_SHAPE);
        let item = Loss(loss / self.share);
        TrainOutput { grads, item }
    }
}

impl InferenceStep for Trainee {
    type Input = Batch;
    type Output = Loss;

    fn step(&self, batch: Batch) -> Loss {
        Loss(self.loss(&batch))
    }
}
