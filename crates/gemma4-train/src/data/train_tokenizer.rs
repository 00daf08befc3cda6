//! Trains a tokenizer like Gemma's on the data, by byte pair encoding (Sennrich et al. 2016, arXiv:1508.07909). Spaces
//! are written as `▁`. Characters without a token are encoded as tokens of their UTF-8 bytes.

use crate::Error;
use burn_gemma4::Gemma4Config;
use serde_json::{Map, Value, json};
use std::{collections::HashMap, fs, path::Path};
use tokenizers::{
    AddedToken, Trainer,
    models::bpe::{BPE, BpeTrainer},
};

/// The special tokens. Their order determines their ids, and the first three ids are the same in every Gemma model.
const SPECIAL: [&str; 17] = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<mask>",
    "<|turn>",
    "<turn|>",
    "<|channel>",
    "<channel|>",
    "<|think|>",
    "<|\"|>",
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
];
/// The largest number of distinct characters that get a token of their own. The most frequent characters are chosen
/// first. Every other character is encoded as the tokens of its UTF-8 bytes.
const ALPHABET: usize = 512;
/// The smallest number of occurrences at which a sequence of characters may become a token.
const MIN_FREQUENCY: u64 = 2;

/// The smallest vocabulary size that [`train`] supports, with room for the special tokens, a token per byte value, and the
/// most frequent characters.
pub const SMALLEST: usize = SPECIAL.len() + 256 + 128;

/// Trains a tokenizer of at most `size` tokens on texts, and returns its `tokenizer.json`.
///
/// # Errors
/// Passes on the errors of the trainer.
pub fn train<'a>(texts: impl Iterator<Item = &'a str>, size: usize) -> Result<String, Error> {
    let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
    let first: Vec<String> = SPECIAL.into_iter().map(String::from).chain(bytes).collect();
    let added = |token: &String| AddedToken::from(token.as_str(), true);
    let mut trainer = BpeTrainer::builder()
        .vocab_size(size)
        .min_frequency(MIN_FREQUENCY)
        .limit_alphabet(ALPHABET.min(size.saturating_sub(first.len()) / 2))
        .special_tokens(first.iter().map(added).collect())
        .show_progress(false)
        .build();
    let spaced: Vec<String> = texts.map(|text| text.replace(' ', "▁")).collect();
    trainer.feed(spaced.iter(), |text| Ok(words(text)))?;
    let mut model = BPE::default();
    trainer.train(&mut model)?;
    let json = description(&model)?;
    Ok(serde_json::to_string(&json)?)
}

/// Splits a text into pieces. Byte pair encoding later merges tokens only within a piece. A word with the space before
/// it is a piece, and so is a run of punctuation characters with the space before it. A single digit, a run of spaces
/// and a run of line breaks are pieces, too.
fn words(text: &str) -> Vec<String> {
    #[derive(Clone, Copy, PartialEq)]
    enum Kind {
        Letters,
        Digit,
        Spaces,
        Lines,
        Signs,
    }
    let kind = |character: char| match character {
        '▁' | '\t' => Kind::Spaces,
        '\n' | '\r' => Kind::Lines,
        _ if character.is_alphabetic() => Kind::Letters,
        _ if character.is_numeric() => Kind::Digit,
        _ => Kind::Signs,
    };
    let mut words: Vec<String> = Vec::new();
    let mut last = None;
    for character in text.chars() {
        let this = kind(character);
        let joins = match (last, this) {
            (Some(Kind::Spaces), Kind::Letters | Kind::Signs) => {
                // The last of several spaces is split off, because a word or a run of punctuation characters includes
                // the space before it.
                match words.last_mut() {
                    Some(spaces) if spaces.ends_with('▁') => {
                        if spaces.chars().count() > 1 {
                            spaces.pop();
                            words.push("▁".into());
                        }
                        true
                    }
                    _ => false,
                }
            }
            (Some(last), this) => last == this && this != Kind::Digit,
            (None, _) => false,
        };
        match words.last_mut() {
            Some(word) if joins => word.push(character),
            _ => words.push(character.into()),
        }
        last = Some(this);
    }
    words
}

/// Builds the `tokenizer.json` that contains the trained model.
fn description(model: &BPE) -> Result<Value, Error> {
    let trained = serde_json::to_value(model)?;
    let vocabulary: HashMap<String, u32> = model.get_vocab();
    let mut by_id: Vec<(String, u32)> = vocabulary.into_iter().collect();
    by_id.sort_by_key(|(_, id)| *id);
    let vocabulary: Map<String, Value> = by_id
        .into_iter()
        .map(|(token, id)| (token, id.into()))
        .collect();
    let special: Vec<Value> = SPECIAL
        .iter()
        .enumerate()
        .map(|(id, token)| {
            json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true,
            })
        })
        .collect();
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": special,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocabulary, "merges": trained["merges"],
        },
    }))
}

/// Writes `tokenizer.json`, `tokenizer_config.json` and `generation_config.json` into the model's folder.
///
/// # Errors
/// The error names the file that cannot be written.
pub fn write(folder: &Path, tokenizer: &str, config: &Gemma4Config) -> Result<(), Error> {
    let tokenizer_config = json!({
        "tokenizer_class": "GemmaTokenizer",
        "backend": "tokenizers",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
        "sot_token": "<|turn>",
        "eot_token": "<turn|>",
        "padding_side": "left",
    });
    let generation_config = json!({
        "bos_token_id": config.bos_token,
        "eos_token_id": config.eos_tokens,
        "pad_token_id": config.pad_token,
        "do_sample": true,
        "temperature": 0.8,
        "top_k": 64,
        "top_p": 0.95,
    });
    let files = [
        ("tokenizer.json", tokenizer.to_owned()),
        ("tokenizer_config.json", format!("{tokenizer_config:#}\n")),
        ("generation_config.json", format!("{generation_config:#}\n")),
    ];
    for (name, contents) in files {
        let path = folder.join(name);
        fs::write(&path, contents).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_gemma4::Tokenizer;

    const TEXT: &str =
        "the cat sat on the mat, and the cat sat on 12 mats.\n    the mat the cat\n\tfn é() {}\n";

    fn tokenizer() -> Tokenizer {
        let json = train([TEXT, TEXT, TEXT].into_iter(), SMALLEST).expect("a tokenizer");
        Tokenizer::from_bytes(json.as_bytes()).expect("a tokenizer of Gemma's kind")
    }

    #[test]
    fn words_keep_the_space_before_them() {
        let expected = ["a", "▁cat", "▁", "1", "2", "▁▁", "▁b", "()", "\n\n", "é"];
        assert_eq!(words("a▁cat▁12▁▁▁b()\n\né"), expected);
    }

    #[test]
    fn decode_of_encoded_text_returns_the_text() {
        let tokenizer = tokenizer();
        for text in [TEXT, "  two  spaces ", "unseen: 漢字 🦀 \u{0} <0x41>", ""] {
            let tokens = tokenizer.encode(text).expect("tokens");
            assert_eq!(tokenizer.decode(&tokens, true).expect("text"), text);
        }
    }

    #[test]
    fn frequent_words_are_single_tokens() {
        let tokenizer = tokenizer();
        assert_eq!(tokenizer.encode(" the cat").expect("tokens").len(), 2);
        assert_eq!(tokenizer.id("<bos>"), Some(2));
        assert_eq!(tokenizer.encode("<eos>").expect("tokens"), [1]);
        assert!(tokenizer.vocab_size() <= SMALLEST);
    }
}
