//! Reads a chat template and its special tokens from the files of a checkpoint.

use crate::error::Gemma4Error;
use crate::error::{existing, read};
use crate::json;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Gemma 4's chat template. It is used for checkpoints whose files contain no template.
pub const GEMMA4: &str = include_str!("gemma4.jinja");

/// The name of the template that is used if a file lists several templates.
const DEFAULT: &str = "default";

/// The default values of the template variables for special tokens, as pairs of a variable's name and its token. A
/// default is used if `tokenizer_config.json` does not define the variable. The names are those of Hugging Face
/// Transformers, and the tokens are those of Gemma 4.
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

/// The special tokens, indexed by the names of their template variables.
#[derive(Clone, Debug)]
pub struct SpecialTokens(BTreeMap<String, String>);

impl Default for SpecialTokens {
    fn default() -> Self {
        let owned = SPECIAL_TOKENS.map(|(name, token)| (name.to_owned(), token.to_owned()));
        Self(owned.into())
    }
}

impl SpecialTokens {
    /// Completes `tokens` with Gemma 4's special tokens. Each element of `tokens` is the name of a template variable
    /// and the variable's token. If Gemma 4 defines the same variable, the token of `tokens` has precedence.
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

/// Reads a UTF-8 text file.
pub fn of_file(path: &Path) -> Result<String, Gemma4Error> {
    String::from_utf8(read(path)?).map_err(|error| Gemma4Error::Malformed {
        path: path.into(),
        reason: error.to_string(),
    })
}

/// Returns a folder's template and special tokens. If no file has a template, returns the template of Gemma 4. Also
/// returns a path to show in error messages that concern the template. [`own`] explains the choice of this path.
pub fn of_folder(folder: &Path) -> Result<(PathBuf, String, SpecialTokens), Gemma4Error> {
    let config = TokenizerConfig::of_folder(folder)?;
    let tokens = config.iter().flat_map(TokenizerConfig::special_tokens);
    let tokens = SpecialTokens::with(tokens);
    let (path, source) = own(folder, config)?;
    Ok((path, source.unwrap_or_else(|| GEMMA4.to_owned()), tokens))
}

/// Returns the template in a folder's files, or `None` if no file has a template.
pub fn of_folder_itself(folder: &Path) -> Result<Option<String>, Gemma4Error> {
    let config = TokenizerConfig::of_folder(folder)?;
    Ok(own(folder, config)?.1)
}

/// Returns the template in a folder's files, or `None` if no file has a template. Also returns a path to show in error
/// messages. This path is the file with the template. If no file has a template, this path is `tokenizer_config.json`,
/// or the folder if `tokenizer_config.json` does not exist.
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

/// The files of a multimodal processor that may contain a template. Hugging Face Transformers reads these files in this
/// order. It prefers a template in these files to a template in any other file.
const PROCESSOR: [&str; 2] = ["processor_config.json", "chat_template.json"];
const TOKENIZER: &str = "tokenizer_config.json";

/// Searches the processor files for a template. Returns the first template, with the path of the file that contains it.
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

/// The fields of `tokenizer_config.json` that this module reads.
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

/// One template, or a list of named templates.
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

    /// Returns the special tokens in the file. A token is a string, or an object with a string in the field `content`.
    fn special_tokens(&self) -> impl Iterator<Item = (String, String)> {
        self.fields.others.iter().filter_map(|(name, token)| {
            let text = token.as_str().or_else(|| token.get("content")?.as_str())?;
            name.ends_with("_token")
                .then(|| (name.clone(), text.to_owned()))
        })
    }
}

impl Templates {
    /// Returns the default template of a file. If a file has several templates and none is called `default`, returns a
    /// template that raises an error when it is rendered.
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
                "{file} has the templates [{}], but none is called {DEFAULT}",
                names.join(", ")
            );
            format!("{{{{ raise_exception({}) }}}}", Value::from(reason))
        })
    }
}
