//! A drafter's folder into a drafter.

use super::{
    LoadOptions, files::TensorFiles, folder::Folder, load_module, names::HEAD, source::Source,
    source::Weights,
};
use crate::{
    Drafter, DrafterConfig, Gemma4Config, Gemma4Error, TensorProblem, checkpoint::missing,
    config::quantization::schemes_of,
};
use burn::tensor::Device;
use safetensors::Dtype;
use std::{collections::BTreeSet, fs, path::Path, sync::Arc};

/// The tokens of each group, of a head that chooses among groups.
const ORDERING: &str = "masked_embedding.token_ordering";

/// The files' tensors by the drafter's paths, which are their names.
struct Named {
    folder: Folder,
    has_groups: bool,
}

impl Weights for Named {
    fn names(&self, path: &str) -> Vec<String> {
        self.folder.names(path)
    }

    fn get(&self, path: &str) -> Result<Source<'_>, TensorProblem> {
        self.folder.get(path)
    }

    fn unknown(&self, known: &BTreeSet<String>, config: &Gemma4Config) -> Vec<String> {
        let mut names = self.folder.unknown(known, config);
        // A head that repeats the embedding's table.
        names.retain(|name| name != HEAD && !(self.has_groups && name == ORDERING));
        names
    }
}

impl Drafter {
    /// Loads the drafter in `folder`, as Hugging Face has it: `config.json` and `model.safetensors`, or an index and several files. Its
    /// weights are whole on the device, whatever the options say of [quantization](LoadOptions::quantization).
    ///
    /// # Errors
    /// Where a file is missing or not what it should be, where tensors do not fit the configuration, and where the device does not
    /// compute in the dtype asked for.
    pub fn load(
        folder: impl AsRef<Path>,
        device: &Device,
        options: LoadOptions<'_>,
    ) -> Result<Self, Gemma4Error> {
        Self::load_for(folder, |_| Ok(()), device, options)
    }

    /// [`load`](Self::load) of a drafter whose configuration stands a check.
    pub(crate) fn load_for(
        folder: impl AsRef<Path>,
        check: impl FnOnce(&DrafterConfig) -> Result<(), Gemma4Error>,
        device: &Device,
        options: LoadOptions<'_>,
    ) -> Result<Self, Gemma4Error> {
        let folder = folder.as_ref();
        // What is no folder, such as a GGUF file, is named by what it is.
        if folder.is_file() {
            return Err(Gemma4Error::Unsupported {
                path: folder.into(),
                reason: "is a file; a drafter is a folder as Hugging Face has it, with safetensors"
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
        // A drafter is small: its weights are whole.
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

/// The tokens of all groups, one group after the other.
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
                "has the dtype {other:?}, which is neither I64 nor I32"
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
                    "has the token {token} twice, or it is none of the vocabulary's {vocabulary}"
                )));
            }
        }
    }
    Ok(tokens.into_iter().map(|token| token as i32).collect())
}
