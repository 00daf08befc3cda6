//! Checks the structure of a `tokenizer.json` before the tokenizers library builds the tokenizer. The check accepts
//! only the types of components that Gemma's tokenizer has. Some component types of the library panic on malformed
//! fields, choose tokens at random, or lengthen a text without bound.

use serde::Deserialize;
use serde_json::Value;

/// The components in a `tokenizer.json`, without the vocabulary. Parsing this struct also checks the JSON syntax of the
/// whole file.
#[derive(Deserialize)]
struct File {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default, rename = "post_processor")]
    _post_processor: Value,
    #[serde(default, rename = "decoder")]
    _decoder: Value,
    model: Model,
}

#[derive(Deserialize)]
struct Model {
    /// The type of the tokenizer model. Old files omit this field.
    r#type: Option<String>,
    dropout: Option<f64>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
}

/// The rules for a component of the tokenizer, such as the normalizer. `kinds` are the allowed types. `parts` is the
/// name of the JSON field that lists the inner components of a component of the type `Sequence`.
struct Part {
    name: &'static str,
    kinds: &'static [&'static str],
    parts: &'static str,
}

const NORMALIZER: Part = Part {
    name: "normalizer",
    kinds: &["Replace", "Prepend", "Sequence"],
    parts: "normalizers",
};
const PRE_TOKENIZER: Part = Part {
    name: "pre-tokenizer",
    kinds: &["Split", "Sequence"],
    parts: "pretokenizers",
};
/// The maximum factor by which an accepted normalizer lengthens a text.
const MOST_GROWTH: usize = 256;

/// Returns an error if the file is invalid JSON, or if the type of a component is not among the accepted types.
pub(super) fn check(bytes: &[u8]) -> Result<(), String> {
    let file: File =
        serde_json::from_slice(bytes).map_err(|error| format!("no tokenizer: {error}"))?;
    file.model.check()?;
    PRE_TOKENIZER.check(&file.pre_tokenizer)?;
    NORMALIZER.check(&file.normalizer)?;
    match growth(&file.normalizer) {
        0..=MOST_GROWTH => Ok(()),
        _ => Err(format!(
            "its normalizer makes a text more than {MOST_GROWTH} times as long"
        )),
    }
}

impl Model {
    fn check(&self) -> Result<(), String> {
        match self.r#type.as_deref() {
            None | Some("BPE") => (),
            Some(other) => {
                return Err(format!(
                    "its model is of the type {other:?}; Gemma's is BPE"
                ));
            }
        }
        if self.dropout.is_some_and(|dropout| dropout != 0.0) {
            return Err("its model has a dropout, which draws tokens at random".into());
        }
        for (name, affix) in [
            ("continuing_subword_prefix", &self.continuing_subword_prefix),
            ("end_of_word_suffix", &self.end_of_word_suffix),
        ] {
            if affix.as_ref().is_some_and(|affix| !affix.is_empty()) {
                return Err(format!("its model has a {name}; Gemma's has none"));
            }
        }
        Ok(())
    }
}

impl Part {
    fn check(&self, value: &Value) -> Result<(), String> {
        if value.is_null() {
            return Ok(());
        }
        let name = self.name;
        let kind = match value.get("type").and_then(Value::as_str) {
            Some(kind) if self.kinds.contains(&kind) => kind,
            Some(other) => {
                return Err(format!(
                    "its {name} is of the type {other:?}, which is not one of {:?}",
                    self.kinds
                ));
            }
            None => return Err(format!("its {name} has no type")),
        };
        match value.get(self.parts).and_then(Value::as_array) {
            Some(parts) if kind == "Sequence" => parts.iter().try_for_each(|part| self.check(part)),
            _ => Ok(()),
        }
    }
}

/// Returns the largest factor by which a normalizer can lengthen a text.
fn growth(normalizer: &Value) -> usize {
    let parts = normalizer.get(NORMALIZER.parts).and_then(Value::as_array);
    let of_parts = parts.into_iter().flatten().map(growth);
    let own = ["content", "prepend"].map(|field| {
        let text = normalizer.get(field).and_then(Value::as_str);
        text.map_or(1, |text| text.len().max(1))
    });
    of_parts
        .chain(own)
        .fold(1, |product: usize, times| product.saturating_mul(times))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn check_of_another_kind_names_it() {
        let nested = (0..3).fold(json!(null), |inner, _| {
            json!({"type": "Sequence", "normalizers": [
                {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"},
                inner,
            ]})
        });
        for (field, value, word) in [
            ("normalizer", json!({"type": "Precompiled"}), "Precompiled"),
            ("normalizer", json!({"lowercase": true}), "no type"),
            ("normalizer", nested, "256 times"),
            (
                "pre_tokenizer",
                json!({"type": "Sequence", "pretokenizers": [{"type": "Metaspace"}]}),
                "Metaspace",
            ),
            ("model", json!({"type": "Unigram"}), "Unigram"),
            ("model", json!({"dropout": 0.1}), "dropout"),
            (
                "model",
                json!({"continuing_subword_prefix": "##"}),
                "continuing_subword_prefix",
            ),
        ] {
            let mut file = json!({"model": {"type": "BPE"}});
            file[field] = value;
            let reason = check(file.to_string().as_bytes())
                .expect_err("the component is not of Gemma's kind");
            assert!(reason.contains(word), "{reason}");
        }
        check(br#"{"model": {"type": "BPE", "dropout": null}}"#)
            .expect("the file is of Gemma's kind");
    }
}
