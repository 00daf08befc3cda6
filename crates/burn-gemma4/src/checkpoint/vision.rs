//! Loads the vision of a multimodal checkpoint, when the first image or video of a prompt needs it.

use super::files::TensorFiles;
use super::lazy_encoder::{ClippedModule, Encoder, LazyEncoder, MediumFormat};
use super::names::is_of_vision;
use super::tower::description;
use crate::config::Gemma4Config;
use crate::config::vision::{EncoderConfig, VisionConfig};
use crate::error::Gemma4Error;
use crate::media_size::MediumSize;
use crate::model::multimodal::ClippedLinear;
use crate::model::vision::{ProjectedVision, TowerPass, TowerVision, Vision};
use crate::vision::image::{Image, ImageHeader};
use crate::vision::patches::{ImageProcessor, Patches};
use crate::vision::prepared::PreparedImage;
use crate::vision::prepared_video::PreparedVideo;
use crate::vision::video::Video;
use crate::vision::video_processor::{FIELD, VideoProcessor};
use burn::tensor::{DType, Device, Tensor};
use std::path::Path;

/// The vision of a checkpoint in a folder. The weights are loaded when the first image needs them.
pub(crate) type LazyVision = LazyEncoder<ImageFormat>;

/// The form that images and videos have in the prompts of a checkpoint. It needs no weights.
#[derive(Clone, Debug)]
pub(crate) struct ImageFormat {
    pub config: VisionConfig,
    processor: ImageProcessor,
    /// The settings for videos, or the reason why the model sees none.
    video: Result<VideoProcessor, String>,
}

impl ImageFormat {
    /// Resizes an image for the model.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the image would have no soft tokens, or more columns or rows than the model
    /// has positions.
    pub fn prepared(&self, image: &Image) -> Result<PreparedImage, Gemma4Error> {
        let size = [image.width(), image.height()];
        self.check_positions(self.processor.soft_tokens(size, image.max_soft_tokens())?)?;
        image.prepared(self.processor)
    }

    /// Returns the settings for videos.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] with the reason why the model sees no videos.
    pub fn video(&self) -> Result<&VideoProcessor, Gemma4Error> {
        self.video.as_ref().map_err(|reason| Gemma4Error::Argument {
            argument: "video",
            reason: format!("this model sees no videos: {reason}"),
        })
    }

    /// Resizes the frames of a video for the model.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the model sees no videos, if the frames are too narrow, or if the
    /// checkpoint samples another number of frames.
    pub fn prepared_video(&self, video: &Video) -> Result<PreparedVideo, Gemma4Error> {
        let VideoProcessor { frame, frames } = *self.video()?;
        video.check_sampling(frames)?;
        let size = [video.width(), video.height()];
        let prepared = video.timestamps().zip(video.frames());
        let prepared = prepared.map(|(timestamp, one)| {
            let soft_tokens = frame.soft_tokens(size, one.image.max_soft_tokens())?;
            self.check_positions(soft_tokens)?;
            Ok((timestamp, one.image.prepared(frame)?))
        });
        Ok(PreparedVideo {
            frames: prepared.collect::<Result<_, Gemma4Error>>()?,
        })
    }

    /// Returns the size of an image from the header of its file. `max_soft_tokens` is the largest number of soft
    /// tokens, if this number is not the checkpoint's.
    ///
    /// # Errors
    /// Returns the errors of [`prepared`](Self::prepared).
    pub fn size(
        &self,
        header: &ImageHeader,
        max_soft_tokens: Option<usize>,
    ) -> Result<MediumSize, Gemma4Error> {
        let size = match header.is_turned {
            true => [header.height, header.width],
            false => [header.width, header.height],
        };
        let soft_tokens = self.processor.soft_tokens(size, max_soft_tokens)?;
        self.check_positions(soft_tokens)?;
        Ok(self.processor.size(size, soft_tokens))
    }

    /// Checks that an image has been resized for patches and soft tokens of this model.
    pub fn check(&self, patches: &Patches) -> Result<(), Gemma4Error> {
        let (patch_size, side) = (self.config.patch_size, self.config.pooling_kernel_size);
        let is_whole = |patches: usize| patches > 0 && patches.is_multiple_of(side);
        let is_own =
            patches.patch_size == patch_size && is_whole(patches.columns) && is_whole(patches.rows);
        match is_own {
            true => Ok(()),
            false => Err(Gemma4Error::Argument {
                argument: "image",
                reason: format!(
                    "has {} x {} patches of {} pixels; expected patches of {patch_size} pixels in squares of {side} x {side}, so prepare the image by the encoder of this checkpoint",
                    patches.columns, patches.rows, patches.patch_size
                ),
            }),
        }
    }

    fn check_positions(&self, [columns, rows]: [usize; 2]) -> Result<(), Gemma4Error> {
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
            false => Ok(()),
        }
    }
}

/// An image whose soft tokens are being computed.
#[derive(Debug)]
pub(crate) enum ImagePass {
    Tower(Box<TowerPass>),
    Projected(Box<Tensor<2>>),
}

impl MediumFormat for ImageFormat {
    type Tower = TowerVision;
    type Projected = ProjectedVision;

    fn is_part(name: &str) -> bool {
        is_of_vision(name)
    }

    fn module(&self, hidden: usize, device: &Device) -> Encoder<TowerVision, ProjectedVision> {
        let config = &self.config;
        match &config.encoder {
            EncoderConfig::Tower(tower) => {
                Encoder::Tower(Box::new(TowerVision::new(config, tower, hidden, device)))
            }
            EncoderConfig::Projection(projection) => {
                let projected = ProjectedVision::new(config, projection, hidden, device);
                Encoder::Projected(Box::new(projected))
            }
        }
    }
}

impl ClippedModule for TowerVision {
    fn linears_mut(&mut self) -> Vec<(String, &mut ClippedLinear)> {
        self.linears_mut()
    }
}

impl LazyVision {
    /// Reads the configuration of a folder's vision and checks the vision's tensors. `files` are the tensors of the
    /// folder, and `json` is the text of its `config.json`. The model computes in `dtype` on `device`. Returns `None` if
    /// the checkpoint has no vision.
    ///
    /// # Errors
    /// Returns an error if this crate cannot run the vision. Text prompts do not need the vision.
    pub(super) fn open(
        folder: &Path,
        files: &TensorFiles,
        json: &str,
        text: &Gemma4Config,
        dtype: DType,
        device: &Device,
    ) -> Result<Option<Self>, Gemma4Error> {
        if !files.names().any(is_of_vision) {
            return Ok(None);
        }
        let Some(config) = VisionConfig::from_json(json, text)? else {
            return Ok(None);
        };
        let format = ImageFormat {
            processor: processor(folder, &config)?,
            video: video_processor(folder, &config, text),
            config,
        };
        Self::new(folder, (files, json), format, text, dtype, device).map(Some)
    }

    /// Begins to compute the soft tokens of an image. The first call loads the weights.
    ///
    /// # Errors
    /// Returns an error if the weights cannot be loaded, or if the image does not fit the model.
    pub fn begin(&self, patches: &Patches) -> Result<ImagePass, Gemma4Error> {
        self.format().check(patches)?;
        Ok(match self.loaded()? {
            Encoder::Tower(vision) => ImagePass::Tower(Box::new(vision.begin(patches)?)),
            Encoder::Projected(vision) => ImagePass::Projected(Box::new(vision.begin(patches)?)),
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
            (Encoder::Tower(vision), ImagePass::Tower(pass)) => vision.advance(pass, layers),
            (Encoder::Projected(vision), ImagePass::Projected(pass)) => {
                vision.advance(pass, layers)
            }
            _ => unreachable!("a pass belongs to the model that has begun it"),
        })
    }
}

/// Reads the image processor, or returns Gemma 4's defaults.
fn processor(folder: &Path, config: &VisionConfig) -> Result<ImageProcessor, Gemma4Error> {
    let default = ImageProcessor::new(config.patch_size, config.pooling_kernel_size);
    match description(folder, "image_processor")? {
        Some((path, description)) => default
            .read("image_processor", &description)
            .map_err(|reason| Gemma4Error::Malformed { path, reason }),
        None => Ok(default),
    }
}

/// Reads the video processor, or returns Gemma 4's defaults. The error is the reason why the model sees no videos. Such
/// a model still sees images.
fn video_processor(
    folder: &Path,
    config: &VisionConfig,
    text: &Gemma4Config,
) -> Result<VideoProcessor, String> {
    if config.video_token as usize >= text.vocab_size {
        return Err(format!(
            "video_token_id is {}, which is outside the vocabulary: vocab_size is {}",
            config.video_token, text.vocab_size
        ));
    }
    let default = VideoProcessor::new(config.patch_size, config.pooling_kernel_size);
    match description(folder, FIELD).map_err(|error| error.to_string())? {
        Some((path, description)) => default.read(&description).map_err(|reason| {
            let malformed = Gemma4Error::Malformed { path, reason };
            malformed.to_string()
        }),
        None => Ok(default),
    }
}
