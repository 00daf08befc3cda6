//! What comes after tokens: logits, on the device until they are asked for, or what was chosen of them there.

use super::check_samplers;
#[cfg(feature = "cube")]
use super::position::{Choice, Outputs};
#[cfg(feature = "cube")]
use crate::generate::sampling::device::{DeviceSampler, upload};
use crate::{
    Gemma4Error, Gemma4Model, Sampler,
    op::{argmax::argmax, flat_rows},
};
use burn::tensor::{DType, Int, Tensor};
use std::marker::PhantomData;

/// What comes after tokens, one of each sequence or [several](super::Decoder::read) of one: the next ones' logits, on the device until
/// they are asked for.
#[derive(Debug)]
pub struct Next<'a> {
    /// `[tokens, vocabulary]`.
    logits: Tensor<2>,
    /// What is known of the next tokens already.
    #[cfg(feature = "cube")]
    chosen: Option<Choice>,
    /// `[tokens, hidden]`, normalised: what the logits are made of, where that is known.
    hidden: Option<Tensor<2>>,
    /// The next step may write over them.
    _until_the_next: PhantomData<&'a mut ()>,
}

impl Next<'_> {
    /// What logits of one position say, `[batch, 1, vocabulary]`, such as those of a prompt's last one.
    pub fn of(logits: Tensor<3>) -> Self {
        Self {
            logits: flat_rows(logits),
            #[cfg(feature = "cube")]
            chosen: None,
            hidden: None,
            _until_the_next: PhantomData,
        }
    }

    /// What `[batch, positions, hidden]`, normalised, say.
    pub(crate) fn of_hidden(model: &Gemma4Model, hidden: Tensor<3>) -> Self {
        Self {
            hidden: Some(flat_rows(hidden.clone())),
            ..Self::of(model.logits(hidden))
        }
    }

    pub(crate) fn vocabulary(&self) -> usize {
        self.logits.dims()[1]
    }

    /// What the logits are made of, `[tokens, hidden]`, normalised; nothing where only they are known. The decoder's next step or pass
    /// may write over it.
    pub fn hidden(&self) -> Option<Tensor<2>> {
        self.hidden.clone()
    }

    /// The likeliest token after each. A logit that is NaN counts as −∞. Only the tokens' numbers leave the device.
    ///
    /// # Errors
    /// [`Gemma4Error::Argument`] where every logit of a sequence is NaN or −∞, so that none is the likeliest;
    /// [`Gemma4Error::Device`] where the device failed.
    pub fn argmax(self) -> Result<Vec<u32>, Gemma4Error> {
        let [_, vocabulary] = self.logits.dims();
        let number = |token: Option<u32>| token.ok_or_else(|| Gemma4Error::no_number(vocabulary));
        self.likeliest()?.into_iter().map(number).collect()
    }

    /// As [`argmax`](Self::argmax), with nothing where no token is the likeliest.
    pub(crate) fn likeliest(self) -> Result<Vec<Option<u32>>, Gemma4Error> {
        #[cfg(feature = "cube")]
        if let Some(Choice::Largest(tokens)) = self.chosen {
            return numbers(tokens);
        }
        numbers(argmax(self.logits))
    }

    /// The next token of each sequence, by its sampler, which reads it: on the device where kernels serve and all samplers have the same
    /// options but for their seeds, so that only the tokens' numbers leave it; else on the host. A token that a decoder
    /// [with samplers](super::Decoder::with_samplers) has drawn in its step is that one.
    ///
    /// # Errors
    /// [`Gemma4Error::Argument`] where there is not one sampler for each of the logits' rows, those of [`Sampling::validate`](crate::Sampling::validate), and where every logit of a sequence, by its
    /// penalty and suppressed tokens, is NaN or −∞; [`Gemma4Error::Device`] where the device failed. No sampler has read a token then.
    pub fn sample(self, samplers: &mut [Sampler]) -> Result<Vec<u32>, Gemma4Error> {
        let [rows, vocabulary] = self.logits.dims();
        check_samplers(samplers.len(), rows)?;
        for sampler in samplers.iter() {
            sampler.sampling().validate()?;
        }
        let of_rows: Vec<&Sampler> = samplers.iter().collect();
        let tokens: Result<Vec<u32>, _> = match self.draw(&of_rows) {
            Some(drawn) => {
                let number =
                    |token: Option<u32>| token.ok_or_else(|| Gemma4Error::no_number(vocabulary));
                drawn?.into_iter().map(number).collect()
            }
            None => {
                let logits = self.logits()?;
                let rows = samplers.iter_mut().zip(logits.chunks_exact(vocabulary));
                rows.map(|(sampler, logits)| sampler.choose(logits))
                    .collect()
            }
        };
        let tokens = tokens?;
        for (sampler, token) in samplers.iter_mut().zip(&tokens) {
            sampler.read(&[*token]);
        }
        Ok(tokens)
    }

    /// The next token of each row, drawn on the device by its sampler, which does not read it; nothing for a row where none can be.
    /// `None` where the device does not draw.
    pub(crate) fn draw(
        &self,
        samplers: &[&Sampler],
    ) -> Option<Result<Vec<Option<u32>>, Gemma4Error>> {
        #[cfg(feature = "cube")]
        {
            if let Some(Choice::Drawn(tokens)) = &self.chosen {
                return Some(numbers(tokens.clone()));
            }
            let (device, dtype) = (self.logits.device(), self.logits.dtype());
            let [rows, vocabulary] = self.logits.dims();
            if samplers.len() == rows
                && let Some(sampler) = DeviceSampler::new(samplers, vocabulary, dtype, &device)
            {
                // Of the tokens that were read last.
                let positions = samplers
                    .iter()
                    .map(|sampler| (sampler.position() as u32).wrapping_sub(1));
                let positions = upload(positions, &device);
                let tokens = sampler.choose(self.logits.clone(), None, positions);
                return Some(numbers(tokens));
            }
        }
        let _ = samplers;
        None
    }

    /// The logits, `[tokens · vocabulary]`, on the host.
    ///
    /// # Errors
    /// [`Gemma4Error::Device`] where the device failed.
    pub fn logits(self) -> Result<Vec<f32>, Gemma4Error> {
        let logits = self
            .logits
            .cast(DType::F32)
            .try_into_data()
            .map_err(failed)?;
        Ok(logits.iter::<f32>().collect())
    }
}

#[cfg(feature = "cube")]
impl From<Outputs> for Next<'_> {
    fn from(outputs: Outputs) -> Self {
        Self {
            logits: outputs.logits,
            chosen: Some(outputs.chosen),
            hidden: Some(outputs.hidden),
            _until_the_next: PhantomData,
        }
    }
}

/// Tokens' numbers, on the host; nothing for those that are none.
fn numbers(tokens: Tensor<1, Int>) -> Result<Vec<Option<u32>>, Gemma4Error> {
    let tokens = tokens.try_into_data().map_err(failed)?;
    let tokens = tokens.iter::<i64>();
    Ok(tokens.map(|token| u32::try_from(token).ok()).collect())
}

fn failed(error: impl std::fmt::Display) -> Gemma4Error {
    Gemma4Error::Device(format!("it computed no logits: {error}"))
}
