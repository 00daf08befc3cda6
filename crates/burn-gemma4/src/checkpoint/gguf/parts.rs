//! The parts of a GGUF checkpoint. `llama-gguf-split` divides a checkpoint into several files, whose names end with
//! `-00001-of-00003.gguf`. The first part has the metadata, and each part has some of the tensors.

use super::container::{Container, Tensor};
use super::metadata::Metadata;
use crate::checkpoint::files::map;
use crate::error::Gemma4Error;
use memmap2::Mmap;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// The digits of a part's number in the part's name.
const DIGITS: usize = 5;

/// One file of a checkpoint.
pub(super) struct Part {
    pub file: Mmap,
    container: Container,
}

/// The files of a checkpoint, in their order, and the tensors of all of them.
pub(super) struct Parts {
    pub files: Vec<Part>,
    /// The index of the part that has a tensor, and the tensor.
    pub tensors: BTreeMap<String, (usize, Tensor)>,
}

impl Part {
    fn open(path: &Path) -> Result<Self, Gemma4Error> {
        let file = map(path)?;
        let container = Container::read(&file).map_err(|reason| malformed(path, reason))?;
        Ok(Self { file, container })
    }

    pub fn metadata(&self) -> Metadata<'_> {
        Metadata {
            file: &self.file,
            values: &self.container.values,
        }
    }

    fn size(&self, key: &str) -> Result<Option<usize>, String> {
        self.metadata().size(key)
    }
}

impl Parts {
    /// Opens the file at `path`, and the other parts of the checkpoint if the file is a part of several. `path` may
    /// name any part.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Malformed`] if a file is incomplete, or if a part is missing, doubled or of another
    /// checkpoint.
    pub fn open(path: &Path) -> Result<Self, Gemma4Error> {
        let named = Part::open(path)?;
        let count = named
            .size("split.count")
            .map_err(|reason| malformed(path, reason))?;
        let count = match count {
            None | Some(0 | 1) => return Self::of(path, vec![(path.into(), named)]),
            Some(count) => count,
        };
        let name = PartName::of(path, count).map_err(|reason| malformed(path, reason))?;
        let mut parts = Vec::new();
        let mut named = Some(named);
        for number in 1..=count {
            let of_part = name.path(number);
            let own = named.take_if(|_| number == name.number);
            let part = match own {
                Some(part) => part,
                None if of_part.is_file() => Part::open(&of_part)?,
                None => {
                    let reason = format!(
                        "is one of {count} parts; part {number} is missing, expected {}",
                        of_part.display()
                    );
                    return Err(malformed(path, reason));
                }
            };
            check(&part, number, count).map_err(|reason| malformed(&of_part, reason))?;
            parts.push((of_part, part));
        }
        Self::of(path, parts)
    }

    /// Joins the tensors of all parts. Each part comes with its path.
    fn of(path: &Path, parts: Vec<(PathBuf, Part)>) -> Result<Self, Gemma4Error> {
        let mut tensors = BTreeMap::new();
        let mut files = Vec::new();
        let expected = parts[0].1.size("split.tensors.count");
        let expected = expected.map_err(|reason| malformed(&parts[0].0, reason))?;
        for (index, (of_part, mut part)) in parts.into_iter().enumerate() {
            for (name, tensor) in std::mem::take(&mut part.container.tensors) {
                if tensors.insert(name.clone(), (index, tensor)).is_some() {
                    let reason = format!(
                        "has the tensor {name:?}, which an earlier part has, too; expected the parts of one checkpoint"
                    );
                    return Err(malformed(&of_part, reason));
                }
            }
            files.push(part);
        }
        match expected {
            Some(expected) if files.len() > 1 && expected != tensors.len() => Err(malformed(
                path,
                format!(
                    "its {} parts have {} tensors; expected {expected}, by split.tensors.count",
                    files.len(),
                    tensors.len()
                ),
            )),
            _ => Ok(Self { files, tensors }),
        }
    }
}

/// Checks that a file is the part `number` of `count`, by its metadata. Files count parts from 0.
fn check(part: &Part, number: usize, count: usize) -> Result<(), String> {
    match (part.size("split.no")?, part.size("split.count")?) {
        (Some(own), Some(of)) if (own, of) == (number - 1, count) => Ok(()),
        (Some(own), Some(of)) => Err(format!(
            "is part {number} of {count} by its name, but part {} of {of} by its metadata",
            own.saturating_add(1)
        )),
        _ => Err(format!(
            "is part {number} of {count} by its name, but its metadata has no split.no and split.count"
        )),
    }
}

/// The name of a part, as `llama-gguf-split` writes it.
struct PartName {
    /// The path without the numbers and the extension.
    prefix: PathBuf,
    /// The number of this part, counted from 1.
    number: usize,
    count: usize,
}

impl PartName {
    fn of(path: &Path, count: usize) -> Result<Self, String> {
        let parse = || {
            let name = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
            let (rest, of) = name.rsplit_once("-of-")?;
            let (prefix, number) = rest.rsplit_once('-')?;
            let is_number =
                |text: &str| text.len() == DIGITS && text.bytes().all(|byte| byte.is_ascii_digit());
            let is_name = is_number(of) && is_number(number);
            let (number, of): (usize, usize) = (number.parse().ok()?, of.parse().ok()?);
            let fits = is_name && of == count && (1..=count).contains(&number);
            fits.then(|| Self {
                prefix: path.with_file_name(prefix),
                number,
                count,
            })
        };
        parse().ok_or_else(|| {
            format!(
                "is one of {count} parts, but its name does not end with the part's number; expected the name that \
                 llama-gguf-split gave, such as model-00001-of-{count:0DIGITS$}.gguf"
            )
        })
    }

    fn path(&self, number: usize) -> PathBuf {
        let mut path = self.prefix.clone().into_os_string();
        path.push(format!(
            "-{number:0DIGITS$}-of-{:0DIGITS$}.gguf",
            self.count
        ));
        path.into()
    }
}

pub(super) fn malformed(path: &Path, reason: String) -> Gemma4Error {
    Gemma4Error::Malformed {
        path: path.into(),
        reason,
    }
}
