//! Tests of models that are in the cache, without a network.

use super::{Hub, Wanted};
use std::{
    fs,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

/// Creates a Hub cache with one model, which has these `snapshots`. `main` is the contents of `refs/main`. Returns the
/// cache and the model's folder.
fn cache(snapshots: &[&str], main: Option<&str>) -> (TempDir, PathBuf) {
    let cache = TempDir::new().expect("a folder");
    let folder = cache.path().join("models--google--gemma-4-E2B-it");
    for snapshot in snapshots {
        let snapshot = folder.join("snapshots").join(snapshot);
        let files = ["config.json", "tokenizer.json", "model.safetensors"];
        write(&snapshot, &files);
    }
    if let Some(main) = main {
        fs::create_dir(folder.join("refs")).expect("a folder");
        fs::write(folder.join("refs/main"), main).expect("a file");
    }
    (cache, folder)
}

fn hub(cache: &TempDir) -> Hub {
    Hub {
        cache: Some(cache.path().to_owned()),
        #[cfg(feature = "download")]
        connection: Err("HF_HUB_OFFLINE forbids to download it"),
    }
}

fn resolved(model: impl AsRef<Path>, cache: &TempDir) -> Result<PathBuf, String> {
    let hub = hub(cache);
    let mut memory = || Ok(Some(8_000_000_000));
    hub.resolve("--model", model.as_ref(), &mut Wanted::Any(&mut memory))
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
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        let (kept, folder) = cache(&["0123"], None);
        fs::remove_file(folder.join("snapshots/0123").join(file)).expect("the file exists");
        let error = resolved("google/gemma-4-E2B-it", &kept).expect_err(file);
        assert!(
            error.contains("not in the Hugging Face Hub's cache"),
            "{error}"
        );
    }
}

#[test]
fn hub_name_with_a_single_file_and_a_stale_index_resolves() {
    let (kept, folder) = cache(&["0123"], None);
    let snapshot = folder.join("snapshots/0123");
    let index = r#"{"weight_map": {"a": "model-00001-of-00002.safetensors"}}"#;
    fs::write(snapshot.join("model.safetensors.index.json"), index).expect("a file");
    assert_eq!(resolved("google/gemma-4-E2B-it", &kept), Ok(snapshot));
}

#[test]
fn hub_name_of_gguf_files_is_refused_by_a_command_that_needs_a_folder() {
    let (kept, folder) = cache(&[], None);
    write(&folder.join("snapshots/0123"), &["e2b-Q4_0.gguf"]);
    let name = Path::new("google/gemma-4-E2B-it");
    let found = hub(&kept).resolve("--draft", name, &mut Wanted::Folder);
    let error = found.expect_err("there are no safetensors").to_string();
    assert!(
        error.starts_with("--draft: google/gemma-4-E2B-it: no such local folder"),
        "{error}"
    );
    for words in ["only GGUF files", "hf download google/gemma-4-E2B-it"] {
        assert!(error.contains(words), "{error}");
    }
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
