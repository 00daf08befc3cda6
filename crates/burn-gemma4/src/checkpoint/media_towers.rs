//! The towers of a checkpoint as modules, which compute the soft tokens of training batches.

use super::audio::{AudioFormat, LazyAudio};
use super::lazy_encoder::Encoder;
use super::media::{MediaEncoders, MediumInput};
use super::names::projected_name;
use super::save::{Stored, stored};
use super::tower::PREFIX;
use super::vision::{ImageFormat, LazyVision};
use crate::audio::features::Features;
use crate::audio::prepared::PreparedAudio;
use crate::error::Gemma4Error;
use crate::model::Gemma4Model;
use crate::model::audio::{ProjectedAudio, TowerAudio};
use crate::model::vision::{ProjectedVision, TowerVision, Vision};
use crate::train::gradients::HasTrainable;
use crate::train::media::{PlacedMedia, PlacedSoftTokens};
use crate::vision::patches::Patches;
use crate::vision::prepared::PreparedImage;
use burn::{
    module::Module,
    tensor::{DType, Device, Tensor},
};
use std::{collections::BTreeSet, ops::Range};

/// The kinds of media in a data set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MediaKinds {
    /// True if the data set has images.
    pub images: bool,
    /// True if the data set has audio clips.
    pub audio: bool,
}

impl MediaKinds {
    /// True if the data set has images or audio clips.
    pub fn any(self) -> bool {
        self.images || self.audio
    }
}

/// The images and audio clips in the rows of a batch, in host memory.
///
/// ```
/// use burn_gemma4::BatchMedia;
///
/// let media = BatchMedia::default();
/// assert!(media.is_empty());
/// ```
#[derive(Clone, Debug, Default)]
pub struct BatchMedia {
    media: Vec<BatchMedium>,
}

#[derive(Clone, Debug)]
struct BatchMedium {
    row: usize,
    positions: Range<usize>,
    input: MediumInput,
}

impl BatchMedia {
    /// Adds an image, whose first soft token is at position `start` of a row.
    pub fn add_image(&mut self, row: usize, start: usize, image: &PreparedImage) {
        self.media.push(BatchMedium {
            row,
            positions: start..start + image.count(),
            input: MediumInput::Image(image.patches.clone()),
        });
    }

    /// Adds an audio clip, whose first soft token is at position `start` of a row.
    pub fn add_audio(&mut self, row: usize, start: usize, clip: &PreparedAudio) {
        self.media.push(BatchMedium {
            row,
            positions: start..start + clip.count(),
            input: MediumInput::Audio(clip.features.clone()),
        });
    }

    /// The number of images and clips.
    pub fn len(&self) -> usize {
        self.media.len()
    }

    /// True if the batch has no images and no clips.
    pub fn is_empty(&self) -> bool {
        self.media.is_empty()
    }
}

/// The towers and projections of a model, which compute soft tokens from images and audio clips. In contrast to
/// [`Gemma4::soft_tokens`](crate::Gemma4::soft_tokens), their parameters are those of a module, which is frozen at first.
/// [`Gemma4::media_towers`](crate::Gemma4::media_towers) loads it.
#[derive(Module, Debug)]
pub struct MediaTowers {
    vision: Option<VisionModules>,
    audio: Option<AudioModules>,
    #[module(skip)]
    formats: Formats,
    /// True if the towers are those of a mobile checkpoint.
    #[module(skip)]
    is_mobile: bool,
}

/// The forms of the loaded kinds of media, without weights.
#[derive(Clone, Debug)]
struct Formats {
    vision: Option<ImageFormat>,
    audio: Option<AudioFormat>,
}

#[derive(Module, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "a run has one value, and Burn derives no module from boxes"
)]
enum VisionModules {
    Tower(TowerVision),
    Projected(ProjectedVision),
}

#[derive(Module, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "a run has one value, and Burn derives no module from boxes"
)]
enum AudioModules {
    Tower(TowerAudio),
    Projected(ProjectedAudio),
}

impl MediaTowers {
    /// Loads the towers of `kinds`.
    ///
    /// # Errors
    /// Returns an error if the model does not read one of the kinds, or if its weights cannot be loaded.
    pub(crate) fn load(encoders: &MediaEncoders, kinds: MediaKinds) -> Result<Self, Gemma4Error> {
        let vision = kinds.images.then(|| encoders.vision()).transpose()?;
        let audio = kinds.audio.then(|| encoders.audio()).transpose()?;
        let of_vision = |vision: &LazyVision| {
            Ok(match vision.load_modules()? {
                Encoder::Tower(tower) => VisionModules::Tower(*tower),
                Encoder::Projected(projected) => VisionModules::Projected(*projected),
            })
        };
        let of_audio = |audio: &LazyAudio| {
            Ok(match audio.load_modules()? {
                Encoder::Tower(tower) => AudioModules::Tower(*tower),
                Encoder::Projected(projected) => AudioModules::Projected(*projected),
            })
        };
        let is_mobile =
            vision.is_some_and(LazyVision::is_mobile) || audio.is_some_and(LazyAudio::is_mobile);
        Ok(Self {
            is_mobile,
            formats: Formats {
                vision: vision.map(|vision| vision.format().clone()),
                audio: audio.map(|audio| audio.format().clone()),
            },
            vision: vision.map(of_vision).transpose()?,
            audio: audio.map(of_audio).transpose()?,
        }
        .no_grad())
    }

    /// Computes the soft tokens of a batch for `model`. `shape` is the shape of the batch's tokens,
    /// `[batch, positions]`. Without trained parameters, the soft tokens are constants, and no activations of the towers
    /// are kept.
    ///
    /// ```no_run
    /// # use burn::tensor::{Device, Int, Tensor};
    /// # use burn_gemma4::{BatchMedia, Gemma4, Image, MediaKinds, Packing};
    /// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
    /// let device = Device::default().autodiff();
    /// let gemma = Gemma4::from_pretrained("gemma-4-E2B-it", &device)?;
    /// let towers = gemma.media_towers(MediaKinds { images: true, audio: false })?;
    /// let image = gemma.prompt_encoder().prepare(&Image::open("cat.jpg")?)?;
    /// let mut media = BatchMedia::default();
    /// media.add_image(0, 5, &image); // The first soft token is at position 5 of row 0.
    /// let tokens = Tensor::<2, Int>::zeros([1, 512], &device);
    /// let packing = Packing::new(vec![vec![400]], 512)?;
    /// let media = towers.place(&media, gemma.model(), tokens.dims())?;
    /// let hidden = gemma.model().hidden_packed_with_media(tokens, &packing, &media)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the batch has media of a kind that was not loaded or that another model
    /// prepared, or if one of them is outside of the rows.
    pub fn place(
        &self,
        media: &BatchMedia,
        model: &Gemma4Model,
        shape: [usize; 2],
    ) -> Result<PlacedMedia, Gemma4Error> {
        let towers = match self.is_trained() {
            true => self.clone(),
            false => self.valid(),
        };
        let placed = media.media.iter().map(|medium| {
            Ok(PlacedSoftTokens {
                row: medium.row,
                positions: medium.positions.clone(),
                soft_tokens: towers.soft_tokens(&medium.input)?,
                is_bidirectional: match medium.input {
                    MediumInput::Image(_) => self.has_blocks(),
                    MediumInput::Audio(_) => false,
                },
            })
        });
        let placed = placed.collect::<Result<_, Gemma4Error>>()?;
        let device = model.device().without_autodiff();
        let hidden = model.config().hidden_size;
        PlacedMedia::new(
            shape,
            hidden,
            (&device, model.dtype()),
            placed,
            self.has_blocks(),
        )
    }

    /// True if a parameter is trained, such as the factors of an [`Adapter`](crate::Adapter). Loaded towers are frozen.
    pub fn is_trained(&self) -> bool {
        let mut trained = HasTrainable(false);
        self.visit(&mut trained);
        trained.0
    }

    /// True if the towers are those of a mobile checkpoint (`quant_method` "gemma").
    pub(super) fn is_mobile(&self) -> bool {
        self.is_mobile
    }

    /// Returns the name of a parameter in Hugging Face Transformers, without the prefix `model.`. `path` is its path in
    /// this module.
    pub(super) fn name_in_transformers(path: &str) -> String {
        let in_checkpoint = Self::path_in_checkpoint(path);
        match path.split('.').nth(1) == Some("Projected") {
            true => projected_name(in_checkpoint),
            false => in_checkpoint.into(),
        }
    }

    /// Returns the path of a parameter in a checkpoint, without the prefix `model.`. `path` is its path in this module.
    pub(crate) fn path_in_checkpoint(path: &str) -> &str {
        // The first part is a field of this module, and the second part a variant of the field's type.
        let mut parts = path.splitn(3, '.');
        parts.nth(2).unwrap_or(path)
    }

    /// Returns the weights that have adapters, with the adapters merged and with their names in a checkpoint.
    pub(super) fn adapted_weights(&self, dtype: DType) -> Vec<(String, Stored)> {
        let plain = self.valid();
        let adapted: BTreeSet<String> = stored(&plain, dtype)
            .into_iter()
            .filter_map(|(path, _)| path.strip_suffix(".lora.a").map(str::to_owned))
            .collect();
        let merged = stored(&plain.materialize(), dtype).into_iter();
        let merged = merged.filter(|(path, _)| adapted.contains(path));
        merged
            .map(|(path, tensor)| {
                let path = Self::path_in_checkpoint(&path);
                (format!("{PREFIX}{path}"), tensor)
            })
            .collect()
    }

    /// The device that holds the towers.
    pub(crate) fn device(&self) -> Device {
        let devices = self.devices();
        let device = devices.into_iter().next();
        device.expect("the towers have parameters")
    }

    /// True if the soft tokens of an image see each other in both directions in sliding layers.
    fn has_blocks(&self) -> bool {
        let vision = self.formats.vision.as_ref();
        vision.is_some_and(|format| format.config.is_bidirectional)
    }

    /// Computes the soft tokens of a medium, `[soft tokens, hidden]`.
    fn soft_tokens(&self, input: &MediumInput) -> Result<Tensor<2>, Gemma4Error> {
        let not_loaded = |argument| {
            let reason = "of this kind is in the batch, but not in the kinds of the towers".into();
            Gemma4Error::Argument { argument, reason }
        };
        match input {
            MediumInput::Image(patches) => match (&self.vision, &self.formats.vision) {
                (Some(vision), Some(format)) => vision.soft_tokens(format, patches),
                _ => Err(not_loaded("image")),
            },
            MediumInput::Audio(features) => match (&self.audio, &self.formats.audio) {
                (Some(audio), Some(format)) => audio.soft_tokens(format, features),
                _ => Err(not_loaded("audio")),
            },
        }
    }
}

impl VisionModules {
    fn soft_tokens(
        &self,
        format: &ImageFormat,
        patches: &Patches,
    ) -> Result<Tensor<2>, Gemma4Error> {
        format.check(patches)?;
        match self {
            Self::Tower(vision) => whole(vision, patches),
            Self::Projected(vision) => whole(vision, patches),
        }
    }
}

/// Runs all layers of a vision.
fn whole<V: Vision>(vision: &V, patches: &Patches) -> Result<Tensor<2>, Gemma4Error> {
    let mut pass = vision.begin(patches)?;
    let rows = vision.advance(&mut pass, usize::MAX);
    Ok(rows.expect("the last layer has run"))
}

impl AudioModules {
    fn soft_tokens(
        &self,
        format: &AudioFormat,
        features: &Features,
    ) -> Result<Tensor<2>, Gemma4Error> {
        format.check(features)?;
        Ok(match self {
            Self::Tower(audio) => {
                let mut pass = audio.begin(features);
                let rows = audio.advance(&mut pass, usize::MAX);
                rows.expect("the last layer has run")
            }
            Self::Projected(audio) => audio.soft_tokens(features),
        })
    }
}
