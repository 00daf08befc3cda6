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
    /// True if the first tokens of a text that is too long are dropped, and not the last.
    pub truncates_left: bool,
}

#[derive(Deserialize)]
struct Part {
    path: String,
    r#type: String,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Deserialize)]
struct Transformer {
    max_seq_length: Option<usize>,
    do_lower_case: Option<bool>,
    transformer_task: Option<String>,
    #[serde(flatten)]
    others: Map<String, Value>,
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
    truncation_side: Option<String>,
}

#[derive(Deserialize)]
struct TokenizerFile {
    truncation: Option<Truncation>,
}

#[derive(Deserialize)]
struct Truncation {
    direction: Option<String>,
}

impl Default for SentenceTransformers {
    fn default() -> Self {
        Self {
            is_normalized: true,
            prompts: BTreeMap::new(),
            default_prompt: None,
            max_tokens: None,
            truncates_left: false,
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
            if let Err(reason) = check_transformer(&fields.others) {
                return refuse(reason);
            }
            settings.max_tokens = fields.max_seq_length;
        }
        settings.read_tokenizer(folder)?;
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

    /// Reads the limit and the side of truncation of the tokenizer's files.
    fn read_tokenizer(&mut self, folder: &Path) -> Result<(), Gemma4Error> {
        let fields = file::<Tokenizer>(folder, "tokenizer_config.json")?;
        let (limit, side) = match fields {
            Some(fields) => (fields.model_max_length, fields.truncation_side),
            None => (None, None),
        };
        let limit = limit.filter(|limit| (1.0..f64::from(i32::MAX)).contains(limit));
        self.max_tokens = self.max_tokens.or(limit.map(|limit| limit as usize));
        let (name, side) = match side {
            Some(side) => ("tokenizer_config.json", Some(side)),
            // Transformers takes the side of this file if the other one has none.
            None => {
                let file = file::<TokenizerFile>(folder, "tokenizer.json")?;
                let truncation = file.and_then(|file| file.truncation);
                let side = truncation.and_then(|truncation| truncation.direction);
                ("tokenizer.json", side.map(|side| side.to_lowercase()))
            }
        };
        self.truncates_left = match side.as_deref() {
            None | Some("right") => false,
            Some("left") => true,
            Some(other) => {
                let reason =
                    format!("the side of truncation is {other:?}; expected \"left\" or \"right\"");
                return malformed(folder, name, reason);
            }
        };
        Ok(())
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
        for part in parts {
            let unknown = part
                .others
                .iter()
                .find(|(name, value)| !matches!(name.as_str(), "idx" | "name") && !is_empty(value));
            if let Some((name, value)) = unknown {
                let reason = format!(
                    "{name} of the module {} is {value}; expected none",
                    part.r#type
                );
                return malformed(folder, "modules.json", reason);
            }
        }
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

/// The arguments of models in `sentence_bert_config.json` that do not change the embeddings beyond rounding.
const HARMLESS_ARGUMENTS: [&str; 4] = [
    "attn_implementation",
    "dtype",
    "torch_dtype",
    "trust_remote_code",
];

/// Checks the further fields of `sentence_bert_config.json`. The model must give its last hidden states of texts, which
/// only the pooling changes.
fn check_transformer(fields: &Map<String, Value>) -> Result<(), String> {
    for (name, value) in fields {
        let is_supported = match name.as_str() {
            // The embeddings are the same without padding.
            "unpad_inputs" => true,
            "module_output_name" => value == "token_embeddings",
            // Other modalities are not supported, whatever their settings are.
            "modality_config" => value.get("text").is_some_and(|text| {
                text["method"] == "forward" && text["method_output_name"] == "last_hidden_state"
            }),
            "model_args" | "model_kwargs" | "config_args" | "config_kwargs" => {
                value.as_object().is_some_and(|arguments| {
                    let mut names = arguments.keys();
                    names.all(|name| HARMLESS_ARGUMENTS.contains(&name.as_str()))
                })
            }
            _ => false,
        };
        if !is_supported && !is_empty(value) {
            return Err(format!("{name} is {value}, which is not supported"));
        }
    }
    Ok(())
}

/// True for a value that sets nothing.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(values) => values.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
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
