//! The largest number of characters that one token can stand for. A text's length divided by this number is a lower
//! bound of the number of tokens in the text. A text that is much too long can therefore be refused without being
//! encoded.

use serde::Deserialize;
use serde_json::Value;
use std::num::NonZeroUsize;

/// The components of a `tokenizer.json` that decide how many characters a token can stand for.
#[derive(Deserialize)]
struct File {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    added_tokens: Vec<Added>,
    model: Model,
}

#[derive(Deserialize)]
struct Added {
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
}

#[derive(Deserialize)]
struct Model {
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    fuse_unk: bool,
    unk_token: Option<String>,
}

/// Returns the largest number of characters that one token can stand for. Returns `None` if a component of the
/// tokenizer may drop characters, or may join any number of characters into one token.
pub(super) fn longest_token(bytes: &[u8], inner: &tokenizers::Tokenizer) -> Option<NonZeroUsize> {
    let file: File = serde_json::from_slice(bytes).ok()?;
    let keeps_length = keeps_length(&file.normalizer)
        && keeps_text(&file.pre_tokenizer)
        && file.added_tokens.iter().all(Added::has_own_length)
        && file.model.has_no_joined_unknown(inner);
    let vocabulary = inner.get_vocab(true);
    let longest = vocabulary.keys().map(|token| token.chars().count()).max();
    longest.filter(|_| keeps_length).and_then(NonZeroUsize::new)
}

/// True if a normalizer never reduces the number of characters in a text.
fn keeps_length(normalizer: &Value) -> bool {
    let chars = |value: &Value| value.as_str().map(|text| text.chars().count());
    match normalizer["type"].as_str() {
        None => normalizer.is_null(),
        Some("Prepend") => true,
        Some("Replace") => {
            // Accept only a fixed string as the pattern, because a regular expression may match any number of
            // characters.
            let pattern = chars(&normalizer["pattern"]["String"]);
            pattern.is_some_and(|count| chars(&normalizer["content"]) >= Some(count))
        }
        Some("Sequence") => {
            let parts = normalizer["normalizers"].as_array();
            parts.is_some_and(|parts| parts.iter().all(keeps_length))
        }
        Some(_) => false,
    }
}

/// True if a pre-tokenizer drops no text.
fn keeps_text(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer["type"].as_str() {
        None => pre_tokenizer.is_null(),
        Some("Split") => pre_tokenizer["behavior"] != "Removed",
        Some("Sequence") => {
            let parts = pre_tokenizer["pretokenizers"].as_array();
            parts.is_some_and(|parts| parts.iter().all(keeps_text))
        }
        Some(_) => false,
    }
}

impl Added {
    /// True if the token stands only for the characters of its name. False if the token may also stand for white space
    /// before or after the name.
    fn has_own_length(&self) -> bool {
        !self.lstrip && !self.rstrip && !self.normalized
    }
}

impl Model {
    /// True if each character that the vocabulary lacks becomes at least one token of its own. False if the tokenizer
    /// may join several of these characters into one unknown token.
    fn has_no_joined_unknown(&self, inner: &tokenizers::Tokenizer) -> bool {
        let mut bytes = (0..=u8::MAX).map(|byte| format!("<0x{byte:02X}>"));
        let has_bytes = self.byte_fallback && bytes.all(|byte| inner.token_to_id(&byte).is_some());
        has_bytes || (self.unk_token.is_some() && !self.fuse_unk)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{build, description, tokenizer};
    use serde_json::{Value, json};

    #[test]
    fn fewest_tokens_is_at_most_the_number_of_tokens() {
        let tokenizer = tokenizer();
        let words = [
            "hi",
            " hi",
            "h",
            "é",
            "<bos>",
            "<tag>",
            "<bos",
            "  ",
            "\u{1F600}",
            "\n",
        ];
        for (first, second) in words
            .iter()
            .flat_map(|first| words.map(|second| (first, second)))
        {
            let text = format!("{first}{second}").repeat(20);
            let tokens = tokenizer.encode(&text).expect("the text encodes").len();
            let fewest = tokenizer.fewest_tokens(&text);
            assert!(0 < fewest && fewest <= tokens, "{text}: {fewest}, {tokens}");
        }
        // The longest token of the vocabulary is a byte token such as `<0xE2>`, which has 6 characters. A text of 61
        // characters therefore has at least 11 tokens.
        assert_eq!(tokenizer.fewest_tokens(&"h".repeat(61)), 11);
        assert_eq!(tokenizer.fewest_tokens(""), 0);
    }

    #[test]
    fn fewest_tokens_of_a_tokenizer_that_may_shorten_a_text_is_zero() {
        let replace = |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        let sequence =
            json!({"type": "Sequence", "normalizers": [replace(json!({"String": "hi"}), "h")]});
        let split = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": false});
        for (path, value) in [
            ("/normalizer", replace(json!({"String": "hi"}), "h")),
            ("/normalizer", replace(json!({"Regex": "h+"}), "h")),
            ("/normalizer", sequence),
            ("/pre_tokenizer", split),
            ("/model/byte_fallback", json!(false)),
            ("/added_tokens/0/lstrip", json!(true)),
            ("/added_tokens/0/rstrip", json!(true)),
            ("/added_tokens/0/normalized", json!(true)),
        ] {
            let mut description = description();
            *description.pointer_mut(path).expect("the field exists") = value;
            let tokenizer = build(&description).expect("the description is a valid tokenizer");
            assert_eq!(tokenizer.fewest_tokens("hi hi hi hi hi"), 0, "{path}");
        }
    }
}
