//! Tests checkpoint folders whose weights are packed by the Python package compressed-tensors. The dequantized weights equal
//! the weights of the unpacked checkpoints bit for bit, and the generated texts are the same.

use crate::fixture::{self, assert_close, greedy, values};
use crate::programs::folder::{Folder, tensors};
use attention_workspace::testing::devices::devices;
use burn::tensor::{DType, Device};
use burn_gemma4::{Gemma4, Gemma4Error, Gemma4Model, LoadOptions, Quantization};
use safetensors::Dtype;
use serde::Deserialize;
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

/// The folders of packed checkpoints. The checkpoints have 4-bit and 8-bit weights, scales per group of columns or per row,
/// zero points or none, and experts in separate tensors. The last two have weights in FP8, and in NVFP4 and MXFP4.
const FOLDERS: [&str; 5] = ["w4a16-grouped", "mixed", "experts", "float8", "float4"];

/// The expected results of a checkpoint folder.
#[derive(Deserialize)]
struct Reference {
    prompt: Vec<u32>,
    generated: Vec<u32>,
    /// The logits at the last position of the prompt.
    logits: Vec<f32>,
    /// The CRC-32 of each packed weight after dequantization to f32.
    packed: BTreeMap<String, u32>,
}

fn path(name: &str) -> PathBuf {
    fixture::folder("compressed").join(name)
}

fn reference(name: &str) -> Reference {
    let file = fs::read(path(name).join("reference.json")).expect("the fixture is readable");
    serde_json::from_slice(&file).expect("the reference parses")
}

fn load(name: &str, device: &Device) -> Gemma4 {
    let options = LoadOptions::new().dtype(DType::F32);
    Gemma4::load(path(name), device, options).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn copy(name: &str) -> Folder {
    Folder::copy(&format!("compressed/{name}"))
}

#[test]
fn packed_weights_equal_compressed_tensors() {
    for name in FOLDERS {
        let saved = TempDir::new().expect("a temporary folder");
        let gemma = load(name, &Device::flex());
        gemma
            .model()
            .save(saved.path(), None)
            .expect("the save succeeds");
        let saved = tensors(saved.path());
        for (tensor, crc) in reference(name).packed {
            let found = fixture::crc32(&saved[&tensor].bytes);
            assert_eq!(found, crc, "{name}: {tensor}");
        }
    }
}

#[test]
fn packed_tokens_equal_the_dequantized_model() {
    for device in devices() {
        for name in FOLDERS {
            let what = format!("{name} {}", device.name);
            let reference = reference(name);
            let gemma = load(name, &device.device);
            let prompt = fixture::tokens(&[&reference.prompt], &device.device);
            let logits = values(
                gemma
                    .model()
                    .forward(prompt)
                    .expect("the tokens are in the vocabulary"),
            );
            let logits = &logits[logits.len() - reference.logits.len()..];
            assert_close(logits, &reference.logits, &what);
            let options = greedy(&gemma, reference.generated.len());
            let generation =
                gemma.generate(reference.prompt, &options, |_| ControlFlow::Continue(()));
            let generated = generation.expect("the generation succeeds").tokens;
            assert_eq!(generated, reference.generated, "{what}");
        }
    }
}

/// For a packed checkpoint, `written_dtype` returns the dtype of the unpacked tensors. This dtype represents every packed
/// weight exactly.
#[test]
fn packed_written_dtype_is_the_checkpoints() {
    let dtype = |name| {
        let model = Gemma4Model::load(path(name), &Device::flex(), LoadOptions::new());
        model.expect("the model is valid").written_dtype()
    };
    assert_eq!(dtype("w4a16-grouped"), Some(DType::BF16));
    assert_eq!(dtype("mixed"), Some(DType::F16));
    assert_eq!(dtype("float8"), Some(DType::BF16));
    assert_eq!(dtype("float4"), Some(DType::BF16));
}

/// `save_like` with a packed folder saves an unpacked model, which has neither packed tensors nor a quantization configuration.
#[test]
fn packed_model_is_saved_unpacked() {
    for name in FOLDERS {
        let gemma = load(name, &Device::flex());
        let saved = TempDir::new().expect("a temporary folder");
        let model = gemma.model();
        model
            .save_like(path(name), saved.path(), None)
            .expect("the save succeeds");
        let names: Vec<String> = tensors(saved.path()).into_keys().collect();
        assert!(
            !names.iter().any(|name| name.contains("weight_")),
            "{names:?}"
        );
        let config =
            fs::read_to_string(saved.path().join("config.json")).expect("the file is readable");
        assert!(!config.contains("quantization_config"));
        // A GEMM over packed weights sums in another order than a GEMM over floats. To make the logits equal, both
        // models are loaded with dequantized weights.
        let whole = |folder: &Path| {
            let options = LoadOptions::new().quantization(Quantization::Whole);
            Gemma4Model::load(folder, &Device::flex(), options).expect("the model is valid")
        };
        let prompt = fixture::tokens(&[&reference(name).prompt], &Device::flex());
        let logits = |model: Gemma4Model| values(model.forward(prompt.clone()).expect("tokens"));
        assert_eq!(
            logits(whole(saved.path())),
            logits(whole(&path(name))),
            "{name}"
        );
    }
    let folder = copy("mixed");
    folder.edit(|tensors| {
        let renamed = std::mem::take(tensors)
            .into_iter()
            .map(|(name, tensor)| (name.replace("model.", "model.language_model."), tensor));
        tensors.extend(renamed);
        let words = tensors["model.language_model.layers.0.mlp.gate_proj.weight_packed"].clone();
        tensors.insert("model.vision_tower.proj.weight_packed".into(), words);
    });
    let model = Gemma4Model::load(folder.path(), &Device::flex(), LoadOptions::new());
    let saved = TempDir::new().expect("a temporary folder");
    let error = model
        .expect("the model is valid")
        .save_like(folder.path(), saved.path(), None);
    let error = error.expect_err("a packed tower is refused").to_string();
    assert!(error.contains("vision_tower.proj.weight_packed"), "{error}");
}

/// Packed key and value weights of a shared KV layer are ignored, because the layer uses the keys and values of an earlier
/// layer.
#[test]
fn packed_keys_of_shared_kv_layers_are_ignored() {
    let folder = copy("mixed");
    folder.edit(|tensors| {
        for part in [
            "weight_packed",
            "weight_scale",
            "weight_shape",
            "weight_zero_point",
        ] {
            let tensor = tensors[&format!("model.layers.0.self_attn.k_proj.{part}")].clone();
            tensors.insert(format!("model.layers.3.self_attn.k_proj.{part}"), tensor);
        }
    });
    Gemma4Model::load(folder.path(), &Device::flex(), LoadOptions::new())
        .expect("the model is valid");
}

#[track_caller]
fn check(folder: &Folder, words: &[&str]) {
    let Err(error) = Gemma4Model::load(folder.path(), &Device::flex(), LoadOptions::new()) else {
        panic!("loading should fail with {words:?}");
    };
    assert!(
        matches!(
            error,
            Gemma4Error::Malformed { .. } | Gemma4Error::Tensors { .. }
        ),
        "{error}"
    );
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{word:?} is missing from {text}");
    }
}

/// The texts that the error must contain, a path in `quantization_config`, and the value to set at this path.
type Case = (&'static [&'static str], &'static str, Value);

#[test]
fn packed_config_with_unsupported_field_is_refused_by_name() {
    let cases: [Case; 17] = [
        (
            &["compressed-tensors", "\"marlin-24\"", "\"float-quantized\""],
            "/format",
            json!("marlin-24"),
        ),
        (
            &["num_bits is 4", "only 8"],
            "/config_groups/group_0/format",
            json!("float-quantized"),
        ),
        (&["\"int-quantized\""], "/format", json!("int-quantized")),
        (&["format is missing"], "/format", Value::Null),
        (
            &["kv_cache_scheme"],
            "/kv_cache_scheme",
            json!({"num_bits": 8}),
        ),
        (
            &["sparsity_config"],
            "/sparsity_config",
            json!({"format": "sparse-24-bitmask"}),
        ),
        (
            &["transform_config"],
            "/transform_config",
            json!({"config_groups": {"a": {}}}),
        ),
        (
            &["input_activations"],
            "/config_groups/group_0/input_activations",
            json!({"num_bits": 8}),
        ),
        (
            &["output_activations"],
            "/config_groups/group_0/output_activations",
            json!({"num_bits": 8}),
        ),
        (
            &["num_bits is 3"],
            "/config_groups/group_0/weights/num_bits",
            json!(3),
        ),
        (
            &["type is \"float\""],
            "/config_groups/group_0/weights/type",
            json!("float"),
        ),
        (
            &["strategy is \"tensor\""],
            "/config_groups/group_0/weights/strategy",
            json!("tensor"),
        ),
        (
            &["strategy is \"block\""],
            "/config_groups/group_0/weights/strategy",
            json!("block"),
        ),
        (
            &["group_size is 0"],
            "/config_groups/group_0/weights/group_size",
            json!(0),
        ),
        (
            &["group_size is missing"],
            "/config_groups/group_0/weights/group_size",
            Value::Null,
        ),
        (
            &["actorder is \"group\""],
            "/config_groups/group_0/weights/actorder",
            json!("group"),
        ),
        (&["no weights"], "/config_groups", json!({})),
    ];
    for case in cases {
        check_config("w4a16-grouped", case);
    }
}

/// Changes a value of a folder's `quantization_config`, and checks that loading is refused.
#[track_caller]
fn check_config(name: &str, (words, place, value): Case) {
    let folder = copy(name);
    let mut config: Value =
        serde_json::from_slice(&folder.read("config.json")).expect("the text is JSON");
    let (parent, field) = place.rsplit_once('/').expect("the path has a parent");
    let quantization = &mut config["quantization_config"];
    *quantization
        .pointer_mut(parent)
        .expect("the parent exists")
        .get_mut(field)
        .unwrap_or(&mut Value::Null) = Value::Null;
    quantization.pointer_mut(parent).expect("the parent exists")[field] = value;
    folder.write("config.json", config.to_string());
    check(
        &folder,
        &[&["config.json", "quantization_config"], words].concat(),
    );
}

/// The groups of `float8` have scales by tensor, by channel and by block. Group 0 of `float4` is MXFP4, group 1 is
/// NVFP4.
#[test]
fn float_config_with_unsupported_field_is_refused_by_name() {
    let cases: [(&str, Case); 10] = [
        (
            "float8",
            (
                &["input_activations", "static scales"],
                "/config_groups/group_0/input_activations/dynamic",
                json!(false),
            ),
        ),
        (
            "float8",
            (
                &["output_activations"],
                "/config_groups/group_0/output_activations",
                json!({"num_bits": 8, "dynamic": true}),
            ),
        ),
        (
            "float8",
            (
                &["kv_cache_scheme"],
                "/kv_cache_scheme",
                json!({"num_bits": 8}),
            ),
        ),
        (
            "float8",
            (
                &["type is \"int\"", "only \"float\""],
                "/config_groups/group_1/weights/type",
                json!("int"),
            ),
        ),
        (
            "float8",
            (
                &["symmetric is false"],
                "/config_groups/group_1/weights/symmetric",
                json!(false),
            ),
        ),
        (
            "float8",
            (
                &["strategy is \"group\"", "\"block\""],
                "/config_groups/group_1/weights/strategy",
                json!("group"),
            ),
        ),
        (
            "float8",
            (
                &["block_structure is None"],
                "/config_groups/group_2/weights/block_structure",
                Value::Null,
            ),
        ),
        (
            "float4",
            (
                &["num_bits is 8", "only 4"],
                "/config_groups/group_0/weights/num_bits",
                json!(8),
            ),
        ),
        (
            "float4",
            (
                &["group_size is Some(32)", "only 16"],
                "/config_groups/group_1/weights/group_size",
                json!(32),
            ),
        ),
        (
            "float4",
            (
                &["\"mxfp6-pack-quantized\"", "supported are"],
                "/config_groups/group_0/format",
                json!("mxfp6-pack-quantized"),
            ),
        ),
    ];
    for (name, case) in cases {
        check_config(name, case);
    }
}

#[test]
fn float_wrong_tensors_are_named() {
    type Tensors = BTreeMap<String, crate::programs::folder::Stored>;
    let check = |name: &str, words: &[&str], change: &dyn Fn(&mut Tensors)| {
        let folder = copy(name);
        folder.edit(|tensors| change(tensors));
        check(&folder, words);
    };
    let of_layer = |part: &str| format!("model.layers.0.{part}");
    for (name, part) in [
        ("float8", "self_attn.q_proj.weight_scale"),
        ("float4", "self_attn.q_proj.weight_scale"),
        ("float4", "self_attn.q_proj.weight_global_scale"),
        ("float4", "mlp.up_proj.weight_scale"),
    ] {
        check(name, &[&of_layer(part), "is missing"], &|tensors| {
            drop(tensors.remove(&of_layer(part)));
        });
    }
    for (name, part, dtype, words) in [
        ("float8", "self_attn.q_proj.weight_scale", Dtype::I16, "I16"),
        (
            "float4",
            "self_attn.q_proj.weight_scale",
            Dtype::U8,
            "no scheme",
        ),
        ("float4", "mlp.up_proj.weight_scale", Dtype::I8, "no scheme"),
        (
            "float4",
            "self_attn.q_proj.weight_global_scale",
            Dtype::I32,
            "I32",
        ),
    ] {
        check(
            name,
            &["self_attn.q_proj", words][usize::from(part.starts_with("mlp"))..],
            &|tensors| {
                let tensor = tensors.get_mut(&of_layer(part));
                tensor.expect("the tensor exists").dtype = dtype;
            },
        );
    }
    // The scales have one dimension, and the scheme needs two.
    let (gate, q) = (of_layer("mlp.gate_proj"), of_layer("self_attn.q_proj"));
    check("float8", &[&gate, "no FP8 scheme"], &|tensors| {
        let scale = tensors.get_mut(&format!("{gate}.weight_scale"));
        scale.expect("the tensor exists").shape = vec![4];
    });
    // A tensor that no matrix has is refused.
    check(
        "float8",
        &[&q, "weight_global_scale", "not part"],
        &|tensors| {
            let scale = tensors[&format!("{q}.weight_scale")].clone();
            tensors.insert(format!("{q}.weight_global_scale"), scale);
        },
    );
}

/// A configuration with a sparsity format of `dense` is accepted. Older versions of compressed-tensors wrote such
/// configurations.
#[test]
fn packed_config_with_dense_sparsity_is_loaded() {
    let folder = copy("w4a16-grouped");
    let mut config: Value =
        serde_json::from_slice(&folder.read("config.json")).expect("the text is JSON");
    let dense = json!({"format": "dense", "global_sparsity": 0.1, "targets": []});
    config["quantization_config"]["sparsity_config"] = dense;
    config["quantization_config"]["transform_config"] = json!({});
    folder.write("config.json", config.to_string());
    Gemma4Model::load(folder.path(), &Device::flex(), LoadOptions::new())
        .expect("the model is valid");
}

#[test]
fn packed_wrong_tensors_are_named() {
    let module = "model.layers.0.self_attn.q_proj";
    let part = |part: &str| format!("{module}.{part}");
    let changed = |change: &dyn Fn(&mut BTreeMap<String, crate::programs::folder::Stored>)| {
        let folder = copy("mixed");
        folder.edit(|tensors| change(tensors));
        folder
    };
    let folder = changed(&|tensors| drop(tensors.remove(&part("weight_scale"))));
    check(&folder, &[&part("weight_scale"), "is missing"]);
    let folder = changed(&|tensors| drop(tensors.remove(&part("weight_shape"))));
    check(&folder, &[&part("weight_shape"), "is missing"]);
    let folder = changed(&|tensors| drop(tensors.remove(&part("weight_zero_point"))));
    check(
        &folder,
        &[&part("weight_packed"), "no scheme of quantization_config"],
    );
    let folder = changed(&|tensors| {
        tensors
            .get_mut(&part("weight_packed"))
            .expect("the tensor exists")
            .dtype = Dtype::U32;
    });
    check(&folder, &[&part("weight_packed"), "U32"]);
    let folder = changed(&|tensors| {
        tensors
            .get_mut(&part("weight_scale"))
            .expect("the tensor exists")
            .dtype = Dtype::I16;
    });
    check(&folder, &[&part("weight_packed"), "weight_scale is in I16"]);
    for sizes in [
        [-1, 64],
        [0, 64],
        [64, 128],
        [128, 1 << 50],
        [i64::MAX, i64::MAX],
    ] {
        let folder = changed(&|tensors| {
            let shape = tensors
                .get_mut(&part("weight_shape"))
                .expect("the tensor exists");
            shape.bytes = sizes.map(i64::to_le_bytes).concat();
        });
        check(&folder, &[&part("weight_packed")]);
    }
    let folder = changed(&|tensors| {
        for (name, tensor) in tensors.iter_mut() {
            // The changed tensors form a complete matrix, but with only half as many rows as the model needs.
            if name.starts_with(module) {
                let rows = tensor.shape[0] / 2;
                match name.ends_with("weight_shape") {
                    true => tensor.bytes = [64i64, 64].map(i64::to_le_bytes).concat(),
                    false => {
                        tensor.bytes.truncate(tensor.bytes.len() / 2);
                        tensor.shape[0] = rows;
                    }
                }
            }
        }
    });
    check(&folder, &[&part("weight_packed"), "[64, 64]", "[128, 64]"]);
    // The group size in the configuration differs from the group size of the packed tensors.
    let folder = copy("w4a16-grouped");
    let config = String::from_utf8(folder.read("config.json")).expect("the text is UTF-8");
    folder.write(
        "config.json",
        config.replace("\"group_size\": 32", "\"group_size\": 16"),
    );
    check(
        &folder,
        &["weight_packed", "no scheme of quantization_config"],
    );
    // Without a quantization configuration, packed tensors are refused.
    let folder = copy("w4a16-grouped");
    folder.set("config.json", "quantization_config", Value::Null);
    check(&folder, &["weight_packed", "no scheme"]);
}

#[test]
fn packed_incomplete_experts_are_named() {
    let layer = "model.layers.0.experts";
    let without = |tensors: &[&str]| {
        let folder = copy("experts");
        folder.edit(|all| {
            all.retain(|name, _| {
                !tensors
                    .iter()
                    .any(|tensor| name.starts_with(&format!("{layer}.{tensor}.")))
            });
        });
        folder
    };
    check(
        &without(&["7.up_proj"]),
        &["experts", "[7, 24, 64]", "[8, 24, 64]"],
    );
    check(
        &without(&["3.down_proj"]),
        &["experts", "[3, 64, 24]", "[8, 64, 24]"],
    );
    let all: Vec<String> = (0..8)
        .flat_map(|expert| ["gate", "up"].map(|part| format!("{expert}.{part}_proj")))
        .collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    check(&without(&all), &["experts.gate_up_proj is missing"]);
}
