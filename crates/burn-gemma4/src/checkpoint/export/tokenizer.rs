//! Converts a folder's tokenizer to GGUF's form: tokens, token types and merges. GGUF cannot express normalization and
//! pre-tokenization. The module therefore refuses a tokenizer whose normalization or pre-tokenization differs from
//! Gemma's.

use crate::checkpoint::gguf::tokenizer::{NAMED, decoder, normalizer, pre_tokenizer, token_type};
use crate::checkpoint::gguf::writer::Written;
use crate::config::Gemma4Config;
use crate::error::{Gemma4Error, existing, read};
use serde::Deserialize;
use serde_json::Value;
use std::{collections::BTreeMap, path::Path};

/// The special tokens that get the type `USER_DEFINED` instead of `CONTROL`. llama.cpp removes control tokens from the
/// text of an answer, but llama.cpp's parser of answers needs these tokens.
const VISIBLE: [&str; 7] = [
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|\"|>",
];
/// The score that llama.cpp's converter gives to every token of Gemma 4.
const SCORE: f32 = -1000.0;

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    decoder: Value,
    model: Model,
}

#[derive(Deserialize)]
struct AddedToken {
    id: usize,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
struct Model {
    unk_token: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    ignore_merges: bool,
    vocab: BTreeMap<String, usize>,
    merges: Vec<Merge>,
}

/// A merge rule, which joins the texts of two tokens. In the file, a rule is either a list of the two texts, or one
/// text that contains both with a space between them.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Apart(String, String),
    Together(String),
}

/// The tokens of a `tokenizer.json` with their GGUF types, the merges, and the ids of tokens with a role, such as `bos`.
pub(super) struct Tokens {
    texts: Vec<String>,
    types: Vec<i32>,
    merges: Vec<String>,
    /// The tokens with a role: the role's name in GGUF's keys, such as `bos`, and the token's id.
    named: Vec<(&'static str, usize)>,
}

impl Tokens {
    /// Reads the tokenizer of the folder `from`.
    pub fn read(from: &Path, config: &Gemma4Config) -> Result<Self, Gemma4Error> {
        let path = from.join("tokenizer.json");
        let malformed = |reason: String| Gemma4Error::Malformed {
            path: path.clone(),
            reason,
        };
        let file: File =
            serde_json::from_slice(&read(&path)?).map_err(|error| malformed(error.to_string()))?;
        let tokens = Self::of(file, config.vocab_size).map_err(malformed)?;
        tokens.with_names(from, config)
    }

    fn of(file: File, vocabulary: usize) -> Result<Self, String> {
        file.refuse_others()?;
        let mut texts: Vec<Option<String>> = vec![None; vocabulary];
        let mut types = vec![token_type::UNUSED as i32; vocabulary];
        let mut add = |id: usize, text: String, kind: usize| match texts.get_mut(id) {
            Some(place) => {
                *place = Some(text);
                types[id] = kind as i32;
                Ok(())
            }
            None => Err(format!(
                "has the token {id}, but the model's vocabulary, and with it GGUF's, has {vocabulary} tokens"
            )),
        };
        for (text, id) in file.model.vocab {
            let is_byte = text.len() == 6 && text.starts_with("<0x") && text.ends_with('>');
            let kind = match is_byte {
                true => token_type::BYTE,
                false => token_type::NORMAL,
            };
            add(id, text, kind)?;
        }
        for AddedToken {
            id,
            content,
            special,
            ..
        } in file.added_tokens
        {
            let kind = match special && !VISIBLE.contains(&content.as_str()) {
                true => token_type::CONTROL,
                false => token_type::USER_DEFINED,
            };
            add(id, content, kind)?;
        }
        let texts = texts.into_iter().enumerate();
        let merges = file.model.merges.into_iter();
        Ok(Self {
            // An id without a token in the `tokenizer.json` gets a placeholder text, as in llama.cpp's converter.
            texts: texts
                .map(|(id, text)| text.unwrap_or_else(|| format!("[PAD{id}]")))
                .collect(),
            types,
            merges: merges.map(Merge::joined).collect::<Result<_, _>>()?,
            named: Vec::new(),
        })
    }

    /// Adds the ids of tokens with a role, such as `bos`. The ids come from the configuration of the tokenizer or of
    /// the model.
    fn with_names(mut self, from: &Path, config: &Gemma4Config) -> Result<Self, Gemma4Error> {
        let json = match existing(from, "tokenizer_config.json")? {
            Some(path) => {
                let json = serde_json::from_slice(&read(&path)?);
                json.map_err(|error| Gemma4Error::Malformed {
                    path,
                    reason: error.to_string(),
                })?
            }
            None => Value::Null,
        };
        for (name, of_template) in NAMED {
            let text = json.get(of_template);
            let text =
                text.and_then(|text| text.as_str().or_else(|| text.get("content")?.as_str()));
            let by_text = text.and_then(|text| self.texts.iter().position(|token| token == text));
            let by_config = match name {
                "bos" => Some(config.bos_token as usize),
                "eos" => config.eos_tokens.first().map(|token| *token as usize),
                "padding" => Some(config.pad_token as usize),
                _ => None,
            };
            // Take the ids of `bos` and `padding` from the model's configuration, because the model expects that a text
            // begins with this configuration's `bos` token.
            let id = match name {
                "bos" | "padding" => by_config,
                _ => by_text.or(by_config),
            };
            self.named.extend(id.map(|id| (name, id)));
        }
        Ok(self)
    }

    /// Adds the tokenizer's keys and their values to `values`.
    pub fn add_to(self, values: &mut Vec<(String, Written)>) {
        let Self {
            texts,
            types,
            merges,
            named,
        } = self;
        let scores = vec![SCORE; texts.len()];
        let mut add = |key: &str, value| values.push((format!("tokenizer.ggml.{key}"), value));
        add("model", Written::Text("gemma4".into()));
        add("tokens", Written::Texts(texts));
        add("scores", Written::F32s(scores));
        add("token_type", Written::I32s(types));
        add("merges", Written::Texts(merges));
        for (name, id) in named {
            add(&format!("{name}_token_id"), Written::U32(id as u32));
        }
        add("add_space_prefix", Written::Boolean(false));
        add("add_bos_token", Written::Boolean(true));
    }
}

impl File {
    /// Refuses a tokenizer whose normalization, pre-tokenization or decoding differs from Gemma 4's. A GGUF file cannot
    /// express such a difference.
    fn refuse_others(&self) -> Result<(), String> {
        let Model {
            unk_token,
            byte_fallback,
            fuse_unk,
            ignore_merges,
            ..
        } = &self.model;
        let added = |is: fn(&AddedToken) -> bool| self.added_tokens.iter().any(is);
        let others = [
            ("normalizer", self.normalizer != normalizer()),
            ("pre_tokenizer", self.pre_tokenizer != pre_tokenizer()),
            ("decoder", self.decoder != decoder()),
            (
                "model's unk_token",
                unk_token.as_deref().is_none_or(|token| token != "<unk>"),
            ),
            ("model's byte_fallback", !byte_fallback),
            ("model's fuse_unk", !fuse_unk),
            ("model's ignore_merges", *ignore_merges),
            (
                "added token with single_word",
                added(|token| token.single_word),
            ),
            ("added token with lstrip", added(|token| token.lstrip)),
            ("added token with rstrip", added(|token| token.rstrip)),
            (
                "added token that is normalized",
                added(|token| token.normalized),
            ),
        ];
        match others.iter().find(|(_, is_other)| *is_other) {
            None => Ok(()),
            Some((what, _)) => Err(format!(
                "its {what} differs from Gemma 4's, which is the only one that GGUF has words for"
            )),
        }
    }
}

impl Merge {
    fn joined(self) -> Result<String, String> {
        match self {
            Self::Together(merge) => Ok(merge),
            Self::Apart(first, second) if !(first.contains(' ') || second.contains(' ')) => {
                Ok(format!("{first} {second}"))
            }
            Self::Apart(first, second) => Err(format!(
                "merges {first:?} and {second:?}; GGUF has no words for spaces in a merge"
            )),
        }
    }
}
