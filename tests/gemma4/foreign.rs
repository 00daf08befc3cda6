//! Tests checkpoints and adapters in formats that are not supported. The error names the format, not merely the first
//! unexpected field or tensor.

use crate::fixture::{folder, values};
use crate::programs::folder::Folder;
use burn::tensor::Device;
use burn_gemma4::{Adapter, Gemma4Config, Gemma4Error, Gemma4Model, LoadOptions};
use safetensors::{Dtype, SafeTensors, serialize, tensor::TensorView};
use serde_json::{Value, json};
use std::{fs, path::Path};
use tempfile::TempDir;

#[track_caller]
fn check<T>(what: &str, outcome: Result<T, Gemma4Error>, words: &[&str]) {
    let Err(error) = outcome else {
        panic!("{what}: loading should fail");
    };
    let text = error.to_string();
    for word in words {
        assert!(
            text.contains(word),
            "{what}: {word:?} is missing from {text}"
        );
    }
}

fn load(path: &Path) -> Result<Gemma4Model, Gemma4Error> {
    Gemma4Model::load(path, &Device::flex(), LoadOptions::new())
}

/// Returns a fixture's `config.json` with one additional field. The field is added to the object `inside`, or at the top
/// level if `inside` is `None`.
fn config(fixture: &str, inside: Option<&str>, field: &str, value: Value) -> String {
    let text =
        fs::read_to_string(folder(fixture).join("config.json")).expect("the file is readable");
    let mut config: Value = serde_json::from_str(&text).expect("the text is JSON");
    match inside {
        Some(part) => config[part][field] = value,
        None => config[field] = value,
    }
    config.to_string()
}

#[test]
fn quantized_checkpoint_is_refused_by_its_method() {
    for method in [
        "gptq",
        "awq",
        "bitsandbytes",
        "compressed-tensors",
        "fp8",
        "modelopt",
        "torchao",
    ] {
        let quantization = || json!({"quant_method": method, "bits": 4});
        let of_text = config("dense-ple", None, "quantization_config", quantization());
        check(
            method,
            Gemma4Config::from_json(&of_text),
            &["quantization_config", method],
        );
        let wrapped = config(
            "dense-ple-mm-bf16",
            None,
            "quantization_config",
            quantization(),
        );
        check(
            method,
            Gemma4Config::from_json(&wrapped),
            &["quantization_config", method],
        );
        let inner = Some("text_config");
        let inner = config(
            "dense-ple-mm-bf16",
            inner,
            "quantization_config",
            quantization(),
        );
        check(
            method,
            Gemma4Config::from_json(&inner),
            &["quantization_config", method],
        );
    }
    let by_mlx = json!({"group_size": 64, "bits": 4, "mode": "affine"});
    let by_mlx = config("dense-ple", None, "quantization", by_mlx);
    check(
        "MLX",
        Gemma4Config::from_json(&by_mlx),
        &["quantization", "MLX"],
    );
    // Quantization-aware training writes float weights and a quantization configuration without a method. Such a configuration
    // is read as unquantized.
    for none in [
        Value::Null,
        json!({}),
        json!({"bits": 4}),
        json!({"quant_method": null}),
    ] {
        let plain = config("dense-ple", None, "quantization_config", none);
        Gemma4Config::from_json(&plain).expect("the configuration has no quantization");
    }
}

/// Checkpoints like `…-qat-q4_0-unquantized` have float weights and a quantization configuration without a method. Such a
/// checkpoint loads as unquantized. If it contains an integer tensor, the error names this tensor.
#[test]
fn quantization_config_without_a_method_over_floats_is_loaded() {
    let nameless = json!({"bits": 4, "group_size": 32, "modules_to_not_convert": ["lm_head"]});
    let folder = Folder::copy("dense-ple");
    let before = load(folder.path())
        .expect("the model is valid")
        .norm
        .weight
        .val();
    folder.set("config.json", "quantization_config", nameless);
    let after = load(folder.path())
        .expect("the model is valid")
        .norm
        .weight
        .val();
    assert_eq!(values(before), values(after));
    let name = "model.layers.1.mlp.up_proj.weight";
    folder.edit(|tensors| {
        let tensor = tensors.get_mut(name).expect("the tensor is a matrix");
        tensor.dtype = Dtype::I32;
    });
    check("integers", load(folder.path()), &[name, "I32"]);
}

#[test]
fn drafter_as_model_is_refused_by_name() {
    for model_type in ["gemma4_assistant", "gemma4_unified_assistant"] {
        let drafter = config("dense-ple", None, "model_type", json!(model_type));
        check(
            model_type,
            Gemma4Config::from_json(&drafter),
            &[model_type, "drafter"],
        );
    }
}

/// A GGUF file that is loaded by its path, lies in the loaded folder, or has the misleading name `model.safetensors`
/// gives an error. The error names the file and its format. The GGUF file of this test is only a header.
#[test]
fn gguf_in_wrong_place_is_refused_by_name() {
    let contents = [&b"GGUF\x03\0\0\0"[..], &[0; 64]].concat();
    let there = TempDir::new().expect("a temporary folder");
    let file = there.path().join("gemma-4-E2B-Q4_K_M.gguf");
    fs::write(&file, &contents).expect("the file is written");
    check(
        "the file",
        load(&file),
        &["gemma-4-E2B-Q4_K_M.gguf", "GGUF"],
    );
    check(
        "its folder",
        load(there.path()),
        &["gemma-4-E2B-Q4_K_M.gguf", "GGUF"],
    );

    let folder = Folder::copy("dense-ple");
    folder.remove("model.safetensors");
    folder.write("model-f16.gguf", &contents);
    check(
        "beside a configuration",
        load(folder.path()),
        &["model-f16.gguf", "GGUF"],
    );
    folder.write("model.safetensors", &contents);
    check(
        "under another name",
        load(folder.path()),
        &["model.safetensors", "GGUF"],
    );
}

#[test]
fn weights_of_other_programs_are_refused_by_name() {
    let folder = Folder::copy("dense-ple");
    folder.remove("model.safetensors");
    folder.write("pytorch_model.bin", b"PK\x03\x04rest");
    check(
        "PyTorch",
        load(folder.path()),
        &["pytorch_model.bin", "PyTorch"],
    );
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n";
    folder.write("model.safetensors", pointer);
    check(
        "a pointer",
        load(folder.path()),
        &["model.safetensors", "Git LFS"],
    );
}

/// If a folder lacks the weights or the configuration, the error names the missing file.
#[test]
fn missing_file_is_named() {
    let folder = Folder::copy("dense-ple");
    folder.remove("model.safetensors");
    check(
        "no weights",
        load(folder.path()),
        &["model.safetensors", "No such file"],
    );
    folder.remove("config.json");
    check(
        "no configuration",
        load(folder.path()),
        &["config.json", "No such file"],
    );
}

#[test]
fn tensor_names_of_mlx_are_refused_by_name() {
    for prefix in ["model.", "model.language_model."] {
        let folder = Folder::copy(match prefix {
            "model." => "dense-ple",
            _ => "dense-ple-mm-bf16",
        });
        folder.edit(|tensors| {
            let renamed = std::mem::take(tensors).into_iter().map(|(name, tensor)| {
                let path = name.strip_prefix(prefix).expect("a tensor of the model");
                (format!("language_model.model.{path}"), tensor)
            });
            tensors.extend(renamed.collect::<Vec<_>>());
        });
        check(
            prefix,
            load(folder.path()),
            &["MLX", "language_model.model."],
        );
    }
}

/// Returns a folder with an untrained adapter of the rank `rank` for the fixture `dense-ple`.
fn adapter(rank: usize) -> TempDir {
    let model = Gemma4Model::load(
        folder("dense-ple"),
        &Device::flex().autodiff(),
        LoadOptions::new(),
    )
    .expect("the model is valid");
    let adapter = Adapter::new(rank, 2.0 * rank as f64);
    let model = adapter.attach(model).expect("the adapter is valid");
    let written = TempDir::new().expect("a temporary folder");
    adapter
        .save(&model, written.path(), "dense-ple")
        .expect("the file is written");
    written
}

fn set(adapter: &Path, field: &str, value: Value) {
    let path = adapter.join("adapter_config.json");
    let text = fs::read_to_string(&path).expect("the file is readable");
    let mut config: Value = serde_json::from_str(&text).expect("the text is JSON");
    config[field] = value;
    fs::write(&path, config.to_string()).expect("the file is written");
}

fn merged(adapter: &Path) -> Result<Gemma4Model, Gemma4Error> {
    load(&folder("dense-ple"))
        .expect("the model is valid")
        .merge_adapter(adapter)
}

#[test]
fn adapter_of_another_rank_than_its_config_is_refused() {
    let written = adapter(4);
    merged(written.path()).expect("a rank that fits");
    for rank in [1, 3, 8, 1_u64 << 40] {
        set(written.path(), "r", json!(rank));
        let words = [
            "adapter_model.safetensors",
            "lora_A.weight",
            "rank 4",
            &format!("r is {rank}"),
        ];
        check("the rank", merged(written.path()), &words);
    }
}

#[test]
fn adapter_of_infinite_alpha_or_without_tensors_is_refused() {
    let written = adapter(4);
    for alpha in [json!(1e300), json!(-1e300)] {
        set(written.path(), "lora_alpha", alpha);
        check(
            "alpha",
            merged(written.path()),
            &["adapter_config.json", "lora_alpha"],
        );
    }
    set(written.path(), "lora_alpha", json!(8.0));
    let empty = serialize(std::iter::empty::<(String, TensorView<'_>)>(), None);
    let weights = written.path().join("adapter_model.safetensors");
    fs::write(weights, empty.expect("the file is written")).expect("the file is written");
    check(
        "no tensors",
        merged(written.path()),
        &["adapter_model.safetensors", "no tensors"],
    );
}

/// Adapters of unsupported kinds are refused, because PEFT does not compute `weight + alpha / r · B · A` for them. A
/// and B are the LoRA matrices of the rank `r`.
#[test]
fn adapter_of_unsupported_kind_is_refused() {
    for (field, value) in [
        ("bias", json!("all")),
        ("use_dora", json!(true)),
        ("lora_bias", json!(true)),
        ("a_switch_to_come", json!(true)),
        // The pattern `layers.0.self_attn.(` is not a valid regular expression.
        ("rank_pattern", json!({"layers.0.self_attn.(": 2})),
        ("alora_invocation_tokens", json!([3, 4])),
        ("layer_replication", json!([[0, 4], [2, 6]])),
        ("init_lora_weights", json!("pissa_niter_4")),
        ("init_lora_weights", json!("loftq")),
    ] {
        let written = adapter(4);
        set(written.path(), field, value);
        let words = ["adapter_config.json", field];
        check(field, merged(written.path()), &words);
    }
    for (field, value) in [
        ("bias", json!("none")),
        ("alora_invocation_tokens", Value::Null),
        ("layers_to_transform", json!([0, 1])),
        ("init_lora_weights", json!("gaussian")),
        ("init_lora_weights", json!(true)),
    ] {
        let written = adapter(4);
        set(written.path(), field, value);
        merged(written.path()).expect(field);
    }
}

/// Renames all tensors in an adapter's file by `name_of`, and adds one tensor for each name in `more`.
fn rename(adapter: &Path, name_of: impl Fn(&str) -> String, more: &[&str]) {
    let path = adapter.join("adapter_model.safetensors");
    let file = fs::read(&path).expect("the file is readable");
    let tensors = SafeTensors::deserialize(&file).expect("the tensors parse");
    let numbers = [0; 4 * 8];
    let all = tensors.iter().map(|(name, view)| (name_of(name), view));
    let more = more.iter().map(|name| {
        let view =
            TensorView::new(Dtype::F32, vec![1, 8], &numbers).expect("the tensor is a matrix");
        ((*name).to_owned(), view)
    });
    let file = serialize(all.chain(more), None).expect("the file is written");
    fs::write(&path, file).expect("the file is written");
}

/// Returns a folder with an adapter whose matrices B are not 0, as after training.
fn trained(rank: usize) -> TempDir {
    let written = adapter(rank);
    let path = written.path().join("adapter_model.safetensors");
    let file = fs::read(&path).expect("the file is readable");
    let tensors = SafeTensors::deserialize(&file).expect("the tensors parse");
    let numbers: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .iter()
        .map(|(name, view)| {
            let count = view.shape().iter().product::<usize>();
            let number = |at: usize| ((at * 7 + name.len()) % 11) as f32 / 50.0 - 0.1;
            let bytes = (0..count).flat_map(|at| number(at).to_le_bytes());
            (name.to_owned(), view.shape().to_vec(), bytes.collect())
        })
        .collect();
    let views = numbers.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytes);
        (name, view.expect("the tensor is a matrix"))
    });
    fs::write(&path, serialize(views, None).expect("the file is written"))
        .expect("the file is written");
    written
}

/// Returns the elements of two of the weight matrices that the adapter changes.
fn adapted(model: &Gemma4Model) -> [Vec<f32>; 2] {
    let layer = &model.layers[0];
    [
        values(layer.self_attn.q_proj.weight.val()),
        values(layer.mlp.up_proj.weight.val()),
    ]
}

/// The adapter's scale follows PEFT's formulas for the rank `r`: `alpha / r`, or `alpha / √r` with `use_rslora`. In
/// `alpha_pattern` and `rank_pattern`, the first pattern that matches a module's name sets the alpha or the rank of the
/// module.
#[test]
fn adapter_scale_with_rslora_and_patterns_equals_peft() {
    const RANK: usize = 4;
    let before = adapted(&load(&folder("dense-ple")).expect("the model is valid"));
    let once = |fields: &[(&str, Value)]| {
        let written = trained(RANK);
        for (field, value) in fields {
            set(written.path(), field, value.clone());
        }
        let after = adapted(&merged(written.path()).expect("the adapter is valid"));
        [0, 1].map(|matrix| {
            let both = after[matrix].iter().zip(&before[matrix]);
            both.map(|(after, before)| f64::from(after - before))
                .collect::<Vec<_>>()
        })
    };
    let unit = once(&[("lora_alpha", json!(RANK))]);
    let norm = |numbers: &[f64]| numbers.iter().map(|one| one * one).sum::<f64>().sqrt();
    for (fields, scales) in [
        (vec![("lora_alpha", json!(6))], [1.5, 1.5]),
        (
            vec![("lora_alpha", json!(6)), ("use_rslora", json!(true))],
            [3.0, 3.0],
        ),
        (
            vec![
                ("lora_alpha", json!(6)),
                ("alpha_pattern", json!({"q_proj": 10})),
            ],
            [2.5, 1.5],
        ),
        (
            vec![
                ("lora_alpha", json!(6)),
                ("use_rslora", json!(true)),
                ("alpha_pattern", json!({r"layers\.\d+\.mlp\.up_proj": 1.0})),
            ],
            [3.0, 0.5],
        ),
        // The configuration's `r` of 64 is no error, because `rank_pattern` gives every module the rank of its matrices.
        (
            vec![
                ("lora_alpha", json!(6)),
                ("r", json!(64)),
                ("rank_pattern", json!({".*_proj": RANK})),
            ],
            [1.5, 1.5],
        ),
    ] {
        let found = once(&fields);
        for (matrix, scale) in scales.iter().enumerate() {
            let expected: Vec<f64> = unit[matrix].iter().map(|one| one * scale).collect();
            let apart: Vec<f64> = found[matrix]
                .iter()
                .zip(&expected)
                .map(|(a, b)| a - b)
                .collect();
            // The tolerance covers the rounding of the merged f32 weights, whose magnitudes are below 1.
            assert!(
                norm(&expected) > 0.1 && norm(&apart) < 1e-5,
                "{fields:?}: {}",
                norm(&apart)
            );
        }
    }
    let written = trained(RANK);
    set(
        written.path(),
        "rank_pattern",
        json!({"layers.0.self_attn.q_proj": 2}),
    );
    check(
        "a rank",
        merged(written.path()),
        &["layers.0.self_attn.q_proj", "rank 4", "r is 2"],
    );
}

/// LoRA matrices A and B of vision and audio towers are ignored, and a warning gives the number of these matrices. PEFT writes
/// such matrices if `target_modules` is `"all-linear"` and the checkpoint is multimodal.
#[test]
fn adapter_factors_of_towers_are_counted_and_ignored() {
    let written = trained(4);
    let expected = adapted(&merged(written.path()).expect("the adapter is valid"));
    let of_towers = [
        "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.lora_A.weight",
        "base_model.model.model.audio_tower.layers.0.feed_forward1.ffw_layer_1.linear.lora_B.weight",
        "base_model.model.model.embed_vision.embedding_projection.lora_A.weight",
    ];
    let multimodal =
        |name: &str| name.replace("model.model.layers", "model.model.language_model.layers");
    rename(written.path(), multimodal, &of_towers);
    let model = merged(written.path()).expect("an adapter of towers, too");
    assert_eq!(adapted(&model), expected);
    let [warning] = model.warnings() else {
        panic!("{:?}", model.warnings());
    };
    assert!(
        warning.contains("3 factors of vision and audio towers"),
        "{warning}"
    );

    let unknown = ["base_model.model.model.smell_tower.proj.lora_A.weight"];
    rename(written.path(), str::to_owned, &unknown);
    // The tensors get the names of a text model's adapter. The tensor of the unknown module remains, and the loader
    // refuses it.
    let text = |name: &str| name.replace("language_model.layers", "layers");
    rename(written.path(), text, &[]);
    check("unknown", merged(written.path()), &["smell_tower"]);
}

#[test]
fn adapter_of_towers_only_is_refused() {
    let written = adapter(4);
    let tower = |name: &str| {
        name.replace(
            "model.model.layers",
            "model.model.vision_tower.encoder.layers",
        )
    };
    rename(written.path(), tower, &[]);
    check(
        "towers",
        merged(written.path()),
        &["adapter_model.safetensors", "towers"],
    );
}

/// An adapter loads if `_orig_mod` occurs in its tensor names. `torch.compile` puts `_orig_mod` before or inside the names of
/// the saved tensors.
#[test]
fn adapter_of_a_compiled_model_is_loaded() {
    let written = trained(4);
    let expected = adapted(&merged(written.path()).expect("the adapter is valid"));
    for (plain, compiled) in [
        ("base_model.model.", "base_model.model._orig_mod."),
        (".layers.0.", ".layers.0._orig_mod."),
        ("base_model.", "_orig_mod.base_model."),
    ] {
        rename(written.path(), |name| name.replace(plain, compiled), &[]);
        assert_eq!(adapted(&merged(written.path()).expect(compiled)), expected);
    }
}

/// Some programs write LoRA matrices A and B for the keys and values of shared KV layers, which have no key and value
/// matrices. The loader ignores these LoRA matrices.
#[test]
fn adapter_factors_of_shared_kv_layers_are_ignored() {
    for (module, is_unread) in [
        ("layers.3.self_attn.k_proj", true),
        ("layers.5.self_attn.v_proj", true),
        ("layers.2.self_attn.k_norm", false),
        ("layers.6.self_attn.k_proj", false),
        ("layers.3.self_attn.kv_proj", false),
    ] {
        let written = adapter(4);
        let path = written.path().join("adapter_model.safetensors");
        let mut file = fs::read(&path).expect("the file is readable");
        let tensors = SafeTensors::deserialize(&file).expect("the tensors parse");
        let name = format!("base_model.model.model.{module}.lora_A.weight");
        let numbers = [0; 4 * 4 * 64];
        let factor =
            TensorView::new(Dtype::F32, vec![4, 64], &numbers).expect("the tensor is a matrix");
        let all = tensors.iter().map(|(name, view)| (name.to_owned(), view));
        file = serialize(all.chain([(name, factor)]), None).expect("the file is written");
        fs::write(&path, file).expect("the file is written");
        match is_unread {
            true => drop(merged(written.path()).expect(module)),
            false => check(module, merged(written.path()), &[module]),
        }
    }
}

/// An adapter may also change the output head, which is outside of the module that contains the layers.
#[test]
fn adapter_factors_of_the_head_are_merged() {
    let device = Device::flex();
    let config = Gemma4Config {
        tie_word_embeddings: false,
        ..load(&folder("dense-ple"))
            .expect("the model is valid")
            .config()
            .clone()
    };
    let model = Gemma4Model::new(&config, &device);
    let head = |model: &Gemma4Model| {
        let head = model.lm_head.as_ref().expect("the model has a head");
        values(head.weight.val())
    };
    let before = head(&model);
    let written = adapter(4);
    let path = written.path().join("adapter_model.safetensors");
    let ones = 1f32.to_le_bytes();
    let factors = [
        ("lora_A", [4, config.hidden_size]),
        ("lora_B", [config.vocab_size, 4]),
    ];
    let numbers = factors.map(|(_, [rows, columns])| ones.repeat(rows * columns));
    let views = factors
        .iter()
        .zip(&numbers)
        .map(|((part, shape), numbers)| {
            let view = TensorView::new(Dtype::F32, shape.to_vec(), numbers)
                .expect("the tensor is a matrix");
            (format!("base_model.model.lm_head.{part}.weight"), view)
        });
    fs::write(&path, serialize(views, None).expect("the file is written"))
        .expect("the file is written");
    let after = head(
        &model
            .merge_adapter(written.path())
            .expect("the adapter of a head merges"),
    );
    let file = fs::read(written.path().join("adapter_config.json")).expect("the file is readable");
    let file: Value = serde_json::from_slice(&file).expect("the text is JSON");
    let added = 4.0 * file["lora_alpha"].as_f64().expect("the field is a number") as f32 / 4.0;
    for (after, before) in after.iter().zip(&before) {
        assert!((after - before - added).abs() < 1e-4, "{after}, {before}");
    }
}
