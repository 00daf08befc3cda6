//! The files of a model on the Hub, and the choice of those that the program needs.

use serde::Deserialize;

/// The answer of the Hub about a model. Fields that the program does not need are ignored.
#[derive(Deserialize)]
pub(super) struct Repository {
    /// The commit of the branch `main`.
    sha: String,
    siblings: Vec<Sibling>,
    #[serde(skip)]
    pub name: String,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

/// A file in Git's large file storage.
#[derive(Deserialize)]
struct Lfs {
    sha256: String,
    size: u64,
}

/// A file of a model on the Hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemoteFile {
    /// The path in the repository.
    pub path: String,
    pub bytes: u64,
    /// The name of the file's contents in the cache: the SHA-256 of a large file, or Git's id of a small one.
    pub etag: String,
    /// True if the file is in Git's large file storage.
    pub is_large: bool,
}

/// The files beside the weights that a model has, as far as the program reads them.
const SMALL: [&str; 13] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    INDEX,
];
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

impl Repository {
    /// Reads the answer of the Hub.
    ///
    /// # Errors
    /// Returns the reason why the answer is malformed. Commits, paths and ids become paths of the cache, so they are
    /// checked.
    pub fn parse(name: &str, json: &[u8]) -> Result<Self, String> {
        let read: Self = serde_json::from_slice(json)
            .map_err(|error| format!("the Hub's answer is malformed: {error}"))?;
        let bad = read.siblings.iter().find(|file| !is_path(&file.rfilename));
        match bad {
            _ if !is_hex(&read.sha) => Err(format!("the Hub's commit {:?} is not valid", read.sha)),
            Some(file) => Err(format!("the Hub's path {:?} is not valid", file.rfilename)),
            None => Ok(Self {
                name: name.into(),
                ..read
            }),
        }
    }

    pub fn commit(&self) -> &str {
        &self.sha
    }

    /// Returns the paths and sizes of all files.
    pub fn sizes(&self) -> Vec<(String, u64)> {
        let sizes = self.siblings.iter().map(|file| {
            let bytes = file.lfs.as_ref().map(|lfs| lfs.size).or(file.size);
            (file.rfilename.clone(), bytes.unwrap_or(0))
        });
        sizes.collect()
    }

    /// Returns the files with the given paths.
    ///
    /// # Errors
    /// Returns an error if a file is absent, or if the Hub does not give its size and id.
    pub fn files<'a>(
        &self,
        paths: impl IntoIterator<Item = &'a str>,
    ) -> Result<Vec<RemoteFile>, String> {
        paths.into_iter().map(|path| self.file(path)).collect()
    }

    fn file(&self, path: &str) -> Result<RemoteFile, String> {
        let found = self.siblings.iter().find(|file| file.rfilename == path);
        let file = found.ok_or_else(|| format!("the model has no file {path}"))?;
        let (bytes, etag, digits) = match &file.lfs {
            Some(lfs) => (Some(lfs.size), Some(&lfs.sha256), 64),
            None => (file.size, file.blob_id.as_ref(), 40),
        };
        let is_hash = |etag: &&String| etag.len() == digits && is_hex(etag);
        match (bytes, etag.filter(is_hash)) {
            (Some(bytes), Some(etag)) => Ok(RemoteFile {
                path: path.into(),
                bytes,
                etag: etag.clone(),
                is_large: file.lfs.is_some(),
            }),
            _ => Err(format!("the Hub gives no size and id of {path}")),
        }
    }

    /// Returns the paths of a checkpoint in safetensors: the weights, and the files beside them. Returns `None` if the
    /// model has no such checkpoint.
    pub fn checkpoint(&self) -> Option<Vec<&str>> {
        let has = |path: &str| self.siblings.iter().any(|file| file.rfilename == path);
        // A single file comes before an index, as in Hugging Face Transformers.
        let weights: Vec<&str> = match (has(SINGLE), has(INDEX)) {
            (true, _) => vec![SINGLE],
            (false, true) => self.paths().filter(|path| is_shard(path)).collect(),
            (false, false) => Vec::new(),
        };
        if weights.is_empty() || !has("config.json") {
            return None;
        }
        let small = SMALL.into_iter();
        let small = small.filter(|path| has(path) && (*path != INDEX || !has(SINGLE)));
        Some(small.chain(weights).collect())
    }

    fn paths(&self) -> impl Iterator<Item = &str> {
        self.siblings.iter().map(|file| file.rfilename.as_str())
    }
}

/// True if the path is one of several files with weights, such as `model-00001-of-00003.safetensors`.
fn is_shard(path: &str) -> bool {
    let numbers = path
        .strip_prefix("model-")
        .and_then(|rest| rest.strip_suffix(".safetensors"))
        .and_then(|rest| rest.split_once("-of-"));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    numbers.is_some_and(|(number, count)| is_number(number) && is_number(count))
}

/// True if the text is a commit or an id: a hexadecimal number.
fn is_hex(text: &str) -> bool {
    (40..=64).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// True if the path leads to a file within the repository, on every operating system.
pub(super) fn is_path(path: &str) -> bool {
    let is_part = |part: &str| {
        let allowed = |one: char| !one.is_control() && !"\\:*?\"<>|".contains(one);
        !part.is_empty() && part != "." && part != ".." && part.chars().all(allowed)
    };
    path.split('/').all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repository(files: &[&str]) -> Repository {
        let siblings: Vec<serde_json::Value> = files
            .iter()
            .map(|path| serde_json::json!({"rfilename": path, "size": 3, "blobId": "a".repeat(40)}))
            .collect();
        let answer = serde_json::json!({"sha": "b".repeat(40), "siblings": siblings});
        Repository::parse("org/name", answer.to_string().as_bytes()).expect("the answer is valid")
    }

    #[test]
    fn checkpoint_has_weights_of_the_index_and_small_files() {
        let shards = [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ];
        let some = [
            "README.md",
            "config.json",
            "tokenizer.json",
            "consolidated.safetensors",
        ];
        let all: Vec<&str> = some.into_iter().chain(shards).chain([INDEX]).collect();
        let expected = ["config.json", "tokenizer.json", INDEX, shards[0], shards[1]];
        assert_eq!(repository(&all).checkpoint(), Some(expected.to_vec()));
        let single = repository(&["config.json", "model.safetensors", "x.gguf"]);
        assert_eq!(single.checkpoint(), Some(vec!["config.json", SINGLE]));
        let both = repository(&["config.json", INDEX, shards[0], SINGLE]);
        assert_eq!(both.checkpoint(), Some(vec!["config.json", SINGLE]));
        for files in [&["model.safetensors"][..], &["config.json", "x.gguf"], &[]] {
            assert_eq!(repository(files).checkpoint(), None, "{files:?}");
        }
    }

    #[test]
    fn parse_refuses_paths_out_of_the_cache() {
        for path in ["../x", "/x", "a/../x", "a\\x", "C:x", "", "a//b", "x\n"] {
            let answer = serde_json::json!({
                "sha": "b".repeat(40), "siblings": [{"rfilename": path}]
            });
            assert!(
                Repository::parse("a/b", answer.to_string().as_bytes()).is_err(),
                "{path:?}"
            );
        }
        let answer = serde_json::json!({"sha": "../..", "siblings": []});
        assert!(Repository::parse("a/b", answer.to_string().as_bytes()).is_err());
        assert!(Repository::parse("a/b", b"<html>").is_err());
    }
}
