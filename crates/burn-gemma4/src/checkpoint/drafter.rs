//! Loads the drafter, the small model that proposes tokens in speculative decoding, from a folder.

use super::{
    files::TensorFiles, folder::Folder, loader::load_module, names::HEAD, options::LoadOptions,
    source::Source, source::WeightSource,
};
use crate::config::Gemma4Config;
use crate::config::drafter::DrafterConfig;
use crate::config::quantization::schemes_of;
use crate::config::unknown_files::missing;
use crate::error::{Gemma4Error, TensorProblem};
use crate::speculative::drafter::Drafter;
use burn::tensor::Device;
use safetensors::Dtype;
use std::{collections::BTreeSet, fs, path::Path, sync::Arc};

/// The name of the tensor that lists the token ids of each token group. The drafter's output head scores the groups first,
/// and then only the tokens of the best groups.
const ORDERING: &str = "masked_embedding.token_ordering";

/// The weights in a drafter's files. In these files, the name of each tensor is the path of its parameter.
struct Named {
    folder: Folder,
    has_groups: bool,
}

impl WeightSource for Named {
    fn names(&self, path: &str) -> Vec<String> {
        self.folder.names(path)
    }

    fn get(&self, path: &str) -> Result<Source<'_>, TensorProblem> {
        self.folder.get(path)
    }

    fn unknown(&self, known: &BTreeSet<String>, config: &Gemma4Config) -> Vec<String> {
        let mut names = self.folder.unknown(known, config);
        // The output projection and the list of token groups count as known tensors, although the drafter has no
        // parameters for them.
        names.retain(|name| name != HEAD && !(self.has_groups && name == ORDERING));
        names
    }
}

impl Drafter {
    /// Loads the drafter in `folder`, in Hugging Face's layout.
    ///
    /// The weights are never quantized, whatever the option for [quantization](LoadOptions::quantization) says.
    ///
    /// # Errors
    /// Returns an error if a file is missing or malformed, if tensors do not fit the configuration, or if the device does
    /// not compute in the requested dtype.
    pub fn load(
        folder: impl AsRef<Path>,
        device: &Device,
        options: LoadOptions<'_>,
    ) -> Result<Self, Gemma4Error> {
        Self::load_for(folder, |_| Ok(()), device, options)
    }

    /// Loads a drafter as [`load`](Self::load) does, but first calls `check` with the drafter's configuration. If
    /// `check` returns an error, the function returns this error.
    pub(crate) fn load_for(
        folder: impl AsRef<Path>,
        check: impl FnOnce(&DrafterConfig) -> Result<(), Gemma4Error>,
        device: &Device,
        options: LoadOptions<'_>,
    ) -> Result<Self, Gemma4Error> {
        let folder = folder.as_ref();
        // If the path leads to a file, such as a GGUF file, return an error that says that a folder is required.
        if folder.is_file() {
            return Err(Gemma4Error::Unsupported {
                path: folder.into(),
                reason: "is a file; expected a drafter's folder in Hugging Face's layout, with safetensors files"
                    .into(),
            });
        }
        let path = folder.join("config.json");
        let config = DrafterConfig::from_file(&path)?;
        check(&config)?;
        let json = fs::read_to_string(&path).map_err(|source| missing(path, source))?;
        let files = Arc::new(TensorFiles::open(folder)?);
        let weights = Named {
            folder: Folder::of_paths(files.clone(), schemes_of(&json)?),
            has_groups: config.ordered_embeddings.is_some(),
        };
        let groups = match &config.ordered_embeddings {
            Some(_) => {
                groups(&files, config.text.vocab_size).map_err(|problem| Gemma4Error::Tensors {
                    path: folder.into(),
                    problems: vec![problem],
                })?
            }
            None => Vec::new(),
        };
        let drafter = Self::of(&config, &groups, device);
        // The drafter's weights stay unquantized, because quantizing so small a model saves little memory.
        load_module(
            folder,
            &weights,
            &config.text,
            drafter,
            device,
            options,
            |_, _| Ok(()),
        )
    }
}

/// Reads the token ids of all groups as one list, `[vocabulary]`. The list holds the ids of the first group, then those
/// of the second group, and so on.
fn groups(files: &TensorFiles, vocabulary: usize) -> Result<Vec<i32>, TensorProblem> {
    let name = || ORDERING.to_owned();
    let entry = files
        .get(ORDERING)
        .ok_or_else(|| TensorProblem::Missing { name: name() })?;
    if entry.shape.iter().product::<usize>() != vocabulary {
        return Err(TensorProblem::Shape {
            name: name(),
            found: entry.shape.clone(),
            expected: vec![vocabulary],
        });
    }
    let refuse = |reason: String| TensorProblem::Packing {
        name: name(),
        reason,
    };
    let bytes = files.bytes(entry);
    let tokens: Vec<i64> = match entry.dtype {
        Dtype::I64 => {
            let numbers = bytes.as_chunks::<8>().0.iter();
            numbers.map(|bytes| i64::from_le_bytes(*bytes)).collect()
        }
        Dtype::I32 => {
            let numbers = bytes.as_chunks::<4>().0.iter();
            numbers
                .map(|bytes| i64::from(i32::from_le_bytes(*bytes)))
                .collect()
        }
        other => {
            return Err(refuse(format!(
                "has the dtype {other:?}; expected I64 or I32"
            )));
        }
    };
    let mut seen = vec![false; vocabulary];
    for token in &tokens {
        match usize::try_from(*token)
            .ok()
            .and_then(|token| seen.get_mut(token))
        {
            Some(seen) if !*seen => *seen = true,
            _ => {
                return Err(refuse(format!(
                    "has the token {token} twice, or {token} is not among the vocabulary's {vocabulary} tokens"
                )));
            }
        }
    }
    Ok(tokens.into_iter().map(|token| token as i32).collect())
}
