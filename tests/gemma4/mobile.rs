//! Tests checkpoints with `quant_method` "gemma", as Google's `-qat-mobile-transformers`. Weights equal those of
//! Hugging Face Transformers (`make_mobile.py`) bit for bit. The checkpoint's static scales round the activations.

use crate::devices::devices;
use crate::fixture::{self, Fixture, folder, greedy, tokens, values};
use crate::media::generated;
use crate::programs::folder::{Folder, Stored};
#[cfg(feature = "training")]
use crate::programs::{
    refused::check as check_refused,
    training::{conversations, finetune},
};
#[cfg(feature = "training")]
use attention_workspace::testing::program::run;
use burn::tensor::{DType, Device};
use burn_gemma4::{
    Adapter, AdapterTargets, Audio, DrafterConfig, Drafts, ExportForm, Gemma4, Gemma4Config,
    Gemma4Error, Gemma4Model, GenerateOptions, Image, LoadOptions, Logits, MediaKinds, Message,
    MessagePart, PerLayerTable, Prompt, Quantization, SavedSession, quantize_checkpoint,
};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::{collections::BTreeMap, fs, ops::ControlFlow, path::Path};
use tempfile::TempDir;

const NAME: &str = "mobile";

/// Returns the dequantized weights of the text model by their names in the file.
fn weights(model: &Gemma4Model) -> BTreeMap<String, Vec<u8>> {
    let mut weights = BTreeMap::new();
    let mut add = |name: String, weight: &burn_gemma4::layer::Weight| {
        weights.insert(name, weight.val().into_data().as_bytes().to_vec());
    };
    let prefix = "model.language_model";
    add(
        format!("{prefix}.embed_tokens.weight"),
        &model.embed_tokens.weight,
    );
    let table = model.embed_tokens_per_layer.as_ref().expect("a table");
    add(
        format!("{prefix}.embed_tokens_per_layer.weight"),
        &table.weight,
    );
    let head = model.lm_head.as_ref().expect("a head");
    add("lm_head.weight".into(), &head.weight);
    for (index, layer) in model.layers.iter().enumerate() {
        let (attention, mlp) = (&layer.self_attn, &layer.mlp);
        let linears = [
            ("self_attn.q_proj", Some(&attention.q_proj)),
            ("self_attn.k_proj", attention.k_proj.as_ref()),
            ("self_attn.v_proj", attention.v_proj.as_ref()),
            ("self_attn.o_proj", Some(&attention.o_proj)),
            ("mlp.gate_proj", Some(&mlp.gate_proj)),
            ("mlp.up_proj", Some(&mlp.up_proj)),
            ("mlp.down_proj", Some(&mlp.down_proj)),
            ("per_layer_input_gate", layer.per_layer_input_gate.as_ref()),
            ("per_layer_projection", layer.per_layer_projection.as_ref()),
        ];
        for (name, linear) in linears {
            if let Some(linear) = linear {
                let name = format!("{prefix}.layers.{index}.{name}.weight");
                add(name, &linear.weight);
            }
        }
    }
    weights
}

#[test]
fn mobile_weights_equal_transformers_in_f32_and_bf16() {
    let reference = fs::read(folder(NAME).join("reference.json")).expect("the fixture is readable");
    let reference: Value = serde_json::from_slice(&reference).expect("the reference parses");
    for (dtype, field) in [(DType::F32, "weights"), (DType::BF16, "weights_bf16")] {
        for form in [Quantization::Stored, Quantization::Whole] {
            let options = LoadOptions::new()
                .dtype(dtype)
                .quantization(form)
                .per_layer_table(PerLayerTable::Device);
            let model = Gemma4Model::load(folder(NAME), &Device::flex(), options);
            let model = model.expect("the model is valid");
            assert_eq!(model.is_quantized(), form == Quantization::Stored);
            let mut expected = reference[field].as_object().expect("an object").clone();
            expected.retain(|name, _| !name.contains("_tower"));
            let found = weights(&model);
            assert_eq!(found.len(), expected.len());
            for (name, bytes) in found {
                let crc = u64::from(fixture::crc32(&bytes));
                assert_eq!(expected[&name], crc, "{name} {dtype:?} {form:?}");
            }
        }
    }
}

/// Checks that rows of the table in host memory equal those on the device.
#[test]
fn mobile_table_on_host_gives_the_same_logits() {
    for dtype in [DType::F32, DType::BF16] {
        let logits = [PerLayerTable::Device, PerLayerTable::Host].map(|table| {
            let options = LoadOptions::new()
                .dtype(dtype)
                .quantization(Quantization::Whole)
                .per_layer_table(table);
            let model = Gemma4Model::load(folder(NAME), &Device::flex(), options);
            let prompt = Fixture::open(NAME).prompt;
            let model = model.expect("the model is valid");
            values(
                model
                    .forward(tokens(&[&prompt], &Device::flex()))
                    .expect("valid tokens"),
            )
        });
        assert_eq!(logits[0], logits[1], "{dtype:?}");
    }
}

#[test]
fn mobile_logits_and_tokens_equal_transformers() {
    let fixture = Fixture::open(NAME);
    for device in devices() {
        for form in [Quantization::Stored, Quantization::Whole] {
            let what = format!("{} {form:?}", device.name);
            let options = LoadOptions::new().dtype(DType::F32).quantization(form);
            let gemma = Gemma4::load(folder(NAME), &device.device, options);
            let gemma = gemma.expect("the model is valid");
            let prompt = tokens(&[&fixture.prompt], &device.device);
            let logits = gemma.model().forward(prompt).expect("valid tokens");
            fixture.reference("text.logits").assert_close(logits, &what);
            for (chunk, drafts) in [
                (None, Drafts::None),
                (Some(1), Drafts::None),
                (Some(7), Drafts::Lookup),
            ] {
                let options = GenerateOptions {
                    prefill_chunk: chunk,
                    drafts,
                    ..greedy(&gemma, fixture.generated.len())
                };
                let found = gemma.generate(fixture.prompt.clone(), &options, |_| {
                    ControlFlow::Continue(())
                });
                let found = found.expect("the generation succeeds").tokens;
                assert_eq!(found, fixture.generated, "{what} {chunk:?}");
            }
        }
    }
}

/// The conversation of `make_mobile.py`, with the media of the fixture `audio-ple`.
fn conversation() -> Vec<Message> {
    let open = |name: &str| {
        let audio = Audio::open(folder("audio-ple").join(name));
        MessagePart::Audio(audio.expect("the file is decodable"))
    };
    let wide = Image::open(folder("audio-ple").join("wide.png")).expect("the image is decodable");
    vec![
        Message::user(vec![open("long.wav"), "what is this?".into()]),
        Message::assistant("a tone"),
        Message::user(vec![
            "and in".into(),
            wide.into(),
            "and".into(),
            open("short.wav"),
        ]),
    ]
}

/// The towers have codes of 2, 4 and 8 bits, and linear layers that clip and round. Errors of f32 change some
/// activations by a step of their scale. Errors of 1e-6 in the inputs change the soft tokens of Transformers by up to 1.6 % of the
/// largest one (2026-11-30). The bound is twice that, and the soft tokens without rounding are farther away.
#[test]
fn mobile_soft_tokens_are_close_to_transformers() {
    const BOUND: f32 = 0.032;
    let fixture = Fixture::open(NAME);
    let media = |name: &str| folder("audio-ple").join(name);
    for device in devices() {
        let gemma = fixture.load(&device.device, DType::F32);
        let audio = |name: &str| {
            let clip = Audio::open(media(name)).expect("the file is decodable");
            gemma.audio_soft_tokens(&clip).expect("the model hears")
        };
        let image = Image::open(media("wide.png")).expect("the image is decodable");
        let image = gemma.soft_tokens(&image).expect("the model sees");
        for (name, found) in [
            ("audio.0", audio("long.wav")),
            ("audio.1", audio("short.wav")),
            ("image.0", image),
        ] {
            let what = format!("{} {name}", device.name);
            let (error, largest) = fixture.reference(name).error(found.clone(), &what);
            println!("{what}: {}", error / largest);
            assert!(error <= BOUND * largest, "{what}: {error} of {largest}");
            let unrounded = fixture.reference(&format!("unrounded.{name}"));
            let (error, _) = unrounded.error(found, &what);
            assert!(error > 2.0 * BOUND * largest, "{what}: {error}");
        }
    }
}

#[test]
fn mobile_batch_equals_single_prompts() {
    let fixture = Fixture::open(NAME);
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let options = greedy(&gemma, 6);
    let prompts = [
        Prompt::Tokens(fixture.prompt.clone()),
        Prompt::Chat(conversation()),
    ];
    let batch = gemma.generate_batch(&prompts, &options);
    let batch = batch.expect("the prompts are valid");
    assert_eq!(batch[0].tokens, fixture.generated[..6]);
    let single = generated(&gemma, conversation(), &options);
    assert_eq!(batch[1].tokens, single.tokens);
}

/// The losses of single tokens and their mean are those of the logits, whose head rounds its input and its output.
#[test]
fn mobile_losses_are_those_of_the_logits() {
    let fixture = Fixture::open(NAME);
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let (model, device) = (gemma.model(), Device::flex());
    let prompt = tokens(&[&fixture.prompt[..23]], &device);
    let targets = tokens(&[&fixture.prompt[1..]], &device);
    let logits = model.forward(prompt.clone()).expect("valid tokens");
    let expected = -burn::tensor::activation::log_softmax(logits, 2)
        .gather(2, targets.clone().unsqueeze_dim(2));
    let expected = values(expected);
    let hidden = model.hidden(prompt, Logits::All).expect("valid tokens");
    let losses = model.token_losses(hidden.clone(), targets.clone());
    fixture::assert_close(&values(losses.expect("valid shapes")), &expected, "losses");
    let mean = values(model.loss(hidden, targets).expect("valid shapes"));
    let of_all = expected.iter().sum::<f32>() / expected.len() as f32;
    fixture::assert_close(&mean, &[of_all], "mean");
}

#[track_caller]
fn check_error<T>(outcome: Result<T, Gemma4Error>, words: &[&str]) {
    let Err(error) = outcome else {
        panic!("{words:?} should be refused");
    };
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{word:?} is missing from {text}");
    }
}

/// Rounding has no gradient, and the files that this crate writes have no scales.
#[test]
fn mobile_model_training_adapters_and_files_are_refused() {
    check_refusals(&folder(NAME));
}

/// Sets all static scales of the text model to 0.
fn without_text_scales() -> Folder {
    let copy = Folder::copy(NAME);
    copy.edit(|tensors| {
        for (name, tensor) in tensors.iter_mut() {
            if name.ends_with("activation_scale") && !name.contains("_tower") {
                tensor.bytes = vec![0; 4];
            }
        }
    });
    copy
}

/// The method decides, not the scales: the written files would lack the quantization of the towers.
#[test]
fn mobile_model_without_scales_is_refused_alike() {
    let zero = without_text_scales();
    check_refusals(zero.path());
    let missing = Folder::copy(NAME);
    missing.edit(|tensors| tensors.retain(|name, _| !name.ends_with("activation_scale")));
    check_refusals(missing.path());
}

/// Checks that the mobile checkpoint in `path` is neither trained, nor adapted, nor written.
#[track_caller]
fn check_refusals(path: &Path) {
    let device = Device::flex().autodiff();
    let options = || LoadOptions::new().quantization(Quantization::Whole);
    let load = || Gemma4Model::load(path, &device, options()).expect("the model is valid");
    let there = TempDir::new().expect("a temporary folder");
    let rounds = "static scales";
    let prompt = || tokens(&[&[2, 30, 40]], &device);
    let model = load();
    let loss = model.gradients(prompt(), None, Logits::All, |hidden| {
        model.loss(hidden, prompt())
    });
    check_error(loss, &[rounds, "training", "-qat-w4a16-ct"]);
    check_error(model.check_trainable(), &[rounds, "training"]);
    let adapter = Adapter::new(2, 4.0);
    check_error(adapter.attach(load()), &[rounds, "training"]);
    let gemma = Gemma4::load(path, &device, options()).expect("the model is valid");
    let kinds = MediaKinds {
        images: true,
        audio: true,
    };
    let towers = gemma.media_towers(kinds).expect("the towers are valid");
    let attached = adapter.attach_towers(towers);
    check_error(attached, &[rounds, "towers: ", "training"]);
    check_error(gemma.attach_adapter(there.path()), &[rounds, "an adapter"]);
    check_error(load().merge_adapter(there.path()), &[rounds, "an adapter"]);
    check_error(load().attach_adapter(there.path()), &[rounds]);
    check_error(
        AdapterTargets::of(&model).read(there.path()),
        &[rounds, "an adapter"],
    );
    check_error(model.save(there.path(), None), &[rounds, "saving"]);
    let saved = model.save_like(path, there.path(), None);
    check_error(saved, &[rounds, "saving"]);
    for name in ["model.gguf", "folder"] {
        let out = there.path().join(name);
        let written = quantize_checkpoint(path, out, ExportForm::Q8, |_| ());
        check_error(written, &["quantized already", "original checkpoint"]);
    }
}

#[test]
fn mobile_drafter_and_embedding_model_are_refused() {
    for (name, what) in [
        ("assistant-ple", "a drafter"),
        ("embedding", "an embedding model"),
    ] {
        let path = folder(name).join("config.json");
        let config = fs::read_to_string(path).expect("the file is readable");
        let mut config: Value = serde_json::from_str(&config).expect("the text is JSON");
        config["quantization_config"] = json!({"quant_method": "gemma"});
        let config = config.to_string();
        let words = ["quantization_config", what, "\"gemma\""];
        match name {
            "embedding" => check_error(
                burn_gemma4::EmbeddingGemmaConfig::from_json(&config),
                &words,
            ),
            _ => check_error(DrafterConfig::from_json(&config), &words),
        }
    }
}

fn load(path: &Path) -> Result<Gemma4Model, Gemma4Error> {
    Gemma4Model::load(path, &Device::flex(), LoadOptions::new())
}

#[test]
fn mobile_config_with_unsupported_field_is_refused_by_name() {
    let fields: [(&str, Value, &[&str]); 6] = [
        ("num_bits", json!(3), &["num_bits is 3", "2, 4 and 8"]),
        (
            "module_quant_configs",
            json!({"lm_head": {"num_bits": 16}}),
            &["\"lm_head\": num_bits is 16"],
        ),
        (
            "module_quant_configs",
            json!({"lm_head": {"group_size": 32}}),
            &["\"lm_head\"", "group_size"],
        ),
        (
            "module_quant_configs",
            json!({"lm_(head": {"num_bits": 2}}),
            &["module_quant_configs", "lm_(head", "regular expression"],
        ),
        (
            "modules_to_not_convert",
            json!(["*"]),
            &["modules_to_not_convert", "\"*\"", "regular expression"],
        ),
        (
            "quantize_embeddings",
            json!("all"),
            &["quantize_embeddings"],
        ),
    ];
    let text = fs::read_to_string(folder(NAME).join("config.json")).expect("the file is readable");
    for (field, value, words) in fields {
        let mut config: Value = serde_json::from_str(&text).expect("the text is JSON");
        config["quantization_config"][field] = value;
        let config = Gemma4Config::from_json(&config.to_string());
        check_error(config, &[&["quantization_config: gemma"], words].concat());
    }
}

type Tensors = BTreeMap<String, Stored>;

#[track_caller]
fn check(words: &[&str], change: impl Fn(&mut Tensors)) {
    let folder = Folder::copy(NAME);
    folder.edit(|tensors| change(tensors));
    check_error(load(folder.path()), words);
}

/// Changes one tensor.
#[track_caller]
fn check_tensor(name: &str, words: &[&str], change: impl Fn(&mut Stored)) {
    check(&[&[name], words].concat(), |tensors| {
        change(tensors.get_mut(name).expect("the tensor exists"));
    });
}

#[test]
fn mobile_wrong_tensors_are_named() {
    let q = "model.language_model.layers.0.self_attn.q_proj";
    let table = "model.language_model.embed_tokens_per_layer";
    let of = |module: &str, part: &str| format!("{module}.{part}");
    for name in [
        of(q, "weight_scale"),
        of(q, "weight"),
        of(table, "embedding_scale"),
    ] {
        check(&[&name, "is missing"], |tensors| {
            drop(tensors.remove(&name));
        });
    }
    check(&[&of(table, "weight"), "is missing"], |tensors| {
        drop(tensors.remove(&of(table, "embedding_quantized")));
    });
    // Codes of 4 bits are unsigned.
    let words = ["it is in I8", "expected U8 for codes of 4 bits"];
    check_tensor(&of(q, "weight"), &words, |tensor| tensor.dtype = Dtype::I8);
    // The rows have half as many bytes, and the scales stay the same.
    let words = ["128 rows of 16 codes", "weight_scale", "[64, 1]"];
    check_tensor(&of(q, "weight"), &words, |tensor| {
        tensor.shape = vec![128, 8];
    });
    // A linear layer has one scale a row.
    let words = ["64 rows of 32 codes", "[32, 2]"];
    check(&[&[&of(q, "weight")[..]], &words[..]].concat(), |tensors| {
        let scale = tensors.get_mut(&of(q, "weight_scale"));
        scale.expect("the tensor exists").shape = vec![32, 2];
    });
    check(&[&of(table, "embedding_quantized"), "F16"], |tensors| {
        let scale = tensors.get_mut(&of(table, "embedding_scale"));
        let scale = scale.expect("the tensor exists");
        scale.dtype = Dtype::F16;
        scale.bytes.truncate(scale.bytes.len() / 2);
    });
    for (number, word) in [(f32::NAN, "NaN"), (-1.0, "-1"), (f32::INFINITY, "inf")] {
        for part in ["input_activation_scale", "output_activation_scale"] {
            check_tensor(&of(q, part), &[word, "positive number"], |tensor| {
                tensor.bytes = number.to_le_bytes().to_vec();
            });
        }
    }
    let words = ["shape [2]", "one number in F32"];
    check_tensor(&of(q, "input_activation_scale"), &words, |tensor| {
        tensor.shape = vec![2];
        tensor.bytes = vec![0; 8];
    });
    // The configuration says that this module has floats.
    let projection = "model.language_model.per_layer_model_projection";
    let words = ["U8", "module has floats"];
    check(
        &[&[&of(projection, "weight")[..]], &words[..]].concat(),
        |tensors| {
            let weight = tensors.get_mut(&of(projection, "weight"));
            let weight = weight.expect("the tensor exists");
            weight.dtype = Dtype::U8;
            weight.bytes.truncate(weight.bytes.len() / 2);
        },
    );
    // Tensors that no module has are refused, even beside keys that no layer reads.
    for extra in [
        "layers.4.self_attn.k_proj.rqv2_muls",
        "layers.0.mlp.rqv2_muls",
    ] {
        let extra = format!("model.language_model.{extra}");
        check(&[&extra, "not part"], |tensors| {
            let scale = tensors[&of(q, "weight_scale")].clone();
            tensors.insert(extra.clone(), scale);
        });
    }
}

/// Without its tensors of codes, a tower is refused only when a prompt needs it.
#[test]
fn mobile_wrong_tower_answers_text_and_refuses_images() {
    let projection = "model.vision_tower.encoder.layers.0.mlp.up_proj.linear.weight_scale";
    let relative = "model.audio_tower.layers.0.self_attn.relative_k_proj";
    let copy = Folder::copy(NAME);
    copy.edit(|tensors| {
        drop(tensors.remove(projection));
        // A linear layer without bounds rounds no activations.
        let [rows, columns] = tensors[&format!("{relative}.weight")].shape[..] else {
            panic!("the weight is a matrix");
        };
        let mut add = |part: &str, dtype, shape, bytes| {
            let name = format!("{relative}.{part}");
            tensors.insert(
                name,
                Stored {
                    dtype,
                    shape,
                    bytes,
                },
            );
        };
        let bytes = columns / 4;
        add(
            "weight",
            Dtype::U8,
            vec![rows, bytes],
            vec![0; rows * bytes],
        );
        let ones = 1f32.to_le_bytes();
        add("weight_scale", Dtype::F32, vec![rows, 1], ones.repeat(rows));
        add("input_activation_scale", Dtype::F32, vec![], ones.to_vec());
    });
    let config = String::from_utf8(copy.read("config.json")).expect("the text is UTF-8");
    let mut config: Value = serde_json::from_str(&config).expect("the text is JSON");
    let floats = config["quantization_config"]["modules_to_not_convert"].as_array_mut();
    floats
        .expect("an array")
        .retain(|name| name != "relative_k_proj");
    copy.write("config.json", config.to_string());
    let gemma = Gemma4::load(copy.path(), &Device::flex(), LoadOptions::new());
    let gemma = gemma.expect("the text model is valid");
    let image = Image::open(folder("audio-ple").join("wide.png")).expect("a decodable image");
    check_error(gemma.soft_tokens(&image), &[projection, "is missing"]);
    let clip = Audio::open(folder("audio-ple").join("short.wav")).expect("the file is decodable");
    check_error(gemma.audio_soft_tokens(&clip), &[relative, "static scales"]);
    let options = greedy(&gemma, 2);
    let prompt = Fixture::open(NAME).prompt;
    let found = gemma.generate(prompt, &options, |_| ControlFlow::Continue(()));
    assert_eq!(found.expect("the generation succeeds").tokens.len(), 2);
}

/// Returns a mixture of experts whose experts have codes of 4 bits, each in a tensor of its own. `scales` are the
/// static scales of the down projection of one expert.
fn quantized_experts(scales: &[(&str, f32)]) -> Folder {
    let copy = Folder::copy("moe");
    copy.edit(|tensors| {
        let stacked: Vec<String> = tensors
            .keys()
            .filter(|name| name.contains(".experts."))
            .cloned()
            .collect();
        for name in stacked {
            let shape = tensors.remove(&name).expect("the tensor exists").shape;
            let [experts, rows, columns] = shape[..] else {
                panic!("the tensor has three dimensions");
            };
            let (module, part) = name.rsplit_once('.').expect("the tensor is in a module");
            let parts: &[&str] = match part {
                "gate_up_proj" => &["gate_proj", "up_proj"],
                _ => &["down_proj"],
            };
            let rows = rows / parts.len();
            for (expert, part) in
                (0..experts).flat_map(|expert| parts.iter().map(move |part| (expert, part)))
            {
                let matrix = format!("{module}.{expert}.{part}");
                let (codes, ones) = (rows * columns / 2, 1f32.to_le_bytes().repeat(rows));
                let codes = Stored {
                    dtype: Dtype::U8,
                    shape: vec![rows, columns / 2],
                    bytes: vec![0x88; codes],
                };
                tensors.insert(format!("{matrix}.weight"), codes);
                tensors.insert(format!("{matrix}.weight_scale"), floats(&[rows, 1], ones));
            }
        }
        for (part, scale) in scales {
            let name = format!("model.layers.1.experts.3.down_proj.{part}");
            tensors.insert(name, floats(&[], scale.to_le_bytes().to_vec()));
        }
    });
    let quantization = json!({"quant_method": "gemma", "num_bits": 4});
    copy.set("config.json", "quantization_config", quantization);
    copy
}

fn floats(shape: &[usize], bytes: Vec<u8>) -> Stored {
    Stored {
        dtype: Dtype::F32,
        shape: shape.to_vec(),
        bytes,
    }
}

#[test]
fn mobile_scales_of_experts_are_refused() {
    for part in ["input_activation_scale", "output_activation_scale"] {
        let name = format!("layers.1.experts.3.down_proj.{part}");
        let model = load(quantized_experts(&[(part, 0.5)]).path());
        check_error(model, &[&name, "cannot round its activations"]);
        let model = load(quantized_experts(&[(part, 0.0)]).path());
        assert!(model.expect("nothing is rounded").is_quantized());
    }
    load(quantized_experts(&[]).path()).expect("nothing is rounded");
}

/// Keys and values depend on the static scales, so a session belongs to a model with the same scales.
#[test]
fn mobile_session_of_other_scales_is_refused() {
    let there = TempDir::new().expect("a temporary folder");
    let path = there.path().join("session.kv");
    let scale = "model.language_model.layers.1.self_attn.v_proj.output_activation_scale";
    let other = Folder::copy(NAME);
    other.edit(|tensors| {
        let scale = tensors.get_mut(scale).expect("the tensor exists");
        scale.bytes = 0.75f32.to_le_bytes().to_vec();
    });
    let none = without_text_scales();
    let own = folder(NAME);
    let folders = [own.as_path(), other.path(), none.path()];
    let gemmas = folders.map(|folder| {
        let options = LoadOptions::new().dtype(DType::F32);
        Gemma4::load(folder, &Device::flex(), options).expect("the model is valid")
    });
    let prints = gemmas.each_ref().map(|gemma| {
        let print = gemma.model().fingerprint();
        print.expect("the weights are readable")
    });
    for (saved, gemma) in gemmas.iter().enumerate() {
        let mut session = gemma.session();
        let prompt = Fixture::open(NAME).prompt;
        let generated = session.generate(prompt, &greedy(gemma, 2), |_| ControlFlow::Continue(()));
        generated.expect("the generation succeeds");
        session.save(&path, &[]).expect("the file is written");
        for (loaded, gemma) in gemmas.iter().enumerate() {
            let outcome = SavedSession::read(gemma.model(), &path);
            assert_eq!(prints[saved] == prints[loaded], saved == loaded);
            match saved == loaded {
                true => drop(outcome.expect("the model is the same")),
                false => check_error(outcome, &["another model", "activation_scales"]),
            }
        }
    }
}

/// Without scales, the fingerprint is the hash of the weights alone, which older versions wrote to files.
#[test]
fn mobile_fingerprint_without_scales_is_that_of_the_weights() {
    let options = LoadOptions::new()
        .dtype(DType::F32)
        .quantization(Quantization::Whole)
        .per_layer_table(PerLayerTable::Device);
    let model = Gemma4Model::load(without_text_scales().path(), &Device::flex(), options);
    let print = model.expect("the model is valid").fingerprint();
    assert_eq!(
        print.expect("the weights are readable"),
        0x8651_6FEE_ABCB_9FE6
    );
}

/// `finetune` refuses the checkpoint before the first step, with and without an adapter.
#[cfg(feature = "training")]
#[test]
fn mobile_finetune_is_refused_early() {
    let there = TempDir::new().expect("a temporary folder");
    let data = there.path().join("data.jsonl");
    fs::write(&data, conversations()).expect("the file is written");
    let copy = Folder::copy(NAME);
    let all = [&["--length", "48", "--full"][..], &["--length", "48"]];
    for arguments in all {
        let out = there.path().join("out");
        let mut command = finetune(&copy, &data, &out, arguments);
        let words = ["mobile checkpoint", "training is not supported"];
        check_refused("training", &run(&mut command), 2, &words);
        assert!(!out.join("run").join("settings.json").exists());
    }
}

/// Sets the head of the multimodal checkpoint to that of the embedding table.
fn tied() -> Folder {
    let copy = Folder::copy(NAME);
    let config = String::from_utf8(copy.read("config.json")).expect("the text is UTF-8");
    let mut config: Value = serde_json::from_str(&config).expect("the text is JSON");
    config["tie_word_embeddings"] = true.into();
    config["text_config"]["tie_word_embeddings"] = true.into();
    copy.write("config.json", config.to_string());
    copy
}

#[test]
fn mobile_quantized_head_beside_tied_table_is_refused() {
    let copy = tied();
    for name in ["lm_head.weight", "lm_head.weight_scale"] {
        check_error(load(copy.path()), &[name, "not part of the model"]);
    }
    copy.edit(|tensors| tensors.retain(|name, _| !name.starts_with("lm_head.")));
    load(copy.path()).expect("the table is the head");
    // A copy of the table in floats is ignored.
    copy.edit(|tensors| {
        let copied = floats(&[320, 32], vec![0; 4 * 320 * 32]);
        tensors.insert("lm_head.weight".into(), copied);
    });
    load(copy.path()).expect("the table is the head");
}

/// The rows of an odd number of codes fill whole bytes.
#[test]
fn mobile_padded_rows_are_refused_by_name() {
    let copy = Folder::copy(NAME);
    let config = String::from_utf8(copy.read("config.json")).expect("the text is UTF-8");
    let mut config: Value = serde_json::from_str(&config).expect("the text is JSON");
    config["text_config"]["intermediate_size"] = 47.into();
    copy.write("config.json", config.to_string());
    let down = "model.language_model.layers.0.mlp.down_proj.weight";
    let words = ["rows of 47 codes are padded to 48", "not supported"];
    check_error(load(copy.path()), &[&[down], &words[..]].concat());
}

#[test]
fn mobile_config_with_many_or_long_expressions_is_refused() {
    let of = |quantization: Value| {
        let text = fs::read_to_string(folder(NAME).join("config.json"));
        let text = text.expect("the file is readable");
        let mut config: Value = serde_json::from_str(&text).expect("the text is JSON");
        for (field, value) in quantization.as_object().expect("an object") {
            config["quantization_config"][field] = value.clone();
        }
        Gemma4Config::from_json(&config.to_string())
    };
    let names = |count| (0..count).map(|index| format!("x{index}"));
    let configs: Value = names(512).map(|name| (name, json!({}))).collect();
    for (count, is_valid) in [(512, true), (513, false)] {
        let found = of(json!({
            "modules_to_not_convert": names(count).collect::<Vec<_>>(),
            "module_quant_configs": configs.clone(),
        }));
        match is_valid {
            true => drop(found.expect("the configuration is valid")),
            false => check_error(found, &["1025 regular expressions", "at most 1024"]),
        }
    }
    // The beginning of a long expression is enough to find it.
    let long = format!("({}", "x".repeat(100_000));
    for quantization in [
        json!({"modules_to_not_convert": [long]}),
        json!({"module_quant_configs": {&long: {}}}),
        json!({"module_quant_configs": {&long: {"num_bits": 3}}}),
    ] {
        let Err(error) = of(quantization) else {
            panic!("the expression is refused");
        };
        let text = error.to_string();
        assert!(text.contains("(xxx") && text.contains("..."), "{text}");
        assert!(text.len() < 500, "{text}");
    }
}

#[test]
fn mobile_config_with_two_methods_is_refused() {
    let text = fs::read_to_string(folder(NAME).join("config.json")).expect("the file is readable");
    let config: Value = serde_json::from_str(&text).expect("the text is JSON");
    let gemma = config["quantization_config"].clone();
    let read = |change: &dyn Fn(&mut Value)| {
        let mut config = config.clone();
        change(&mut config);
        Gemma4Config::from_json(&config.to_string())
    };
    let other = json!({
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"all": {"weights": {
            "num_bits": 4, "type": "int", "strategy": "channel", "symmetric": true
        }}}
    });
    let both = ["both \"gemma\" and", "expected one method"];
    for swapped in [false, true] {
        let found = read(&|config| {
            let (top, text) = match swapped {
                true => (&other, &gemma),
                false => (&gemma, &other),
            };
            config["quantization_config"] = top.clone();
            config["text_config"]["quantization_config"] = text.clone();
        });
        check_error(found, &[&both[..], &["compressed-tensors"]].concat());
    }
    let found = read(&|config| config["quantization"] = json!({"bits": 4}));
    check_error(found, &[&both[..], &["MLX"]].concat());
    let found = read(&|config| {
        config["text_config"]["quantization_config"] = json!({"quant_method": "fp8"});
    });
    check_error(found, &["\"fp8\""]);
    let found = read(&|config| {
        config["text_config"]["quantization_config"] = json!({"quant_method": "gemma"});
    });
    check_error(
        found,
        &["gemma: text_config has another quantization_config"],
    );
    let found = read(&|config| config["text_config"]["quantization_config"] = gemma.clone());
    found.expect("both objects are equal");
}
