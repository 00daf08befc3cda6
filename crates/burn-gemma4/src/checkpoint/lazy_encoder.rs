//! The encoder of images or audio of a checkpoint. Its weights are loaded when the first image or clip of a prompt needs
//! them.

use super::adapter::{PartNames, check_tower_adapter, merge_tower_adapter};
use super::files::TensorFiles;
use super::tower::TowerWeights;
use crate::config::Gemma4Config;
use crate::config::quantization::{QuantizationSchemes, schemes_of};
use crate::error::Gemma4Error;
use crate::model::multimodal::ClippedLinear;
use burn::{
    module::Module,
    tensor::{DType, Device},
};
use std::fmt::Debug;
use std::{
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

/// The form that one kind of media has in the prompts of a checkpoint. The form determines the modules of the encoder,
/// and needs no weights itself.
pub(crate) trait MediumFormat: Clone + Debug {
    /// A tower, with the projection to the text model.
    type Tower: ClippedModule;
    /// The projection of a model without a tower.
    type Projected: Module;

    /// True for the names of the encoder's tensors.
    fn is_part(name: &str) -> bool;

    /// Creates the modules without weights. `hidden` is the width of the text model.
    fn module(&self, hidden: usize, device: &Device) -> Encoder<Self::Tower, Self::Projected>;
}

/// A module with linear layers that have bounds.
pub(crate) trait ClippedModule: Module {
    /// Returns each linear layer that may have bounds, with its path.
    fn linears_mut(&mut self) -> Vec<(String, &mut ClippedLinear)>;
}

/// The modules of an encoder.
#[derive(Debug)]
pub(crate) enum Encoder<T, P> {
    Tower(Box<T>),
    Projected(Box<P>),
}

/// The encoder of one kind of media in a checkpoint in a folder. Clones share the weights.
#[derive(Clone, Debug)]
pub(crate) struct LazyEncoder<F: MediumFormat> {
    shared: Arc<Shared<F>>,
}

#[derive(Debug)]
struct Shared<F: MediumFormat> {
    folder: PathBuf,
    format: F,
    text: Gemma4Config,
    dtype: DType,
    device: Device,
    /// The quantization of the checkpoint's weights.
    schemes: Arc<QuantizationSchemes>,
    /// The folders of adapters that become part of the weights when these are loaded.
    adapters: Vec<PathBuf>,
    loaded: OnceLock<Encoder<F::Tower, F::Projected>>,
}

impl<F: MediumFormat> LazyEncoder<F> {
    /// Checks the tensors of an encoder, without loading them. `files` are the tensors of `folder`, and `json` is the
    /// text of its `config.json`. The encoder computes in `dtype` on `device`.
    ///
    /// # Errors
    /// Returns an error if tensors are missing, unknown or of another shape.
    pub(super) fn new(
        folder: &Path,
        (files, json): (&TensorFiles, &str),
        format: F,
        text: &Gemma4Config,
        dtype: DType,
        device: &Device,
    ) -> Result<Self, Gemma4Error> {
        let shared = Shared {
            folder: folder.into(),
            format,
            text: text.clone(),
            dtype,
            device: device.clone(),
            schemes: Arc::new(schemes_of(json)?),
            adapters: Vec::new(),
            loaded: OnceLock::new(),
        };
        shared.check(files)?;
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// Returns an encoder whose weights contain the adapter in `folder`. They are loaded again when they are needed.
    ///
    /// # Errors
    /// Returns an error if the factors of the adapter do not fit the encoder.
    pub fn with_adapter(&self, folder: &Path) -> Result<Self, Gemma4Error> {
        let own = &self.shared;
        let shared = Shared {
            folder: own.folder.clone(),
            format: own.format.clone(),
            text: own.text.clone(),
            dtype: own.dtype,
            device: own.device.clone(),
            schemes: own.schemes.clone(),
            adapters: own
                .adapters
                .iter()
                .cloned()
                .chain([folder.into()])
                .collect(),
            loaded: OnceLock::new(),
        };
        match shared.module() {
            Encoder::Tower(tower) => check_tower_adapter(folder, &*tower, part::<F>(false))?,
            Encoder::Projected(projected) => {
                check_tower_adapter(folder, &*projected, part::<F>(true))?;
            }
        }
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    pub fn format(&self) -> &F {
        &self.shared.format
    }

    /// True if the checkpoint is a mobile one (`quant_method` "gemma").
    pub fn is_mobile(&self) -> bool {
        self.shared.schemes.mobile.is_some()
    }

    /// Loads the weights, unless they have been loaded before.
    ///
    /// # Errors
    /// Returns an error if the weights cannot be loaded.
    pub fn load(&self) -> Result<(), Gemma4Error> {
        self.loaded().map(|_| ())
    }

    /// Loads the weights into modules of the caller, whether or not they have been loaded before.
    ///
    /// # Errors
    /// Returns an error if the weights cannot be loaded.
    pub fn load_modules(&self) -> Result<Encoder<F::Tower, F::Projected>, Gemma4Error> {
        self.shared.load()
    }

    /// Returns the modules. The first call loads the weights.
    ///
    /// # Errors
    /// Returns an error if the weights cannot be loaded.
    pub fn loaded(&self) -> Result<&Encoder<F::Tower, F::Projected>, Gemma4Error> {
        let shared = &self.shared;
        Ok(match shared.loaded.get() {
            Some(loaded) => loaded,
            None => {
                let loaded = shared.load()?;
                shared.loaded.get_or_init(|| loaded)
            }
        })
    }
}

impl<F: MediumFormat> Shared<F> {
    fn module(&self) -> Encoder<F::Tower, F::Projected> {
        self.format.module(self.text.hidden_size, &self.device)
    }

    /// Returns the source of a module's weights.
    fn weights<'a>(
        &'a self,
        module: &mut Encoder<F::Tower, F::Projected>,
        files: &'a TensorFiles,
    ) -> TowerWeights<'a> {
        let linears = match module {
            Encoder::Tower(tower) => tower.linears_mut(),
            Encoder::Projected(_) => Vec::new(),
        };
        let mut weights = TowerWeights {
            folder: &self.folder,
            files,
            schemes: &self.schemes,
            linears: Vec::new(),
            clipped: Vec::new(),
            is_part: F::is_part,
        };
        for (path, linear) in linears {
            if linear.clip_mut().is_some() {
                weights.clipped.push(path.clone());
            }
            weights.linears.push(path);
        }
        weights
    }

    /// Checks the names, shapes and dtypes of the tensors, without loading them.
    fn check(&self, files: &TensorFiles) -> Result<(), Gemma4Error> {
        let mut module = self.module();
        let weights = self.weights(&mut module, files);
        match &module {
            Encoder::Tower(tower) => weights.check(&**tower, &self.text),
            Encoder::Projected(projected) => weights.check(&**projected, &self.text),
        }
    }

    fn load(&self) -> Result<Encoder<F::Tower, F::Projected>, Gemma4Error> {
        let files = TensorFiles::open(&self.folder)?;
        let mut module = self.module();
        let weights = self.weights(&mut module, &files);
        let (text, dtype, device) = (&self.text, self.dtype, &self.device);
        Ok(match module {
            Encoder::Tower(tower) => {
                let mut tower = weights.load(*tower, text, dtype, device)?;
                let mut clips = weights.clips()?.into_iter();
                let scales = weights.scales_of_linears()?;
                for ((_, linear), scales) in tower.linears_mut().into_iter().zip(scales) {
                    linear.set_activation_scales(scales);
                    if let Some((clip, found)) = linear.clip_mut().zip(clips.next()) {
                        *clip = found;
                    }
                }
                Encoder::Tower(Box::new(self.adapted(tower, false)?))
            }
            Encoder::Projected(projected) => {
                let projected = weights.load(*projected, text, dtype, device)?;
                Encoder::Projected(Box::new(self.adapted(projected, true)?))
            }
        })
    }

    /// Adds the adapters to loaded weights.
    fn adapted<M: Module>(&self, module: M, is_projected: bool) -> Result<M, Gemma4Error> {
        let mut adapters = self.adapters.iter();
        adapters.try_fold(module, |module, folder| {
            merge_tower_adapter(folder, module, part::<F>(is_projected))
        })
    }
}

fn part<F: MediumFormat>(is_projected: bool) -> PartNames {
    PartNames {
        is_part: F::is_part,
        is_projected,
    }
}
