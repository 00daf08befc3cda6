//! The weights of a Hugging Face folder.

use super::{
    files::TensorFiles,
    floats8,
    mobile::{self, MobileModule},
    names::{HEAD, MLX, Names},
    packed,
    source::{Source, WeightSource, burn_dtype},
};
use crate::config::Gemma4Config;
use crate::config::quantization::QuantizationSchemes;
use crate::error::{Gemma4Error, TensorProblem};
use crate::model::layer::ActivationScales;
use std::{collections::BTreeSet, path::Path, sync::Arc};

/// The tensors in a folder's files, and the quantization schemes of the matrices.
pub(super) struct Folder {
    files: Arc<TensorFiles>,
    names: Names,
    schemes: QuantizationSchemes,
}

impl Folder {
    pub fn of(files: Arc<TensorFiles>, schemes: QuantizationSchemes) -> Self {
        let names = Names::of(&files);
        Self {
            files,
            names,
            schemes,
        }
    }

    /// Creates a source of weights from `files`. In these files, the name of each tensor must be the path of its
    /// parameter.
    pub fn of_paths(files: Arc<TensorFiles>, schemes: QuantizationSchemes) -> Self {
        Self {
            files,
            names: Names::of_paths(),
            schemes,
        }
    }

    /// Refuses files whose tensors have MLX's names. MLX stores experts and towers in a layout that this crate cannot
    /// read.
    pub fn refuse_mlx(&self, folder: &Path) -> Result<(), Gemma4Error> {
        let is_mlx = |name: &str| name.starts_with(MLX);
        match self.files.names().any(is_mlx)
            && !self.files.names().any(|name| self.names.is_ours(name))
        {
            true => Err(Gemma4Error::Unsupported {
                path: folder.into(),
                reason: format!(
                    "its tensors' names begin with {MLX}, as MLX writes them; use the original checkpoint instead"
                ),
            }),
            false => Ok(()),
        }
    }

    /// Returns the name that the files use for the parameter at `path`.
    pub fn in_file(&self, path: &str) -> String {
        self.names.in_file(path)
    }

    /// Returns the paths of unused K and V projections. The files contain these projections, but no layer uses them.
    pub fn unread(&self, config: &Gemma4Config) -> Vec<String> {
        let layers = config.first_shared_layer()..config.num_layers();
        let paths = layers.flat_map(|layer| {
            ["k_proj", "v_proj"].map(|name| format!("layers.{layer}.self_attn.{name}.weight"))
        });
        let is_there = |path: &String| self.files.get(&self.in_file(path)).is_some();
        paths.filter(is_there).collect()
    }

    /// Returns the names of the experts' tensors if the files store each expert's matrices separately. `name` is the
    /// stacked tensor that would hold these matrices together. The result has one list per projection, with one name
    /// per expert. If the matrices are not stored separately, the result is empty.
    fn apart(&self, name: &str) -> Vec<Vec<String>> {
        let Some((layer, whole)) = name.split_once(EXPERTS) else {
            return Vec::new();
        };
        let parts = match whole {
            _ if self.files.get(name).is_some() => return Vec::new(),
            GATE_UP => GATE_AND_UP,
            DOWN => ONLY_DOWN,
            _ => return Vec::new(),
        };
        let of_part = |part: &&str| -> Vec<String> {
            let numbered = (0..).map(|expert| format!("{layer}{EXPERTS}{expert}.{part}"));
            numbered
                .take_while(|name| !self.tensors(name).is_empty())
                .collect()
        };
        let parts: Vec<Vec<String>> = parts.iter().map(of_part).collect();
        match parts.iter().all(Vec::is_empty) {
            true => Vec::new(),
            false => parts,
        }
    }

    /// Returns the names of the tensors that store the matrix `name`. If the files do not contain the matrix, the list
    /// is empty.
    fn tensors(&self, name: &str) -> Vec<String> {
        if let Some(module) = self.mobile(name) {
            return module.names();
        }
        match self.files.get(name) {
            Some(entry) if floats8::is_fp8(entry) => floats8::fp8_names(&self.files, name),
            Some(_) => vec![name.to_owned()],
            None => packed::names(&self.files, name),
        }
    }

    /// Returns the module of a mobile checkpoint whose matrix is called `name`, or `None` if the matrix has floats.
    fn mobile<'name>(&self, name: &'name str) -> Option<MobileModule<'_, 'name>> {
        MobileModule::of(&self.files, &self.schemes, name)
    }

    /// Reads a parameter or one expert's matrix. `name` is the name of the parameter or matrix in the files.
    fn named(&self, name: &str) -> Result<Source<'_>, TensorProblem> {
        if let Some(module) = self.mobile(name) {
            return module.matrix();
        }
        let Some(entry) = self.files.get(name) else {
            return match packed::names(&self.files, name).is_empty() {
                true => Err(TensorProblem::Missing { name: name.into() }),
                false => packed::get(&self.files, &self.schemes.matrices, name),
            };
        };
        match burn_dtype(entry.dtype) {
            _ if floats8::is_fp8(entry) => floats8::fp8(&self.files, &self.schemes.matrices, name),
            Some(dtype) => {
                let bytes = self.files.bytes(entry);
                Ok(Source::floats(entry.shape.clone(), dtype, bytes))
            }
            None => Err(TensorProblem::Dtype {
                name: name.into(),
                found: format!("{:?}", entry.dtype),
            }),
        }
    }

    fn joined(&self, names: Vec<String>) -> Result<Source<'_>, TensorProblem> {
        let named = |name: String| Ok((name.clone(), self.named(&name)?));
        Source::joined(names.into_iter().map(named).collect::<Result<_, _>>()?)
    }
}

/// Parts of the paths of matrices whose layers cannot round their activations by static scales.
const WITHOUT_ROUNDING: [&str; 2] = [".router.", EXPERTS];

/// The part of an expert tensor's name that follows the layer's name.
const EXPERTS: &str = ".experts.";
const GATE_UP: &str = "gate_up_proj";
const GATE_AND_UP: &[&str] = &["gate_proj.weight", "up_proj.weight"];
const DOWN: &str = "down_proj";
const ONLY_DOWN: &[&str] = &["down_proj.weight"];

impl WeightSource for Folder {
    fn names(&self, path: &str) -> Vec<String> {
        let name = self.names.in_file(path);
        let apart = self.apart(&name).concat();
        let names: Vec<String> = match apart.is_empty() {
            true => self.tensors(&name),
            false => apart.iter().flat_map(|name| self.tensors(name)).collect(),
        };
        match names.is_empty() {
            true => vec![name],
            false => names,
        }
    }

    fn get(&self, path: &str) -> Result<Source<'_>, TensorProblem> {
        let name = self.names.in_file(path);
        let mut apart = self.apart(&name);
        match (apart.pop(), apart.pop()) {
            (None, _) => self.named(&name),
            (Some(all), None) => self.joined(all),
            (Some(second), Some(first)) => {
                let name = second.last().cloned().unwrap_or(name);
                Source::stacked(self.joined(first)?, name, self.joined(second)?)
            }
        }
    }

    fn activation_scales(&self, path: &str) -> Result<Option<ActivationScales>, TensorProblem> {
        let name = self.names.in_file(path);
        let is_served = !WITHOUT_ROUNDING.iter().any(|part| path.contains(part));
        // The matrices of experts have scales of their own.
        let apart = self.apart(&name).concat();
        for matrix in &apart {
            if let Some(module) = self.mobile(matrix) {
                module.refuse_scales()?;
            }
        }
        match self.mobile(&name) {
            None => Ok(None),
            Some(module) if is_served => module.activation_scales(),
            Some(module) => module.refuse_scales().map(|()| None),
        }
    }

    fn is_mobile(&self) -> bool {
        self.schemes.mobile.is_some()
    }

    fn unknown(&self, known: &BTreeSet<String>, config: &Gemma4Config) -> Vec<String> {
        let names = self.files.names();
        let is_ignored = |name: &str| {
            let part = name.rsplit('.').next().unwrap_or_default();
            let is_of_cache = self.is_mobile() && mobile::CACHE_SCALES.contains(&part);
            // A copy of the embedding table in floats is harmless. Codes may stand for other weights.
            let has_codes = || self.files.get(name).is_some_and(mobile::is_codes);
            is_of_cache || self.names.is_ignored(name, config) && !(name == HEAD && has_codes())
        };
        names
            .filter(|name| !known.contains(*name) && !is_ignored(name))
            .map(String::from)
            .collect()
    }
}
