//! Loads the audio of a multimodal checkpoint, when the first audio clip of a prompt needs it.

use super::files::TensorFiles;
use super::lazy_encoder::{ClippedModule, Encoder, LazyEncoder, MediumFormat};
use super::names::is_of_audio;
use super::tower::description;
use crate::audio::clip::{Audio, MOST_SECONDS, SAMPLE_RATE};
use crate::audio::features::{FeatureExtractor, Features};
use crate::audio::header::AudioHeader;
use crate::audio::prepared::PreparedAudio;
use crate::config::Gemma4Config;
use crate::config::audio::{AudioConfig, AudioEncoderConfig};
use crate::error::Gemma4Error;
use crate::media_size::MediumSize;
use crate::model::audio::{ConformerPass, ProjectedAudio, TowerAudio};
use crate::model::multimodal::ClippedLinear;
use burn::tensor::{DType, Device, Tensor};
use serde_json::{Value, json};
use std::{path::Path, sync::Arc};

/// The audio of a checkpoint in a folder. The weights are loaded when the first audio clip needs them.
pub(crate) type LazyAudio = LazyEncoder<AudioFormat>;

/// The form that audio has in the prompts of a checkpoint. It needs no weights.
#[derive(Clone, Debug)]
pub(crate) struct AudioFormat {
    pub config: AudioConfig,
    extractor: Arc<FeatureExtractor>,
}

impl AudioFormat {
    /// Computes the features of a clip for the model.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the clip is too short.
    pub fn prepared(&self, audio: &Audio) -> Result<PreparedAudio, Gemma4Error> {
        audio.prepared(&self.extractor).map_err(refused)
    }

    /// Returns the size of a clip from the header of its file. `tokens` is a lower bound, and the bytes are upper
    /// bounds.
    pub fn size(&self, header: &AudioHeader) -> MediumSize {
        let longest = MOST_SECONDS * SAMPLE_RATE as usize;
        let samples = header.converted_samples();
        // The decoder refuses a clip without a whole frame, and a clip that is longer than its header says by a second.
        let tokens = samples.and_then(|samples| self.extractor.soft_tokens(samples).ok());
        let most = samples.map_or(longest, |samples| {
            longest.min(samples + SAMPLE_RATE as usize)
        });
        let bytes = self.extractor.bytes(most);
        MediumSize {
            tokens: tokens.unwrap_or(1) + 2,
            bytes,
            // The numbers are copied to be hashed.
            preparing_bytes: 2 * bytes,
        }
    }

    /// Checks that the features of a clip are those of this model.
    pub fn check(&self, features: &Features) -> Result<(), Gemma4Error> {
        let (found, expected) = (features.columns, self.extractor.columns());
        match found == expected {
            true => Ok(()),
            false => Err(refused(format!(
                "has {found} features in a frame; expected {expected}, so prepare the clip by the encoder of this checkpoint"
            ))),
        }
    }
}

/// An audio clip whose soft tokens are being computed.
#[derive(Debug)]
pub(crate) enum AudioPass {
    Tower(Box<ConformerPass>),
    Projected(Box<Tensor<2>>),
}

impl MediumFormat for AudioFormat {
    type Tower = TowerAudio;
    type Projected = ProjectedAudio;

    fn is_part(name: &str) -> bool {
        is_of_audio(name)
    }

    fn module(&self, hidden: usize, device: &Device) -> Encoder<TowerAudio, ProjectedAudio> {
        match &self.config.encoder {
            AudioEncoderConfig::Tower(tower) => {
                Encoder::Tower(Box::new(TowerAudio::new(tower, hidden, device)))
            }
            AudioEncoderConfig::Projection(frames) => {
                Encoder::Projected(Box::new(ProjectedAudio::new(frames, hidden, device)))
            }
        }
    }
}

impl ClippedModule for TowerAudio {
    fn linears_mut(&mut self) -> Vec<(String, &mut ClippedLinear)> {
        self.linears_mut()
    }
}

impl LazyAudio {
    /// Reads the configuration of a folder's audio and checks the audio's tensors. `files` are the tensors of the folder,
    /// and `json` is the text of its `config.json`. The model computes in `dtype` on `device`. Returns `None` if the
    /// checkpoint has no audio.
    ///
    /// # Errors
    /// Returns an error if this crate cannot run the audio. Text prompts do not need the audio.
    pub(super) fn open(
        folder: &Path,
        files: &TensorFiles,
        json: &str,
        text: &Gemma4Config,
        dtype: DType,
        device: &Device,
    ) -> Result<Option<Self>, Gemma4Error> {
        if !files.names().any(is_of_audio) {
            return Ok(None);
        }
        let Some(config) = AudioConfig::from_json(json, text)? else {
            return Ok(None);
        };
        let format = AudioFormat {
            extractor: Arc::new(extractor(folder, &config)?),
            config,
        };
        Self::new(folder, (files, json), format, text, dtype, device).map(Some)
    }

    /// Begins to compute the soft tokens of a clip. The first call loads the weights.
    ///
    /// # Errors
    /// Returns an error if the weights cannot be loaded, or if the clip was prepared for another model.
    pub fn begin(&self, features: &Features) -> Result<AudioPass, Gemma4Error> {
        self.format().check(features)?;
        Ok(match self.loaded()? {
            Encoder::Tower(audio) => AudioPass::Tower(Box::new(audio.begin(features))),
            Encoder::Projected(audio) => {
                AudioPass::Projected(Box::new(audio.soft_tokens(features)))
            }
        })
    }

    /// Runs up to `layers` further layers over a clip. After the last layer, returns the soft tokens,
    /// `[soft tokens, hidden]`. A model without a tower has no layers, so its pass is complete at its beginning.
    ///
    /// # Errors
    /// Returns an error if the weights cannot be loaded.
    ///
    /// # Panics
    /// Panics if another model has begun the pass.
    pub fn advance(
        &self,
        pass: &mut AudioPass,
        layers: usize,
    ) -> Result<Option<Tensor<2>>, Gemma4Error> {
        Ok(match (self.loaded()?, pass) {
            (Encoder::Tower(audio), AudioPass::Tower(pass)) => audio.advance(pass, layers),
            (Encoder::Projected(_), AudioPass::Projected(rows)) => Some(Tensor::clone(rows)),
            _ => unreachable!("a pass belongs to the model that has begun it"),
        })
    }
}

fn refused(reason: String) -> Gemma4Error {
    let argument = "audio";
    Gemma4Error::Argument { argument, reason }
}

/// Reads the feature extractor, or returns Gemma 4's defaults.
fn extractor(folder: &Path, config: &AudioConfig) -> Result<FeatureExtractor, Gemma4Error> {
    let (path, description) = match description(folder, "feature_extractor")? {
        Some(found) => found,
        None => (folder.join("processor_config.json"), json!({})),
    };
    read_extractor(&description, config).map_err(|reason| Gemma4Error::Malformed { path, reason })
}

fn read_extractor(description: &Value, config: &AudioConfig) -> Result<FeatureExtractor, String> {
    let tower = match &config.encoder {
        AudioEncoderConfig::Tower(tower) => tower,
        AudioEncoderConfig::Projection(frames) => {
            return FeatureExtractor::samples(description, frames.audio_embed_dim);
        }
    };
    let extractor = FeatureExtractor::log_mel(description)?;
    // The projection after the convolutions is as wide as a quarter of the first channels.
    let (columns, expected) = (extractor.columns(), tower.channels[0] / 4);
    match columns.div_ceil(2).div_ceil(2) == expected {
        true => Ok(extractor),
        false => Err(format!(
            "feature_extractor.feature_size is {columns}; expected {}, as subsampling_conv_channels of config.json",
            tower.channels[0]
        )),
    }
}
