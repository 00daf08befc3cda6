//! The cache of the Hugging Face Hub on this machine, in the layout of `huggingface_hub`.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

/// Returns the Hub's cache folder, in which `hf download` stores models. The rules are those of `huggingface_hub`.
pub(super) fn cache_folder() -> Option<PathBuf> {
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
pub(super) fn snapshot(folder: &Path) -> Result<PathBuf, String> {
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

/// True if a snapshot has a configuration, a tokenizer, and a single file of weights or all files that its index names.
/// Another program may have downloaded only some of the files.
pub(super) fn is_whole(snapshot: &Path) -> bool {
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
        Err(_) => false,
    };
    let has_weights = has_weights || snapshot.join("model.safetensors").exists();
    let mut others = ["config.json", "tokenizer.json"].iter();
    has_weights && others.all(|file| snapshot.join(file).exists())
}

/// Returns the paths and sizes of the files in a snapshot and in its folders.
pub(super) fn files_of(snapshot: &Path) -> Vec<(String, u64)> {
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
