//! Tests GGUF files that llama.cpp made. The greedy tokens after several prompts, the logits, and the tokenization of
//! texts are the same as in llama.cpp. The script `tests/fixtures/gguf/continuations.py` recorded llama.cpp's results.

use super::{load, path};
use crate::fixture::{self, assert_close, greedy, values};
use attention_workspace::testing::devices::devices;
use burn::tensor::Device;
use burn_gemma4::Gemma4;
use serde::Deserialize;
use std::{fs, ops::ControlFlow};

/// The GGUF files, which cover every kind of Gemma 4 model and every number format. Models like E2B have per-layer embeddings
/// and shared KV layers. Models like 31B have no separate values in full layers, and models like 26B have experts. One model
/// has head sizes 256 and 512.
const FILES: [&str; 8] = [
    "dense-keqv.F16",
    "realhead-ple.BF16",
    "dense-ple.Q8_0",
    "dense-ple-mm.Q4_0",
    "moe.Q4_0",
    "wide.Q4_K_M",
    "per-layer.Q4_K_M",
    "experts.Q4_K_M",
];

/// The results of llama.cpp for a file.
#[derive(Deserialize)]
struct LlamaCpp {
    continuations: Vec<Continuation>,
    texts: Vec<Text>,
}

#[derive(Deserialize)]
struct Continuation {
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    /// The logits of the dequantized model in f32: after the prompt, and after all generated tokens except the last one.
    logits: [Vec<f32>; 2],
}

#[derive(Deserialize)]
struct Text {
    text: String,
    tokens: Vec<u32>,
    spelled: String,
}

fn llama_cpp(name: &str) -> LlamaCpp {
    let path = fixture::folder("gguf").join(format!("{name}.llama_cpp.json"));
    serde_json::from_slice(&fs::read(path).expect("the fixture is readable"))
        .expect("llama.cpp's results parse")
}

#[test]
fn gguf_continuations_equal_llama_cpp() {
    for device in devices() {
        for name in FILES {
            let gemma = load(&path(name), &device.device).expect(name);
            for expected in llama_cpp(name).continuations {
                let tokens = expected.prompt.len();
                let what = format!("{name} after {tokens} tokens, {}", device.name);
                check(&gemma, &expected, &what);
            }
        }
    }
}

fn check(gemma: &Gemma4, expected: &Continuation, what: &str) {
    let count = expected.tokens.len();
    assert!(count >= 24, "{what}");
    let options = greedy(gemma, count);
    let prompt = expected.prompt.clone();
    let generation = gemma.generate(prompt, &options, |_| ControlFlow::Continue(()));
    let generated = generation.expect("the generation succeeds").tokens;
    assert_eq!(generated, expected.tokens, "{what}");
    let text = [&expected.prompt, &expected.tokens[..count - 1]].concat();
    let input = fixture::tokens(&[&text], &gemma.device());
    let logits = values(
        gemma
            .model()
            .forward(input)
            .expect("the tokens are in the vocabulary"),
    );
    let positions = [expected.prompt.len() - 1, text.len() - 1];
    let vocabulary = gemma.config().vocab_size;
    for (position, expected) in positions.into_iter().zip(&expected.logits) {
        let found = &logits[position * vocabulary..][..vocabulary];
        assert_close(found, expected, &format!("{what}, position {position}"));
    }
}

#[test]
fn gguf_tokenization_equals_llama_cpp() {
    for name in FILES {
        let gemma = load(&path(name), &Device::flex()).expect(name);
        for expected in llama_cpp(name).texts {
            let what = format!("{name}: {:?}", expected.text);
            let tokens = gemma
                .tokenizer()
                .encode(&expected.text)
                .expect("the text encodes");
            assert_eq!(tokens, expected.tokens, "{what}");
            let spelled = gemma
                .tokenizer()
                .decode(&tokens, false)
                .expect("the tokens decode");
            assert_eq!(spelled, expected.spelled, "{what}");
        }
    }
}
