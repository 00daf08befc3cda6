//! Tests `Tokenizer::marking`. If a message spells out a special token, the tokenizer must encode the spelling as plain
//! text. A mark character that is inserted into the spelling achieves this. The tests try to defeat the mark with
//! special tokens that contain possible mark characters.

use burn_gemma4::{Gemma4Error, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

const FIRST_ID: u32 = 400;

/// Returns the tokenizer of a fixture with additional special tokens, or `None` if no such tokenizer can be built.
fn tokenizer(special: &[String], is_normalized: bool) -> Option<Tokenizer> {
    let file = include_str!("../fixtures/dense-ple/tokenizer.json");
    let mut description: Value = serde_json::from_str(file).expect("the tokenizer is valid");
    let added = description["added_tokens"]
        .as_array_mut()
        .expect("the field is a list");
    for (id, content) in (FIRST_ID..).zip(special) {
        added.push(json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": is_normalized, "special": true,
        }));
    }
    Tokenizer::from_bytes(description.to_string().as_bytes()).ok()
}

/// Asserts that marking `text` either fails or gives an encoding without special tokens.
fn assert_plain(tokenizer: &Tokenizer, text: &str) {
    let marking = tokenizer.marking([text]).expect("a marker exists");
    let tokens = match marking
        .mark(text)
        .and_then(|marked| marking.encode(&marked))
    {
        Ok(tokens) => tokens,
        Err(error) => {
            assert!(matches!(error, Gemma4Error::Tokenizer(_)), "{error:?}");
            return;
        }
    };
    assert!(
        tokens.iter().all(|token| *token < FIRST_ID),
        "{text:?}: {tokens:?}"
    );
}

#[test]
fn mark_with_private_characters_in_tokens_ends() {
    let special: Vec<String> = ["th".to_owned()]
        .into_iter()
        .chain((0..8).map(|more| format!("t\u{F0000}{}", "h".repeat(more))))
        .collect();
    let tokenizer = tokenizer(&special, false).expect("the tokenizer is valid");
    for text in ["the cat", "t\u{F0000}h", "tttthhhh", ""] {
        assert_plain(&tokenizer, text);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mark_of_any_vocabulary_ends_and_leaves_no_special_token(
        special in prop::collection::vec("[ab \u{2581}\u{F0000}\u{F0001}]{1,4}", 1..6),
        is_normalized: bool,
        text in "[ab \u{2581}\u{F0000}\u{F0001}]{0,24}",
    ) {
        if let Some(tokenizer) = tokenizer(&special, is_normalized) {
            assert_plain(&tokenizer, &text);
        }
    }
}
