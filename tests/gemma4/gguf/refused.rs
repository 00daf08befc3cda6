//! Tests that GGUF files of other models, and files with wrong contents, are refused. Each error names what is wrong.

use super::{changed, path};
use crate::programs::folder::Folder;
use attention_workspace::testing::gguf::{Gguf, kind, text_bytes};
use burn::tensor::Device;
use burn_gemma4::{Gemma4, Gemma4Error, LoadOptions};
use std::fs;

/// The texts that the error must contain, and a function that makes the GGUF file invalid.
type Case = (&'static [&'static str], fn(&mut Gguf));

#[track_caller]
fn check(file: &str, words: &[&str], change: impl FnOnce(&mut Gguf)) {
    let copy = changed(file, change);
    let Err(error) = copy.load() else {
        panic!("loading should fail with {words:?}");
    };
    let text = error.to_string();
    assert!(text.contains("model.gguf"), "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is missing from {text}");
    }
}

/// Returns a GGUF metadata value that is a list of numbers.
fn list(kind: u32, numbers: &[u32]) -> (u32, Vec<u8>) {
    let count = (numbers.len() as u64).to_le_bytes();
    let numbers = numbers.iter().flat_map(|number| number.to_le_bytes());
    let bytes = kind.to_le_bytes().into_iter().chain(count).chain(numbers);
    (kind::LIST, bytes.collect())
}

/// Returns a GGUF metadata value that is a list of texts.
fn texts(texts: &[&str]) -> (u32, Vec<u8>) {
    let count = (texts.len() as u64).to_le_bytes();
    let bytes = kind::TEXT.to_le_bytes().into_iter().chain(count);
    let texts = texts.iter().flat_map(|text| text_bytes(text));
    (kind::LIST, bytes.chain(texts).collect())
}

#[test]
fn gguf_of_another_model_is_refused_by_name() {
    let cases: [Case; 4] = [
        (&["\"llama\"", "only \"gemma4\""], |gguf| {
            gguf.set_text("general.architecture", "llama");
        }),
        (&["\"clip\""], |gguf| {
            gguf.set_text("general.architecture", "clip")
        }),
        (&["gemma4-assistant", "drafter"], |gguf| {
            gguf.set_text("general.architecture", "gemma4-assistant");
        }),
        (&["general.architecture is missing", "GGUF"], |gguf| {
            gguf.values.remove("general.architecture");
        }),
    ];
    for (words, change) in cases {
        check("dense-ple.Q8_0", words, change);
    }
}

#[test]
fn gguf_wrong_metadata_is_refused_by_name() {
    let cases: [Case; 16] = [
        (&["gemma4.block_count is missing"], |gguf| {
            gguf.values.remove("gemma4.block_count");
        }),
        (&["gemma4.block_count is 4294967295", "1024"], |gguf| {
            gguf.set_number("gemma4.block_count", u32::MAX);
        }),
        (&["gemma4.embedding_length is not a whole number"], |gguf| {
            gguf.set_text("gemma4.embedding_length", "64");
        }),
        (&["hidden_size is 0"], |gguf| {
            gguf.set_number("gemma4.embedding_length", 0);
        }),
        (&["token_embd.weight", "[320, 64]", "[320, 128]"], |gguf| {
            gguf.set_number("gemma4.embedding_length", 128);
        }),
        (&["attention.head_count_kv", "a list of 6"], |gguf| {
            let heads = list(kind::U32, &[1; 5]);
            gguf.values
                .insert("gemma4.attention.head_count_kv".into(), heads);
        }),
        (
            &["attention.head_count_kv", "1 of one layer and 2 of another"],
            |gguf| {
                let heads = list(kind::U32, &[1, 2, 1, 1, 1, 1]);
                gguf.values
                    .insert("gemma4.attention.head_count_kv".into(), heads);
            },
        ),
        (
            &["feed_forward_length", "neither as much nor twice"],
            |gguf| {
                let widths = list(kind::U32, &[96, 96, 96, 200, 200, 200]);
                gguf.values
                    .insert("gemma4.feed_forward_length".into(), widths);
            },
        ),
        (
            &["attention.sliding_window_pattern", "6 times true or false"],
            |gguf| {
                let pattern = list(kind::U32, &[1; 6]);
                gguf.values
                    .insert("gemma4.attention.sliding_window_pattern".into(), pattern);
            },
        ),
        (
            &["attention.value_length is 32", "key_length is 64"],
            |gguf| {
                gguf.set_number("gemma4.attention.value_length", 32);
            },
        ),
        (&["rope.dimension_count_swa is 16"], |gguf| {
            gguf.set_number("gemma4.rope.dimension_count_swa", 16);
        }),
        (&["rope.scaling.type", "\"yarn\""], |gguf| {
            gguf.set_text("gemma4.rope.scaling.type", "yarn");
        }),
        (&["attention.shared_kv_layers is 7", "none of 6"], |gguf| {
            gguf.set_number("gemma4.attention.shared_kv_layers", 7);
        }),
        (&["rope_freqs.weight is missing"], |gguf| {
            gguf.tensors.remove("rope_freqs.weight");
        }),
        (&["rope_freqs.weight has 31 numbers"], |gguf| {
            let freqs = gguf
                .tensors
                .get_mut("rope_freqs.weight")
                .expect("the tensor exists");
            freqs.dimensions[0] = 31;
        }),
        (
            &["rope_freqs.weight", "a huge one for the others"],
            |gguf| {
                let freqs = gguf
                    .tensors
                    .get_mut("rope_freqs.weight")
                    .expect("the tensor exists");
                freqs.bytes[..4].copy_from_slice(&2.0f32.to_le_bytes());
            },
        ),
    ];
    for (words, change) in cases {
        check("dense-ple.Q8_0", words, change);
    }
}

#[test]
fn gguf_wrong_tokenizer_is_refused_by_name() {
    let cases: [Case; 8] = [
        (&["tokenizer.ggml.model is \"llama\""], |gguf| {
            gguf.set_text("tokenizer.ggml.model", "llama");
        }),
        (&["tokenizer.ggml.model is missing"], |gguf| {
            gguf.values.remove("tokenizer.ggml.model");
        }),
        (&["tokenizer.ggml.tokens is not a list of texts"], |gguf| {
            gguf.set_number("tokenizer.ggml.tokens", 3);
        }),
        (&["\"a\" twice"], |gguf| {
            let tokens = texts(&["a", "b", "a"]);
            gguf.values.insert("tokenizer.ggml.tokens".into(), tokens);
            for name in ["bos", "eos", "unknown", "padding", "mask"] {
                gguf.set_number(&format!("tokenizer.ggml.{name}_token_id"), 0);
            }
        }),
        (
            &["tokenizer.ggml.token_type has 2 entries for 320"],
            |gguf| {
                let types = list(kind::U32, &[1, 1]);
                gguf.values
                    .insert("tokenizer.ggml.token_type".into(), types);
            },
        ),
        (
            &["tokenizer.ggml.merges", "\"ab\"", "no two texts"],
            |gguf| {
                let merges = texts(&["a n", "ab"]);
                gguf.values.insert("tokenizer.ggml.merges".into(), merges);
            },
        ),
        (&["no tokenizer", "out of vocabulary"], |gguf| {
            let merges = texts(&["a q_q"]);
            gguf.values.insert("tokenizer.ggml.merges".into(), merges);
        }),
        (&["unknown_token_id is 320", "320 tokens"], |gguf| {
            gguf.set_number("tokenizer.ggml.unknown_token_id", 320);
        }),
    ];
    for (words, change) in cases {
        check("dense-ple.Q8_0", words, change);
    }
}

#[test]
fn gguf_wrong_tensor_is_refused_by_name() {
    let name = "blk.1.ffn_up.weight";
    check("dense-ple.Q8_0", &[name, "is missing"], |gguf| {
        gguf.tensors.remove(name);
    });
    check(
        "dense-ple.Q8_0",
        &["blk.9.ffn_up.weight", "not part of the model"],
        |gguf| {
            let tensor = gguf.tensors[name].clone();
            gguf.tensors.insert("blk.9.ffn_up.weight".into(), tensor);
        },
    );
    check("dense-ple.Q8_0", &[name, "[64, 96]", "[96, 64]"], |gguf| {
        gguf.tensors.get_mut(name).expect(name).dimensions.reverse();
    });
    for (kind, type_name, nearest) in [
        (16, "IQ2_XXS", "is Q2_K"),
        (21, "IQ3_S", "is Q3_K"),
        (40, "NVFP4", "is MXFP4"),
        (15, "Q8_K", "is Q8_0"),
        (99, "type 99", "is Q4_K"),
    ] {
        check("dense-ple.Q8_0", &[name, type_name, nearest], |gguf| {
            gguf.tensors.get_mut(name).expect(name).kind = kind;
        });
    }
    // The file has the experts' gate matrices but not the up matrices. A file must have the gate and the up matrices, or one
    // tensor that joins the two.
    check(
        "moe.Q4_0",
        &["blk.0.ffn_up_exps.weight is missing"],
        |gguf| {
            let whole = gguf.tensors.remove("blk.0.ffn_gate_up_exps.weight");
            gguf.tensors.insert(
                "blk.0.ffn_gate_exps.weight".into(),
                whole.expect("the tensor exists"),
            );
        },
    );
}

/// A folder with a GGUF file is refused. The error says that the file must be loaded by its own path.
#[test]
fn gguf_folder_error_names_the_file() {
    let folder = Folder::copy("dense-ple");
    folder.remove("model.safetensors");
    folder.write(
        "model-q8.gguf",
        fs::read(path("dense-ple.Q8_0")).expect("the fixture is readable"),
    );
    let error = Gemma4::load(folder.path(), &Device::flex(), LoadOptions::new());
    let error = error.expect_err("a folder with only a GGUF file is refused");
    assert!(matches!(error, Gemma4Error::Unsupported { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("model-q8.gguf") && text.contains("own path"),
        "{text}"
    );
}
