//! GGUF files of Gemma 4. GGUF is llama.cpp's format, which stores a whole checkpoint in one file or in several parts.

mod config;
mod container;
pub(super) mod importance;
mod metadata;
pub(super) mod names;
mod parts;
pub(super) mod tokenizer;
pub(super) mod types;
pub(super) mod writer;

use super::source::{Source, WeightSource};
use crate::config::Gemma4Config;
use crate::config::generation::GenerationDefaults;
use crate::error::{Gemma4Error, TensorProblem};
use crate::text::chat::ChatTemplate;
use crate::text::tokenizer::Tokenizer;
use burn::tensor::{DType, TensorData};
use container::{MAGIC, Tensor};
use metadata::Metadata;
use parts::{Parts, malformed};
use std::{
    collections::BTreeSet,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};
use types::Encoding;

/// A GGUF checkpoint of Gemma 4, in one file or in several parts. Opening a checkpoint reads only the headers. The
/// bytes of a tensor are read when the tensor is used.
pub(crate) struct Gguf {
    path: PathBuf,
    parts: Parts,
}

impl Gguf {
    /// Opens the file at `path`, which may be any part of a split checkpoint. Returns `None` if the file is not GGUF.
    ///
    /// # Errors
    /// Returns an error if a file is incomplete, if parts are missing or do not belong together, or if the checkpoint
    /// is not a Gemma 4 model.
    pub fn at(path: &Path) -> Result<Option<Self>, Gemma4Error> {
        match begins_with_magic(path) {
            true => Self::open(path).map(Some),
            false => Ok(None),
        }
    }

    fn open(path: &Path) -> Result<Self, Gemma4Error> {
        let gguf = Self {
            path: path.into(),
            parts: Parts::open(path)?,
        };
        config::refuse_others(gguf.metadata()).map_err(|reason| Gemma4Error::Unsupported {
            path: path.into(),
            reason,
        })?;
        Ok(gguf)
    }

    /// Returns the path of the file, or of the part by which the checkpoint was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the model's configuration.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Malformed`], which names the key or tensor at fault.
    pub fn config(&self) -> Result<Gemma4Config, Gemma4Error> {
        let config = config::config(self).map_err(|reason| self.malformed(reason))?;
        match config.validate() {
            Ok(()) => Ok(config),
            Err(Gemma4Error::Config(reason)) => Err(self.malformed(format!(
                "its metadata, by the field names of config.json: {reason}"
            ))),
            Err(other) => Err(other),
        }
    }

    /// Returns the tokenizer.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Malformed`] if the file has no tokenizer, or if the tokenizer's type is not supported.
    pub fn tokenizer(&self) -> Result<Tokenizer, Gemma4Error> {
        let json = tokenizer::json(self.metadata()).map_err(|reason| self.malformed(reason))?;
        Tokenizer::from_bytes(json.as_bytes()).map_err(|error| self.malformed(error.to_string()))
    }

    /// Returns the chat template in the file, or [`ChatTemplate::gemma4`] if the file has none.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Malformed`] if the file's template is invalid.
    pub fn chat_template(&self) -> Result<ChatTemplate, Gemma4Error> {
        let metadata = self.metadata();
        let read = || {
            let tokens = tokenizer::named(metadata)?;
            Ok((metadata.text("tokenizer.chat_template")?, tokens))
        };
        let (source, tokens) = read().map_err(|reason| self.malformed(reason))?;
        ChatTemplate::with_tokens(source, tokens).map_err(|error| self.malformed(error.to_string()))
    }

    /// Returns the generation defaults in the file.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Malformed`] if the sampling settings are invalid.
    pub fn generation_defaults(&self) -> Result<GenerationDefaults, Gemma4Error> {
        let json = tokenizer::generation_config(self.metadata())
            .map_err(|reason| self.malformed(reason))?;
        GenerationDefaults::parse(json.to_string().as_bytes(), &self.path)
    }

    fn metadata(&self) -> Metadata<'_> {
        self.parts.files[0].metadata()
    }

    fn has(&self, name: &str) -> bool {
        self.parts.tensors.contains_key(name)
    }

    /// Returns a tensor and the bytes of the file that has it.
    fn find(&self, name: &str) -> Option<(&Tensor, &[u8])> {
        let (part, tensor) = self.parts.tensors.get(name)?;
        Some((tensor, &self.parts.files[*part].file))
    }

    /// Returns the size of a tensor's first dimension: the number of rows of a matrix.
    fn rows(&self, name: &str) -> Result<usize, String> {
        match self.find(name) {
            Some((tensor, _)) => Ok(tensor.shape[0]),
            None => Err(format!("the tensor {name} is missing")),
        }
    }

    /// Reads the elements of a small tensor and converts them to f32.
    fn floats(&self, name: &str) -> Result<Vec<f32>, String> {
        /// The largest number of elements that this function reads. The tensor of rotary divisors is far smaller.
        const MOST: usize = 1 << 16;
        match self.tensor(name) {
            Ok(source) if source.shape.iter().product::<usize>() <= MOST => {
                let data: TensorData = source.slices(0..source.shape[0], DType::F32);
                Ok(data.iter::<f32>().collect())
            }
            Ok(source) => Err(format!("{name} has the shape {:?}", source.shape)),
            Err(problem) => Err(problem.to_string()),
        }
    }

    fn tensor(&self, name: &str) -> Result<Source<'_>, TensorProblem> {
        let Some((tensor, file)) = self.find(name) else {
            return Err(TensorProblem::Missing { name: name.into() });
        };
        let shape = tensor.shape.clone();
        let bytes = &file[tensor.place.clone()];
        match tensor.kind.encoding() {
            Some(Encoding::Floats(dtype)) => Ok(Source::floats(shape, dtype, bytes)),
            Some(Encoding::Blocks(format)) => Ok(Source::blocks(shape, format, bytes)),
            None => Err(TensorProblem::Encoding {
                name: name.into(),
                found: tensor.kind.to_string(),
                nearest: tensor.kind.nearest(),
            }),
        }
    }

    fn malformed(&self, reason: String) -> Gemma4Error {
        malformed(&self.path, reason)
    }
}

impl WeightSource for Gguf {
    fn names(&self, path: &str) -> Vec<String> {
        names::in_file(path, |name| self.has(name))
    }

    fn get(&self, path: &str) -> Result<Source<'_>, TensorProblem> {
        match &self.names(path)[..] {
            [gate, up] => Source::stacked(self.tensor(gate)?, up.clone(), self.tensor(up)?),
            names => self.tensor(&names[0]),
        }
    }

    fn unknown(&self, known: &BTreeSet<String>, config: &Gemma4Config) -> Vec<String> {
        let is_ignored = |name: &str| {
            // The model has no parameters for the rotary divisors, and none for K and V tensors that no layer uses. Do
            // not report these tensors as unknown.
            name == "rope_freqs.weight"
                || names::layer_of_unread_keys(name)
                    .is_some_and(|layer| config.is_shared(layer) && layer < config.num_layers())
        };
        let names = self.parts.tensors.keys();
        names
            .filter(|name| !known.contains(*name) && !is_ignored(name))
            .cloned()
            .collect()
    }
}

fn begins_with_magic(path: &Path) -> bool {
    let mut beginning = [0; MAGIC.len()];
    let is_file = path.is_file();
    is_file
        && File::open(path)
            .and_then(|mut file| file.read_exact(&mut beginning))
            .is_ok_and(|()| beginning == MAGIC)
}
