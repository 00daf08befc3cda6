//! Finds models by their names in this machine's cache of the Hugging Face Hub. The program downloads nothing: `hf download`
//! fills the cache.

use crate::{Error, terminal::WrongArgument, terminal::note};
use std::{
    env, fs,
    path::{Path, PathBuf},
};

/// Resolves the argument `--model` to a folder or file. If the argument is a model's folder in the Hub's cache, or a
/// name `organisation/name`, the result is the folder of the model's snapshot. Any other path is returned unchanged.
///
/// # Errors
/// Returns [`WrongArgument`] if the path is a safetensors file or if the cache lacks the model. The error says how to
/// proceed.
pub fn resolve(model: &Path) -> Result<PathBuf, Error> {
    resolve_in(model, cache_folder().as_deref())
}

fn resolve_in(model: &Path, cache: Option<&Path>) -> Result<PathBuf, Error> {
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
    let Some(name) = name_on_hub(model) else {
        return Err(refuse("no such file or folder".into()));
    };
    let folder = cache.map(|cache| cache.join(format!("models--{}", name.replace('/', "--"))));
    match folder
        .as_deref()
        .filter(|folder| folder.join("snapshots").is_dir())
    {
        Some(folder) => {
            let found = snapshot(folder).map_err(refuse)?;
            note(format_args!(
                "note: {name} is in the Hub's cache; loading {}",
                found.display()
            ));
            Ok(found)
        }
        None => {
            let searched = cache.map_or("no cache".into(), |cache| cache.display().to_string());
            Err(refuse(format!(
                "no such folder, and not in the Hugging Face Hub's cache ({searched}); `hf download {name}` downloads it"
            )))
        }
    }
}

/// Returns the path as a name `organisation/name`, or `None` if the path does not have this form.
fn name_on_hub(model: &Path) -> Option<&str> {
    let text = model.to_str()?;
    let (organisation, name) = text.split_once('/')?;
    let is_part = |part: &str| {
        let mut characters = part.chars();
        characters
            .next()
            .is_some_and(|first| first.is_ascii_alphanumeric() || first == '_')
            && characters.all(|other| other.is_ascii_alphanumeric() || "-_.".contains(other))
    };
    // Do not treat a path with a weight file's extension as a model's name, because the user means a file.
    let is_file = text.ends_with(".gguf") || text.ends_with(".safetensors");
    (is_part(organisation) && is_part(name) && !is_file).then_some(text)
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
mod tests {
    use super::*;
    use tempfile::TempDir;

    /// Creates a Hub cache with one model, which has these `snapshots`. `main` is the contents of `refs/main`. Returns the
    /// cache and the model's folder.
    fn cache(snapshots: &[&str], main: Option<&str>) -> (TempDir, PathBuf) {
        let cache = TempDir::new().expect("a folder");
        let folder = cache.path().join("models--google--gemma-4-E2B-it");
        for snapshot in snapshots {
            fs::create_dir_all(folder.join("snapshots").join(snapshot)).expect("a folder");
        }
        if let Some(main) = main {
            fs::create_dir(folder.join("refs")).expect("a folder");
            fs::write(folder.join("refs/main"), main).expect("a file");
        }
        (cache, folder)
    }

    fn resolved(model: impl AsRef<Path>, cache: &TempDir) -> Result<PathBuf, String> {
        resolve_in(model.as_ref(), Some(cache.path())).map_err(|error| error.to_string())
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
        assert!(
            error.contains("hf download google/gemma-4-E4B-it"),
            "{error}"
        );
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
