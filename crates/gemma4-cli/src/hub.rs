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
mod name;
#[cfg(feature = "download")]
mod online;
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
use name::Name;
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
    Hub::from_env().resolve("--model", model, &mut Wanted::Any(memory))
}

/// Resolves a model's path or name as [`resolve`] does, for commands that need a folder with weights in safetensors.
/// `argument` is the argument of the command, such as `--model`. A model that has only GGUF files is refused, and none
/// of them is downloaded.
///
/// # Errors
/// Returns the errors of [`resolve`], which name `argument`.
pub fn resolve_folder(argument: &str, model: &Path) -> Result<PathBuf, Error> {
    Hub::from_env().resolve(argument, model, &mut Wanted::Folder)
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
            connection: match offline_reason(|name| env::var(name).ok()) {
                Some(reason) => Err(reason),
                None => Ok(download::Hub::from_env()),
            },
        }
    }

    fn resolve(
        &self,
        argument: &str,
        model: &Path,
        wanted: &mut Wanted<'_>,
    ) -> Result<PathBuf, Error> {
        let refuse = |reason: String| -> Error {
            WrongArgument(format!("{argument}: {}: {reason}", model.display())).into()
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
                "no such local folder, and no cache of the Hugging Face Hub; set HF_HOME to a folder for it{}",
                self.remedy(name)
            )));
        };
        let folder = cache.join(format!("models--{}", name.model.replace('/', "--")));
        let with_argument = |error: Error| match error.downcast::<Reason>() {
            Ok(reason) => refuse(reason.0),
            Err(other) => other,
        };
        let found = self.found(name, &folder, wanted).map_err(with_argument)?;
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

    /// Returns the model in the cache, or downloads the model. `folder` is the model's folder in the cache.
    fn found(
        &self,
        name: Name<'_>,
        folder: &Path,
        wanted: &mut Wanted<'_>,
    ) -> Result<PathBuf, Error> {
        let cached = match folder.join("snapshots").is_dir() {
            true => Cached::of(snapshot(folder).map_err(Reason)?, name),
            false => Cached::Nothing,
        };
        let files = match cached {
            Cached::Model(path) => return Ok(path),
            Cached::GgufFiles(files) => Some(files),
            Cached::Nothing => None,
        };
        #[cfg(feature = "download")]
        if let Ok(hub) = &self.connection {
            return online::found(hub, name, folder, files.as_ref(), wanted);
        }
        match (files, &wanted) {
            (Some(files), Wanted::Any(_)) => files.choose(name, wanted),
            (files, _) => Err(self.absent(name, folder, files.is_some())),
        }
    }

    fn absent(&self, name: Name<'_>, folder: &Path, has_gguf: bool) -> Error {
        let kind = match has_gguf {
            true => ", which has only GGUF files of the model; this command needs safetensors",
            false => "",
        };
        Reason(format!(
            "no such local folder, and not in the Hugging Face Hub's cache ({}){kind}{}",
            folder.parent().unwrap_or(folder).display(),
            self.remedy(name)
        ))
        .into()
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

/// The state of a model in the cache.
enum Cached {
    /// The snapshot's folder with a whole checkpoint, or the named GGUF file.
    Model(PathBuf),
    /// GGUF files that the user has not named. The Hub may have a checkpoint in safetensors beside them.
    GgufFiles(GgufFiles),
    /// Nothing, or less than a whole checkpoint, as after an interrupted download.
    Nothing,
}

/// The GGUF files of a snapshot.
struct GgufFiles {
    snapshot: PathBuf,
    /// The paths and sizes of all files of the snapshot.
    sizes: Vec<(String, u64)>,
}

impl Cached {
    fn of(snapshot: PathBuf, name: Name<'_>) -> Self {
        let sizes = files_of(&snapshot);
        match name.file {
            Some(file) => match with_parts(file, &sizes) {
                Some(named) => Self::Model(snapshot.join(named.path())),
                None => Self::Nothing,
            },
            None if is_whole(&snapshot) => Self::Model(snapshot),
            None if candidates(&sizes).is_empty() => Self::Nothing,
            None => Self::GgufFiles(GgufFiles { snapshot, sizes }),
        }
    }
}

impl GgufFiles {
    fn choose(&self, name: Name<'_>, wanted: &mut Wanted<'_>) -> Result<PathBuf, Error> {
        Ok(self
            .snapshot
            .join(gguf_of(&self.sizes, name, wanted)?.path()))
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

/// Returns the reason why the network must not be used, by the rules of `huggingface_hub`. `variable` returns the value
/// of an environment variable.
#[cfg(feature = "download")]
fn offline_reason(variable: impl Fn(&str) -> Option<String>) -> Option<&'static str> {
    let of = |name: &str| variable(name).filter(|value| !value.is_empty());
    let (value, reason) = match of("HF_HUB_OFFLINE") {
        Some(value) => (value, "HF_HUB_OFFLINE forbids to download it"),
        None => (
            of("TRANSFORMERS_OFFLINE")?,
            "TRANSFORMERS_OFFLINE forbids to download it",
        ),
    };
    ["1", "ON", "YES", "TRUE"]
        .contains(&value.to_uppercase().as_str())
        .then_some(reason)
}

#[cfg(all(test, feature = "download"))]
mod offline_tests {
    use super::offline_reason;

    #[test]
    fn offline_reason_follows_huggingface_hub() {
        for (hub, transformers, expected) in [
            (None, None, None),
            (Some("1"), None, Some("HF_HUB_OFFLINE")),
            (Some("yes"), Some("0"), Some("HF_HUB_OFFLINE")),
            (None, Some("True"), Some("TRANSFORMERS_OFFLINE")),
            (Some(""), Some("on"), Some("TRANSFORMERS_OFFLINE")),
            (Some("0"), Some("1"), None),
            (None, Some("no"), None),
        ] {
            let variable = |name: &str| match name {
                "HF_HUB_OFFLINE" => hub.map(str::to_owned),
                _ => transformers.map(str::to_owned),
            };
            let found = offline_reason(variable);
            let found = found.and_then(|reason| reason.split(' ').next());
            assert_eq!(found, expected, "{hub:?}, {transformers:?}");
        }
    }
}
