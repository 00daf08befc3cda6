//! The tensors of a checkpoint's safetensors files.

use crate::config::unknown_files::{missing, refuse_contents};
use crate::error::Gemma4Error;
use crate::json;
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::ErrorKind,
    ops::Range,
    path::{Path, PathBuf},
};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The name part that `torch.compile` adds. `torch.compile` wraps a module and adds this part to the wrapped module's
/// name.
const COMPILED: &str = "_orig_mod";

/// All tensors of a checkpoint by name. The files are memory-mapped.
pub(super) struct TensorFiles {
    files: Vec<Bytes>,
    tensors: BTreeMap<String, Entry>,
}

/// The bytes of a file: memory-mapped, or embedded in the program.
enum Bytes {
    Mapped(Mmap),
    Embedded(&'static [u8]),
}

/// The dtype, the shape and the byte range of a tensor in a checkpoint's files.
pub(super) struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    file: usize,
    range: Range<usize>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl TensorFiles {
    /// Opens the tensors of a folder. They are in `model.safetensors`. If the folder lacks this file, they are in all
    /// files that its `model.safetensors.index.json` lists. Hugging Face Transformers has the same order.
    pub fn open(folder: &Path) -> Result<Self, Gemma4Error> {
        let index = folder.join(INDEX);
        let single = || BTreeSet::from([SINGLE.to_owned()]);
        let names = match fs::read_to_string(&index) {
            _ if folder.join(SINGLE).is_file() => single(),
            Ok(text) => shards(&index, &text)?,
            Err(error) if error.kind() == ErrorKind::NotFound => single(),
            Err(source) => {
                return Err(Gemma4Error::Io {
                    path: index,
                    source,
                });
            }
        };
        let mut opened = Self {
            files: Vec::new(),
            tensors: BTreeMap::new(),
        };
        for name in names {
            let path = folder.join(name);
            let bytes = map(&path)?;
            opened.add(path, Bytes::Mapped(bytes))?;
        }
        Ok(opened)
    }

    /// Opens the tensors of a file that is embedded in the program.
    pub fn embedded(name: &str, bytes: &'static [u8]) -> Result<Self, Gemma4Error> {
        let mut opened = Self {
            files: Vec::new(),
            tensors: BTreeMap::new(),
        };
        opened.add(name.into(), Bytes::Embedded(bytes))?;
        Ok(opened)
    }

    fn add(&mut self, path: PathBuf, bytes: Bytes) -> Result<(), Gemma4Error> {
        let malformed = |reason: String| Gemma4Error::Malformed {
            path: path.clone(),
            reason,
        };
        let contents = bytes.as_slice();
        refuse_contents(&path, contents)?;
        let tensors = SafeTensors::deserialize(contents).map_err(|error| {
            malformed(format!(
                "not a whole safetensors file of {} bytes: {error}",
                contents.len()
            ))
        })?;
        let file = self.files.len();
        for (name, view) in tensors.iter() {
            let name = uncompiled(name);
            let start = view.data().as_ptr() as usize - contents.as_ptr() as usize;
            let entry = Entry {
                dtype: view.dtype(),
                shape: view.shape().to_vec(),
                file,
                range: start..start + view.data().len(),
            };
            if self.tensors.insert(name.clone(), entry).is_some() {
                return Err(malformed(format!(
                    "{name} occurs twice, here or in another file"
                )));
            }
        }
        self.files.push(bytes);
        Ok(())
    }

    /// Returns the tensor called `name`.
    pub fn get(&self, name: &str) -> Option<&Entry> {
        self.tensors.get(name)
    }

    /// Returns the names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns a tensor's bytes, little-endian, row by row.
    pub fn bytes(&self, entry: &Entry) -> &[u8] {
        &self.files[entry.file].as_slice()[entry.range.clone()]
    }
}

impl Bytes {
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Embedded(bytes) => bytes,
        }
    }
}

/// Returns the names of the weight files that an index lists.
fn shards(path: &Path, text: &str) -> Result<BTreeSet<String>, Gemma4Error> {
    let malformed = |reason: String| Gemma4Error::Malformed {
        path: path.to_owned(),
        reason,
    };
    let index: Index = json::from_slice(text.as_bytes()).map_err(malformed)?;
    let names: BTreeSet<String> = index.weight_map.into_values().collect();
    if names.is_empty() {
        return Err(malformed("weight_map lists no files".into()));
    }
    // Only plain file names are accepted. A name with directories in it could lead outside the checkpoint's folder.
    match names.iter().find(|name| {
        Path::new(name)
            .file_name()
            .is_none_or(|file| file != name.as_str())
    }) {
        Some(name) => Err(malformed(format!("{name:?} is not the name of a file"))),
        None => Ok(names),
    }
}

/// Returns a tensor's name without the parts that `torch.compile` adds.
pub(super) fn uncompiled(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').filter(|part| *part != COMPILED).collect();
    parts.join(".")
}

pub(crate) fn map(path: &Path) -> Result<Mmap, Gemma4Error> {
    let failed = |source| missing(path.to_owned(), source);
    let file = File::open(path).map_err(failed)?;
    // SAFETY: the file must not change while it is mapped. This process does not write to the file. A change by another
    // process would be undefined behavior, as in every program that maps files.
    unsafe { Mmap::map(&file) }.map_err(failed)
}
