//! Loads the audio of a multimodal checkpoint, when the first audio clip of a prompt needs it.

use super::files::TensorFiles;
use super::names::is_of_audio;
use super::tower::{TowerWeights, description};
use crate::audio::clip::Audio;
use crate::audio::features::{FeatureExtractor, Features};
use crate::audio::prepared::PreparedAudio;
use crate::config::Gemma4Config;
use crate::config::audio::{AudioConfig, AudioEncoderConfig};
use crate::error::Gemma4Error;
use crate::model::audio::{ConformerPass, ProjectedAudio, TowerAudio};
use burn::tensor::{DType, Device, Tensor};
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

/// The audio of a checkpoint in a folder. The weights are loaded when the first audio clip needs them. Clones share the
/// weights.
#[derive(Clone, Debug)]
pub(crate) struct LazyAudio {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    folder: PathBuf,
    format: AudioFormat,
    text: Gemma4Config,
    dtype: DType,
    device: Device,
    loaded: OnceLock<LoadedAudio>,
}

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
}

/// An audio clip whose soft tokens are being computed.
#[derive(Debug)]
pub(crate) enum AudioPass {
    Tower(Box<ConformerPass>),
    Projected(Box<Tensor<2>>),
}

#[derive(Debug)]
enum LoadedAudio {
    Tower(Box<TowerAudio>),
    Projected(Box<ProjectedAudio>),
}

impl LazyAudio {
    /// Reads the configuration of a folder's audio and checks the audio's tensors. `json` is the text of the folder's
    /// `config.json`. The model computes in `dtype` on `device`. Returns `None` if the checkpoint has no audio.
    ///
    /// # Errors
    /// Returns an error if this crate cannot run the audio. Text prompts do not need the audio.
    pub fn open(
        folder: &Path,
        json: &str,
        text: &Gemma4Config,
        dtype: DType,
        device: &Device,
    ) -> Result<Option<Self>, Gemma4Error> {
        let files = TensorFiles::open(folder)?;
        if !files.names().any(is_of_audio) {
            return Ok(None);
        }
        let Some(config) = AudioConfig::from_json(json, text)? else {
            return Ok(None);
        };
        let shared = Shared {
            format: AudioFormat {
                extractor: Arc::new(extractor(folder, &config)?),
                config,
            },
            folder: folder.into(),
            text: text.clone(),
            dtype,
            device: device.clone(),
            loaded: OnceLock::new(),
        };
        shared.check(files)?;
        Ok(Some(Self {
            shared: Arc::new(shared),
        }))
    }

    pub fn format(&self) -> &AudioFormat {
        &self.shared.format
    }

    /// Loads the weights, unless they have been loaded before.
    ///
    /// # Errors
    /// Returns an error if the weights cannot be loaded.
    pub fn load(&self) -> Result<(), Gemma4Error> {
        self.loaded().map(|_| ())
    }

    fn loaded(&self) -> Result<&LoadedAudio, Gemma4Error> {
        let shared = &self.shared;
        Ok(match shared.loaded.get() {
            Some(loaded) => loaded,
            None => {
                let loaded = shared.load()?;
                shared.loaded.get_or_init(|| loaded)
            }
        })
    }

    /// Computes the soft tokens of a clip, `[soft tokens, hidden]`. The first call loads the weights.
    ///
    /// # Errors
    /// Returns an error if the weights cannot be loaded.
    pub fn soft_tokens(&self, features: &Features) -> Result<Tensor<2>, Gemma4Error> {
        let mut pass = self.begin(features)?;
        loop {
            if let Some(rows) = self.advance(&mut pass, usize::MAX)? {
                return Ok(rows);
            }
        }
    }

    /// Begins to compute the soft tokens of a clip. The first call loads the weights.
    ///
    /// # Errors
    /// Returns an error if the weights cannot be loaded.
    pub fn begin(&self, features: &Features) -> Result<AudioPass, Gemma4Error> {
        Ok(match self.loaded()? {
            LoadedAudio::Tower(audio) => AudioPass::Tower(Box::new(audio.begin(features))),
            LoadedAudio::Projected(audio) => {
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
            (LoadedAudio::Tower(audio), AudioPass::Tower(pass)) => audio.advance(pass, layers),
            (LoadedAudio::Projected(_), AudioPass::Projected(rows)) => Some(Tensor::clone(rows)),
            _ => unreachable!("a pass belongs to the model that has begun it"),
        })
    }
}

fn refused(reason: String) -> Gemma4Error {
    let argument = "audio";
    Gemma4Error::Argument { argument, reason }
}

impl Shared {
    fn module(&self) -> LoadedAudio {
        let (hidden, device) = (self.text.hidden_size, &self.device);
        match &self.format.config.encoder {
            AudioEncoderConfig::Tower(tower) => {
                LoadedAudio::Tower(Box::new(TowerAudio::new(tower, hidden, device)))
            }
            AudioEncoderConfig::Projection(frames) => {
                LoadedAudio::Projected(Box::new(ProjectedAudio::new(frames, hidden, device)))
            }
        }
    }

    /// Checks the names, shapes and dtypes of the audio's tensors, without loading them.
    fn check(&self, files: TensorFiles) -> Result<(), Gemma4Error> {
        let mut module = self.module();
        let weights = module.weights(&self.folder, files);
        match &module {
            LoadedAudio::Tower(audio) => weights.check(&**audio, &self.text),
            LoadedAudio::Projected(audio) => weights.check(&**audio, &self.text),
        }
    }

    fn load(&self) -> Result<LoadedAudio, Gemma4Error> {
        let files = TensorFiles::open(&self.folder)?;
        let mut module = self.module();
        let weights = module.weights(&self.folder, files);
        let (text, dtype, device) = (&self.text, self.dtype, &self.device);
        Ok(match module {
            LoadedAudio::Tower(audio) => {
                let mut audio = weights.load(*audio, text, dtype, device)?;
                for ((_, clip), found) in audio.clips_mut().into_iter().zip(weights.clips()?) {
                    *clip = found;
                }
                LoadedAudio::Tower(Box::new(audio))
            }
            LoadedAudio::Projected(audio) => {
                LoadedAudio::Projected(Box::new(weights.load(*audio, text, dtype, device)?))
            }
        })
    }
}

impl LoadedAudio {
    /// Returns the source of this module's weights.
    fn weights<'a>(&mut self, folder: &'a Path, files: TensorFiles) -> TowerWeights<'a> {
        let clipped = match self {
            Self::Tower(audio) => {
                let clips = audio.clips_mut().into_iter();
                clips.map(|(path, _)| path).collect()
            }
            Self::Projected(_) => Vec::new(),
        };
        TowerWeights {
            folder,
            files,
            clipped,
            is_part: is_of_audio,
        }
    }
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
