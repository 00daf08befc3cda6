//! A text, what is to be learned of it, and the gradients of that.

use crate::{Gemma4Error, Gemma4Model, Logits, Packing, model::forward::Text};
use burn::{
    optim::GradientsParams,
    tensor::{Int, Tensor},
};

/// A text and what is to be learned of it.
#[derive(Clone, Debug)]
pub struct Lesson<'a> {
    /// `[batch, positions]`.
    pub tokens: Tensor<2, Int>,
    /// The documents of each row; without, a row is one.
    pub packing: Option<&'a Packing>,
    /// `[batch, last]`: the tokens that come after the last positions, or after all of them, which with a packing they have to; negative
    /// where the loss does not count.
    pub targets: Tensor<2, Int>,
}

/// The same on the device, without autodiff.
pub(super) struct Read {
    pub text: Text,
    /// `[batch, last]`.
    pub targets: Tensor<2, Int>,
}

impl Read {
    pub fn new(model: &Gemma4Model, lesson: Lesson<'_>) -> Result<Self, Gemma4Error> {
        let Lesson {
            tokens,
            packing,
            targets,
        } = lesson;
        model.refuse_training_quantized()?;
        let [batch, positions] = tokens.dims();
        let [of, last] = targets.dims();
        if batch == 0 {
            return Err(Gemma4Error::Argument {
                argument: "tokens",
                reason: format!("has the shape {:?}, of no text", [batch, positions]),
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
                    "has the shape {:?}, which is not {which} positions of tokens {:?}",
                    [of, last],
                    [batch, positions]
                ),
            });
        }
        if let Some(packing) = packing {
            packing.check(&tokens)?;
        }
        let tokens = model.read_tokens(tokens.inner())?;
        let text = match packing {
            Some(packing) => model.packed_text(&tokens, packing),
            None => model.whole_text(&tokens),
        };
        Ok(Self {
            text,
            targets: targets.inner(),
        })
    }

    /// The mean loss, without autodiff, and the gradients of what `scaled` makes of it. Nothing here depends on the host but the shapes.
    pub fn gradients(
        self,
        model: &Gemma4Model,
        by_layer: bool,
        scaled: impl FnOnce(Tensor<1>) -> Tensor<1>,
    ) -> Result<(Tensor<1>, GradientsParams), Gemma4Error> {
        let Self { text, targets } = self;
        let asked = Logits::Last(targets.dims()[1]);
        if !by_layer {
            let hidden = model.hidden_states(text, None, asked, &mut ());
            let loss = model.loss(hidden, targets)?;
            let plain = loss.clone().inner();
            let gradients = scaled(loss).backward();
            return Ok((plain, GradientsParams::from_grads(gradients, model)));
        }
        let mut plain = None;
        let of_states = |hidden| {
            let loss = model.loss(hidden, targets)?;
            plain = Some(loss.clone().inner());
            Ok(scaled(loss))
        };
        let (scaled, gradients) = model.gradients_by_layer(text, asked, of_states)?;
        Ok((plain.unwrap_or(scaled), gradients))
    }
}
