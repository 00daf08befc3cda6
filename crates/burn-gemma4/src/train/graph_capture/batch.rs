//! A training batch and its gradients.

use crate::error::Gemma4Error;
use crate::model::forward::Text;
use crate::model::{Gemma4Model, Logits};
use crate::train::gradients::{BatchGradients, HasTrainable};
use crate::train::media::PlacedMedia;
use crate::train::packing::Packing;
use burn::{
    module::Module,
    optim::GradientsParams,
    tensor::{Int, Tensor},
};

/// A batch of texts and their target tokens.
#[derive(Clone, Debug)]
pub struct TrainBatch<'a> {
    /// The token ids, `[batch, positions]`.
    pub tokens: Tensor<2, Int>,
    /// The documents in each row, or `None` if each row is one document.
    pub packing: Option<&'a Packing>,
    /// The soft tokens of images and audio clips, or `None` for a data set of texts.
    pub media: Option<&'a PlacedMedia>,
    /// The token to predict at each of the last positions, `[batch, last]`. With a packing, `last` must equal
    /// `positions`. Positions with negative targets do not count in the loss.
    pub targets: Tensor<2, Int>,
}

/// A checked batch on the device. Its tensors have no autodiff.
pub(super) struct Read {
    pub text: Text,
    /// The targets, `[batch, last]`.
    pub targets: Tensor<2, Int>,
}

impl Read {
    pub fn new(model: &Gemma4Model, lesson: TrainBatch<'_>) -> Result<Self, Gemma4Error> {
        let TrainBatch {
            tokens,
            packing,
            media,
            targets,
        } = lesson;
        model.check_trainable()?;
        let [batch, positions] = tokens.dims();
        let [of, last] = targets.dims();
        if batch == 0 {
            return Err(Gemma4Error::Argument {
                argument: "tokens",
                reason: format!("has the shape {:?}, which has no text", [batch, positions]),
            });
        }
        let fewest = if packing.is_some() { positions } else { 1 };
        if of != batch || last > positions || last < fewest.max(1) {
            let which = match packing {
                Some(_) => "all",
                None => "the last",
            };
            return Err(Gemma4Error::Argument {
                argument: "targets",
                reason: format!(
                    "has the shape {:?}, which does not match {which} positions of tokens {:?}",
                    [of, last],
                    [batch, positions]
                ),
            });
        }
        if let Some(packing) = packing {
            packing.check(&tokens)?;
        }
        if let Some(media) = media {
            media.check([batch, positions], packing)?;
        }
        let tokens = model.read_tokens(tokens.inner())?;
        Ok(Self {
            text: model.training_text(&tokens, packing, media),
            targets: targets.inner(),
        })
    }

    /// True if the loss depends on a trained parameter of the model, or on soft tokens that are a leaf of the autodiff
    /// graph. A batch without media has no gradients if only towers are trained.
    pub fn is_tracked(&self, model: &Gemma4Model) -> bool {
        let mut trained = HasTrainable(false);
        model.visit(&mut trained);
        trained.0 || self.text.media.leaf().is_some()
    }

    /// Computes the mean loss without autodiff.
    pub fn loss(self, model: &Gemma4Model) -> Result<Tensor<1>, Gemma4Error> {
        let Self { text, targets } = self;
        let asked = Logits::Last(targets.dims()[1]);
        let hidden = model.hidden_states(text, None, asked, &mut ());
        Ok(model.loss(hidden, targets)?.inner())
    }

    /// Computes the mean loss without autodiff, and the gradients of `scaled(loss)`. All inputs are on the device, so
    /// that a CUDA graph can capture the computation.
    pub fn gradients(
        self,
        model: &Gemma4Model,
        by_layer: bool,
        scaled: impl FnOnce(Tensor<1>) -> Tensor<1>,
    ) -> Result<BatchGradients, Gemma4Error> {
        let Self { text, targets } = self;
        let asked = Logits::Last(targets.dims()[1]);
        if !by_layer {
            let leaf = text.media.leaf().cloned();
            let hidden = model.hidden_states(text, None, asked, &mut ());
            let loss = model.loss(hidden, targets)?;
            let plain = loss.clone().inner();
            let mut gradients = scaled(loss).backward();
            return Ok(BatchGradients {
                loss: plain,
                soft_tokens: leaf.and_then(|leaf| leaf.grad_remove(&mut gradients)),
                parameters: GradientsParams::from_grads(gradients, model),
            });
        }
        let mut plain = None;
        let of_states = |hidden| {
            let loss = model.loss(hidden, targets)?;
            plain = Some(loss.clone().inner());
            Ok(scaled(loss))
        };
        let found = model.gradients_by_layer(text, asked, of_states)?;
        Ok(BatchGradients {
            loss: plain.unwrap_or(found.loss),
            ..found
        })
    }
}
