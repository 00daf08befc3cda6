//! Finds models by their names in this machine's cache of the Hugging Face Hub. With the feature `download`, a model that
//! the cache lacks is downloaded. `hf download` fills the same cache.

#[cfg(feature = "download")]
mod download;
mod gguf_files;
#[cfg(feature = "download")]
mod repository;
#[cfg(all(test, feature = "download"))]
mod tests;

use crate::{Error, terminal::WrongArgument, terminal::note};
use gguf_files::{Candidate, candidates, choose, gigabytes, with_parts};
use std::{
    env, fs,
    path::{Path, PathBuf},
};

/// The memory of the device in bytes, or `None` if the device does not report its memory. The function is called only
/// if one of several GGUF files must be chosen.
pub type MemoryOf<'a> = &'a mut dyn FnMut() -> Result<Option<u64>, Error>;

/// Resolves the argument `--model` to a folder or file. The argument may be a model's folder in the Hub's cache, a name
/// `organisation/name`, or a GGUF file `organisation/name:file.gguf`. A model that the cache lacks is downloaded. Among
/// several GGUF files, the largest that fits `memory` is taken. Any other path is returned unchanged.
///
/// # Errors
/// Returns [`WrongArgument`] if the path is a safetensors file, if the model cannot be found or downloaded, or if none of
/// its GGUF files fits. The error says how to proceed.
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
        let found =
            match folder.join("snapshots").is_dir() {
                true => in_snapshot(&snapshot(&folder).map_err(refuse)?, name, wanted).map_err(
                    |error| match error.downcast::<Reason>() {
                        Ok(reason) => refuse(reason.0),
                        Err(other) => other,
                    },
                )?,
                false => None,
            };
        let found = match found {
            Some(found) => found,
            None => self.download(name, &folder, wanted).map_err(|error| {
                match error.downcast::<Reason>() {
                    Ok(reason) => refuse(reason.0),
                    Err(other) => other,
                }
            })?,
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
            gigabytes(missing.iter().sum()),
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

/// Returns the model in a snapshot of the cache: the snapshot's folder, or one of its GGUF files. Returns `None` if files
/// are missing, as after an interrupted download.
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

/// True if a snapshot has a configuration, and all files of weights that its index names.
fn is_whole(snapshot: &Path) -> bool {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let index = fs::read(snapshot.join("model.safetensors.index.json"));
    let has_weights = match index {
        Ok(index) => match serde_json::from_slice::<Index>(&index) {
            Ok(index) => index
                .weight_map
                .values()
                .all(|file| snapshot.join(file).exists()),
            // The loader says what is wrong with the index.
            Err(_) => true,
        },
        Err(_) => snapshot.join("model.safetensors").exists(),
    };
    has_weights && snapshot.join("config.json").exists()
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

/// Returns the paths and sizes of the files in a snapshot and in its folders.
fn files_of(snapshot: &Path) -> Vec<(String, u64)> {
    let list = |folder: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).into_iter().flatten();
        entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .collect()
    };
    let (folders, files): (Vec<PathBuf>, Vec<PathBuf>) =
        list(snapshot).into_iter().partition(|path| path.is_dir());
    let files = files
        .into_iter()
        .chain(folders.iter().flat_map(|folder| list(folder)));
    let mut found: Vec<(String, u64)> = files
        .filter_map(|path| {
            let bytes = fs::metadata(&path)
                .ok()
                .filter(fs::Metadata::is_file)?
                .len();
            let path = path.strip_prefix(snapshot).ok()?.to_str()?;
            Some((path.replace('\\', "/"), bytes))
        })
        .collect();
    found.sort();
    found
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

/// Returns the Hub's cache folder, in which `hf download` stores models. The rules are those of `huggingface_hub`.
fn cache_folder() -> Option<PathBuf> {
    let of = |name: &str| {
        env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let home = || of("HOME").or_else(|| of("USERPROFILE"));
    of("HF_HUB_CACHE")
        .or_else(|| of("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| Some(of("HF_HOME")?.join("hub")))
        .or_else(|| Some(of("XDG_CACHE_HOME")?.join("huggingface/hub")))
        .or_else(|| Some(home()?.join(".cache/huggingface/hub")))
}

/// Returns the snapshot in a model's cache folder: the snapshot that `refs/main` names, or the only snapshot.
fn snapshot(folder: &Path) -> Result<PathBuf, String> {
    let snapshots = folder.join("snapshots");
    if let Ok(commit) = fs::read_to_string(folder.join("refs/main")) {
        let commit = commit.trim();
        // Accept only an alphanumeric name. The contents of `refs/main` are untrusted, and a path could lead out of the
        // folder.
        let is_name = !commit.is_empty() && commit.chars().all(|one| one.is_ascii_alphanumeric());
        let path = snapshots.join(commit);
        if is_name && path.is_dir() {
            return Ok(path);
        }
    }
    let entries = fs::read_dir(&snapshots).map_err(|error| error.to_string())?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.is_dir())
        .collect();
    found.sort();
    match &found[..] {
        [only] => Ok(only.clone()),
        [] => Err("has no snapshot in snapshots/; expected a downloaded model".into()),
        several => Err(format!(
            "has {} snapshots in snapshots/, and refs/main names none of them; expected the path of one",
            several.len()
        )),
    }
}

#[cfg(test)]
mod cached {
    use super::*;
    use tempfile::TempDir;

    /// Creates a Hub cache with one model, which has these `snapshots`. `main` is the contents of `refs/main`. Returns the
    /// cache and the model's folder.
    fn cache(snapshots: &[&str], main: Option<&str>) -> (TempDir, PathBuf) {
        let cache = TempDir::new().expect("a folder");
        let folder = cache.path().join("models--google--gemma-4-E2B-it");
        for snapshot in snapshots {
            let snapshot = folder.join("snapshots").join(snapshot);
            write(&snapshot, &["config.json", "model.safetensors"]);
        }
        if let Some(main) = main {
            fs::create_dir(folder.join("refs")).expect("a folder");
            fs::write(folder.join("refs/main"), main).expect("a file");
        }
        (cache, folder)
    }

    fn resolved(model: impl AsRef<Path>, cache: &TempDir) -> Result<PathBuf, String> {
        let hub = Hub {
            cache: Some(cache.path().to_owned()),
            #[cfg(feature = "download")]
            connection: Err("HF_HUB_OFFLINE forbids to download it"),
        };
        let mut memory = || Ok(Some(8_000_000_000));
        hub.resolve(model.as_ref(), &mut Wanted::Any(&mut memory))
            .map_err(|error| error.to_string())
    }

    fn write(folder: &Path, files: &[&str]) {
        for file in files {
            let path = folder.join(file);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, "{}").expect("a file");
        }
    }

    #[test]
    fn hub_name_in_cache_resolves_to_snapshot() {
        let name = "google/gemma-4-E2B-it";
        let (kept, folder) = cache(&["0123", "4567"], Some("4567\n"));
        let expected = folder.join("snapshots/4567");
        assert_eq!(resolved(name, &kept), Ok(expected.clone()));
        assert_eq!(resolved(&folder, &kept), Ok(expected));
        let (kept, folder) = cache(&["0123"], None);
        assert_eq!(resolved(name, &kept), Ok(folder.join("snapshots/0123")));
        for (snapshots, main) in [
            (&["0123", "4567"], None),
            (&["0123", "4567"], Some("../..")),
        ] {
            let (kept, _) = cache(snapshots, main);
            let error = resolved(name, &kept).expect_err("two snapshots");
            assert!(error.contains("snapshots"), "{error}");
        }
    }

    #[test]
    fn hub_name_not_in_cache_is_refused_with_download_command() {
        let (kept, _) = cache(&["0123"], None);
        let error = resolved("google/gemma-4-E4B-it", &kept).expect_err("another model");
        let remedy = "hf download google/gemma-4-E4B-it";
        assert!(error.contains(remedy), "{error}");
        assert_eq!(error.contains("HF_HUB_OFFLINE"), cfg!(feature = "download"));
    }

    #[test]
    fn hub_name_with_an_incomplete_snapshot_is_not_loaded() {
        let (kept, folder) = cache(&["0123"], None);
        fs::remove_file(folder.join("snapshots/0123/model.safetensors")).expect("the file exists");
        let error = resolved("google/gemma-4-E2B-it", &kept).expect_err("no weights");
        assert!(
            error.contains("not in the Hugging Face Hub's cache"),
            "{error}"
        );
    }

    #[test]
    fn hub_name_of_gguf_files_takes_the_largest_that_fits() {
        let (kept, folder) = cache(&[], None);
        let snapshot = folder.join("snapshots/0123");
        write(&snapshot, &["e2b-Q4_0.gguf", "mmproj-F16.gguf"]);
        fs::write(snapshot.join("e2b-Q8_0.gguf"), "longer").expect("a file");
        write(&snapshot, &["BF16/e2b-00001-of-00002.gguf"]);
        let name = "google/gemma-4-E2B-it";
        assert_eq!(resolved(name, &kept), Ok(snapshot.join("e2b-Q8_0.gguf")));
        let named = format!("{name}:e2b-Q4_0.gguf");
        assert_eq!(resolved(&named, &kept), Ok(snapshot.join("e2b-Q4_0.gguf")));
        for file in ["e2b-Q5_0.gguf", "BF16/e2b-00001-of-00002.gguf"] {
            let error = resolved(format!("{name}:{file}"), &kept).expect_err("the file is absent");
            assert!(
                error.contains("not in the Hugging Face Hub's cache"),
                "{error}"
            );
        }
        for file in ["../x.gguf", "e2b.bin", "", "a//b.gguf"] {
            let error = resolved(format!("{name}:{file}"), &kept).expect_err("not a file");
            assert!(error.contains("no such file or folder"), "{error}");
        }
    }

    #[test]
    fn path_that_exists_is_unchanged_and_others_are_refused() {
        let (kept, folder) = cache(&["0123"], None);
        let snapshot = folder.join("snapshots/0123");
        assert_eq!(resolved(&snapshot, &kept), Ok(snapshot));
        for path in [
            "absent",
            "/absent/folder",
            "../absent",
            "a/b/c",
            "models/e2b.gguf",
        ] {
            let error = resolved(path, &kept).expect_err("the path does not exist");
            assert!(error.contains("no such file or folder"), "{error}");
        }
    }
}
