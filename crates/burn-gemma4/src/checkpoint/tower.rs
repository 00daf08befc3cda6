//! The tensors of a vision or audio tower, and the description of its preprocessing.

use super::files::TensorFiles;
use super::loader::{Expected, Loader, check, load_module};
use super::mobile::MobileModule;
use super::options::LoadOptions;
use super::source::{Source, WeightSource, burn_dtype};
use crate::config::Gemma4Config;
use crate::config::quantization::QuantizationSchemes;
use crate::error::{Gemma4Error, TensorProblem, existing, read};
use crate::json;
use crate::model::layer::ActivationScales;
use crate::model::multimodal::Clip;
use crate::vision::video_processor;
use burn::{
    module::Module,
    tensor::{DType, Device},
};
use serde_json::Value;
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

/// The prefix of a tower's tensors in a checkpoint, before the path of a parameter.
pub(super) const PREFIX: &str = "model.";

/// The path of the weight in a linear layer that may have bounds.
const WEIGHT: &str = "linear.weight";

/// The names of a linear layer's bounds, in the order of [`Clip`]'s fields.
const BOUNDS: [&str; 4] = ["input_min", "input_max", "output_min", "output_max"];

/// The tensors of a tower in a folder's files.
pub(super) struct TowerWeights<'a> {
    pub folder: &'a Path,
    pub files: &'a TensorFiles,
    /// The quantization of the checkpoint's weights.
    pub schemes: &'a QuantizationSchemes,
    /// The paths of the linear layers that may have bounds or static scales.
    pub linears: Vec<String>,
    /// The paths of the linear layers that have bounds.
    pub clipped: Vec<String>,
    /// A predicate that is true for the names of the tower's tensors.
    pub is_part: fn(&str) -> bool,
}

impl TowerWeights<'_> {
    /// Checks the names, shapes and dtypes of the tensors, without loading them. `text` is the configuration of the
    /// text model.
    pub fn check<M: Module>(&self, module: &M, text: &Gemma4Config) -> Result<(), Gemma4Error> {
        let mut expected = Expected::default();
        module.visit(&mut expected);
        self.clips()?;
        check(self.folder, self, text, &expected).map(|_| ())
    }

    /// Loads the parameters of a module, without its bounds.
    pub fn load<M: Module>(
        &self,
        module: M,
        text: &Gemma4Config,
        dtype: DType,
        device: &Device,
    ) -> Result<M, Gemma4Error> {
        let options = LoadOptions::new().dtype(dtype);
        let nothing = |_: &mut Loader<'_, '_>, _: &mut M| Ok(());
        load_module(self.folder, self, text, module, device, options, nothing)
    }

    /// Returns the static scales of each layer in `linears`.
    pub fn scales_of_linears(&self) -> Result<Vec<Option<ActivationScales>>, Gemma4Error> {
        let scales = self.linears.iter().map(|path| {
            self.activation_scales(&format!("{path}.{WEIGHT}"))
                .map_err(|problem| self.error(problem))
        });
        scales.collect()
    }

    /// Returns the bounds of each layer in `clipped`.
    pub fn clips(&self) -> Result<Vec<Clip>, Gemma4Error> {
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
            .map_err(|problem| self.error(problem))
    }

    fn error(&self, problem: TensorProblem) -> Gemma4Error {
        Gemma4Error::Tensors {
            path: self.folder.into(),
            problems: vec![problem],
        }
    }

    /// Returns the module of a mobile checkpoint whose matrix is called `name`, or `None` if the matrix has floats.
    fn mobile<'name>(&self, name: &'name str) -> Option<MobileModule<'_, 'name>> {
        MobileModule::of(self.files, self.schemes, name)
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

impl WeightSource for TowerWeights<'_> {
    fn names(&self, path: &str) -> Vec<String> {
        let name = format!("{PREFIX}{path}");
        match self.mobile(&name) {
            Some(module) => module.names(),
            None => vec![name],
        }
    }

    fn get(&self, path: &str) -> Result<Source<'_>, TensorProblem> {
        let name = format!("{PREFIX}{path}");
        if let Some(module) = self.mobile(&name) {
            return module.matrix();
        }
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

    fn activation_scales(&self, path: &str) -> Result<Option<ActivationScales>, TensorProblem> {
        let name = format!("{PREFIX}{path}");
        let Some(module) = self.mobile(&name) else {
            return Ok(None);
        };
        let linear = path
            .strip_suffix(WEIGHT)
            .and_then(|path| path.strip_suffix('.'));
        let is_served = linear.is_some_and(|linear| self.linears.iter().any(|path| path == linear));
        match is_served {
            true => module.activation_scales(),
            false => module.refuse_scales().map(|()| None),
        }
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
        let names = self.files.names().filter(|name| (self.is_part)(name));
        names
            .filter(|name| !known.contains(*name) && !is_bound(name))
            .map(String::from)
            .collect()
    }
}

/// Reads the description of a part of the preprocessing: the field `name` of `processor_config.json`, or the whole of
/// `preprocessor_config.json`. A video processor may have `video_preprocessor_config.json` instead. Returns the
/// description with the path of its file, or `None` if no file has it.
pub(super) fn description(
    folder: &Path,
    name: &str,
) -> Result<Option<(PathBuf, Value)>, Gemma4Error> {
    for (file, is_nested) in [
        ("processor_config.json", true),
        ("video_preprocessor_config.json", false),
        ("preprocessor_config.json", false),
    ] {
        if file.starts_with("video") && name != video_processor::FIELD {
            continue;
        }
        let Some(path) = existing(folder, file)? else {
            continue;
        };
        let whole: Value = json::from_slice(&read(&path)?).map_err(|reason| {
            let path = path.clone();
            Gemma4Error::Malformed { path, reason }
        })?;
        let found = match is_nested {
            true => whole.get(name).cloned(),
            false => Some(whole),
        };
        if let Some(description) = found.filter(|value| !value.is_null()) {
            return Ok(Some((path, description)));
        }
    }
    Ok(None)
}
