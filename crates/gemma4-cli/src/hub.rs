//! Finds models by their names in this machine's cache of the Hugging Face Hub. With the feature `download`, a model
//! that the cache lacks is downloaded. `hf download` fills the same cache.

mod cache;
#[cfg(test)]
mod cached;
#[cfg(feature = "download")]
mod download;
mod gguf_files;
#[cfg(feature = "download")]
mod layout;
#[cfg(feature = "download")]
mod repository;
#[cfg(all(test, feature = "download"))]
mod test_server;
#[cfg(all(test, feature = "download"))]
mod tests;
#[cfg(feature = "download")]
mod transfer;

use crate::{Error, terminal::WrongArgument, terminal::note};
use cache::{cache_folder, files_of, is_whole, snapshot};
use gguf_files::{Candidate, candidates, choose, gigabytes, with_parts};
#[cfg(feature = "download")]
use std::env;
use std::path::{Path, PathBuf};

/// The memory of the device in bytes, or `None` if the device does not report its memory. The function is called only
/// if one of several GGUF files must be chosen.
pub type MemoryOf<'a> = &'a mut dyn FnMut() -> Result<Option<u64>, Error>;

/// Resolves the argument `--model` to a folder or file. The argument may be a model's folder in the Hub's cache, a name
/// `organisation/name`, or a GGUF file `organisation/name:file.gguf`. A model that the cache lacks is downloaded. Among
/// several GGUF files, the largest that fits `memory` is taken. Any other path is returned unchanged.
///
/// # Errors
/// Returns [`WrongArgument`] if the path is a safetensors file, if the model cannot be found or downloaded, or if none
/// of its GGUF files fits. The error says how to proceed.
pub fn resolve(model: &Path, memory: MemoryOf<'_>) -> Result<PathBuf, Error> {
    Hub::from_env().resolve(model, &mut Wanted::Any(memory))
}

/// Resolves the argument `--model` as [`resolve`] does, for commands that need a folder with unquantized weights. A
/// model that has only GGUF files is refused, and none of them is downloaded.
///
/// # Errors
/// Returns the errors of [`resolve`].
pub fn resolve_folder(model: &Path) -> Result<PathBuf, Error> {
    Hub::from_env().resolve(model, &mut Wanted::Folder)
}

/// The form of a model that a command needs.
enum Wanted<'a> {
    Folder,
    Any(MemoryOf<'a>),
}

/// The Hub as the environment describes it.
struct Hub {
    cache: Option<PathBuf>,
    /// The connection, or the reason why nothing is downloaded.
    #[cfg(feature = "download")]
    connection: Result<download::Hub, &'static str>,
}

impl Hub {
    fn from_env() -> Self {
        Self {
            cache: cache_folder(),
            #[cfg(feature = "download")]
            connection: match is_offline() {
                true => Err("HF_HUB_OFFLINE forbids to download it"),
                false => Ok(download::Hub::from_env()),
            },
        }
    }

    fn resolve(&self, model: &Path, wanted: &mut Wanted<'_>) -> Result<PathBuf, Error> {
        let refuse = |reason: String| -> Error {
            WrongArgument(format!("--model: {}: {reason}", model.display())).into()
        };
        let is_safetensors = model.extension().is_some_and(|end| end == "safetensors");
        if is_safetensors && model.is_file() {
            let folder = model.parent().filter(|folder| *folder != Path::new(""));
            let folder = folder.unwrap_or(Path::new("."));
            return Err(refuse(format!(
                "is a safetensors file; expected the folder of the file, with config.json: {}",
                folder.display()
            )));
        }
        if model.join("snapshots").is_dir() && !model.join("config.json").exists() {
            let found = snapshot(model).map_err(refuse)?;
            note(format_args!(
                "note: {} is a folder of the Hub's cache; loading {}",
                model.display(),
                found.display()
            ));
            return Ok(found);
        }
        if model.exists() {
            return Ok(model.to_owned());
        }
        let Some(name) = Name::of(model) else {
            return Err(refuse("no such file or folder".into()));
        };
        let Some(cache) = &self.cache else {
            return Err(refuse(format!(
                "no such folder, and no cache of the Hugging Face Hub; set HF_HOME to a folder for it{}",
                self.remedy(name)
            )));
        };
        let folder = cache.join(format!("models--{}", name.model.replace('/', "--")));
        let with_argument = |error: Error| match error.downcast::<Reason>() {
            Ok(reason) => refuse(reason.0),
            Err(other) => other,
        };
        let found = match folder.join("snapshots").is_dir() {
            true => {
                let snapshot = snapshot(&folder).map_err(refuse)?;
                in_snapshot(&snapshot, name, wanted).map_err(with_argument)?
            }
            false => None,
        };
        let found = match found {
            Some(found) => found,
            None => self
                .download(name, &folder, wanted)
                .map_err(with_argument)?,
        };
        note(format_args!(
            "note: {} is in the Hub's cache; loading {}",
            name.model,
            found.display()
        ));
        Ok(found)
    }

    /// Returns the end of an error's text, which says how to get the model.
    fn remedy(&self, name: Name<'_>) -> String {
        #[cfg(feature = "download")]
        if let Err(reason) = &self.connection {
            return format!("; {reason}, and `hf download {}` downloads it", name.model);
        }
        format!("; `hf download {}` downloads it", name.model)
    }

    #[cfg(not(feature = "download"))]
    fn download(
        &self,
        name: Name<'_>,
        folder: &Path,
        _wanted: &mut Wanted<'_>,
    ) -> Result<PathBuf, Error> {
        Err(self.absent(name, folder))
    }

    fn absent(&self, name: Name<'_>, folder: &Path) -> Error {
        Reason(format!(
            "no such folder, and not in the Hugging Face Hub's cache ({}){}",
            folder.parent().unwrap_or(folder).display(),
            self.remedy(name)
        ))
        .into()
    }

    /// Downloads the model's files that the cache lacks. Prints their size first.
    #[cfg(feature = "download")]
    fn download(
        &self,
        name: Name<'_>,
        folder: &Path,
        wanted: &mut Wanted<'_>,
    ) -> Result<PathBuf, Error> {
        let Ok(hub) = &self.connection else {
            return Err(self.absent(name, folder));
        };
        let repository = hub.repository(name.model).map_err(Reason)?;
        let sizes = repository.sizes();
        let checkpoint = repository.checkpoint().filter(|_| name.file.is_none());
        let candidate = match checkpoint {
            Some(_) => None,
            None => Some(gguf_of(&sizes, name, wanted)?),
        };
        let paths = match (&candidate, &checkpoint) {
            (Some(candidate), _) => candidate.files.iter().map(String::as_str).collect(),
            (None, checkpoint) => checkpoint.clone().unwrap_or_default(),
        };
        let files = repository.files(paths).map_err(Reason)?;
        let missing: Vec<u64> = files
            .iter()
            .filter(|file| !folder.join("blobs").join(&file.etag).exists())
            .map(|file| file.bytes)
            .collect();
        note(format_args!(
            "note: downloading {} from {} to {}: {} in {} files. The licence on the model's page holds.",
            name.model,
            hub.endpoint(),
            folder.display(),
            gigabytes(
                missing
                    .iter()
                    .fold(0, |sum: u64, bytes| sum.saturating_add(*bytes))
            ),
            missing.len()
        ));
        let bar = crate::model::progress_bar()?;
        let snapshot = hub.fetch(&repository, &files, folder, &bar);
        bar.finish_and_clear();
        let snapshot = snapshot.map_err(Reason)?;
        Ok(match candidate {
            Some(candidate) => snapshot.join(candidate.path()),
            None => snapshot,
        })
    }
}

/// The reason why a model is refused. The caller adds the argument.
#[derive(Debug)]
struct Reason(String);

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Reason {}

/// Returns the model in a snapshot of the cache: the snapshot's folder, or one of its GGUF files. Returns `None` if
/// files are missing, as after an interrupted download.
fn in_snapshot(
    snapshot: &Path,
    name: Name<'_>,
    wanted: &mut Wanted<'_>,
) -> Result<Option<PathBuf>, Error> {
    let sizes = files_of(snapshot);
    if name.file.is_none() && (snapshot.join("config.json").exists() || sizes.is_empty()) {
        return Ok(is_whole(snapshot).then(|| snapshot.to_owned()));
    }
    let has_none = match name.file {
        Some(file) => with_parts(file, &sizes).is_none(),
        None => candidates(&sizes).is_empty(),
    };
    match has_none {
        true => Ok(None),
        false => Ok(Some(snapshot.join(gguf_of(&sizes, name, wanted)?.path()))),
    }
}

/// Returns the GGUF checkpoint that a name means: the named file, or the largest that fits the device.
fn gguf_of(
    sizes: &[(String, u64)],
    name: Name<'_>,
    wanted: &mut Wanted<'_>,
) -> Result<Candidate, Error> {
    let Wanted::Any(memory) = wanted else {
        return Err(Reason(
            "has no checkpoint in safetensors; this command needs one, and reads no GGUF file"
                .into(),
        )
        .into());
    };
    let found = candidates(sizes);
    let names = || -> Vec<&str> { found.iter().map(Candidate::path).collect() };
    if let Some(file) = name.file {
        let named = with_parts(file, sizes);
        return named.ok_or_else(|| {
            Reason(format!(
                "has no file {file}, or lacks a part of it; expected one of {:?}",
                names()
            ))
            .into()
        });
    }
    if found.is_empty() {
        return Err(Reason(
            "has neither a checkpoint in safetensors nor a GGUF file of a supported type".into(),
        )
        .into());
    }
    let memory = match found.len() {
        1 => None,
        _ => memory()?,
    };
    let (chosen, reason) =
        choose(&found, memory).map_err(|reason| Reason(format!("{reason}: {:?}", names())))?;
    note(format_args!(
        "note: {}: taking {} of {}, {reason}; --model {}:FILE takes another",
        name.model,
        chosen.path(),
        gigabytes(chosen.bytes),
        name.model
    ));
    Ok(chosen.clone())
}

/// A model on the Hub, and one of its GGUF files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Name<'a> {
    /// The name `organisation/name`.
    model: &'a str,
    file: Option<&'a str>,
}

impl<'a> Name<'a> {
    /// Returns the path as a name `organisation/name` or `organisation/name:file.gguf`, or `None` if the path does not
    /// have this form.
    fn of(model: &'a Path) -> Option<Self> {
        let text = model.to_str()?;
        let (model, file) = match text.split_once(':') {
            Some((model, file)) => (model, Some(file)),
            None => (text, None),
        };
        let is_character = |one: char| one.is_ascii_alphanumeric() || "-_.".contains(one);
        let is_part = |part: &str| {
            let first = part.chars().next();
            first.is_some_and(|first| first.is_ascii_alphanumeric() || first == '_')
                && part.chars().all(is_character)
        };
        let is_file = |file: &str| file.ends_with(".gguf") && file.split('/').all(is_part);
        let (organisation, name) = model.split_once('/')?;
        // Do not treat a path with a weight file's extension as a model's name, because the user means a file.
        let is_weights = model.ends_with(".gguf") || model.ends_with(".safetensors");
        let is_name = is_part(organisation) && is_part(name) && !is_weights;
        (is_name && file.is_none_or(is_file)).then_some(Self { model, file })
    }
}

/// True if `HF_HUB_OFFLINE` forbids to use the network, by the rules of `huggingface_hub`.
#[cfg(feature = "download")]
fn is_offline() -> bool {
    let value = env::var("HF_HUB_OFFLINE")
        .unwrap_or_default()
        .to_uppercase();
    ["1", "ON", "YES", "TRUE"].contains(&value.as_str())
}
