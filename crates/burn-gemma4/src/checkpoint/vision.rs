//! Loads the vision of a multimodal checkpoint, when the first image of a prompt needs it.

use super::files::TensorFiles;
use super::loader::{Expected, check, load_module};
use super::names::is_of_vision;
use super::options::LoadOptions;
use super::source::{Source, WeightSource, burn_dtype};
use crate::config::Gemma4Config;
use crate::config::unknown_files::missing;
use crate::config::vision::{EncoderConfig, VisionConfig};
use crate::error::{Gemma4Error, TensorProblem, existing, read};
use crate::json;
use crate::model::multimodal::Clip;
use crate::model::vision::{ProjectedVision, TowerPass, TowerVision, Vision};
use crate::vision::image::Image;
use crate::vision::patches::{ImageProcessor, Patches};
use crate::vision::prepared::PreparedImage;
use burn::{
    module::Module,
    tensor::{DType, Device, Tensor},
};
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

/// The prefix of the vision's tensors in a checkpoint, before the path of a parameter.
const PREFIX: &str = "model.";

/// The names of a linear layer's bounds, in the order of [`Clip`]'s fields.
const BOUNDS: [&str; 4] = ["input_min", "input_max", "output_min", "output_max"];

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
                    "becomes {columns} x {rows} soft tokens, but the model has {positions} positions in each direction; lower max_soft_tokens"
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
    /// Reads the configuration of a folder's vision and checks the vision's tensors. The model computes in `dtype` on
    /// `device`. Returns `None` if the checkpoint has no vision.
    ///
    /// # Errors
    /// Returns an error if this crate cannot run the vision. Text prompts do not need the vision.
    pub fn open(
        folder: &Path,
        text: &Gemma4Config,
        dtype: DType,
        device: &Device,
    ) -> Result<Option<Self>, Gemma4Error> {
        let path = folder.join("config.json");
        let json = fs::read_to_string(&path).map_err(|source| missing(path, source))?;
        let files = TensorFiles::open(folder)?;
        if !files.names().any(is_of_vision) {
            return Ok(None);
        }
        let Some(config) = VisionConfig::from_json(&json, text)? else {
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
        let mut expected = Expected::default();
        let mut module = self.module();
        match &module {
            LoadedVision::Tower(vision) => vision.visit(&mut expected),
            LoadedVision::Projected(vision) => vision.visit(&mut expected),
        }
        let weights = module.weights(files);
        weights.clips(&self.folder)?;
        check(&self.folder, &weights, &self.text, &expected)?;
        Ok(())
    }

    fn load(&self) -> Result<LoadedVision, Gemma4Error> {
        let files = TensorFiles::open(&self.folder)?;
        let mut module = self.module();
        let weights = module.weights(files);
        Ok(match module {
            LoadedVision::Tower(vision) => {
                let mut vision = self.loaded(*vision, &weights)?;
                let clips = weights.clips(&self.folder)?;
                for ((_, clip), found) in vision.clips_mut().into_iter().zip(clips) {
                    *clip = found;
                }
                LoadedVision::Tower(Box::new(vision))
            }
            LoadedVision::Projected(vision) => {
                LoadedVision::Projected(Box::new(self.loaded(*vision, &weights)?))
            }
        })
    }

    fn loaded<M: Module>(&self, module: M, weights: &Weights) -> Result<M, Gemma4Error> {
        let options = LoadOptions::new().dtype(self.dtype);
        let nothing = |_: &mut super::loader::Loader<'_, '_>, _: &mut M| Ok(());
        load_module(
            &self.folder,
            weights,
            &self.text,
            module,
            &self.device,
            options,
            nothing,
        )
    }
}

impl LoadedVision {
    /// Returns the source of this module's weights.
    fn weights(&mut self, files: TensorFiles) -> Weights {
        let clipped = match self {
            Self::Tower(vision) => {
                let clips = vision.clips_mut().into_iter();
                clips.map(|(path, _)| path).collect()
            }
            Self::Projected(_) => Vec::new(),
        };
        Weights { files, clipped }
    }
}

/// The vision's tensors in a folder's files.
struct Weights {
    files: TensorFiles,
    /// The paths of the linear layers that have bounds.
    clipped: Vec<String>,
}

impl Weights {
    /// Returns the bounds of each layer in `clipped`.
    fn clips(&self, folder: &Path) -> Result<Vec<Clip>, Gemma4Error> {
        let clips = self.clipped.iter().map(|path| {
            let mut bounds = [0.0; 4];
            for (bound, name) in bounds.iter_mut().zip(BOUNDS) {
                *bound = self.bound(&format!("{path}.{name}"))?;
            }
            let [input_min, input_max, output_min, output_max] = bounds;
            for (end, [smallest, largest]) in [
                ("input", [input_min, input_max]),
                ("output", [output_min, output_max]),
            ] {
                if smallest > largest {
                    return Err(TensorProblem::Packing {
                        name: format!("{PREFIX}{path}.{end}_min"),
                        reason: format!("is {smallest}; expected at most {end}_max, {largest}"),
                    });
                }
            }
            Ok(Clip {
                input: [input_min, input_max],
                output: [output_min, output_max],
            })
        });
        clips
            .collect::<Result<_, _>>()
            .map_err(|problem| Gemma4Error::Tensors {
                path: folder.into(),
                problems: vec![problem],
            })
    }

    /// Reads a bound, a tensor of one element that is not NaN.
    fn bound(&self, path: &str) -> Result<f32, TensorProblem> {
        let source = self.get(path)?;
        let name = || format!("{PREFIX}{path}");
        if source.shape != [1] {
            return Err(TensorProblem::Shape {
                name: name(),
                found: source.shape,
                expected: vec![1],
            });
        }
        let bound = source.slices(0..1, DType::F32).iter::<f32>().next();
        bound
            .filter(|bound| !bound.is_nan())
            .ok_or_else(|| TensorProblem::Packing {
                name: name(),
                reason: "is NaN; expected a bound".into(),
            })
    }
}

impl WeightSource for Weights {
    fn names(&self, path: &str) -> Vec<String> {
        vec![format!("{PREFIX}{path}")]
    }

    fn get(&self, path: &str) -> Result<Source<'_>, TensorProblem> {
        let name = format!("{PREFIX}{path}");
        let Some(entry) = self.files.get(&name) else {
            return Err(TensorProblem::Missing { name });
        };
        let Some(dtype) = burn_dtype(entry.dtype) else {
            let found = format!("{:?}", entry.dtype);
            return Err(TensorProblem::Dtype { name, found });
        };
        // Bounds are tensors without dimensions.
        let shape = match entry.shape.is_empty() {
            true => vec![1],
            false => entry.shape.clone(),
        };
        Ok(Source::floats(shape, dtype, self.files.bytes(entry)))
    }

    fn unknown(&self, known: &BTreeSet<String>, _config: &Gemma4Config) -> Vec<String> {
        let is_bound = |name: &str| {
            let layer = name
                .strip_prefix(PREFIX)
                .and_then(|path| path.rsplit_once('.'));
            layer.is_some_and(|(layer, bound)| {
                BOUNDS.contains(&bound) && self.clipped.iter().any(|path| path == layer)
            })
        };
        let names = self.files.names().filter(|name| is_of_vision(name));
        names
            .filter(|name| !known.contains(*name) && !is_bound(name))
            .map(String::from)
            .collect()
    }
}

/// Reads the image processor from `processor_config.json`, or from `preprocessor_config.json`. If both files lack it,
/// returns Gemma 4's defaults.
fn processor(folder: &Path, config: &VisionConfig) -> Result<ImageProcessor, Gemma4Error> {
    let default = ImageProcessor::new(config.patch_size, config.pooling_kernel_size);
    for (name, is_nested) in [
        ("processor_config.json", true),
        ("preprocessor_config.json", false),
    ] {
        let Some(path) = existing(folder, name)? else {
            continue;
        };
        let malformed = |reason| Gemma4Error::Malformed {
            path: path.clone(),
            reason,
        };
        let whole: Value = json::from_slice(&read(&path)?).map_err(malformed)?;
        let found = match is_nested {
            true => whole.get("image_processor"),
            false => Some(&whole),
        };
        if let Some(description) = found.filter(|value| !value.is_null()) {
            return default.read(description).map_err(malformed);
        }
    }
    Ok(default)
}
