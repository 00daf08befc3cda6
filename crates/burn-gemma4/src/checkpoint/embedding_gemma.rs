//! Loads EmbeddingGemma 2 from a folder.

use super::{
    files::TensorFiles,
    folder::Folder,
    loader::load_module,
    names::is_of_tower,
    options::{LoadOptions, Quantization},
    source::{Source, WeightSource},
};
use crate::config::Gemma4Config;
use crate::config::embedding_gemma::EmbeddingGemmaConfig;
use crate::config::quantization::schemes_of;
use crate::config::unknown_files::missing;
use crate::error::{Gemma4Error, TensorProblem};
use crate::model::embedding_gemma::EmbeddingGemmaModel;
use burn::tensor::Device;
use std::{collections::BTreeSet, fs, path::Path, sync::Arc};

/// The prefixes that the names of the model's tensors may have, by the class that wrote the file.
const PREFIXES: [&str; 4] = ["language_model.", "model.language_model.", "model.", ""];

/// The tensor that every checkpoint has. The loader finds the prefix by it.
const TABLE: &str = "embed_tokens.weight";

/// The modules of a layer that the checkpoint keeps in a module of their own.
const PER_LAYER_MODULES: [&str; 3] = [
    "per_layer_input_gate",
    "per_layer_projection",
    "post_per_layer_input_norm",
];

/// The weights in the files of an EmbeddingGemma 2 checkpoint.
struct Named {
    folder: Folder,
    files: Arc<TensorFiles>,
    prefix: &'static str,
}

impl Named {
    fn of(files: Arc<TensorFiles>, json: &str) -> Result<Self, Gemma4Error> {
        let has_table = |prefix: &&&str| files.get(&format!("{prefix}{TABLE}")).is_some();
        let prefix = PREFIXES.iter().find(has_table).unwrap_or(&PREFIXES[0]);
        Ok(Self {
            folder: Folder::of_paths(files.clone(), schemes_of(json)?),
            files,
            prefix,
        })
    }

    /// Returns the name that the parameter at `path` has in the files.
    fn in_file(&self, path: &str) -> String {
        let module = path.rsplit('.').nth(1).unwrap_or_default();
        let name = match path.starts_with("layers.") && PER_LAYER_MODULES.contains(&module) {
            true => path.replacen(module, &format!("ple_block.{module}"), 1),
            false => path.to_owned(),
        };
        format!("{}{name}", self.prefix)
    }
}

impl WeightSource for Named {
    fn names(&self, path: &str) -> Vec<String> {
        self.folder.names(&self.in_file(path))
    }

    fn get(&self, path: &str) -> Result<Source<'_>, TensorProblem> {
        self.folder.get(&self.in_file(path))
    }

    fn unknown(&self, known: &BTreeSet<String>, _config: &Gemma4Config) -> Vec<String> {
        let names = self.files.names();
        names
            .filter(|name| !known.contains(*name) && !is_of_tower(name))
            .map(String::from)
            .collect()
    }
}

impl EmbeddingGemmaModel {
    /// Loads the model in `folder`, in Hugging Face's layout. Weights that compressed-tensors has packed are
    /// dequantized. The towers of vision and audio are not loaded.
    ///
    /// # Errors
    /// Returns an error if a file is missing or malformed, if tensors do not fit the configuration, if the device does
    /// not compute in the requested dtype, or if the options ask for quantized weights.
    pub fn load(
        folder: impl AsRef<Path>,
        device: &Device,
        options: LoadOptions<'_>,
    ) -> Result<Self, Gemma4Error> {
        let folder = folder.as_ref();
        if folder.is_file() {
            return Err(Gemma4Error::Unsupported {
                path: folder.into(),
                reason: "is a file; expected an embedding model's folder in Hugging Face's layout, with safetensors"
                    .into(),
            });
        }
        if let Quantization::Q8 | Quantization::Q4 = options.quantization {
            return Err(Gemma4Error::Argument {
                argument: "quantization",
                reason: "is set, but embedding models are not quantized; expected the checkpoint's format"
                    .into(),
            });
        }
        let path = folder.join("config.json");
        let config = EmbeddingGemmaConfig::from_file(&path)?;
        let json = fs::read_to_string(&path).map_err(|source| missing(path, source))?;
        let weights = Named::of(Arc::new(TensorFiles::open(folder)?), &json)?;
        let model = Self::new(&config, device);
        load_module(
            folder,
            &weights,
            &config.text,
            model,
            device,
            options,
            |_, _| Ok(()),
        )
    }
}
