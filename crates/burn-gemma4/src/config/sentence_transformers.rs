//! The files of sentence-transformers in a checkpoint's folder: the pooling, the normalization, the prompts and the
//! largest number of tokens.

use crate::error::{Gemma4Error, existing, read};
use crate::json;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// The settings of a sentence-transformers model. A folder without these files has the settings of EmbeddingGemma 2:
/// the mean over all tokens, divided by its norm, without prompts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SentenceTransformers {
    /// True if an embedding is divided by its norm.
    pub is_normalized: bool,
    /// The texts that stand before a text, by the name of their task.
    pub prompts: BTreeMap<String, String>,
    /// The prompt of texts for which none is chosen.
    pub default_prompt: Option<String>,
    /// The largest number of tokens of a text, if the files have it.
    pub max_tokens: Option<usize>,
}

#[derive(Deserialize)]
struct Part {
    path: String,
    r#type: String,
}

#[derive(Deserialize)]
struct Transformer {
    max_seq_length: Option<usize>,
    do_lower_case: Option<bool>,
    transformer_task: Option<String>,
}

#[derive(Deserialize)]
struct Prompts {
    prompts: Option<BTreeMap<String, String>>,
    default_prompt_name: Option<String>,
}

#[derive(Deserialize)]
struct Tokenizer {
    /// A float, because files without a limit have 10³⁰.
    model_max_length: Option<f64>,
}

impl Default for SentenceTransformers {
    fn default() -> Self {
        Self {
            is_normalized: true,
            prompts: BTreeMap::new(),
            default_prompt: None,
            max_tokens: None,
        }
    }
}

impl SentenceTransformers {
    /// Reads the files in `folder`. The model's embeddings have `dimensions` elements.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Malformed`] for a module or a setting that is not supported, which the error names.
    pub fn from_folder(folder: &Path, dimensions: usize) -> Result<Self, Gemma4Error> {
        let mut settings = Self::default();
        if let Some(parts) = file::<Vec<Part>>(folder, "modules.json")? {
            settings.read_modules(folder, &parts, dimensions)?;
        }
        if let Some(fields) = file::<Transformer>(folder, "sentence_bert_config.json")? {
            let refuse = |reason| malformed(folder, "sentence_bert_config.json", reason);
            if fields.do_lower_case == Some(true) {
                return refuse("do_lower_case is true; only false is supported".into());
            }
            if let Some(task) = fields
                .transformer_task
                .filter(|task| task != "feature-extraction")
            {
                return refuse(format!(
                    "transformer_task is {task:?}; only \"feature-extraction\" is supported"
                ));
            }
            settings.max_tokens = fields.max_seq_length;
        }
        if settings.max_tokens.is_none()
            && let Some(fields) = file::<Tokenizer>(folder, "tokenizer_config.json")?
        {
            let limit = fields.model_max_length;
            let limit = limit.filter(|limit| (1.0..f64::from(i32::MAX)).contains(limit));
            settings.max_tokens = limit.map(|limit| limit as usize);
        }
        if settings.max_tokens == Some(0) {
            let reason = "max_seq_length is 0; expected a number of tokens".into();
            return malformed(folder, "sentence_bert_config.json", reason);
        }
        if let Some(fields) = file::<Prompts>(folder, "config_sentence_transformers.json")? {
            settings.prompts = fields.prompts.unwrap_or_default();
            settings.default_prompt = fields.default_prompt_name;
            if let Some(name) = &settings.default_prompt
                && !settings.prompts.contains_key(name)
            {
                let reason = format!("default_prompt_name is {name:?}, which prompts lacks");
                return malformed(folder, "config_sentence_transformers.json", reason);
            }
        }
        Ok(settings)
    }

    /// Reads and checks the list of modules.
    fn read_modules(
        &mut self,
        folder: &Path,
        parts: &[Part],
        dimensions: usize,
    ) -> Result<(), Gemma4Error> {
        // Only the last name of a type is stable: the modules in front of it have moved between versions.
        let kinds: Vec<&str> = parts
            .iter()
            .map(|part| part.r#type.rsplit('.').next().unwrap_or_default())
            .collect();
        self.is_normalized = match kinds.as_slice() {
            ["Transformer", "Pooling", "Normalize"] => true,
            ["Transformer", "Pooling"] => false,
            _ => {
                let reason = format!(
                    "has the modules {kinds:?}; expected Transformer, Pooling and optionally Normalize"
                );
                return malformed(folder, "modules.json", reason);
            }
        };
        let [transformer, pooling] = [&parts[0].path, &parts[1].path];
        if !transformer.is_empty() {
            let reason = format!(
                "has the Transformer in {transformer:?}; expected the model in the folder itself"
            );
            return malformed(folder, "modules.json", reason);
        }
        if Path::new(pooling)
            .file_name()
            .is_none_or(|name| name != pooling.as_str())
        {
            let reason = format!("has the path {pooling:?}, which is not the name of a folder");
            return malformed(folder, "modules.json", reason);
        }
        let within = folder.join(pooling);
        match file::<Map<String, Value>>(&within, "config.json")? {
            Some(fields) => match check_pooling(&fields, dimensions) {
                Ok(()) => Ok(()),
                Err(reason) => malformed(&within, "config.json", reason),
            },
            None => malformed(
                folder,
                "modules.json",
                format!("{pooling}/config.json is missing"),
            ),
        }
    }
}

/// Checks that a `Pooling` module computes the mean over all tokens. There are two dialects: `pooling_mode`, and one
/// field for each mode.
fn check_pooling(fields: &Map<String, Value>, dimensions: usize) -> Result<(), String> {
    for name in ["embedding_dimension", "word_embedding_dimension"] {
        let found = fields.get(name).filter(|value| !value.is_null());
        if let Some(found) = found.filter(|value| value.as_u64() != Some(dimensions as u64)) {
            return Err(format!("{name} is {found}; the model has {dimensions}"));
        }
    }
    if fields.get("include_prompt") == Some(&Value::Bool(false)) {
        return Err("include_prompt is false; only true is supported".into());
    }
    let modes: Vec<&str> = match fields.get("pooling_mode") {
        Some(Value::String(mode)) => vec![mode],
        Some(other) => {
            return Err(format!(
                "pooling_mode is {other}; only \"mean\" is supported"
            ));
        }
        None => {
            let modes = fields.iter().filter_map(|(name, value)| {
                let mode = name.strip_prefix("pooling_mode_")?;
                (value == &Value::Bool(true)).then_some(mode)
            });
            modes.collect()
        }
    };
    match modes.as_slice() {
        ["mean" | "mean_tokens"] => Ok(()),
        other => Err(format!(
            "pooling modes are {other:?}; only \"mean\" is supported"
        )),
    }
}

/// Reads a JSON file, or returns `None` if it does not exist.
fn file<T: DeserializeOwned>(folder: &Path, name: &str) -> Result<Option<T>, Gemma4Error> {
    let Some(path) = existing(folder, name)? else {
        return Ok(None);
    };
    match json::from_slice(&read(&path)?) {
        Ok(fields) => Ok(Some(fields)),
        Err(reason) => Err(Gemma4Error::Malformed { path, reason }),
    }
}

fn malformed<T>(folder: &Path, name: &str, reason: String) -> Result<T, Gemma4Error> {
    Err(Gemma4Error::Malformed {
        path: folder.join(name),
        reason,
    })
}
