//! A model as Burn's learner takes it.

use super::{arguments::Checkpointing, averaging::Averaging, loader::Batch};
use burn::{
    module::Module,
    optim::GradientsParams,
    tensor::{ExecutionError, Tensor},
    train::{
        InferenceStep, ItemLazy, TrainOutput, TrainStep,
        metric::{Adaptor, LossInput},
    },
};
use burn_gemma4::{Gemma4Model, Logits};

const ONE_SHAPE: &str =
    "the loader makes tokens of the vocabulary, and targets and packing of their shape";

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
    /// Where the gradients are averaged with those of other devices.
    #[module(skip)]
    averaging: Option<Averaging>,
}

impl Trainee {
    /// `model`, where the learner adds up the gradients of so many batches for a step.
    pub fn new(
        model: Gemma4Model,
        batches: usize,
        checkpointing: Checkpointing,
        averaging: Option<Averaging>,
    ) -> Self {
        Self {
            model,
            share: 1.0 / batches as f64,
            by_layer: checkpointing.is_by_layer(),
            averaging,
        }
    }

    /// The mean loss of a batch, without autodiff, and the gradients of its share in a step.
    fn gradients(&self, model: &Gemma4Model, batch: Batch) -> (Tensor<1>, GradientsParams) {
        if !self.by_layer {
            let loss = loss(model, &batch);
            let gradients = (loss.clone() * self.share).backward();
            return (loss.detach(), GradientsParams::from_grads(gradients, model));
        }
        let Batch {
            tokens,
            targets,
            packing,
        } = batch;
        let share = |hidden| Ok(model.loss(hidden, targets)? * self.share);
        let outcome = model.gradients(tokens, Some(&packing), Logits::All, share);
        let (loss, gradients) = outcome.expect(ONE_SHAPE);
        (loss / self.share, gradients)
    }
}

/// The mean loss of a batch.
fn loss(model: &Gemma4Model, batch: &Batch) -> Tensor<1> {
    let hidden = model.hidden_packed(batch.tokens.clone(), &batch.packing);
    hidden
        .and_then(|hidden| model.loss(hidden, batch.targets.clone()))
        .expect(ONE_SHAPE)
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
        let (loss, grads) = match &self.averaging {
            None => self.gradients(&self.model, batch),
            Some(averaging) => {
                let model = averaging.unmarked(&self.model);
                let (loss, gradients) = self.gradients(&model, batch);
                (loss, averaging.average(gradients, &model))
            }
        };
        let item = Loss(loss);
        TrainOutput { grads, item }
    }
}

impl InferenceStep for Trainee {
    type Input = Batch;
    type Output = Loss;

    fn step(&self, batch: Batch) -> Loss {
        Loss(loss(&self.model, &batch))
    }
}
