//! Checkpoints and adapters that are not ours to load: each is refused by what it is, not by the first thing in it that looks odd.

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
        panic!("{what}: it is loaded");
    };
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{what}: no {word:?} in {text}");
    }
}

fn load(path: &Path) -> Result<Gemma4Model, Gemma4Error> {
    Gemma4Model::load(path, &Device::flex(), LoadOptions::new())
}

/// A fixture's `config.json` with one more field.
fn config(fixture: &str, inside: Option<&str>, field: &str, value: Value) -> String {
    let text = fs::read_to_string(folder(fixture).join("config.json")).expect("a file");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    match inside {
        Some(part) => config[part][field] = value,
        None => config[field] = value,
    }
    config.to_string()
}

#[test]
fn quantized_weights_are_named_by_their_method() {
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
    // Quantization-aware training leaves weights as floats. Tensors that are not floats are refused by their names.
    for none in [
        Value::Null,
        json!({}),
        json!({"bits": 4}),
        json!({"quant_method": null}),
    ] {
        let plain = config("dense-ple", None, "quantization_config", none);
        Gemma4Config::from_json(&plain).expect("weights as they are");
    }
}

/// As `…-qat-q4_0-unquantized`: a configuration of quantization that names no method beside weights in floats.
#[test]
fn quantization_config_without_a_method_over_floats_is_loaded() {
    let nameless = json!({"bits": 4, "group_size": 32, "modules_to_not_convert": ["lm_head"]});
    let folder = Folder::copy("dense-ple");
    let before = load(folder.path()).expect("a model").norm.weight.val();
    folder.set("config.json", "quantization_config", nameless);
    let after = load(folder.path()).expect("a model").norm.weight.val();
    assert_eq!(values(before), values(after));
    let name = "model.layers.1.mlp.up_proj.weight";
    folder.edit(|tensors| {
        let tensor = tensors.get_mut(name).expect("a matrix");
        tensor.dtype = Dtype::I32;
    });
    check("integers", load(folder.path()), &[name, "I32"]);
}

#[test]
fn drafters_are_named() {
    for model_type in ["gemma4_assistant", "gemma4_unified_assistant"] {
        let drafter = config("dense-ple", None, "model_type", json!(model_type));
        check(
            model_type,
            Gemma4Config::from_json(&drafter),
            &[model_type, "drafter"],
        );
    }
}

/// The file itself, alone in a folder, beside a configuration, and under a name that is not its own.
#[test]
fn gguf_is_named() {
    let contents = [&b"GGUF\x03\0\0\0"[..], &[0; 64]].concat();
    let there = TempDir::new().expect("a folder");
    let file = there.path().join("gemma-4-E2B-Q4_K_M.gguf");
    fs::write(&file, &contents).expect("a file");
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
fn weights_of_other_programs_are_named() {
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

/// Where nothing else is there, the file that is missing is named as ever.
#[test]
fn what_is_missing_is_still_named() {
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
fn names_of_mlx_are_named() {
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

/// An adapter of the given rank, of the fixture `dense-ple`.
fn adapter(rank: usize) -> TempDir {
    let model = Gemma4Model::load(
        folder("dense-ple"),
        &Device::flex().autodiff(),
        LoadOptions::new(),
    )
    .expect("a model");
    let adapter = Adapter::new(rank, 2.0 * rank as f64);
    let model = adapter.attach(model).expect("an adapter");
    let written = TempDir::new().expect("a folder");
    adapter
        .save(&model, written.path(), "dense-ple")
        .expect("written");
    written
}

fn set(adapter: &Path, field: &str, value: Value) {
    let path = adapter.join("adapter_config.json");
    let text = fs::read_to_string(&path).expect("a file");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    config[field] = value;
    fs::write(&path, config.to_string()).expect("written");
}

fn merged(adapter: &Path) -> Result<Gemma4Model, Gemma4Error> {
    load(&folder("dense-ple"))
        .expect("a model")
        .merge_adapter(adapter)
}

#[test]
fn adapters_whose_rank_is_not_that_of_their_configuration() {
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
fn adapters_that_would_add_nothing_or_no_numbers() {
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
    fs::write(weights, empty.expect("a file")).expect("written");
    check(
        "no tensors",
        merged(written.path()),
        &["adapter_model.safetensors", "no tensors"],
    );
}

/// Where PEFT computes something else than `weight + alpha / r · B · A`, or changes the weights beneath, first.
#[test]
fn adapters_of_other_kinds() {
    for (field, value) in [
        ("bias", json!("all")),
        ("use_dora", json!(true)),
        ("lora_bias", json!(true)),
        ("a_switch_to_come", json!(true)),
        // A rank that the factors do not have.
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

/// The file of factors with other names, and one more tensor for each of `more`.
fn rename(adapter: &Path, name_of: impl Fn(&str) -> String, more: &[&str]) {
    let path = adapter.join("adapter_model.safetensors");
    let file = fs::read(&path).expect("a file");
    let tensors = SafeTensors::deserialize(&file).expect("tensors");
    let numbers = [0; 4 * 8];
    let all = tensors.iter().map(|(name, view)| (name_of(name), view));
    let more = more.iter().map(|name| {
        let view = TensorView::new(Dtype::F32, vec![1, 8], &numbers).expect("a matrix");
        ((*name).to_owned(), view)
    });
    let file = serialize(all.chain(more), None).expect("a file");
    fs::write(&path, file).expect("written");
}

/// A written adapter whose second factors are not 0.
fn trained(rank: usize) -> TempDir {
    let written = adapter(rank);
    let path = written.path().join("adapter_model.safetensors");
    let file = fs::read(&path).expect("a file");
    let tensors = SafeTensors::deserialize(&file).expect("tensors");
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
        (name, view.expect("a matrix"))
    });
    fs::write(&path, serialize(views, None).expect("a file")).expect("written");
    written
}

/// Numbers of two matrices that an adapter adds to.
fn adapted(model: &Gemma4Model) -> [Vec<f32>; 2] {
    let layer = &model.layers[0];
    [
        values(layer.self_attn.q_proj.weight.val()),
        values(layer.mlp.up_proj.weight.val()),
    ]
}

/// By PEFT's formulas: `alpha / r`, or `alpha / √r` with `use_rslora`, by the first pattern that matches a module's name.
#[test]
fn scaling_of_rslora_and_patterns_is_that_of_peft() {
    const RANK: usize = 4;
    let before = adapted(&load(&folder("dense-ple")).expect("a model"));
    let once = |fields: &[(&str, Value)]| {
        let written = trained(RANK);
        for (field, value) in fields {
            set(written.path(), field, value.clone());
        }
        let after = adapted(&merged(written.path()).expect("an adapter"));
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
        // The rank of the file is another, and each module's own is that of its factors.
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
            // Sums with weights of f32 are rounded twice, at numbers below 1.
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

/// As PEFT writes `target_modules="all-linear"` over a multimodal checkpoint.
#[test]
fn factors_of_towers_are_counted_and_not_used() {
    let written = trained(4);
    let expected = adapted(&merged(written.path()).expect("an adapter"));
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
    // An unknown part is refused in the names of a text model.
    let text = |name: &str| name.replace("language_model.layers", "layers");
    rename(written.path(), text, &[]);
    check("unknown", merged(written.path()), &["smell_tower"]);
}

#[test]
fn adapter_of_towers_alone_is_refused() {
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

/// `torch.compile` puts `_orig_mod` before, or within, the names of what is saved.
#[test]
fn adapter_of_a_compiled_model_is_read() {
    let written = trained(4);
    let expected = adapted(&merged(written.path()).expect("an adapter"));
    for (plain, compiled) in [
        ("base_model.model.", "base_model.model._orig_mod."),
        (".layers.0.", ".layers.0._orig_mod."),
        ("base_model.", "_orig_mod.base_model."),
    ] {
        rename(written.path(), |name| name.replace(plain, compiled), &[]);
        assert_eq!(adapted(&merged(written.path()).expect(compiled)), expected);
    }
}

/// Layers that read an earlier layer's keys and values have had matrices for their own in some programs, which nobody reads.
#[test]
fn factors_of_keys_that_are_not_made() {
    for (module, is_unread) in [
        ("layers.3.self_attn.k_proj", true),
        ("layers.5.self_attn.v_proj", true),
        ("layers.2.self_attn.k_norm", false),
        ("layers.6.self_attn.k_proj", false),
        ("layers.3.self_attn.kv_proj", false),
    ] {
        let written = adapter(4);
        let path = written.path().join("adapter_model.safetensors");
        let mut file = fs::read(&path).expect("a file");
        let tensors = SafeTensors::deserialize(&file).expect("tensors");
        let name = format!("base_model.model.model.{module}.lora_A.weight");
        let numbers = [0; 4 * 4 * 64];
        let factor = TensorView::new(Dtype::F32, vec![4, 64], &numbers).expect("a matrix");
        let all = tensors.iter().map(|(name, view)| (name.to_owned(), view));
        file = serialize(all.chain([(name, factor)]), None).expect("a file");
        fs::write(&path, file).expect("written");
        match is_unread {
            true => drop(merged(written.path()).expect(module)),
            false => check(module, merged(written.path()), &[module]),
        }
    }
}

/// A head is beside the model that has the layers, and so is what an adapter adds to it.
#[test]
fn factors_of_a_head() {
    let device = Device::flex();
    let config = Gemma4Config {
        tie_word_embeddings: false,
        ..load(&folder("dense-ple"))
            .expect("a model")
            .config()
            .clone()
    };
    let model = Gemma4Model::new(&config, &device);
    let head = |model: &Gemma4Model| {
        let head = model.lm_head.as_ref().expect("a head");
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
            let view = TensorView::new(Dtype::F32, shape.to_vec(), numbers).expect("a matrix");
            (format!("base_model.model.lm_head.{part}.weight"), view)
        });
    fs::write(&path, serialize(views, None).expect("a file")).expect("written");
    let after = head(
        &model
            .merge_adapter(written.path())
            .expect("a head's adapter"),
    );
    let file = fs::read(written.path().join("adapter_config.json")).expect("a file");
    let file: Value = serde_json::from_slice(&file).expect("JSON");
    let added = 4.0 * file["lora_alpha"].as_f64().expect("a number") as f32 / 4.0;
    for (after, before) in after.iter().zip(&before) {
        assert!((after - before - added).abs() < 1e-4, "{after}, {before}");
    }
}
