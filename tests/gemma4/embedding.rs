//! Tests EmbeddingGemma 2 against Hugging Face Transformers. The error of a tensor is its distance from the definition
//! in f64. It may be at most twice the error that Transformers has in the same dtype.

use crate::devices::devices;
use crate::fixture::{Reference, assert_close, folder, read, values};
use burn::tensor::{DType, Device, Tensor};
use burn_gemma4::{
    EmbedOptions, EmbeddingGemma, EmbeddingGemmaConfig, Gemma4, LayerType, LoadOptions,
    Quantization,
    observe::{LayerSite, Observer, Site},
};
use safetensors::SafeTensors;
use serde::Deserialize;
use std::collections::HashMap;
use std::{fs, path::Path};
use tempfile::TempDir;

const ALL: [&str; 2] = ["embedding", "embedding-realhead"];

#[derive(Deserialize)]
struct Description {
    texts: Vec<Text>,
}

/// A text with its prompt, and the tokens that Transformers gives both.
#[derive(Deserialize)]
struct Text {
    prompt: Option<String>,
    text: String,
    tokens: Vec<u32>,
}

impl Text {
    fn options(&self) -> EmbedOptions {
        match &self.prompt {
            Some(name) => EmbedOptions::new().prompt(name),
            None => EmbedOptions::new(),
        }
    }
}

fn texts(name: &str) -> Vec<Text> {
    let path = folder(name).join("reference.json");
    let json = fs::read_to_string(path).expect("the fixture is readable");
    let description: Description = serde_json::from_str(&json).expect("the description parses");
    description.texts
}

fn references(name: &str) -> HashMap<String, Reference> {
    read(folder(name).join("reference.safetensors"))
}

fn load(name: &str, device: &Device, dtype: DType) -> EmbeddingGemma {
    EmbeddingGemma::load(folder(name), device, LoadOptions::new().dtype(dtype))
        .unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Returns the root mean square of `a - b`.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let squares: f32 = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum();
    (squares / a.len() as f32).sqrt()
}

fn tag(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::BF16 => "bf16",
        _ => "f16",
    }
}

#[test]
fn tokens_with_prompts_are_those_of_transformers() {
    for name in ALL {
        let model = load(name, &devices()[0].device, DType::F32);
        for text in texts(name) {
            let tokens = model.tokens(&text.text, &text.options());
            assert_eq!(tokens.expect("the text encodes"), text.tokens, "{name}");
        }
    }
}

/// Embeddings of single texts, and of all texts in one call, against the definition in f64.
#[test]
fn embeddings_have_at_most_twice_the_error_of_transformers() {
    for device in devices() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            if !device.computes_in(dtype) {
                continue;
            }
            for name in ALL {
                let (texts, references) = (texts(name), references(name));
                let model = load(name, &device.device, dtype);
                let all: Vec<Vec<u32>> = texts.iter().map(|text| text.tokens.clone()).collect();
                let together = model.embed_tokens(&all, None).expect("the tokens embed");
                let of_texts = |of: &dyn Fn(usize) -> Vec<f32>| -> Vec<f32> {
                    (0..texts.len()).flat_map(of).collect()
                };
                let values = |name: &str| references[name].values.clone();
                let exact = of_texts(&|index| values(&format!("exact.{index}.embedding")));
                let theirs =
                    of_texts(&|index| values(&format!("{}.{index}.embedding", tag(dtype))));
                let alone = of_texts(&|index| {
                    let text = &texts[index];
                    let embedding = model.embed(&[&text.text], &text.options());
                    embedding.expect("the text embeds").remove(0)
                });
                let ours = distance(&alone, &exact);
                let packed = distance(&together.concat(), &exact);
                let theirs = distance(&theirs, &exact);
                let what = format!("{name} {} {}", device.name, tag(dtype));
                println!("{what}: {ours:e} alone, {packed:e} together, transformers {theirs:e}");
                assert!(ours <= 2.0 * theirs, "{what}: {ours:e} > 2 * {theirs:e}");
                assert!(
                    packed <= 2.0 * theirs,
                    "{what}: {packed:e} > 2 * {theirs:e}"
                );
            }
        }
    }
}

/// Compares the hidden states of one text with those of Transformers.
struct States<'a> {
    references: &'a HashMap<String, Reference>,
    compared: usize,
}

impl Observer for States<'_> {
    fn observe<const D: usize>(&mut self, site: Site, tensor: impl FnOnce() -> Tensor<D>) {
        let name = match site {
            Site::PerLayerEmbeddings => "f32.2.ple".to_owned(),
            Site::Layer(layer, LayerSite::Output) => format!("f32.2.layer.{layer}.out"),
            Site::FinalNorm => "f32.2.norm".to_owned(),
            _ => return,
        };
        self.references[&name].assert_close(tensor(), &name);
        self.compared += 1;
    }
}

#[test]
fn hidden_states_are_those_of_transformers() {
    for device in devices() {
        for name in ALL {
            let (texts, references) = (texts(name), references(name));
            let model = load(name, &device.device, DType::F32);
            let window = 2 * model.config().window_radius() + 1;
            assert!(
                texts[2].tokens.len() > window,
                "the text is longer than the window"
            );
            let mut states = States {
                references: &references,
                compared: 0,
            };
            let pooled = model
                .model()
                .forward_observed(&[&texts[2].tokens], &mut states);
            let pooled = values(pooled.expect("the tokens are in the vocabulary"));
            assert_eq!(states.compared, model.config().text.num_layers() + 2);
            // The mean of Transformers' projected states is the projection of our mean.
            let last = &references["f32.2.last_hidden_state"].values;
            let mut mean = vec![0.0; pooled.len()];
            for row in last.chunks_exact(pooled.len()) {
                for (sum, element) in mean.iter_mut().zip(row) {
                    *sum += element / texts[2].tokens.len() as f32;
                }
            }
            assert_close(&pooled, &mean, name);
        }
    }
}

#[test]
fn embeddings_in_one_pass_are_those_of_each_text_alone() {
    for device in devices() {
        for name in ALL {
            let model = load(name, &device.device, DType::F32).model().clone();
            let texts = texts(name);
            let tokens: Vec<&[u32]> = texts.iter().map(|text| text.tokens.as_slice()).collect();
            let together = values(model.forward(&tokens).expect("the tokens embed"));
            let rows = together.chunks_exact(model.config().embedding_dim);
            for (row, tokens) in rows.zip(&tokens) {
                let alone = values(model.forward(&[tokens]).expect("the tokens embed"));
                assert_close(row, &alone, name);
            }
        }
    }
}

/// A text whose embedding is NaN fails alone, although NaN reaches the other texts of its pass.
#[test]
fn embeddings_that_are_not_finite_spare_other_texts() {
    let name = "embedding-realhead";
    let texts = texts(name);
    let [first, second, third] = [0, 1, 2].map(|index| texts[index].tokens.clone());
    let used = [first.clone(), second.clone(), third.clone()].concat();
    let poison = (0..320u32).find(|token| !used.contains(token));
    let poison = poison.expect("a token is in no text");
    let copied = Copied::of(name);
    copied.poison("language_model.embed_tokens.weight", poison as usize);
    for device in devices() {
        let options = || LoadOptions::new().dtype(DType::F32);
        let whole = load(name, &device.device, DType::F32);
        let model = EmbeddingGemma::load(copied.path(), &device.device, options());
        let model = model.expect("the copy loads");
        let expected = whole.embed_tokens(std::slice::from_ref(&second), None);
        let expected = expected.expect("the tokens embed").remove(0);
        let [before, after] = [[first.clone(), vec![poison]], [vec![poison], third.clone()]];
        let tokens = [before.concat(), second.clone(), after.concat()];
        let embeddings = model.try_embed_tokens(&tokens).expect("the device works");
        let [before, middle, after] = &embeddings[..] else {
            panic!("{embeddings:?}");
        };
        for failed in [before, after] {
            let message = failed
                .as_ref()
                .expect_err("the embedding is NaN")
                .to_string();
            assert!(message.contains("not finite"), "{message}");
        }
        let middle = middle.as_ref().expect("the text has no NaN");
        assert_close(middle, &expected, name);
        let error = model.embed_tokens(&tokens, None);
        let message = error.expect_err("a text failed").to_string();
        assert!(
            message.contains("text 0 has an embedding in f32"),
            "{message}"
        );
    }
}

#[test]
fn truncated_embeddings_are_normalized_prefixes() {
    let name = ALL[0];
    let model = load(name, &devices()[0].device, DType::F32);
    let whole = model
        .embed(&["the cat"], &EmbedOptions::new())
        .expect("the text embeds");
    let norm = |embedding: &[f32]| embedding.iter().map(|one| one * one).sum::<f32>().sqrt();
    assert!((norm(&whole[0]) - 1.0).abs() < 1e-5);
    for dimensions in [1, 16, 48] {
        let options = EmbedOptions::new().dimensions(dimensions);
        let cut = model
            .embed(&["the cat"], &options)
            .expect("the text embeds");
        let length = norm(&whole[0][..dimensions]);
        let expected: Vec<f32> = whole[0][..dimensions]
            .iter()
            .map(|one| one / length)
            .collect();
        assert_close(&cut[0], &expected, name);
    }
}

#[test]
fn invalid_arguments_are_refused_by_name() {
    let model = load("embedding", &devices()[0].device, DType::F32);
    let error = |texts: &[&str], options: &EmbedOptions| {
        let outcome = model.embed(texts, options);
        outcome.expect_err("the arguments are refused").to_string()
    };
    let whole = EmbedOptions::new();
    for dimensions in [0, 49] {
        let message = error(&["x"], &whole.clone().dimensions(dimensions));
        assert!(
            message.contains("dimensions") && message.contains("48"),
            "{message}"
        );
    }
    let message = error(&["x"], &whole.clone().prompt("Poem"));
    assert!(
        message.contains("Poem") && message.contains("Retrieval-query"),
        "{message}"
    );

    // The limit of `sentence_bert_config.json` is 96 tokens.
    let long = "x ".repeat(200);
    let message = error(&["x", &long], &whole);
    assert!(
        message.contains("text 1") && message.contains("96"),
        "{message}"
    );
    let options = whole.clone().truncate(true);
    let tokens = model
        .tokens(&long, &options)
        .expect("the text is truncated");
    assert_eq!(tokens.len(), 96);
    assert_eq!((tokens[0], tokens[95]), (2, 1), "the added tokens stay");
    let endless = "é".repeat((1 << 20) + 1);
    let message = error(&[&endless], &options);
    assert!(
        message.contains("text 0 has 1048577 characters") && message.contains("1048576"),
        "{message}"
    );

    let outcome = model.embed_tokens(&[vec![2], vec![]], None);
    let message = outcome.expect_err("a text is empty").to_string();
    assert!(message.contains("text 1 has no tokens"), "{message}");
    let outcome = model.embed_tokens(&[vec![2, 320]], None);
    let message = outcome.expect_err("a token is unknown").to_string();
    assert!(message.contains("320"), "{message}");
    assert!(
        model
            .embed::<&str>(&[], &whole)
            .expect("no texts have no embeddings")
            .is_empty()
    );
}

#[test]
fn hub_style_configuration_is_the_same() {
    for name in ALL {
        let config = |file| EmbeddingGemmaConfig::from_file(folder(name).join(file));
        let written = config("config.json").expect("transformers' file parses");
        let hub = config("config.hub.json").expect("the Hub's style parses");
        assert_eq!(written, hub);
    }
}

#[test]
fn unsupported_configurations_are_refused_by_name() {
    let json = fs::read_to_string(folder("embedding").join("config.json")).expect("it is readable");
    let base: serde_json::Value = serde_json::from_str(&json).expect("it is JSON");
    let refused = |field: &str, value: serde_json::Value| {
        let mut changed = base.clone();
        changed["text_config"][field] = value;
        let outcome = EmbeddingGemmaConfig::from_json(&changed.to_string());
        let message = outcome.expect_err("the field is not supported").to_string();
        assert!(message.contains(field), "{field}: {message}");
    };
    refused("attention_bias", true.into());
    refused("hidden_activation", "silu".into());
    refused("num_kv_shared_layers", 2.into());
    refused("attention_k_eq_v", true.into());
    refused("use_double_wide_mlp", true.into());
    refused("hidden_size_per_layer_input", 0.into());
    refused("embedding_dim", 0.into());
    let mut changed = base.clone();
    let fields = changed["text_config"].as_object_mut().expect("an object");
    fields.remove("layer_types");
    fields.remove("per_layer_config");
    let mut with_period = |period: usize| {
        changed["text_config"]["sliding_window_pattern"] = period.into();
        EmbeddingGemmaConfig::from_json(&changed.to_string())
    };
    let config = with_period(2).expect("the field is supported");
    let full = config
        .text
        .layer_types
        .iter()
        .map(|kind| *kind == LayerType::Full);
    assert!(
        full.enumerate()
            .all(|(index, is_full)| is_full == (index % 2 == 1))
    );
    let message = with_period(0).expect_err("no layer is full").to_string();
    assert!(message.contains("sliding_window_pattern"), "{message}");
    refused("use_bidirectional_attention", "all".into());
    refused(
        "rope_parameters",
        serde_json::json!({"full_attention": {"rope_theta": 1e6}}),
    );
    let other =
        fs::read_to_string(folder("dense-ple").join("config.json")).expect("it is readable");
    let message = EmbeddingGemmaConfig::from_json(&other)
        .expect_err("a chat model")
        .to_string();
    assert!(message.contains("gemma4_text"), "{message}");
}

/// Embedding models and chat models are not taken for each other.
#[test]
fn other_kinds_of_models_are_refused() {
    let device = Device::flex();
    let outcome = Gemma4::from_pretrained(folder("embedding"), &device);
    let message = outcome
        .expect_err("the model generates no text")
        .to_string();
    assert!(message.contains("embedding model"), "{message}");
    let is_embedding = |name| EmbeddingGemma::is_at(folder(name)).expect("the file is JSON");
    assert!(is_embedding("embedding") && !is_embedding("dense-ple"));
    assert!(!is_embedding("no-such-folder"));
    let options = LoadOptions::new().quantization(Quantization::Q8);
    let outcome = EmbeddingGemma::load(folder("embedding"), &device, options);
    let message = outcome.expect_err("the weights stay whole").to_string();
    assert!(message.contains("quantization"), "{message}");
}

/// A copy of a fixture whose JSON files change.
pub struct Copied(TempDir);

impl Copied {
    pub fn of(name: &str) -> Self {
        fn copy(from: &Path, to: &Path) {
            fs::create_dir_all(to).expect("the folder is writable");
            for entry in fs::read_dir(from).expect("the fixture is readable") {
                let entry = entry.expect("the fixture is readable");
                let (from, to) = (entry.path(), to.join(entry.file_name()));
                match from.is_dir() {
                    true => copy(&from, &to),
                    false => drop(fs::copy(from, to).expect("the file is copyable")),
                }
            }
        }
        let copied = TempDir::new().expect("a temporary folder");
        copy(&folder(name), copied.path());
        Self(copied)
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    fn change(&self, file: &str, change: impl FnOnce(&mut serde_json::Value)) {
        let path = self.path().join(file);
        let text = fs::read_to_string(&path).expect("the file is readable");
        let mut json = serde_json::from_str(&text).expect("the file is JSON");
        change(&mut json);
        fs::write(path, json.to_string()).expect("the file is writable");
    }
}

impl Copied {
    /// Sets a row of a bf16 matrix to NaN.
    pub fn poison(&self, tensor: &str, row: usize) {
        let path = self.path().join("model.safetensors");
        let mut bytes = fs::read(&path).expect("the fixture is readable");
        let tensors = SafeTensors::deserialize(&bytes).expect("the fixture parses");
        let view = tensors.tensor(tensor).expect("the fixture has the tensor");
        let start = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
        let columns = view.shape()[1];
        for element in 0..columns {
            let at = start + 2 * (row * columns + element);
            bytes[at..at + 2].copy_from_slice(&0x7fc0u16.to_le_bytes());
        }
        fs::write(path, bytes).expect("the file is writable");
    }
}

/// Settings of sentence-transformers that would change the embeddings are refused.
#[test]
fn unsupported_modules_are_refused_by_name() {
    type Change = fn(&mut serde_json::Value);
    let device = Device::flex();
    let cases: [(&str, Change, &str); 13] = [
        (
            "modules.json",
            |json| json[0]["kwargs"] = serde_json::json!(["task"]),
            "kwargs",
        ),
        (
            "sentence_bert_config.json",
            |json| json["query_length"] = 32.into(),
            "query_length",
        ),
        (
            "sentence_bert_config.json",
            |json| json["module_output_name"] = "sentence_embedding".into(),
            "module_output_name",
        ),
        (
            "sentence_bert_config.json",
            |json| {
                let text =
                    serde_json::json!({"method": "get_text_features", "method_output_name": null});
                json["modality_config"] = serde_json::json!({"text": text});
            },
            "modality_config",
        ),
        (
            "sentence_bert_config.json",
            |json| json["model_kwargs"] = serde_json::json!({"add_pooling_layer": true}),
            "model_kwargs",
        ),
        (
            "sentence_bert_config.json",
            |json| json["max_seq_length"] = 2.into(),
            "at least 3",
        ),
        (
            "tokenizer_config.json",
            |json| json["truncation_side"] = "middle".into(),
            "middle",
        ),
        (
            "modules.json",
            |json| json[2]["type"] = "x.Dense".into(),
            "Dense",
        ),
        (
            "modules.json",
            |json| json[1]["path"] = "../up".into(),
            "../up",
        ),
        (
            "1_Pooling/config.json",
            |json| json["pooling_mode"] = "cls".into(),
            "cls",
        ),
        (
            "1_Pooling/config.json",
            |json| json["embedding_dimension"] = 7.into(),
            "48",
        ),
        (
            "sentence_bert_config.json",
            |json| json["do_lower_case"] = true.into(),
            "do_lower_case",
        ),
        (
            "config_sentence_transformers.json",
            |json| json["default_prompt_name"] = "Poem".into(),
            "Poem",
        ),
    ];
    for (file, change, word) in cases {
        let copied = Copied::of("embedding");
        copied.change(file, change);
        let outcome = EmbeddingGemma::from_pretrained(copied.path(), &device);
        let message = outcome
            .expect_err("the setting is not supported")
            .to_string();
        assert!(message.contains(word), "{file}: {message}");
    }
    // Settings that do not change the embeddings.
    let copied = Copied::of("embedding");
    copied.change("modules.json", |json| {
        json[0]["kwargs"] = serde_json::json!([])
    });
    copied.change("sentence_bert_config.json", |json| {
        let forward =
            serde_json::json!({"method": "forward", "method_output_name": "last_hidden_state"});
        json["modality_config"] = serde_json::json!({"text": forward, "image": {}});
        json["module_output_name"] = "token_embeddings".into();
        json["processing_kwargs"] = serde_json::json!({});
        json["unpad_inputs"] = true.into();
        json["model_kwargs"] = serde_json::json!({"dtype": "auto", "attn_implementation": "sdpa"});
    });
    EmbeddingGemma::from_pretrained(copied.path(), &device).expect("it loads");
    // The older dialect of the same settings.
    let copied = Copied::of("embedding");
    copied.change("1_Pooling/config.json", |json| {
        *json = serde_json::json!({
            "word_embedding_dimension": 48, "pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false,
        });
    });
    copied.change("config_sentence_transformers.json", |json| {
        json["default_prompt_name"] = "Document".into();
    });
    let model = EmbeddingGemma::from_pretrained(copied.path(), &device).expect("it loads");
    let document = EmbedOptions::new().prompt("Document");
    let tokens = |options| model.tokens("the cat", &options).expect("the text encodes");
    assert_eq!(tokens(EmbedOptions::new()), tokens(document));
}

/// The side of truncation is that of `tokenizer_config.json`, or else that of `tokenizer.json`.
#[test]
fn truncation_drops_the_tokens_of_the_checkpoints_side() {
    let device = Device::flex();
    let text = "one ".repeat(200) + "end";
    let tokens = |copied: &Copied| {
        let model = EmbeddingGemma::from_pretrained(copied.path(), &device).expect("it loads");
        let all = model.tokenizer().encode(&text).expect("the text encodes");
        let tokens = model.tokens(&text, &EmbedOptions::new().truncate(true));
        (all, tokens.expect("the text is truncated"))
    };
    let copied = Copied::of("embedding");
    copied.change("tokenizer.json", |json| {
        json["truncation"] = serde_json::json!({
            "direction": "Left", "max_length": 8, "strategy": "LongestFirst", "stride": 0,
        });
    });
    let (all, left) = tokens(&copied);
    assert_eq!(left, [&[2][..], &all[all.len() - 94..], &[1]].concat());
    copied.change("tokenizer_config.json", |json| {
        json["truncation_side"] = "right".into();
    });
    let (all, right) = tokens(&copied);
    assert_eq!(right, [&[2][..], &all[..94], &[1]].concat());
}

/// Images and audio are not supported. Their placeholders would otherwise be embedded as ordinary tokens.
#[test]
fn placeholders_of_media_are_refused_by_name() {
    let copied = Copied::of("embedding");
    let device = Device::flex();
    let id = |token: &str| {
        let model = load("embedding", &device, DType::F32);
        let id = model.tokenizer().id(token);
        id.expect("the tokenizer has the token")
    };
    let (image, audio) = (id("<|image|>"), id("<|audio|>"));
    copied.change("config.json", |json| {
        json["image_token_id"] = image.into();
        json["audio_token_id"] = audio.into();
    });
    let model = EmbeddingGemma::from_pretrained(copied.path(), &device).expect("it loads");
    for (text, medium) in [("a <|image|>", "image"), ("<|audio|>", "audio")] {
        let error = model.embed(&["x", text], &EmbedOptions::new());
        let message = error.expect_err("there is no medium").to_string();
        assert!(
            message.contains("text 1") && message.contains(medium),
            "{message}"
        );
    }
}
