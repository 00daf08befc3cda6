//! The parts of a checkpoint that see images and hear audio.

use super::audio::{AudioFormat, AudioPass, LazyAudio};
use super::files::TensorFiles;
use super::vision::{ImageFormat, ImagePass, LazyVision};
use crate::audio::features::Features;
use crate::config::Gemma4Config;
use crate::error::Gemma4Error;
use crate::vision::patches::Patches;
use burn::tensor::{DType, Device, Tensor};
use std::path::Path;
use std::sync::Arc;

/// The parts of a checkpoint that see images and hear audio, or the reasons why the checkpoint lacks them.
#[derive(Clone, Debug)]
pub(crate) struct MediaEncoders {
    pub vision: Result<LazyVision, String>,
    pub audio: Result<LazyAudio, String>,
}

/// The forms that images and audio have in the prompts of a checkpoint, or the reasons why it reads none. They need no
/// weights.
#[derive(Clone, Debug)]
pub(crate) struct MediaFormats {
    pub vision: Result<ImageFormat, String>,
    pub audio: Result<AudioFormat, String>,
}

/// An image, a frame of a video or an audio clip in the form from which soft tokens are computed. Clones share the memory.
#[derive(Clone, Debug)]
pub(crate) enum MediumInput {
    Image(Arc<Patches>),
    Audio(Arc<Features>),
}

/// An image or an audio clip whose soft tokens are being computed.
#[derive(Debug)]
pub(crate) enum MediumPass {
    Image(ImagePass),
    Audio(AudioPass),
}

impl MediumInput {
    /// The size in memory, in bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Image(patches) => patches.rgb.len(),
            Self::Audio(features) => features.bytes(),
        }
    }

    /// The number of rows that run through a layer of a tower: the patches of an image, or a quarter of the log-mel
    /// frames of a clip.
    pub fn rows(&self) -> usize {
        match self {
            Self::Image(patches) => patches.columns * patches.rows,
            Self::Audio(features) => features.frames.div_ceil(4),
        }
    }
}

impl MediaEncoders {
    /// Reads the configurations in a folder, whose `config.json` has the text `json`. A model whose vision or audio
    /// cannot run still answers texts.
    pub fn open(
        folder: &Path,
        json: &str,
        text: &Gemma4Config,
        dtype: DType,
        device: &Device,
    ) -> Self {
        let files = match TensorFiles::open(folder) {
            Ok(files) => files,
            Err(error) => {
                let reason = error.to_string();
                return Self {
                    vision: Err(reason.clone()),
                    audio: Err(reason),
                };
            }
        };
        let vision = LazyVision::open(folder, &files, json, text, dtype, device);
        let audio = LazyAudio::open(folder, &files, json, text, dtype, device);
        Self {
            vision: found(vision, "vision"),
            audio: found(audio, "audio"),
        }
    }

    /// Returns no encoders. `place` is the noun of the place where they are missing, and `advice` is for the user.
    pub fn none(place: &str, advice: &str) -> Self {
        Self {
            vision: Err(format!("{place} no vision; {advice}")),
            audio: Err(format!("{place} no audio; {advice}")),
        }
    }

    /// Returns the part that sees images.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] with the reason why the model sees no images.
    pub fn vision(&self) -> Result<&LazyVision, Gemma4Error> {
        seeing(&self.vision)
    }

    /// Returns the part that hears audio.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] with the reason why the model hears no audio.
    pub fn audio(&self) -> Result<&LazyAudio, Gemma4Error> {
        hearing(&self.audio)
    }

    /// Loads the weights of the vision, if the model sees images.
    pub fn load_vision(&self) -> Result<(), Gemma4Error> {
        self.vision.as_ref().map_or(Ok(()), LazyVision::load)
    }

    /// Loads the weights of the audio, if the model hears audio.
    pub fn load_audio(&self) -> Result<(), Gemma4Error> {
        self.audio.as_ref().map_or(Ok(()), LazyAudio::load)
    }

    /// Returns the forms of images and audio, without weights.
    pub fn formats(&self) -> MediaFormats {
        let vision = self.vision.as_ref().map(|vision| vision.format().clone());
        let audio = self.audio.as_ref().map(|audio| audio.format().clone());
        MediaFormats {
            vision: vision.map_err(String::clone),
            audio: audio.map_err(String::clone),
        }
    }

    /// Checks that the model reads each of some media.
    ///
    /// # Errors
    /// Returns the errors of [`vision`](Self::vision) and [`audio`](Self::audio).
    pub fn check(&self, inputs: &[MediumInput]) -> Result<(), Gemma4Error> {
        inputs.iter().try_for_each(|input| match input {
            MediumInput::Image(_) => self.vision().map(|_| ()),
            MediumInput::Audio(_) => self.audio().map(|_| ()),
        })
    }

    /// True if the soft tokens of a medium see each other in both directions in sliding layers. Audio is causal in all
    /// models.
    pub fn is_bidirectional(&self, input: &MediumInput) -> bool {
        match (input, &self.vision) {
            (MediumInput::Image(_), Ok(vision)) => vision.format().config.is_bidirectional,
            _ => false,
        }
    }

    /// Computes the soft tokens of a medium, `[soft tokens, hidden]`. The first call for a kind loads its weights.
    ///
    /// # Errors
    /// Returns an error if the weights cannot be loaded, or if the model does not read the medium.
    pub fn soft_tokens(&self, input: &MediumInput) -> Result<Tensor<2>, Gemma4Error> {
        let mut pass = self.begin(input)?;
        loop {
            if let Some(rows) = self.advance(&mut pass, usize::MAX)? {
                return Ok(rows);
            }
        }
    }

    /// Begins to compute the soft tokens of a medium. The first call for a kind loads its weights.
    ///
    /// # Errors
    /// Returns the errors of [`soft_tokens`](Self::soft_tokens).
    pub fn begin(&self, input: &MediumInput) -> Result<MediumPass, Gemma4Error> {
        Ok(match input {
            MediumInput::Image(patches) => MediumPass::Image(self.vision()?.begin(patches)?),
            MediumInput::Audio(features) => MediumPass::Audio(self.audio()?.begin(features)?),
        })
    }

    /// Runs up to `layers` further layers over a medium. After the last layer, returns the soft tokens,
    /// `[soft tokens, hidden]`.
    ///
    /// # Errors
    /// Returns the errors of [`soft_tokens`](Self::soft_tokens).
    ///
    /// # Panics
    /// Panics if another model has begun the pass.
    pub fn advance(
        &self,
        pass: &mut MediumPass,
        layers: usize,
    ) -> Result<Option<Tensor<2>>, Gemma4Error> {
        match pass {
            MediumPass::Image(pass) => self.vision()?.advance(pass, layers),
            MediumPass::Audio(pass) => self.audio()?.advance(pass, layers),
        }
    }
}

impl MediaFormats {
    /// Returns the form of images.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] with the reason why the model sees no images.
    pub fn vision(&self) -> Result<&ImageFormat, Gemma4Error> {
        seeing(&self.vision)
    }

    /// Checks that the model sees videos.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] with the reason why the model sees no images or no videos.
    pub fn check_video(&self) -> Result<(), Gemma4Error> {
        self.vision()?.video().map(|_| ())
    }

    /// Returns the form of audio.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] with the reason why the model hears no audio.
    pub fn audio(&self) -> Result<&AudioFormat, Gemma4Error> {
        hearing(&self.audio)
    }
}

fn seeing<T>(part: &Result<T, String>) -> Result<&T, Gemma4Error> {
    part.as_ref().map_err(|reason| Gemma4Error::Argument {
        argument: "image",
        reason: format!("this model sees no images: {reason}"),
    })
}

fn hearing<T>(part: &Result<T, String>) -> Result<&T, Gemma4Error> {
    part.as_ref().map_err(|reason| Gemma4Error::Argument {
        argument: "audio",
        reason: format!("this model hears no audio: {reason}"),
    })
}

fn found<T>(part: Result<Option<T>, Gemma4Error>, noun: &str) -> Result<T, String> {
    match part {
        Ok(part) => part.ok_or_else(|| format!("the checkpoint has no {noun}")),
        Err(error) => Err(error.to_string()),
    }
}
