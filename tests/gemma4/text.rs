//! Tests text processing: tokenization as in Hugging Face Transformers, token streams, prompts, and the generation
//! defaults of checkpoints.

use crate::fixture::{self, folder};
use burn_gemma4::{ChatOptions, ChatTemplate, GenerationDefaults, Message, Sampling, Tokenizer};
use proptest::prelude::*;
use serde::Deserialize;
use serde_json::Value;
use std::fs;
use std::sync::LazyLock;

/// Reads a fixture's `reference.json`.
pub fn reference(name: &str) -> Value {
    let json = fs::read(folder(name).join("reference.json")).expect("the fixture is readable");
    serde_json::from_slice(&json).expect("the description parses")
}

/// Returns the tokens in a JSON list of numbers.
pub fn tokens(list: &Value) -> Vec<u32> {
    Vec::deserialize(list).expect("a list of tokens")
}

fn tokenizer(name: &str) -> Tokenizer {
    Tokenizer::from_file(folder(name).join("tokenizer.json")).expect("the tokenizer is valid")
}

#[test]
fn tokenizer_tokens_equal_transformers() {
    for name in fixture::ALL {
        let tokenizer = tokenizer(name);
        let reference = reference(name);
        let examples = reference["tokenizer_examples"].as_object();
        for (text, list) in examples.expect("texts and their tokens") {
            let tokens = tokens(list);
            assert_eq!(
                tokenizer.encode(text).expect("the text encodes"),
                tokens,
                "{text:?}"
            );
            assert_eq!(
                &tokenizer.decode(&tokens, false).expect("the tokens decode"),
                text
            );
        }
    }
}

#[test]
fn tokenizer_vocabulary_counts_each_token_once() {
    let tokenizer = tokenizer("dense-ple");
    assert_eq!(tokenizer.vocab_size(), 320);
    assert_eq!(tokenizer.id("<turn|>"), Some(12));
}

/// The built-in template renders a conversation to one of the texts in `reference.json`. The tokenizer encodes this
/// text to the same tokens as Hugging Face Transformers does.
#[test]
fn tokenizer_prompt_of_a_conversation_equals_transformers() {
    let prompt = ChatTemplate::gemma4()
        .render(&[Message::user("hi")], ChatOptions::default())
        .expect("the prompt is valid");
    let reference = reference("dense-ple");
    let tokens = tokens(&reference["tokenizer_examples"][&prompt]);
    let encoded = tokenizer("dense-ple")
        .encode(&prompt)
        .expect("the text encodes");
    assert_eq!(encoded, tokens);
}

#[test]
fn generation_defaults_are_those_of_the_checkpoints() {
    for name in fixture::ALL {
        let path = folder(name).join("generation_config.json");
        let defaults = GenerationDefaults::from_file(path).expect("the defaults are valid");
        assert_eq!(defaults.stop_tokens, [1, 12, 17]);
        assert_eq!((defaults.bos_token, defaults.pad_token), (Some(2), Some(0)));
        let expected = Sampling {
            temperature: 1.0,
            top_k: Some(64),
            top_p: Some(0.95),
            ..Sampling::greedy()
        };
        assert_eq!(defaults.sampling(), expected);
    }
}

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| tokenizer("dense-ple"));

/// Returns lists of random tokens. In this vocabulary, the tokens 24 to 279 are bytes, and the last token is 319.
fn any_tokens() -> impl Strategy<Value = Vec<u32>> {
    let token = prop_oneof![4 => 24u32..280, 2 => 280u32..320, 1 => 0u32..24, 1 => 320u32..330];
    proptest::collection::vec(token, 0..40)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// For any tokens, the pieces of a stream together equal the text of all tokens. A stream never gives a replacement
    /// character for bytes that the next token could complete.
    #[test]
    fn token_stream_gives_the_whole_text(tokens in any_tokens()) {
        let mut stream = TOKENIZER.stream();
        let mut text = String::new();
        for token in &tokens {
            text += &stream.push(*token).expect("the tokens decode");
        }
        text += &stream.finish().expect("the tokens decode");
        prop_assert_eq!(text, TOKENIZER.decode(&tokens, true).expect("the tokens decode"));
    }

    /// Decoding the tokens of an encoded text gives the same text. In a stream, no piece contains a replacement character
    /// unless the text does.
    #[test]
    fn tokenizer_decode_of_encoded_text_gives_the_text(text in "\\PC{0,60}") {
        let tokens = TOKENIZER.encode(&text).expect("the text encodes");
        prop_assert_eq!(&TOKENIZER.decode(&tokens, false).expect("the tokens decode"), &text);
        let mut stream = TOKENIZER.stream();
        for token in tokens {
            let piece = stream.push(token).expect("the tokens decode");
            let replaced = |text: &str| text.contains(char::REPLACEMENT_CHARACTER);
            prop_assert!(replaced(&text) || !replaced(&piece));
        }
    }
}
