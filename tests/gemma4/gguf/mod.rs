//! Tests GGUF files that llama.cpp's converter and quantizer made from tiny checkpoints. A loaded file gives bitwise
//! the same weights as the dequantized checkpoint, and the same generated tokens, tokenizer and generation defaults.

mod hostile;
mod llama_cpp;
mod refused;
mod small_types;
mod split;

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

/// The GGUF files. Each file comes with the fixture from which it was made, or `None` if it was made from no fixture.
/// The first file is a model like Gemma 4 E2B, and the second is a model like Gemma 4 26B. The third file has rows that
/// are wide enough for every block type.
const FILES: [(&str, Option<&str>); 3] = [
    ("dense-ple.Q8_0", Some("dense-ple")),
    ("moe.Q4_0", Some("moe")),
    ("wide.Q4_K_M", None),
];

/// The expected contents and results of a file.
#[derive(Deserialize)]
struct Reference {
    prompt: Vec<u32>,
    /// The tokens that Hugging Face Transformers generates in f32 with the dequantized weights.
    generated: Vec<u32>,
    /// The logits at the last position of the prompt.
    logits: Vec<f32>,
    /// The tokens that llama.cpp generates with the GGUF file.
    llama_cpp: Vec<u32>,
    /// The type of each tensor, and the CRC-32 of the tensor's elements in f32.
    tensors: BTreeMap<String, (String, u32)>,
}

fn path(name: &str) -> PathBuf {
    fixture::folder("gguf").join(format!("{name}.gguf"))
}

fn reference(name: &str) -> Reference {
    let path = fixture::folder("gguf").join(format!("{name}.json"));
    serde_json::from_slice(&fs::read(path).expect("the fixture is readable"))
        .expect("the reference parses")
}

fn load(path: &Path, device: &Device) -> Result<Gemma4, Gemma4Error> {
    Gemma4::load(path, device, LoadOptions::new().dtype(DType::F32))
}

/// A GGUF file that is deleted after the test.
struct Copy {
    folder: TempDir,
}

impl Copy {
    fn of(bytes: &[u8]) -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        fs::write(folder.path().join("model.gguf"), bytes).expect("the file is written");
        Self { folder }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("model.gguf")
    }

    fn load(&self) -> Result<Gemma4, Gemma4Error> {
        load(&self.path(), &Device::flex())
    }
}

/// Reads a fixture's GGUF file into its metadata values and tensors.
fn parts(name: &str) -> Gguf {
    Gguf::read(&fs::read(path(name)).expect("the fixture is readable"))
        .expect("the file is complete")
}

/// Returns a copy of a fixture's GGUF file after `change` has changed its contents.
fn changed(name: &str, change: impl FnOnce(&mut Gguf)) -> Copy {
    let mut gguf = parts(name);
    change(&mut gguf);
    Copy::of(&gguf.to_bytes())
}

fn logits(gemma: &Gemma4, prompt: &[u32]) -> Vec<f32> {
    let tokens = fixture::tokens(&[prompt], &gemma.device());
    let logits = values(
        gemma
            .model()
            .forward(tokens)
            .expect("the tokens are in the vocabulary"),
    );
    logits[logits.len() - gemma.config().vocab_size..].to_vec()
}

#[test]
fn gguf_dequantized_weights_equal_the_gguf_package() {
    for (name, _) in FILES {
        let gemma = load(&path(name), &Device::flex()).expect(name);
        let saved = TempDir::new().expect("a temporary folder");
        gemma
            .model()
            .save(saved.path(), None)
            .expect("the save succeeds");
        let saved = fs::read(saved.path().join("model.safetensors")).expect("the file is readable");
        let saved = SafeTensors::deserialize(&saved).expect("the file is safetensors");
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
fn gguf_tokens_equal_the_dequantized_model_and_llama_cpp() {
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
            let generated = generation.expect("the generation succeeds").tokens;
            assert_eq!(generated, reference.generated, "{what}");
            assert_eq!(generated, reference.llama_cpp, "{what}");
        }
    }
}

/// A GGUF file gives the same configuration, tokenizer and generation defaults as the checkpoint folder from which the file
/// was made.
#[test]
fn gguf_config_tokenizer_and_defaults_equal_the_folder() {
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
            let tokens = folder.tokenizer().encode(text).expect("the text encodes");
            assert_eq!(
                gguf.tokenizer().encode(text).expect("the text encodes"),
                tokens
            );
            for skip_special in [true, false] {
                let decoded = |gemma: &Gemma4| gemma.tokenizer().decode(&tokens, skip_special);
                assert_eq!(
                    decoded(&gguf).expect("the tokens decode"),
                    decoded(&folder).expect("the tokens decode")
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

/// For a GGUF model, `written_dtype` returns the dtype that the weights had before quantization, which is bf16.
#[test]
fn gguf_default_dtype_is_that_before_quantization() {
    let load = |path: &Path, options: LoadOptions<'_>| {
        Gemma4Model::load(path, &Device::flex(), options).expect("the model is valid")
    };
    let written = |path: &Path| load(path, LoadOptions::new()).written_dtype();
    let quantized = path("dense-ple.Q8_0");
    assert_eq!(written(&quantized), Some(DType::BF16));
    // On a CPU, the default dtype is f32.
    assert_eq!(load(&quantized, LoadOptions::new()).dtype(), DType::F32);
    let asked = LoadOptions::new().dtype(DType::F16);
    assert_eq!(load(&quantized, asked).dtype(), DType::F16);
    let name = "token_embd.weight";
    let whole = changed("dense-ple.Q8_0", |gguf| {
        let table = gguf.tensors.get_mut(name).expect(name);
        let numbers = table.dimensions.iter().product::<u64>() as usize;
        (table.kind, table.bytes) = (0, vec![0; 4 * numbers]);
    });
    // The result of `written_dtype` stays bf16 if one tensor of the quantized file is in f32.
    assert_eq!(written(&whole.path()), Some(DType::BF16));
}

#[test]
fn gguf_progress_reaches_the_end() {
    let mut seen = Vec::new();
    let options = LoadOptions::new().on_progress(|progress| {
        seen.push((progress.tensor.to_owned(), progress.bytes));
        assert!(progress.bytes <= progress.total_bytes);
    });
    Gemma4Model::load(path("moe.Q4_0"), &Device::flex(), options).expect("the model is valid");
    assert!(seen.windows(2).all(|pair| pair[0].1 < pair[1].1));
    assert!(seen.iter().any(|(name, _)| name == "token_embd.weight"));
    let gguf = parts("moe.Q4_0");
    let whole: usize = gguf
        .tensors
        .iter()
        .filter(|(name, _)| *name != "rope_freqs.weight")
        .map(|(_, tensor)| tensor.bytes.len().div_ceil(32) * 32)
        .sum();
    let read = seen.last().expect("progress is reported").1;
    // In the file, a tensor is padded to a multiple of 32 bytes. The reported number of bytes may include this padding or
    // not.
    assert!((whole - 32 * gguf.tensors.len()..=whole).contains(&read));
}

/// Some converters store the two halves (gate and up) of an expert's first matrix as separate tensors. The loader joins the
/// halves.
#[test]
fn gguf_separate_expert_halves_are_joined() {
    let prompt = reference("moe.Q4_0").prompt;
    let expected = load(&path("moe.Q4_0"), &Device::flex()).expect("the model is valid");
    let copy = changed("moe.Q4_0", |gguf| {
        for layer in 0..4 {
            let name = |part: &str| format!("blk.{layer}.ffn_{part}_exps.weight");
            let whole = gguf
                .tensors
                .remove(&name("gate_up"))
                .expect("the tensor exists");
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
    let found = copy.load().expect("the model is valid");
    assert_eq!(logits(&found, &prompt), logits(&expected, &prompt));
}

/// Converted files of E2B contain keys and values of the shared KV layers, although these layers use the keys and values of an
/// earlier layer. The loader ignores such tensors.
#[test]
fn gguf_keys_of_shared_kv_layers_are_ignored() {
    let copy = changed("dense-ple.Q8_0", |gguf| {
        for part in ["attn_k", "attn_v", "attn_k_norm"] {
            let tensor = gguf.tensors[&format!("blk.0.{part}.weight")].clone();
            gguf.tensors.insert(format!("blk.3.{part}.weight"), tensor);
        }
    });
    copy.load().expect("the model is valid");
}

#[test]
fn gguf_chat_template_of_the_file_is_used() {
    let copy = changed("dense-ple.Q8_0", |gguf| {
        let template = "{{ bos_token }}{{ messages[0]['content'] }}{{ unk_token }}";
        gguf.set_text("tokenizer.chat_template", template);
        gguf.set_number("tokenizer.ggml.unknown_token_id", 4);
    });
    let gemma = copy.load().expect("the model is valid");
    let prompt = gemma.chat_template();
    let prompt = prompt.render(&[Message::user("Hi")], ChatOptions::default());
    assert_eq!(prompt.expect("the prompt is valid"), "<bos>Hi<mask>");
    let broken = changed("dense-ple.Q8_0", |gguf| {
        gguf.set_text("tokenizer.chat_template", "{% if %}");
    });
    let error = broken
        .load()
        .expect_err("the template is not valid")
        .to_string();
    assert!(
        error.contains("model.gguf") && error.contains("chat template"),
        "{error}"
    );
}

/// A model that was loaded from a GGUF file can be saved as a checkpoint folder.
#[test]
fn gguf_model_is_saved_as_a_folder() {
    let gemma = load(&path("dense-ple.Q8_0"), &Device::flex()).expect("the model is valid");
    let saved = TempDir::new().expect("a temporary folder");
    gemma
        .model()
        .save(saved.path(), None)
        .expect("the save succeeds");
    let again = Gemma4Model::load(saved.path(), &Device::flex(), LoadOptions::new());
    let prompt = fixture::tokens(&[&reference("dense-ple.Q8_0").prompt], &gemma.device());
    let logits = |model: &Gemma4Model| values(model.forward(prompt.clone()).expect("tokens"));
    assert_eq!(
        logits(&again.expect("the model is valid")),
        logits(gemma.model())
    );
    let like = gemma
        .model()
        .save_like(path("dense-ple.Q8_0"), saved.path(), None);
    let error = like.expect_err("a GGUF file is not a folder").to_string();
    assert!(error.contains("GGUF"), "{error}");
}
