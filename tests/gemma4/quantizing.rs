//! `quantize`: what it writes are the weights that `--quantize` makes, and the bytes that the formats' own programs make; it comes to its place
//! whole or not at all, and what is not served is named.

use crate::{
    fixture,
    programs::{
        folder::{Folder, Stored, tensors},
        refused::check,
        report,
    },
};
use attention_workspace::testing::{
    gguf::Gguf,
    program::{program, run, succeed},
};
use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{DType, Device, Int, Tensor},
};
use burn_gemma4::{
    Gemma4, Gemma4Config, Gemma4Model, LayerType, LoadOptions, Message, Prompt, Quantization,
    quantize_checkpoint,
};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};
use tempfile::TempDir;

const FORMS: [(Quantization, &str); 2] = [(Quantization::Q8, "q8"), (Quantization::Q4, "q4")];

fn load(path: &Path, form: Quantization) -> Gemma4 {
    let options = LoadOptions::new().dtype(DType::F32).quantization(form);
    Gemma4::load(path, &Device::flex(), options)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A model's parameters, words or numbers.
#[derive(Default)]
struct Parameters {
    path: Vec<String>,
    found: BTreeMap<String, Vec<u8>>,
}

impl Parameters {
    fn of(gemma: &Gemma4) -> BTreeMap<String, Vec<u8>> {
        let mut parameters = Self::default();
        gemma.model().visit(&mut parameters);
        parameters.found
    }
}

impl ModuleVisitor for Parameters {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let bytes = param.val().into_data().as_bytes().to_vec();
        self.found.insert(self.path.join("."), bytes);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let bytes = param.val().into_data().as_bytes().to_vec();
        self.found.insert(self.path.join("."), bytes);
    }
}

#[test]
fn a_gguf_file_has_what_is_quantized_while_loading() {
    let folder = TempDir::new().expect("a folder");
    for name in fixture::ALL {
        for (form, to) in FORMS {
            let out = folder.path().join(format!("{name}.{to}.gguf"));
            let from = fixture::folder(name);
            let written = quantize_checkpoint(&from, &out, form, |_| ()).expect(name);
            assert_eq!(written.bytes, fs::metadata(&out).expect("a file").len());
            let (found, expected) = (load(&out, Quantization::Stored), load(&from, form));
            let parameters = Parameters::of(&expected);
            assert!(Parameters::of(&found) == parameters, "{name}, {to}");
            for path in &written.whole {
                assert!(parameters.contains_key(path), "{name}, {to}: {path}");
            }
            let text = "the cat <bos> 42\n  é<turn|>";
            let prompt = Prompt::Chat(vec![Message::user(text)]);
            for prompt in [Prompt::Text(text.into()), prompt] {
                let tokens = |gemma: &Gemma4| gemma.tokens(&prompt, Default::default());
                assert_eq!(
                    tokens(&found).expect("tokens"),
                    tokens(&expected).expect("tokens")
                );
            }
            let (mut found, mut expected) = (found.options(), expected.options());
            for options in [&mut found, &mut expected] {
                options.stop_tokens.sort_unstable();
            }
            assert_eq!(found.sampling, expected.sampling, "{name}");
            assert_eq!(found.stop_tokens, expected.stop_tokens, "{name}");
        }
    }
}

/// The converter's and the quantizer's own file of the same checkpoint.
#[test]
fn a_gguf_file_is_llama_cpps() {
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().join("out.gguf");
    let read = |path: &Path| Gguf::read(&fs::read(path).expect("a file")).expect("GGUF");
    for (name, form, file) in [
        ("dense-ple", Quantization::Q8, "dense-ple.Q8_0.gguf"),
        ("moe", Quantization::Q4, "moe.Q4_0.gguf"),
    ] {
        quantize_checkpoint(fixture::folder(name), &out, form, |_| ()).expect(name);
        let (mut found, mut expected) = (read(&out), read(&fixture::folder("gguf").join(file)));
        for gguf in [&mut found, &mut expected] {
            gguf.values.remove("general.name");
            gguf.values.remove("general.size_label");
        }
        assert_eq!(found.values, expected.values, "{name}");
        assert!(found.tensors.keys().eq(expected.tensors.keys()), "{name}");
        let mut alike = 0;
        for (tensor, found) in &found.tensors {
            let expected = &expected.tensors[tensor];
            assert_eq!(found.dimensions, expected.dimensions, "{tensor}");
            // llama.cpp's quantizer chooses larger types for some.
            if found.kind == expected.kind {
                let bytes = found.bytes.len().min(expected.bytes.len());
                // The last one goes on to the end of the file.
                assert!(found.bytes[..bytes] == expected.bytes[..bytes], "{tensor}");
                alike += 1;
            }
        }
        assert!(alike > 60, "{name}: {alike}");
        fs::remove_file(&out).expect("a file to remove");
    }
}

/// `tests/fixtures/check_quantized.py` holds these folders to compressed-tensors and transformers, and has written the checksums down.
#[test]
fn a_folder_is_compressed_tensors() {
    let checksums = fs::read(fixture::folder("quantized.json")).expect("a fixture");
    let checksums: BTreeMap<String, u32> = serde_json::from_slice(&checksums).expect("JSON");
    assert_eq!(checksums.len(), 6);
    let folder = TempDir::new().expect("a folder");
    for (name, expected) in checksums {
        let (checkpoint, to) = name.rsplit_once('-').expect("a form");
        let form = FORMS
            .iter()
            .find(|(_, name)| *name == to)
            .expect("a form")
            .0;
        let (from, out) = (fixture::folder(checkpoint), folder.path().join(&name));
        quantize_checkpoint(&from, &out, form, |_| ()).expect(&name);
        let written = tensors(&out);
        let packed = written
            .iter()
            .filter(|(name, _)| name.contains(".weight_"))
            .flat_map(|(_, tensor)| tensor.bytes.iter().copied());
        assert_eq!(
            fixture::crc32(&packed.collect::<Vec<_>>()),
            expected,
            "{name}"
        );
        let before = tensors(&from);
        for (name, tensor) in written {
            assert!(
                name.contains(".weight_") || before[&name] == tensor,
                "{name}"
            );
        }
        assert!(load(&out, Quantization::Stored).model().is_quantized());
        let beside = |folder: &Path| fs::read(folder.join("tokenizer.json")).expect("a file");
        assert_eq!(beside(&out), beside(&from));
    }
}

fn quantize(from: &Path, to: &str, out: &Path, arguments: &[&str]) -> Command {
    let mut command = program("quantize");
    command.arg("--model").arg(from).args(["--to", to]);
    command.arg("--out").arg(out).args(arguments);
    command
}

/// Of the small model that has learned something.
#[test]
fn the_program_tells_what_it_costs() {
    let embedded = concat!(env!("CARGO_MANIFEST_DIR"), "/crates/burn-gemma4/embedded");
    let folder = TempDir::new().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let text: String = include_str!("../../LICENSE-APACHE")
        .chars()
        .take(1000)
        .collect();
    fs::write(path("text.txt"), text).expect("a file");
    let data = path("text.txt");
    let arguments = ["--data", data.to_str().expect("a name"), "--device", "flex"];
    let arguments = [&arguments[..], &["--dtype", "f32", "--json"]].concat();
    for (out, to, most) in [("w8", "q8", 0.01), ("w4.gguf", "q4", 0.1)] {
        let out = path(out);
        let ended = succeed(&mut quantize(Path::new(embedded), to, &out, &arguments));
        // 8 columns of per-layer embeddings are no block.
        assert!(
            ended.stderr.contains("layers.0.per_layer_projection"),
            "{ended:?}"
        );
        let report = report(&ended);
        let of = |when: &str| report[when]["cross_entropy"].as_f64().expect("a number");
        let more = of("after") / of("before") - 1.0;
        assert!(more != 0.0 && more.abs() < most, "{report}");
        assert!(report["bytes"].as_u64() < Some(2_800_000), "{report}");
        let again = run(&mut quantize(Path::new(embedded), to, &out, &[]));
        check("what is there", &again, 2, &["--out", "is there already"]);
    }
}

#[test]
fn what_is_not_served_is_named() {
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("out.gguf");
    let directory = folder.path().join("out");
    let outs = [&file, &directory];
    let refused = |what: &str, from: &Path, outs: &[&PathBuf], words: &[&str]| {
        for out in outs {
            check(what, &run(&mut quantize(from, "q8", out, &[])), 1, words);
            assert!(!out.exists(), "{what}");
        }
        let left = fs::read_dir(folder.path()).expect("a folder").count();
        assert_eq!(left, 0, "{what} leaves something");
    };
    let packed = fixture::folder("compressed").join("mixed");
    refused("packed", &packed, &outs, &["compressed-tensors already"]);
    let gguf = fixture::folder("gguf").join("dense-ple.Q8_0.gguf");
    refused("a file", &gguf, &outs, &["Q8_0.gguf", "is a file"]);
    let drafter = fixture::folder("assistant-ple");
    refused(
        "a drafter",
        &drafter,
        &outs,
        &["gemma4_assistant", "drafter"],
    );
    let absent = fixture::folder("absent");
    refused("nothing", &absent, &outs, &["config.json"]);

    for number in [f32::NAN, f32::INFINITY, 1e38] {
        let broken = Folder::copy("dense-ple");
        broken.edit(|tensors| {
            let name = "model.layers.1.mlp.up_proj.weight";
            let tensor = tensors.get_mut(name).expect("it");
            tensor.bytes[40..44].copy_from_slice(&number.to_le_bytes());
        });
        let words = ["layers.1.mlp.up_proj", "no finite number"];
        // A scale in f32 holds more than one in f16.
        let outs = if number.is_finite() {
            &outs[..1]
        } else {
            &outs
        };
        refused("a broken weight", broken.path(), outs, &words);
    }
    let misshapen = Folder::copy("dense-ple");
    misshapen.edit(|tensors| {
        tensors.get_mut("model.norm.weight").expect("it").shape = vec![8, 8];
    });
    refused(
        "a misshapen weight",
        misshapen.path(),
        &outs,
        &["model.norm.weight", "[8, 8]"],
    );

    let other = Folder::copy("dense-ple");
    let mut tokenizer: Value = serde_json::from_slice(&other.read("tokenizer.json")).expect("JSON");
    tokenizer["normalizer"]["content"] = json!("_");
    other.write("tokenizer.json", tokenizer.to_string());
    refused(
        "another tokenizer",
        other.path(),
        &outs[..1],
        &["tokenizer.json", "normalizer"],
    );
    let broken = Folder::copy("dense-ple");
    broken.write(
        "generation_config.json",
        r#"{"temperature": -1, "do_sample": true}"#,
    );
    refused(
        "broken defaults",
        broken.path(),
        &outs[..1],
        &["generation_config.json", "temperature"],
    );
    let large = Folder::copy("dense-ple");
    let mut tokenizer: Value = serde_json::from_slice(&large.read("tokenizer.json")).expect("JSON");
    tokenizer["model"]["vocab"]["more"] = json!(320);
    large.write("tokenizer.json", tokenizer.to_string());
    refused(
        "a larger tokenizer",
        large.path(),
        &outs[..1],
        &["token 320", "320 tokens"],
    );
    let fine = Folder::copy("dense-ple");
    fine.set("config.json", "rms_norm_eps", 1.000_000_01e-6);
    refused(
        "another number",
        fine.path(),
        &outs[..1],
        &["GGUF has no words"],
    );
}

/// What others have there, such as a run that was killed, is neither in the way nor written over, and a link is not followed.
#[test]
fn nobodys_files_are_written_over() {
    let from = fixture::folder("dense-ple");
    for name in ["out", "out.gguf"] {
        let folder = TempDir::new().expect("a folder");
        let out = folder.path().join(name);
        let left = folder.path().join(format!("{name}.partial"));
        let others = folder.path().join("others");
        fs::write(&others, "theirs").expect("a file");
        #[cfg(unix)]
        std::os::unix::fs::symlink(&others, &left).expect("a link");
        #[cfg(not(unix))]
        fs::copy(&others, &left).expect("a file");
        quantize_checkpoint(&from, &out, Quantization::Q8, |_| ()).expect(name);
        for path in [&others, &left] {
            let there = fs::read_to_string(path).unwrap_or_default();
            assert!(there == "theirs", "{name}: {}", path.display());
        }
        assert!(left.symlink_metadata().expect("a link").is_symlink() || cfg!(not(unix)));
        let there = fs::read_dir(folder.path()).expect("a folder").count();
        assert_eq!(there, 3, "{name} leaves something");
        assert!(load(&out, Quantization::Stored).model().is_quantized());
    }
}

/// As other programs write them, though a temporary file is its owner's alone.
#[cfg(unix)]
#[test]
fn others_may_read_what_is_written() {
    use std::os::unix::fs::PermissionsExt;
    let folder = TempDir::new().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    fs::write(path("a file"), "").expect("a file");
    fs::create_dir(path("a folder")).expect("a folder");
    let mode = |path: &Path| fs::metadata(path).expect("it").permissions().mode();
    let from = fixture::folder("dense-ple");
    for name in ["out", "out.gguf"] {
        quantize_checkpoint(&from, path(name), Quantization::Q8, |_| ()).expect(name);
    }
    assert_eq!(mode(&path("out.gguf")), mode(&path("a file")));
    assert_eq!(mode(&path("out")), mode(&path("a folder")));
    for name in ["model.safetensors", "config.json"] {
        assert_eq!(mode(&path("out").join(name)), mode(&path("a file")));
    }
}

#[test]
fn an_ending_is_one_in_any_case() {
    let folder = TempDir::new().expect("a folder");
    for name in ["A.GGUF", "a.Gguf"] {
        let out = folder.path().join(name);
        let from = fixture::folder("dense-ple");
        quantize_checkpoint(from, &out, Quantization::Q8, |_| ()).expect(name);
        assert!(out.is_file(), "{name}");
        assert!(load(&out, Quantization::Stored).model().is_quantized());
    }
}

/// Of products that have no whole blocks, and a table that has: a folder packs no tables.
#[test]
fn a_folder_of_which_nothing_is_quantized_is_refused() {
    let config = Gemma4Config {
        vocab_size: 120,
        vocab_size_per_layer_input: 120,
        hidden_size: 24,
        intermediate_size: 24,
        layer_types: vec![LayerType::Sliding, LayerType::Full],
        num_attention_heads: 3,
        num_key_value_heads: 1,
        num_global_key_value_heads: 1,
        sliding_head_dim: 8,
        global_head_dim: 8,
        num_kv_shared_layers: 0,
        hidden_size_per_layer_input: 16,
        ..Gemma4Config::e2b()
    };
    let folder = TempDir::new().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let model = Gemma4Model::new(&config, &Device::flex());
    model.save(path("small"), None).expect("a checkpoint");
    let written = quantize_checkpoint(path("small"), path("out"), Quantization::Q8, |_| ());
    let error = written.expect_err("nothing to quantize").to_string();
    assert!(error.contains("nothing to quantize"), "{error}");
    assert!(!path("out").exists());
}

/// Towers are in a folder as they were, and not in a GGUF file, which is said.
#[test]
fn towers_are_kept_or_named() {
    let base = Folder::copy("dense-ple-mm-bf16");
    let tower = "model.vision_tower.patch_embedder.weight";
    base.edit(|tensors| {
        let stored = crate::programs::folder::Stored {
            dtype: Dtype::BF16,
            shape: vec![3, 2],
            bytes: (1..=12).collect(),
        };
        tensors.insert(tower.into(), stored);
    });
    base.set(
        "config.json",
        "vision_config",
        json!({"model_type": "gemma4_vision"}),
    );
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().join("out");
    succeed(&mut quantize(base.path(), "q4", &out, &[]));
    assert!(tensors(&out)[tower] == tensors(base.path())[tower]);
    let config = fs::read(out.join("config.json")).expect("a file");
    let config: Value = serde_json::from_slice(&config).expect("JSON");
    let ignored = config["quantization_config"]["ignore"]
        .as_array()
        .expect("a list");
    assert!(ignored.contains(&json!("model.vision_tower.patch_embedder")));
    let out = folder.path().join("out.gguf");
    base.set("generation_config.json", "eos_token_id", json!([1, 77]));
    base.set("generation_config.json", "max_new_tokens", 5);
    // A penalty without draws: GGUF's readers, and the converter, know it with the others alone.
    base.set("generation_config.json", "do_sample", false);
    base.set("generation_config.json", "repetition_penalty", 1.5);
    let ended = succeed(&mut quantize(base.path(), "q4", &out, &[]));
    for words in [
        "the sampling of",
        "tower of vision_config",
        "[77] as ends",
        "max_new_tokens",
    ] {
        assert!(ended.stderr.contains(words), "{ended:?}");
    }
}

/// Keys of a layer that reads an earlier one's, of no size at all, as loading leaves them alone.
#[test]
fn what_nobody_reads_may_be_nothing() {
    for shape in [[8, 0], [0, 32]] {
        let folder = Folder::copy("dense-ple");
        folder.edit(|tensors| {
            let empty = Stored {
                dtype: Dtype::F32,
                shape: shape.to_vec(),
                bytes: Vec::new(),
            };
            let layer = tensors
                .keys()
                .filter(|name| name.ends_with("q_proj.weight"));
            let last = layer.max().expect("layers").clone();
            tensors.insert(last.replace("q_proj", "k_proj"), empty);
        });
        load(folder.path(), Quantization::Stored);
        let out = TempDir::new().expect("a folder");
        let out = out.path().join("quantized");
        quantize_checkpoint(folder.path(), &out, Quantization::Q8, |_| ()).expect("quantized");
        load(&out, Quantization::Stored);
    }
}
