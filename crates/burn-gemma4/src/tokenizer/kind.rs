//! What a `tokenizer.json` is made of, looked at before it is built: the builder panics where parts of it are not well-formed,
//! and has kinds of them that no Gemma has.

use serde::Deserialize;
use serde_json::Value;

/// The parts but for the vocabulary. Reading them checks their syntax to the end.
#[derive(Deserialize)]
struct File {
    #[serde(default)]
    normalizer: Value,
    #[serde(default, rename = "pre_tokenizer")]
    _pre_tokenizer: Value,
    #[serde(default, rename = "post_processor")]
    _post_processor: Value,
    #[serde(default, rename = "decoder")]
    _decoder: Value,
    model: Model,
}

#[derive(Deserialize)]
struct Model {
    /// Absent in files of old.
    r#type: Option<String>,
}

/// The normalizers that change text by rules of their own, rather than by data in the file.
const NORMALIZERS: [&str; 11] = [
    "Replace",
    "Prepend",
    "Sequence",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Lowercase",
    "Strip",
    "StripAccents",
    "ByteLevel",
];

/// Refuses what is no JSON, and parts of other kinds than Gemma's.
pub(super) fn check(bytes: &[u8]) -> Result<(), String> {
    let file: File =
        serde_json::from_slice(bytes).map_err(|error| format!("no tokenizer: {error}"))?;
    match file.model.r#type.as_deref() {
        None | Some("BPE") => (),
        Some(other) => {
            return Err(format!(
                "its model is of the type {other:?}; Gemma's is BPE"
            ));
        }
    }
    check_normalizer(&file.normalizer)
}

fn check_normalizer(normalizer: &Value) -> Result<(), String> {
    let kind = match normalizer.get("type").and_then(Value::as_str) {
        _ if normalizer.is_null() => return Ok(()),
        Some(kind) if NORMALIZERS.contains(&kind) => kind,
        Some(other) => {
            return Err(format!(
                "its normalizer is of the type {other:?}, which is none of {NORMALIZERS:?}"
            ));
        }
        None => return Err("its normalizer has no type".into()),
    };
    let parts = normalizer.get("normalizers").and_then(Value::as_array);
    match parts {
        Some(parts) if kind == "Sequence" => parts.iter().try_for_each(check_normalizer),
        _ => Ok(()),
    }
}
