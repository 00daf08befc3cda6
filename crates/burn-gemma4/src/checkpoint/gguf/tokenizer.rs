//! Converts a GGUF file's tokens to a Hugging Face `tokenizer.json`, and its generation settings to a `generation_config.json`.

use super::metadata::Metadata;
use crate::text::chat::SPECIAL_TOKENS;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use std::collections::{BTreeSet, HashSet};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
/// The only supported type of tokenizer, by llama.cpp's name.
const MODEL: &str = "gemma4";

/// The ids of token types in GGUF files.
pub(in crate::checkpoint) mod token_type {
    pub const NORMAL: usize = 1;
    pub const UNKNOWN: usize = 2;
    pub const CONTROL: usize = 3;
    pub const USER_DEFINED: usize = 4;
    pub const UNUSED: usize = 5;
    pub const BYTE: usize = 6;
}

/// The roles of special tokens. Each role has two names. The first is the `{name}` in the metadata key
/// `tokenizer.ggml.{name}_token_id`. The second is the name of the variable in chat templates.
pub(in crate::checkpoint) const NAMED: [(&str, &str); 5] = [
    ("bos", "bos_token"),
    ("eos", "eos_token"),
    ("unknown", "unk_token"),
    ("padding", "pad_token"),
    ("mask", "mask_token"),
];
/// The tokens that end a text, as in llama.cpp. `ENDS` lists tokens by their roles, and `ENDS_BY_TEXT` lists further
/// tokens by their texts.
const ENDS: [&str; 3] = ["eos", "eot", "eom"];
const ENDS_BY_TEXT: [&str; 3] = ["<eos>", "<turn|>", "<|tool_response>"];

/// The fields of a `tokenizer.json`.
#[derive(Serialize)]
struct File<'a> {
    added_tokens: Vec<AddedToken<'a>>,
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    model: Model<'a>,
}

#[derive(Serialize)]
struct AddedToken<'a> {
    id: usize,
    content: &'a str,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

#[derive(Serialize)]
struct Model<'a> {
    r#type: &'static str,
    unk_token: Option<&'a str>,
    fuse_unk: bool,
    byte_fallback: bool,
    #[serde(serialize_with = "numbered")]
    vocab: &'a [&'a str],
    merges: Vec<(&'a str, &'a str)>,
}

/// Serializes a list of texts as a JSON object that maps each text to its index.
fn numbered<S: Serializer>(tokens: &[&str], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(tokens.iter().zip(0u32..))
}

/// Returns the contents of a `tokenizer.json` with the file's tokens.
pub(super) fn json(metadata: Metadata<'_>) -> Result<String, String> {
    match metadata.text("tokenizer.ggml.model")? {
        Some(MODEL) => (),
        Some(other) => {
            return Err(format!(
                "tokenizer.ggml.model is {other:?}; only {MODEL:?} is read"
            ));
        }
        None => return Err("has no tokenizer: tokenizer.ggml.model is missing".into()),
    }
    let tokens = tokens(metadata)?;
    let mut seen = HashSet::new();
    if let Some(token) = tokens.iter().find(|token| !seen.insert(**token)) {
        return Err(format!("{TOKENS} has {token:?} twice"));
    }
    let types = metadata.list(TYPES)?;
    let types = types.ok_or_else(|| format!("{TYPES} is missing"))?;
    if types.len() != tokens.len() {
        return Err(format!(
            "{TYPES} has {} entries for {} tokens",
            types.len(),
            tokens.len()
        ));
    }
    let merges = metadata.texts(MERGES)?;
    let merges = merges.ok_or_else(|| format!("{MERGES} is missing"))?;
    let file = File {
        added_tokens: added(&tokens, &types),
        normalizer: normalizer(),
        pre_tokenizer: pre_tokenizer(),
        decoder: decoder(),
        model: Model {
            r#type: "BPE",
            unk_token: token(metadata, "unknown", &tokens)?.map(|id| tokens[id]),
            fuse_unk: true,
            byte_fallback: true,
            vocab: &tokens,
            merges: merges.into_iter().map(pair).collect::<Result<_, _>>()?,
        },
    };
    serde_json::to_string(&file).map_err(|error| error.to_string())
}

/// Returns the normalizer, which changes the text before it is split.
pub(in crate::checkpoint) fn normalizer() -> Value {
    json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
}

/// Returns the pre-tokenizer, which splits the text before the tokenizer applies merges.
pub(in crate::checkpoint) fn pre_tokenizer() -> Value {
    json!({
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false,
    })
}

/// Returns the decoder, which turns tokens into text.
pub(in crate::checkpoint) fn decoder() -> Value {
    json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]})
}

fn tokens<'a>(metadata: Metadata<'a>) -> Result<Vec<&'a str>, String> {
    let tokens = metadata.texts(TOKENS)?;
    tokens.ok_or_else(|| format!("{TOKENS} is missing"))
}

/// Returns the id of the token with the role `name`, such as `bos`, or `None` if the metadata gives no id for this role.
fn token(metadata: Metadata<'_>, name: &str, tokens: &[&str]) -> Result<Option<usize>, String> {
    let key = format!("tokenizer.ggml.{name}_token_id");
    match metadata.size(&key)? {
        Some(id) if id >= tokens.len() => Err(format!(
            "{key} is {id}, but there are {} tokens",
            tokens.len()
        )),
        id => Ok(id),
    }
}

/// Returns the added tokens, which the tokenizer looks for in a text before it applies merges. Gemma's control tokens
/// get the flag `special`, even if their type in the file is `USER_DEFINED`.
fn added<'a>(tokens: &[&'a str], types: &[usize]) -> Vec<AddedToken<'a>> {
    let marks: BTreeSet<&str> = SPECIAL_TOKENS.iter().map(|(_, token)| *token).collect();
    let tokens = tokens.iter().zip(types).enumerate();
    tokens
        .filter_map(|(id, (content, kind))| {
            let special = match *kind {
                token_type::CONTROL | token_type::UNKNOWN => true,
                token_type::USER_DEFINED => marks.contains(content),
                _ => return None,
            };
            Some(AddedToken {
                id,
                content,
                single_word: false,
                lstrip: false,
                rstrip: false,
                normalized: false,
                special,
            })
        })
        .collect()
}

/// Splits a merge rule at the space between the rule's two texts. The first text has at least one character, and this
/// character may be a space.
fn pair(merge: &str) -> Result<(&str, &str), String> {
    let space = merge.match_indices(' ').find(|(at, _)| *at > 0);
    match space {
        Some((at, _)) => Ok((&merge[..at], &merge[at + 1..])),
        None => Err(format!("{MERGES} has {merge:?}, which is no two texts")),
    }
}

/// Returns the variables that chat templates use for special tokens: each variable's name and its token's text.
pub(super) fn named(metadata: Metadata<'_>) -> Result<Vec<(String, String)>, String> {
    let tokens = tokens(metadata)?;
    let mut named = Vec::new();
    for (name, template_name) in NAMED {
        if let Some(id) = token(metadata, name, &tokens)? {
            named.push((template_name.into(), tokens[id].into()));
        }
    }
    Ok(named)
}

/// Returns the contents of a `generation_config.json` with the file's sampling settings and special tokens.
pub(super) fn generation_config(metadata: Metadata<'_>) -> Result<Value, String> {
    let tokens = tokens(metadata)?;
    let mut ends = BTreeSet::new();
    for name in ENDS {
        ends.extend(token(metadata, name, &tokens)?);
    }
    let by_text = tokens.iter().enumerate();
    ends.extend(
        by_text
            .filter(|(_, token)| ENDS_BY_TEXT.contains(token))
            .map(|(id, _)| id),
    );
    let sampling = |name: &str| format!("general.sampling.{name}");
    let temperature = metadata.float(&sampling("temp"))?;
    let top_k = metadata.size(&sampling("top_k"))?;
    let top_p = metadata.float(&sampling("top_p"))?;
    let min_p = metadata.float(&sampling("min_p"))?;
    let draws = temperature.is_some() || top_k.is_some() || top_p.is_some() || min_p.is_some();
    Ok(json!({
        "do_sample": draws && temperature != Some(0.0),
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": metadata.float(&sampling("penalty_repeat"))?,
        "suppress_tokens": metadata.list("tokenizer.ggml.suppress_tokens")?,
        "eos_token_id": ends,
        "bos_token_id": token(metadata, "bos", &tokens)?,
        "pad_token_id": token(metadata, "padding", &tokens)?,
    }))
}
