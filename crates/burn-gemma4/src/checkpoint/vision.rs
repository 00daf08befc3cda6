//! Loads the vision of a multimodal checkpoint, when the first image of a prompt needs it.

use super::files::TensorFiles;
use super::names::is_of_vision;
use super::tower::{TowerWeights, description};
use crate::config::Gemma4Config;
use crate::config::vision::{EncoderConfig, VisionConfig};
use crate::error::Gemma4Error;
use crate::model::vision::{ProjectedVision, TowerPass, TowerVision, Vision};
use crate::vision::image::Image;
use crate::vision::patches::{ImageProcessor, Patches};
use crate::vision::prepared::PreparedImage;
use burn::tensor::{DType, Device, Tensor};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

/// The vision of a checkpoint in a folder. The weights are loaded when the first image needs them. Clones share the
/// weights.
#[derive(Clone, Debug)]
pub(crate) struct LazyVision {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    folder: PathBuf,
    format: ImageFormat,
    text: Gemma4Config,
    dtype: DType,
    device: Device,
    loaded: OnceLock<LoadedVision>,
}

/// The form that images have in the prompts of a checkpoint. It needs no weights.
#[derive(Clone, Debug)]
pub(crate) struct ImageFormat {
    pub config: VisionConfig,
    processor: ImageProcessor,
}

impl ImageFormat {
    /// Resizes an image for the model.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the image would have no soft tokens, or more columns or rows than the model
    /// has positions.
    pub fn prepared(&self, image: &Image) -> Result<PreparedImage, Gemma4Error> {
        let prepared = image.prepared(self.processor)?;
        let [columns, rows] = prepared.soft_tokens();
        let positions = match &self.config.encoder {
            EncoderConfig::Tower(tower) => {
                tower.position_embedding_size / self.config.pooling_kernel_size
            }
            EncoderConfig::Projection(projection) => projection.mm_posemb_size,
        };
        match columns.max(rows) > positions {
            true => Err(Gemma4Error::Argument {
                argument: "image",
                reason: format!(
                    "becomes {columns} x {rows} soft tokens, but the model has {positions} positions in each direction; lower the detail, which is the number of soft tokens"
                ),
            }),
            false => Ok(prepared),
        }
    }
}

/// An image whose soft tokens are being computed.
#[derive(Debug)]
pub(crate) enum ImagePass {
    Tower(Box<TowerPass>),
    Projected(Box<Tensor<2>>),
}

#[derive(Debug)]
enum LoadedVision {
    Tower(Box<TowerVision>),
    Projected(Box<ProjectedVision>),
}

impl LazyVision {
    /// Reads the configuration of a folder's vision and checks the vision's tensors. `json` is the text of the folder's
    /// `config.json`. The model computes in `dtype` on `device`. Returns `None` if the checkpoint has no vision.
    ///
    /// # Errors
    /// Returns an error if this crate cannot run the vision. Text prompts do not need the vision.
    pub fn open(
        folder: &Path,
        json: &str,
        text: &Gemma4Config,
        dtype: DType,
        device: &Device,
    ) -> Result<Option<Self>, Gemma4Error> {
        let files = TensorFiles::open(folder)?;
        if !files.names().any(is_of_vision) {
            return Ok(None);
        }
        let Some(config) = VisionConfig::from_json(json, text)? else {
            return Ok(None);
        };
        let shared = Shared {
            format: ImageFormat {
                processor: processor(folder, &config)?,
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

    pub fn config(&self) -> &VisionConfig {
        &self.shared.format.config
    }

    pub fn format(&self) -> &ImageFormat {
        &self.shared.format
    }

    /// Loads the weights, unless they have been loaded before.
    ///
    /// # Errors
    /// Returns an error if the weights cannot be loaded.
    pub fn load(&self) -> Result<(), Gemma4Error> {
        self.loaded().map(|_| ())
    }

    fn loaded(&self) -> Result<&LoadedVision, Gemma4Error> {
        let shared = &self.shared;
        Ok(match shared.loaded.get() {
            Some(loaded) => loaded,
            None => {
                let loaded = shared.load()?;
                shared.loaded.get_or_init(|| loaded)
            }
        })
    }

    /// Computes the soft tokens of an image, `[soft tokens, hidden]`. The first call loads the weights.
    ///
    /// # Errors
    /// Returns an error if the weights cannot be loaded, or if the image does not fit the model.
    pub fn soft_tokens(&self, patches: &Patches) -> Result<Tensor<2>, Gemma4Error> {
        let mut pass = self.begin(patches)?;
        loop {
            if let Some(rows) = self.advance(&mut pass, usize::MAX)? {
                return Ok(rows);
            }
        }
    }

    /// Begins to compute the soft tokens of an image. The first call loads the weights.
    ///
    /// # Errors
    /// Returns the errors of [`soft_tokens`](Self::soft_tokens).
    pub fn begin(&self, patches: &Patches) -> Result<ImagePass, Gemma4Error> {
        Ok(match self.loaded()? {
            LoadedVision::Tower(vision) => ImagePass::Tower(Box::new(vision.begin(patches)?)),
            LoadedVision::Projected(vision) => {
                ImagePass::Projected(Box::new(vision.begin(patches)?))
            }
        })
    }

    /// Runs up to `layers` further layers over an image. After the last layer, returns the soft tokens,
    /// `[soft tokens, hidden]`.
    ///
    /// # Errors
    /// Returns an error if the weights cannot be loaded.
    ///
    /// # Panics
    /// Panics if another model has begun the pass.
    pub fn advance(
        &self,
        pass: &mut ImagePass,
        layers: usize,
    ) -> Result<Option<Tensor<2>>, Gemma4Error> {
        Ok(match (self.loaded()?, pass) {
            (LoadedVision::Tower(vision), ImagePass::Tower(pass)) => vision.advance(pass, layers),
            (LoadedVision::Projected(vision), ImagePass::Projected(pass)) => {
                vision.advance(pass, layers)
            }
            _ => unreachable!("a pass belongs to the model that has begun it"),
        })
    }
}

impl Shared {
    fn module(&self) -> LoadedVision {
        let (config, hidden, device) = (&self.format.config, self.text.hidden_size, &self.device);
        match &config.encoder {
            EncoderConfig::Tower(tower) => {
                LoadedVision::Tower(Box::new(TowerVision::new(config, tower, hidden, device)))
            }
            EncoderConfig::Projection(projection) => LoadedVision::Projected(Box::new(
                ProjectedVision::new(config, projection, hidden, device),
            )),
        }
    }

    /// Checks the names, shapes and dtypes of the vision's tensors, without loading them.
    fn check(&self, files: TensorFiles) -> Result<(), Gemma4Error> {
        let mut module = self.module();
        let weights = module.weights(&self.folder, files);
        match &module {
            LoadedVision::Tower(vision) => weights.check(&**vision, &self.text),
            LoadedVision::Projected(vision) => weights.check(&**vision, &self.text),
        }
    }

    fn load(&self) -> Result<LoadedVision, Gemma4Error> {
        let files = TensorFiles::open(&self.folder)?;
        let mut module = self.module();
        let weights = module.weights(&self.folder, files);
        let (text, dtype, device) = (&self.text, self.dtype, &self.device);
        Ok(match module {
            LoadedVision::Tower(vision) => {
                let mut vision = weights.load(*vision, text, dtype, device)?;
                for ((_, clip), found) in vision.clips_mut().into_iter().zip(weights.clips()?) {
                    *clip = found;
                }
                LoadedVision::Tower(Box::new(vision))
            }
            LoadedVision::Projected(vision) => {
                LoadedVision::Projected(Box::new(weights.load(*vision, text, dtype, device)?))
            }
        })
    }
}

impl LoadedVision {
    /// Returns the source of this module's weights.
    fn weights<'a>(&mut self, folder: &'a Path, files: TensorFiles) -> TowerWeights<'a> {
        let clipped = match self {
            Self::Tower(vision) => {
                let clips = vision.clips_mut().into_iter();
                clips.map(|(path, _)| path).collect()
            }
            Self::Projected(_) => Vec::new(),
        };
        TowerWeights {
            folder,
            files,
            clipped,
            is_part: is_of_vision,
        }
    }
}

/// Reads the image processor, or returns Gemma 4's defaults.
fn processor(folder: &Path, config: &VisionConfig) -> Result<ImageProcessor, Gemma4Error> {
    let default = ImageProcessor::new(config.patch_size, config.pooling_kernel_size);
    match description(folder, "image_processor")? {
        Some((path, description)) => default
            .read(&description)
            .map_err(|reason| Gemma4Error::Malformed { path, reason }),
        None => Ok(default),
    }
}
