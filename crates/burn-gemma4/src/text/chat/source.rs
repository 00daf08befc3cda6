//! Where a checkpoint keeps its chat template, and what templates name of its tokenizer.

use crate::error::{existing, read};
use crate::{Gemma4Error, json};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The template of checkpoints that bring none.
pub const GEMMA4: &str = include_str!("gemma4.jinja");

/// The template that is taken where there are several.
const DEFAULT: &str = "default";

/// What templates name of the tokenizer where `tokenizer_config.json` does not say. The names are transformers', the tokens
/// Gemma 4's.
pub const SPECIAL_TOKENS: [(&str, &str); 23] = [
    ("bos_token", "<bos>"),
    ("eos_token", "<eos>"),
    ("pad_token", "<pad>"),
    ("unk_token", "<unk>"),
    ("mask_token", "<mask>"),
    ("sot_token", "<|turn>"),
    ("eot_token", "<turn|>"),
    ("soc_token", "<|channel>"),
    ("eoc_token", "<channel|>"),
    ("think_token", "<|think|>"),
    ("escape_token", "<|\"|>"),
    ("std_token", "<|tool>"),
    ("etd_token", "<tool|>"),
    ("stc_token", "<|tool_call>"),
    ("etc_token", "<tool_call|>"),
    ("str_token", "<|tool_response>"),
    ("etr_token", "<tool_response|>"),
    ("image_token", "<|image|>"),
    ("boi_token", "<|image>"),
    ("eoi_token", "<image|>"),
    ("audio_token", "<|audio|>"),
    ("boa_token", "<|audio>"),
    ("eoa_token", "<audio|>"),
];

/// Special tokens by the names that templates have for them.
#[derive(Clone, Debug)]
pub struct SpecialTokens(BTreeMap<String, String>);

impl Default for SpecialTokens {
    fn default() -> Self {
        let owned = SPECIAL_TOKENS.map(|(name, token)| (name.to_owned(), token.to_owned()));
        Self(owned.into())
    }
}

impl SpecialTokens {
    /// Gemma 4's, and in their place those of `tokens`.
    pub fn with(tokens: impl IntoIterator<Item = (String, String)>) -> Self {
        let mut all = Self::default();
        all.0.extend(tokens);
        all
    }
}

impl IntoIterator for SpecialTokens {
    type Item = (String, String);
    type IntoIter = std::collections::btree_map::IntoIter<String, String>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// The text of a file.
pub fn of_file(path: &Path) -> Result<String, Gemma4Error> {
    String::from_utf8(read(path)?).map_err(|error| Gemma4Error::Malformed {
        path: path.into(),
        reason: error.to_string(),
    })
}

/// The file that has the template, the template, and the special tokens.
pub fn of_folder(folder: &Path) -> Result<(PathBuf, String, SpecialTokens), Gemma4Error> {
    let config = TokenizerConfig::of_folder(folder)?;
    let tokens = config.iter().flat_map(TokenizerConfig::special_tokens);
    let tokens = SpecialTokens::with(tokens);
    let (path, source) = own(folder, config)?;
    Ok((path, source.unwrap_or_else(|| GEMMA4.to_owned()), tokens))
}

/// The template of a folder that brings one.
pub fn of_folder_itself(folder: &Path) -> Result<Option<String>, Gemma4Error> {
    let config = TokenizerConfig::of_folder(folder)?;
    Ok(own(folder, config)?.1)
}

/// The template that a folder brings, and the file that would have it.
fn own(
    folder: &Path,
    config: Option<TokenizerConfig>,
) -> Result<(PathBuf, Option<String>), Gemma4Error> {
    if let Some((path, source)) = of_processor(folder)? {
        return Ok((path, Some(source)));
    }
    if let Some(path) = existing(folder, "chat_template.jinja")? {
        let source = of_file(&path)?;
        return Ok((path, Some(source)));
    }
    Ok(match config {
        Some(TokenizerConfig { path, fields }) => {
            let source = fields.chat_template;
            (path, source.map(|one| one.into_default(TOKENIZER)))
        }
        None => (folder.to_owned(), None),
    })
}

/// The files of a multimodal processor, whose template transformers takes before the others, and of these two in this order.
const PROCESSOR: [&str; 2] = ["processor_config.json", "chat_template.json"];
const TOKENIZER: &str = "tokenizer_config.json";

/// The file of a processor that has a template, and the template.
fn of_processor(folder: &Path) -> Result<Option<(PathBuf, String)>, Gemma4Error> {
    for name in PROCESSOR {
        if let Some(path) = existing(folder, name)? {
            let processor: Processor = parse(&path)?;
            if let Some(templates) = processor.chat_template {
                return Ok(Some((path, templates.into_default(name))));
            }
        }
    }
    Ok(None)
}

#[derive(Deserialize)]
struct Processor {
    chat_template: Option<Templates>,
}

fn parse<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, Gemma4Error> {
    json::from_slice(&read(path)?).map_err(|reason| Gemma4Error::Malformed {
        path: path.into(),
        reason,
    })
}

/// What is read of a `tokenizer_config.json`.
struct TokenizerConfig {
    path: PathBuf,
    fields: Fields,
}

#[derive(Deserialize)]
struct Fields {
    chat_template: Option<Templates>,
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// One template, or several by their names.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "chat_template should be a template or a list of templates with names"
)]
enum Templates {
    One(String),
    Listed(Vec<Named>),
    Named(BTreeMap<String, String>),
}

#[derive(Deserialize)]
struct Named {
    name: String,
    template: String,
}

impl TokenizerConfig {
    fn of_folder(folder: &Path) -> Result<Option<Self>, Gemma4Error> {
        let path = existing(folder, TOKENIZER)?;
        path.map(Self::from_file).transpose()
    }

    fn from_file(path: PathBuf) -> Result<Self, Gemma4Error> {
        let fields = parse(&path)?;
        Ok(Self { path, fields })
    }

    /// Tokens are texts, or objects with the text as their content.
    fn special_tokens(&self) -> impl Iterator<Item = (String, String)> {
        self.fields.others.iter().filter_map(|(name, token)| {
            let text = token.as_str().or_else(|| token.get("content")?.as_str())?;
            name.ends_with("_token")
                .then(|| (name.clone(), text.to_owned()))
        })
    }
}

impl Templates {
    /// The default one of a file; where there is none, one that says so when a conversation comes.
    fn into_default(self, file: &str) -> String {
        let mut named = match self {
            Self::One(template) => return template,
            Self::Named(named) => named,
            Self::Listed(list) => list
                .into_iter()
                .map(|named| (named.name, named.template))
                .collect(),
        };
        named.remove(DEFAULT).unwrap_or_else(|| {
            let names: Vec<String> = named.into_keys().collect();
            let reason = format!(
                "{file} has the templates [{}], and none is called {DEFAULT}",
                names.join(", ")
            );
            format!("{{{{ raise_exception({}) }}}}", Value::from(reason))
        })
    }
}
