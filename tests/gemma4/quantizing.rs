//! Tests the program `quantize` and its library function. The written weights equal the weights of a model that is
//! quantized while loading. The written bytes equal the output of the format's original program: llama.cpp for GGUF,
//! and compressed-tensors for folders. The output appears only when it is complete.

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
    program::{gemma4, run, succeed},
};
use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{DType, Device, Int, Tensor},
};
use burn_gemma4::{
    ExportForm, Gemma4, Gemma4Config, Gemma4Model, LayerType, LoadOptions, Message, Prompt,
    Quantization, quantize_checkpoint,
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

/// Forms that loading can also quantize to, each with the argument of the program.
const FORMS: [(Quantization, ExportForm, &str); 2] = [
    (Quantization::Q8, ExportForm::Q8, "q8"),
    (Quantization::Q4, ExportForm::Q4, "q4"),
];

fn load(path: &Path, form: Quantization) -> Gemma4 {
    let options = LoadOptions::new().dtype(DType::F32).quantization(form);
    Gemma4::load(path, &Device::flex(), options)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A visitor that collects the bytes of all parameters of a model. Packed parameters stay packed.
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
fn quantize_to_gguf_equals_quantizing_while_loading() {
    let folder = TempDir::new().expect("a temporary folder");
    for name in fixture::ALL {
        for (form, exported, to) in FORMS {
            let out = folder.path().join(format!("{name}.{to}.gguf"));
            let from = fixture::folder(name);
            let written = quantize_checkpoint(&from, &out, exported, |_| ()).expect(name);
            assert_eq!(
                written.bytes,
                fs::metadata(&out).expect("the file is readable").len()
            );
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
                    tokens(&found).expect("the tokens are valid"),
                    tokens(&expected).expect("the tokens are valid")
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

/// A quantized GGUF file equals the file that llama.cpp made from the same checkpoint, with its own converter and
/// quantizer.
#[test]
fn quantize_to_gguf_equals_llama_cpp() {
    let folder = TempDir::new().expect("a temporary folder");
    let out = folder.path().join("out.gguf");
    let read = |path: &Path| Gguf::read(&fs::read(path).expect("a file")).expect("GGUF");
    for (name, form, file) in [
        ("dense-ple", ExportForm::Q8, "dense-ple.Q8_0.gguf"),
        ("moe", ExportForm::Q4, "moe.Q4_0.gguf"),
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
            // llama.cpp's quantizer chooses larger types for some tensors. The test therefore compares only tensors
            // that have the same type in both files.
            if found.kind == expected.kind {
                let bytes = found.bytes.len().min(expected.bytes.len());
                // The last tensor's bytes extend to the end of the file, and may include padding. Only the bytes that both
                // files have are compared.
                assert!(found.bytes[..bytes] == expected.bytes[..bytes], "{tensor}");
                alike += 1;
            }
        }
        assert!(alike > 60, "{name}: {alike}");
        fs::remove_file(&out).expect("the file is removed");
    }
}

/// The packed tensors of quantized folders have the recorded checksums. The script `tests/fixtures/check_quantized.py`
/// has written these checksums after checking the folders with compressed-tensors and Hugging Face Transformers.
#[test]
fn quantize_to_folder_equals_compressed_tensors() {
    let checksums = fs::read(fixture::folder("quantized.json")).expect("the fixture is readable");
    let checksums: BTreeMap<String, u32> =
        serde_json::from_slice(&checksums).expect("the text is JSON");
    assert_eq!(checksums.len(), 6);
    let folder = TempDir::new().expect("a temporary folder");
    for (name, expected) in checksums {
        let (checkpoint, to) = name.rsplit_once('-').expect("the name ends with a form");
        let form = FORMS
            .iter()
            .find(|(_, _, name)| *name == to)
            .expect("the form is known")
            .1;
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
        let beside =
            |folder: &Path| fs::read(folder.join("tokenizer.json")).expect("the file is readable");
        assert_eq!(beside(&out), beside(&from));
    }
}

fn quantize(from: &Path, to: &str, out: &Path, arguments: &[&str]) -> Command {
    let mut command = gemma4("quantize");
    command.arg("--model").arg(from).args(["--to", to]);
    command.arg("--out").arg(out).args(arguments);
    command
}

/// The program reports the cross entropy of a text before and after quantization. The model is the small trained model that
/// `burn-gemma4` embeds.
#[test]
fn quantize_program_reports_the_cost() {
    let embedded = concat!(env!("CARGO_MANIFEST_DIR"), "/crates/burn-gemma4/embedded");
    let folder = TempDir::new().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name);
    let text: String = include_str!("../../LICENSE-APACHE")
        .chars()
        .take(1000)
        .collect();
    fs::write(path("text.txt"), text).expect("the file is written");
    let data = path("text.txt");
    let arguments = [
        "--data",
        data.to_str().expect("the path is UTF-8"),
        "--device",
        "flex",
    ];
    let arguments = [&arguments[..], &["--dtype", "f32", "--json"]].concat();
    for (out, to, most) in [("w8", "q8", 0.01), ("w4.gguf", "q4", 0.1)] {
        let out = path(out);
        let ended = succeed(&mut quantize(Path::new(embedded), to, &out, &arguments));
        // The rows of `per_layer_projection` have 8 columns, which is less than a quantization block. The matrix therefore
        // stays unquantized, and the program names the matrix.
        assert!(
            ended.stderr.contains("layers.0.per_layer_projection"),
            "{ended:?}"
        );
        let report = report(&ended);
        let of = |when: &str| report[when]["cross_entropy"].as_f64().expect("is a number");
        let more = of("after") / of("before") - 1.0;
        assert!(more != 0.0 && more.abs() < most, "{report}");
        assert!(report["bytes"].as_u64() < Some(2_800_000), "{report}");
        // The types are those of GGUF files.
        let bits = report["bits_per_weight"].as_f64();
        let is_right = match to {
            "q8" => bits.is_none() && report["types"] == serde_json::json!({}),
            _ => bits.is_some_and(|bits| (4.5..6.0).contains(&bits)),
        };
        assert!(is_right, "{report}");
        let again = run(&mut quantize(Path::new(embedded), to, &out, &[]));
        check("what is there", &again, 2, &["--out", "is there already"]);
    }
}

#[test]
fn quantize_unsupported_input_is_refused_by_name() {
    let folder = TempDir::new().expect("a temporary folder");
    let file = folder.path().join("out.gguf");
    let directory = folder.path().join("out");
    let outs = [&file, &directory];
    let refused = |what: &str, from: &Path, outs: &[&PathBuf], words: &[&str]| {
        for out in outs {
            check(what, &run(&mut quantize(from, "q8", out, &[])), 1, words);
            assert!(!out.exists(), "{what}");
        }
        let left = fs::read_dir(folder.path())
            .expect("the folder is readable")
            .count();
        assert_eq!(left, 0, "{what}: files are left in the folder");
    };
    let packed = fixture::folder("compressed").join("mixed");
    refused("packed", &packed, &outs, &["quantized already"]);
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
    let ended = run(&mut quantize(&absent, "q8", &file, &[]));
    check("nothing", &ended, 2, &["absent", "no such file or folder"]);

    for number in [f32::NAN, f32::INFINITY, 1e38] {
        let broken = Folder::copy("dense-ple");
        broken.edit(|tensors| {
            let name = "model.layers.1.mlp.up_proj.weight";
            let tensor = tensors.get_mut(name).expect("the tensor exists");
            tensor.bytes[40..44].copy_from_slice(&number.to_le_bytes());
        });
        let words = ["layers.1.mlp.up_proj", "no finite number"];
        // Only GGUF refuses the weight 1e38. A GGUF file stores scales in f16, which cannot represent the scale of such a
        // weight.
        let outs = if number.is_finite() {
            &outs[..1]
        } else {
            &outs
        };
        refused("a broken weight", broken.path(), outs, &words);
    }
    let misshapen = Folder::copy("dense-ple");
    misshapen.edit(|tensors| {
        tensors
            .get_mut("model.norm.weight")
            .expect("the tensor exists")
            .shape = vec![8, 8];
    });
    refused(
        "a misshapen weight",
        misshapen.path(),
        &outs,
        &["model.norm.weight", "[8, 8]"],
    );

    let other = Folder::copy("dense-ple");
    let mut tokenizer: Value =
        serde_json::from_slice(&other.read("tokenizer.json")).expect("the text is JSON");
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
    let mut tokenizer: Value =
        serde_json::from_slice(&large.read("tokenizer.json")).expect("the text is JSON");
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

/// The folder of the output may contain other files, such as temporary files that a killed run has left. `quantize`
/// still writes its output. The program does not overwrite these files, and does not follow a symbolic link.
#[test]
fn quantize_leaves_other_files_unchanged() {
    let from = fixture::folder("dense-ple");
    for name in ["out", "out.gguf"] {
        let folder = TempDir::new().expect("a temporary folder");
        let out = folder.path().join(name);
        let left = folder.path().join(format!("{name}.partial"));
        let others = folder.path().join("others");
        fs::write(&others, "theirs").expect("the file is written");
        #[cfg(unix)]
        std::os::unix::fs::symlink(&others, &left).expect("the link is created");
        #[cfg(not(unix))]
        fs::copy(&others, &left).expect("the file is written");
        quantize_checkpoint(&from, &out, ExportForm::Q8, |_| ()).expect(name);
        for path in [&others, &left] {
            let there = fs::read_to_string(path).unwrap_or_default();
            assert!(there == "theirs", "{name}: {}", path.display());
        }
        assert!(
            left.symlink_metadata()
                .expect("the link exists")
                .is_symlink()
                || cfg!(not(unix))
        );
        let there = fs::read_dir(folder.path())
            .expect("the folder is readable")
            .count();
        assert_eq!(there, 3, "{name}: other files are left in the folder");
        assert!(load(&out, Quantization::Stored).model().is_quantized());
    }
}

/// The output has the usual permissions, although the temporary files are readable only by their owner.
#[cfg(unix)]
#[test]
fn quantize_output_has_the_usual_permissions() {
    use std::os::unix::fs::PermissionsExt;
    let folder = TempDir::new().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name);
    fs::write(path("a file"), "").expect("the file is written");
    fs::create_dir(path("a folder")).expect("the folder is created");
    let mode = |path: &Path| fs::metadata(path).expect("exists").permissions().mode();
    let from = fixture::folder("dense-ple");
    for name in ["out", "out.gguf"] {
        quantize_checkpoint(&from, path(name), ExportForm::Q8, |_| ()).expect(name);
    }
    assert_eq!(mode(&path("out.gguf")), mode(&path("a file")));
    assert_eq!(mode(&path("out")), mode(&path("a folder")));
    for name in ["model.safetensors", "config.json"] {
        assert_eq!(mode(&path("out").join(name)), mode(&path("a file")));
    }
}

#[test]
fn quantize_gguf_extension_in_any_case_is_recognized() {
    let folder = TempDir::new().expect("a temporary folder");
    for name in ["A.GGUF", "a.Gguf"] {
        let out = folder.path().join(name);
        let from = fixture::folder("dense-ple");
        quantize_checkpoint(from, &out, ExportForm::Q8, |_| ()).expect(name);
        assert!(out.is_file(), "{name}");
        assert!(load(&out, Quantization::Stored).model().is_quantized());
    }
}

/// A folder is refused if none of its weights can be packed. In this test, the rows of all matrices are shorter than a
/// quantization block. Tables of per-layer embeddings are never packed in folders.
#[test]
fn quantize_folder_without_packable_weights_is_refused() {
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
    let folder = TempDir::new().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name);
    let model = Gemma4Model::new(&config, &Device::flex());
    model
        .save(path("small"), None)
        .expect("the checkpoint is valid");
    let written = quantize_checkpoint(path("small"), path("out"), ExportForm::Q8, |_| ());
    let error = written
        .expect_err("there is nothing to quantize")
        .to_string();
    assert!(error.contains("nothing to quantize"), "{error}");
    assert!(!path("out").exists());
}

/// A quantized folder contains the vision and audio towers unchanged. A GGUF file leaves the towers out, and the program
/// reports that.
#[test]
fn quantize_towers_are_kept_in_folders_and_reported_for_gguf() {
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
    let folder = TempDir::new().expect("a temporary folder");
    let out = folder.path().join("out");
    succeed(&mut quantize(base.path(), "q4", &out, &[]));
    assert!(tensors(&out)[tower] == tensors(base.path())[tower]);
    let config = fs::read(out.join("config.json")).expect("the file is readable");
    let config: Value = serde_json::from_slice(&config).expect("the text is JSON");
    let ignored = config["quantization_config"]["ignore"]
        .as_array()
        .expect("the field is a list");
    assert!(ignored.contains(&json!("model.vision_tower.patch_embedder")));
    let out = folder.path().join("out.gguf");
    base.set("generation_config.json", "eos_token_id", json!([1, 77]));
    base.set("generation_config.json", "max_new_tokens", 5);
    // The generation defaults have a repetition penalty but disable sampling. GGUF readers use all sampling options or none,
    // so the program must report that the sampling options are left out.
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

/// The unused key weights of a shared KV layer may have no elements. `quantize` ignores such tensors, as loading does.
#[test]
fn quantize_empty_keys_of_shared_kv_layers_are_ignored() {
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
            let last = layer.max().expect("there is a layer").clone();
            tensors.insert(last.replace("q_proj", "k_proj"), empty);
        });
        load(folder.path(), Quantization::Stored);
        let out = TempDir::new().expect("a temporary folder");
        let out = out.path().join("quantized");
        quantize_checkpoint(folder.path(), &out, ExportForm::Q8, |_| ())
            .expect("the checkpoint is quantized");
        load(&out, Quantization::Stored);
    }
}
