//! GGUF files: what llama.cpp's converter and quantizer made of tiny checkpoints is the dequantized checkpoint, bit by bit and token by
//! token, and so are its tokenizer and its defaults. `tests/fixtures/gguf` says how the files are made and what they stand for.

mod hostile;
mod llama_cpp;
mod refused;

use crate::fixture::{self, assert_close, greedy, values};
use attention_workspace::testing::devices::devices;
use attention_workspace::testing::gguf::{Gguf, GgufTensor};
use burn::tensor::{DType, Device};
use burn_gemma4::{
    ChatOptions, Gemma4, Gemma4Config, Gemma4Error, Gemma4Model, LoadOptions, Message, Prompt,
};
use safetensors::SafeTensors;
use serde::Deserialize;
use std::{
    collections::BTreeMap,
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

/// The files, and the checkpoints that they were made of where that is a fixture: E2B's kind, 26B's, and one with rows that are wide enough
/// for every type.
const FILES: [(&str, Option<&str>); 3] = [
    ("dense-ple.Q8_0", Some("dense-ple")),
    ("moe.Q4_0", Some("moe")),
    ("wide.Q4_K_M", None),
];

/// What a file stands for.
#[derive(Deserialize)]
struct Reference {
    prompt: Vec<u32>,
    /// By transformers, in f32, of the dequantized weights.
    generated: Vec<u32>,
    /// Of the position after the prompt.
    logits: Vec<f32>,
    /// By llama.cpp, of the file itself.
    llama_cpp: Vec<u32>,
    /// Types, and the CRC-32 of the numbers in f32.
    tensors: BTreeMap<String, (String, u32)>,
}

fn path(name: &str) -> PathBuf {
    fixture::folder("gguf").join(format!("{name}.gguf"))
}

fn reference(name: &str) -> Reference {
    let path = fixture::folder("gguf").join(format!("{name}.json"));
    serde_json::from_slice(&fs::read(path).expect("a fixture")).expect("a reference")
}

fn load(path: &Path, device: &Device) -> Result<Gemma4, Gemma4Error> {
    Gemma4::load(path, device, LoadOptions::new().dtype(DType::F32))
}

/// A file that is gone after the test.
struct Copy {
    folder: TempDir,
}

impl Copy {
    fn of(bytes: &[u8]) -> Self {
        let folder = TempDir::new().expect("a folder");
        fs::write(folder.path().join("model.gguf"), bytes).expect("a file");
        Self { folder }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("model.gguf")
    }

    fn load(&self) -> Result<Gemma4, Gemma4Error> {
        load(&self.path(), &Device::flex())
    }
}

/// A fixture's parts.
fn parts(name: &str) -> Gguf {
    Gguf::read(&fs::read(path(name)).expect("a fixture")).expect("a whole file")
}

/// A fixture with something changed.
fn changed(name: &str, change: impl FnOnce(&mut Gguf)) -> Copy {
    let mut gguf = parts(name);
    change(&mut gguf);
    Copy::of(&gguf.to_bytes())
}

fn logits(gemma: &Gemma4, prompt: &[u32]) -> Vec<f32> {
    let tokens = fixture::tokens(&[prompt], &gemma.device());
    let logits = values(gemma.model().forward(tokens).expect("tokens within"));
    logits[logits.len() - gemma.config().vocab_size..].to_vec()
}

#[test]
fn numbers_are_those_of_the_formats_own_package() {
    for (name, _) in FILES {
        let gemma = load(&path(name), &Device::flex()).expect(name);
        let saved = TempDir::new().expect("a folder");
        gemma.model().save(saved.path(), None).expect("saved");
        let saved = fs::read(saved.path().join("model.safetensors")).expect("a file");
        let saved = SafeTensors::deserialize(&saved).expect("safetensors");
        let expected = reference(name).tensors;
        assert_eq!(saved.len(), expected.len(), "{name}");
        for (tensor, (kind, crc)) in expected {
            let found = saved.tensor(&tensor).expect(&tensor);
            assert_eq!(
                fixture::crc32(found.data()),
                crc,
                "{name}: {tensor} in {kind}"
            );
        }
    }
}

#[test]
fn tokens_are_those_of_the_dequantized_model_and_of_llama_cpp() {
    for device in devices() {
        for (name, _) in FILES {
            let what = format!("{name} {}", device.name);
            let reference = reference(name);
            let gemma = load(&path(name), &device.device).expect(&what);
            let found = logits(&gemma, &reference.prompt);
            assert_close(&found, &reference.logits, &what);
            let options = greedy(&gemma, reference.generated.len());
            let generation =
                gemma.generate(reference.prompt, &options, |_| ControlFlow::Continue(()));
            let generated = generation.expect("a generation").tokens;
            assert_eq!(generated, reference.generated, "{what}");
            assert_eq!(generated, reference.llama_cpp, "{what}");
        }
    }
}

/// The configuration, the tokenizer and the defaults of the file are those of the folder that it was made of.
#[test]
fn all_but_the_weights_is_as_in_the_folder() {
    for (name, folder) in FILES {
        let Some(folder) = folder else { continue };
        let gguf = load(&path(name), &Device::flex()).expect(name);
        let folder = load(&fixture::folder(folder), &Device::flex()).expect(name);
        let config = Gemma4Config {
            dtype: None,
            ..folder.config().clone()
        };
        assert_eq!(*gguf.config(), config, "{name}");
        assert_eq!(gguf.defaults(), folder.defaults(), "{name}");
        assert_eq!(
            gguf.tokenizer().vocab_size(),
            folder.tokenizer().vocab_size()
        );
        for text in [
            "the cat and the hat",
            "Hello é!\n\n\tthen",
            "  two  spaces",
            "<bos><|turn>user\nhi<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",
            "日本 <|tool_call>call:x{a:<|\"|>b<|\"|>}<tool_call|><unk><0x41>",
        ] {
            let tokens = folder.tokenizer().encode(text).expect("tokens");
            assert_eq!(gguf.tokenizer().encode(text).expect("tokens"), tokens);
            for skip_special in [true, false] {
                let decoded = |gemma: &Gemma4| gemma.tokenizer().decode(&tokens, skip_special);
                assert_eq!(
                    decoded(&gguf).expect("text"),
                    decoded(&folder).expect("text")
                );
            }
            let spelled = |gemma: &Gemma4| {
                let tokens = gemma.tokenizer().encode_text(text);
                tokens.map_err(|error| error.to_string())
            };
            assert_eq!(spelled(&gguf), spelled(&folder), "{text}");
        }
        let chat = Prompt::Chat(vec![Message::user("<turn|>the <|channel>cat")]);
        let prompt = |gemma: &Gemma4| gemma.tokens(&chat, ChatOptions::default()).expect("tokens");
        assert_eq!(prompt(&gguf), prompt(&folder), "{name}");
    }
}

/// Quantized weights are computed in bf16 unless it is said, as those of the models that they were made of.
#[test]
fn the_dtype_is_that_before_quantization() {
    let load = |path: &Path, options: LoadOptions<'_>| {
        Gemma4Model::load(path, &Device::flex(), options).expect("a model")
    };
    let written = |path: &Path| load(path, LoadOptions::new()).written_dtype();
    let quantized = path("dense-ple.Q8_0");
    assert_eq!(written(&quantized), Some(DType::BF16));
    // A processor computes in f32 unless it is said.
    assert_eq!(load(&quantized, LoadOptions::new()).dtype(), DType::F32);
    let asked = LoadOptions::new().dtype(DType::F16);
    assert_eq!(load(&quantized, asked).dtype(), DType::F16);
    let name = "token_embd.weight";
    let whole = changed("dense-ple.Q8_0", |gguf| {
        let table = gguf.tensors.get_mut(name).expect(name);
        let numbers = table.dimensions.iter().product::<u64>() as usize;
        (table.kind, table.bytes) = (0, vec![0; 4 * numbers]);
    });
    // One tensor in f32 does not outweigh the others.
    assert_eq!(written(&whole.path()), Some(DType::BF16));
}

#[test]
fn progress_reaches_the_end() {
    let mut seen = Vec::new();
    let options = LoadOptions::new().on_progress(|progress| {
        seen.push((progress.tensor.to_owned(), progress.bytes));
        assert!(progress.bytes <= progress.total_bytes);
    });
    Gemma4Model::load(path("moe.Q4_0"), &Device::flex(), options).expect("a model");
    assert!(seen.windows(2).all(|pair| pair[0].1 < pair[1].1));
    assert!(seen.iter().any(|(name, _)| name == "token_embd.weight"));
    let gguf = parts("moe.Q4_0");
    let whole: usize = gguf
        .tensors
        .iter()
        .filter(|(name, _)| *name != "rope_freqs.weight")
        .map(|(_, tensor)| tensor.bytes.len().div_ceil(32) * 32)
        .sum();
    let read = seen.last().expect("progress").1;
    // Tensors are filled up to where the next one begins.
    assert!((whole - 32 * gguf.tensors.len()..=whole).contains(&read));
}

/// The halves of the experts' first matrices, which other converters leave apart.
#[test]
fn halves_that_are_apart_are_put_together() {
    let prompt = reference("moe.Q4_0").prompt;
    let expected = load(&path("moe.Q4_0"), &Device::flex()).expect("a model");
    let copy = changed("moe.Q4_0", |gguf| {
        for layer in 0..4 {
            let name = |part: &str| format!("blk.{layer}.ffn_{part}_exps.weight");
            let whole = gguf.tensors.remove(&name("gate_up")).expect("experts");
            let [columns, rows, experts] = whole.dimensions[..] else {
                panic!("{:?}", whole.dimensions);
            };
            let expert = whole.bytes.len() / experts as usize;
            for (part, half) in [("gate", 0), ("up", 1)] {
                let bytes = whole.bytes.chunks_exact(expert);
                let bytes = bytes.flat_map(|bytes| &bytes[half * expert / 2..][..expert / 2]);
                let tensor = GgufTensor {
                    dimensions: vec![columns, rows / 2, experts],
                    kind: whole.kind,
                    bytes: bytes.copied().collect(),
                };
                gguf.tensors.insert(name(part), tensor);
            }
        }
    });
    let found = copy.load().expect("a model");
    assert_eq!(logits(&found, &prompt), logits(&expected, &prompt));
}

/// Converted files of E2B still have keys and values of layers that read an earlier one's.
#[test]
fn keys_that_nobody_reads_are_ignored() {
    let copy = changed("dense-ple.Q8_0", |gguf| {
        for part in ["attn_k", "attn_v", "attn_k_norm"] {
            let tensor = gguf.tensors[&format!("blk.0.{part}.weight")].clone();
            gguf.tensors.insert(format!("blk.3.{part}.weight"), tensor);
        }
    });
    copy.load().expect("a model");
}

#[test]
fn its_chat_template_is_its_own() {
    let copy = changed("dense-ple.Q8_0", |gguf| {
        let template = "{{ bos_token }}{{ messages[0]['content'] }}{{ unk_token }}";
        gguf.set_text("tokenizer.chat_template", template);
        gguf.set_number("tokenizer.ggml.unknown_token_id", 4);
    });
    let gemma = copy.load().expect("a model");
    let prompt = gemma.chat_template();
    let prompt = prompt.render(&[Message::user("Hi")], ChatOptions::default());
    assert_eq!(prompt.expect("a prompt"), "<bos>Hi<mask>");
    let broken = changed("dense-ple.Q8_0", |gguf| {
        gguf.set_text("tokenizer.chat_template", "{% if %}");
    });
    let error = broken.load().expect_err("no template").to_string();
    assert!(
        error.contains("model.gguf") && error.contains("chat template"),
        "{error}"
    );
}

/// A GGUF file is a checkpoint for all that is made of one.
#[test]
fn it_is_saved_as_a_folder() {
    let gemma = load(&path("dense-ple.Q8_0"), &Device::flex()).expect("a model");
    let saved = TempDir::new().expect("a folder");
    gemma.model().save(saved.path(), None).expect("saved");
    let again = Gemma4Model::load(saved.path(), &Device::flex(), LoadOptions::new());
    let prompt = fixture::tokens(&[&reference("dense-ple.Q8_0").prompt], &gemma.device());
    let logits = |model: &Gemma4Model| values(model.forward(prompt.clone()).expect("tokens"));
    assert_eq!(logits(&again.expect("a model")), logits(gemma.model()));
    let like = gemma
        .model()
        .save_like(path("dense-ple.Q8_0"), saved.path(), None);
    let error = like.expect_err("no folder").to_string();
    assert!(error.contains("GGUF"), "{error}");
}
