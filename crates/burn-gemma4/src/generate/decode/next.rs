//! The result of a decode step: logits, or tokens that the device has already chosen.

#[cfg(feature = "cube")]
use super::position::{Choice, Outputs};
use crate::error::Gemma4Error;
#[cfg(feature = "cube")]
use crate::generate::sampling::device::{DeviceSampler, upload};
use crate::generate::sampling::sampler::Sampler;
use crate::model::Gemma4Model;
use crate::op::argmax::argmax;
use crate::op::flat_rows;
use burn::tensor::{DType, Int, Tensor};
use std::marker::PhantomData;

/// The logits after one or [several](super::Decoder::read) tokens of each sequence. The logits stay on the device until
/// the host requests them.
#[derive(Debug)]
pub struct Next<'a> {
    /// The logits, `[rows, vocabulary]`. Each input token of the step has one row.
    logits: Tensor<2>,
    /// The next tokens, or `None` if the decode step has not chosen tokens on the device.
    #[cfg(feature = "cube")]
    chosen: Option<Choice>,
    /// The normalized hidden states from which the logits are computed, `[rows, hidden]`. `None` if only the logits are
    /// available.
    hidden: Option<Tensor<2>>,
    /// Keeps the decoder borrowed while this value exists, because the decoder's next step may overwrite the tensors.
    _until_the_next: PhantomData<&'a mut ()>,
}

impl Next<'_> {
    /// Wraps the logits of one position per sequence, such as the last position of each prompt.
    ///
    /// # Shapes
    /// `logits`: `[batch, 1, vocabulary]`.
    pub fn of(logits: Tensor<3>) -> Self {
        Self {
            logits: flat_rows(logits),
            #[cfg(feature = "cube")]
            chosen: None,
            hidden: None,
            _until_the_next: PhantomData,
        }
    }

    /// Computes the logits from normalized hidden states, `[batch, positions, hidden]`, and wraps the logits.
    pub(crate) fn of_hidden(model: &Gemma4Model, hidden: Tensor<3>) -> Self {
        Self {
            hidden: Some(flat_rows(hidden.clone())),
            ..Self::of(model.logits(hidden))
        }
    }

    /// The logits on the device, `[rows, vocabulary]`.
    pub(super) fn rows(&self) -> Tensor<2> {
        self.logits.clone()
    }

    pub(crate) fn vocabulary(&self) -> usize {
        self.logits.dims()[1]
    }

    /// Returns the normalized hidden states from which the logits are computed, `[rows, hidden]`, if they are available.
    /// The decoder's next step may overwrite the hidden states.
    pub fn hidden(&self) -> Option<Tensor<2>> {
        self.hidden.clone()
    }

    /// Returns the argmax of each row. A NaN logit counts as −∞.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if every logit of a row is NaN or −∞. Returns [`Gemma4Error::Device`] if the
    /// device failed.
    pub fn argmax(self) -> Result<Vec<u32>, Gemma4Error> {
        let [_, vocabulary] = self.logits.dims();
        let number = |token: Option<u32>| token.ok_or_else(|| Gemma4Error::no_number(vocabulary));
        self.try_argmax()?.into_iter().map(number).collect()
    }

    /// Returns the argmax of each row like [`argmax`](Self::argmax), with `None` for a row without an argmax.
    pub(crate) fn try_argmax(self) -> Result<Vec<Option<u32>>, Gemma4Error> {
        #[cfg(feature = "cube")]
        if let Some(Choice::Largest(tokens)) = self.chosen {
            return numbers(tokens);
        }
        numbers(argmax(self.logits))
    }

    /// Returns the next token of each sequence. The sequence's sampler chooses the token and records it.
    ///
    /// A decoder [with samplers](super::Decoder::with_samplers) may have drawn the tokens already. Otherwise the device
    /// draws the tokens now, if its kernels support the vocabulary, and if the samplers' options differ only in their
    /// seeds. In all other cases the host draws.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the number of samplers differs from the number of rows, or if a row has no
    /// possible token. Returns [`Gemma4Error::Device`] if the device failed. Also passes on the errors of
    /// [`Sampling::validate`](crate::config::sampling::Sampling::validate). After an error no sampler has recorded a
    /// token.
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

    /// Draws the next token of each row on the device, with the row's sampler. Returns a list with one entry per row.
    /// The entry is `None` if no token is possible in its row. If the device does not support the samplers, the
    /// function returns `None` instead of a list.
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
                // The sampler adds 1 to each position to get the position of the new token. Pass the position of each
                // sequence's last token.
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

    /// Copies the logits to the host, `[rows · vocabulary]`.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Device`] if the device failed.
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

/// Copies token ids to the host. A negative id means that no token is possible in the row, and becomes `None`.
fn numbers(tokens: Tensor<1, Int>) -> Result<Vec<Option<u32>>, Gemma4Error> {
    let tokens = tokens.try_into_data().map_err(failed)?;
    let tokens = tokens.iter::<i64>();
    Ok(tokens.map(|token| u32::try_from(token).ok()).collect())
}

fn failed(error: impl std::fmt::Display) -> Gemma4Error {
    Gemma4Error::Device(format!("cannot read the logits or tokens: {error}"))
}

/// Checks that each sequence has one sampler.
pub(super) fn check_samplers(samplers: usize, sequences: usize) -> Result<(), Gemma4Error> {
    match samplers == sequences {
        true => Ok(()),
        false => Err(Gemma4Error::Argument {
            argument: "samplers",
            reason: format!("are {samplers}; expected one for each of {sequences} sequences"),
        }),
    }
}
