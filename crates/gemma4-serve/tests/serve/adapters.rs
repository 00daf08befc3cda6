//! Tests adapters that requests select by the name of their model. Each answer must equal the answer of a model into
//! which the adapter is merged, whatever adapters the other answers have.

use crate::harness::{Harness, MODEL, gemma, user};
use axum::http::StatusCode;
use burn::tensor::Device;
use burn_gemma4::{Adapter, Gemma4, GenerateOptions, LoadOptions, Sampling};
use gemma4_serve::ServerOptions;
use gemma4_serve::engine::EngineOptions;
use rand::{Rng, SeedableRng, rngs::StdRng};
use safetensors::{Dtype, SafeTensors, serialize, tensor::TensorView};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

const PROMPT: &str = "/// Returns the number of tokens in the cache.\npub fn ";
const TOKENS: usize = 24;

/// Writes adapters of the embedded model, each into the subfolder `name` of one folder. The numbers depend on the seed.
pub fn adapters<const N: usize>(names: [(&str, usize, u64); N]) -> TempDir {
    let root = TempDir::new().expect("a folder");
    let tracked = Gemma4::embedded(&Device::flex().autodiff(), LoadOptions::new());
    let model = tracked.expect("the model loads").model().clone();
    for (name, rank, seed) in names {
        let adapter = Adapter::new(rank, 2.0 * rank as f64);
        let attached = adapter.attach(model.clone()).expect("the rank fits");
        let folder = root.path().join(name);
        adapter
            .save(&attached, &folder, "embedded")
            .expect("the adapter is written");
        let path = folder.join("adapter_model.safetensors");
        let bytes = fs::read(&path).expect("the file exists");
        let mut rng = StdRng::seed_from_u64(seed);
        let tensors = SafeTensors::deserialize(&bytes).expect("the file is safetensors");
        let mut drawn: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
        // The order of `iter` is random, but each tensor must get the same numbers in every run.
        let in_order: BTreeMap<_, _> = tensors.iter().collect();
        for (name, view) in in_order {
            let count = view.shape().iter().product::<usize>();
            let numbers = (0..count).flat_map(|_| rng.random_range(-0.2..0.2_f32).to_le_bytes());
            drawn.push((name.to_owned(), view.shape().to_vec(), numbers.collect()));
        }
        write(&path, &drawn);
    }
    root
}

/// Writes f32 tensors: the name, the shape and the bytes of each tensor.
fn write(path: &Path, tensors: &[(String, Vec<usize>, Vec<u8>)]) {
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytes);
        (name.clone(), view.expect("the bytes fit the shape"))
    });
    let bytes = serialize(views, None).expect("the tensors are valid");
    fs::write(path, bytes).expect("the file is written");
}

/// Returns the greedy answer of a model without a server.
pub fn alone(gemma: &Gemma4, tokens: usize) -> String {
    let options = GenerateOptions {
        max_tokens: tokens,
        sampling: Sampling::greedy(),
        ignore_stop_tokens: true,
        ..gemma.options()
    };
    let mut text = String::new();
    let generation = gemma.generate(PROMPT, &options, |token| {
        text += token.text;
        ControlFlow::Continue(())
    });
    generation.expect("the generation succeeds");
    text
}

pub fn merged(folder: &Path, tokens: usize) -> String {
    alone(
        &gemma().merge_adapter(folder).expect("the adapter fits"),
        tokens,
    )
}

pub fn request(model: &str, tokens: usize) -> Value {
    json!({
        "model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
    })
}

/// Returns the text of the answer of `model`, and the number of reused prompt tokens.
pub async fn answer(harness: &Harness, model: &str, tokens: usize) -> (String, u64) {
    let request = request(model, tokens);
    let answer = harness.post("/v1/completions", &request).await.ok();
    assert_eq!(answer["model"], model);
    let text = answer["choices"][0]["text"].as_str().expect("a text");
    let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    (text.to_owned(), cached.as_u64().expect("a number"))
}

pub async fn load(harness: &Harness, name: &str, path: &str) -> (StatusCode, String) {
    let body = json!({"lora_name": name, "lora_path": path});
    let answer = harness.post("/v1/load_lora_adapter", &body).await;
    (answer.status, answer.text)
}

pub async fn unload(harness: &Harness, name: &str) -> (StatusCode, String) {
    let body = json!({"lora_name": name});
    let answer = harness.post("/v1/unload_lora_adapter", &body).await;
    (answer.status, answer.text)
}

/// Returns a server whose clients can load adapters from `root`.
pub fn with_root(root: &TempDir, max_adapters: usize, engines: usize) -> Harness {
    let engine = EngineOptions {
        max_adapters,
        ..EngineOptions::default()
    };
    let options = ServerOptions {
        adapter_root: Some(root.path().to_owned()),
        ..ServerOptions::default()
    };
    Harness::with_engines(engines, engine, options)
}

#[tokio::test]
async fn answers_of_a_mixed_batch_equal_those_of_merged_models() {
    let root = adapters([("one", 2, 1), ("two", 5, 2)]);
    let harness = Arc::new(Harness::plain());
    let mut expected = vec![(MODEL.to_owned(), alone(&gemma(), TOKENS))];
    for name in ["one", "two"] {
        let folder = root.path().join(name);
        let loaded = harness.server.load_adapter(name, &folder);
        loaded.expect("the adapter fits");
        expected.push((format!("{MODEL}:{name}"), merged(&folder, TOKENS)));
    }
    assert!(expected[0].1 != expected[1].1 && expected[1].1 != expected[2].1);
    let models = harness.get("/v1/models").await.ok();
    let models = models["data"].as_array().expect("a list").iter();
    let models: Vec<(&Value, &Value)> = models.map(|one| (&one["id"], &one["parent"])).collect();
    let (one, two) = (json!("tiny:one"), json!("tiny:two"));
    let base = json!(MODEL);
    assert_eq!(
        models,
        [(&base, &Value::Null), (&one, &base), (&two, &base)]
    );
    assert_eq!(harness.get("/v1/models/tiny:two").await.ok()["id"], two);
    for round in 0..2 {
        // Each model first answers without a prefix, and then with the prefix of its own earlier prompt.
        for (model, expected) in &expected {
            let (text, cached) = answer(&harness, model, TOKENS).await;
            assert_eq!(text, *expected, "{model}");
            assert_eq!(cached > 0, round > 0, "{model}");
        }
    }
    let mixed = expected.iter().cycle().take(8).cloned();
    let tasks: Vec<_> = mixed
        .enumerate()
        .map(|(index, (model, expected))| {
            let harness = harness.clone();
            tokio::spawn(async move {
                let tokens = TOKENS - index;
                let (text, _) = answer(&harness, &model, tokens).await;
                assert!(
                    !text.is_empty() && expected.starts_with(&text),
                    "{model}: {text}"
                );
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("the answer is as expected");
    }
}

#[tokio::test]
async fn unknown_adapter_is_not_found_in_the_form_of_each_api() {
    let root = adapters([("one", 2, 1)]);
    let harness = Harness::plain();
    let loaded = harness.server.load_adapter("one", root.path().join("one"));
    loaded.expect("the adapter fits");
    for model in [
        "tiny:two",
        "tiny:",
        "one",
        "tiny:one ",
        "other:one",
        "tiny:tiny:one",
    ] {
        for (path, body) in [
            ("/v1/chat/completions", json!({"messages": user("x")})),
            ("/v1/completions", json!({"prompt": "x"})),
            ("/v1/responses", json!({"input": "x"})),
            (
                "/v1/messages",
                json!({"messages": user("x"), "max_tokens": 2}),
            ),
            ("/v1/messages/count_tokens", json!({"messages": user("x")})),
        ] {
            let mut body = body;
            body["model"] = json!(model);
            let answer = harness.post(path, &body).await;
            assert_eq!(answer.status, 404, "{path} {model}: {}", answer.text);
            let answer = answer.json();
            let message = answer["error"]["message"].as_str().expect("a message");
            assert!(message.contains("tiny:one"), "{path}: {message}");
            let kind = match path.starts_with("/v1/messages") {
                true => "not_found_error",
                false => "invalid_request_error",
            };
            assert_eq!(answer["error"]["type"], kind, "{path}");
        }
    }
    assert_eq!(harness.get("/v1/models/tiny:two").await.status, 404);
    let messages = json!({"model": "tiny:one", "messages": user("x"), "max_tokens": 2});
    let answer = harness.post("/v1/messages", &messages).await.ok();
    assert_eq!(answer["model"], "tiny:one");
}

#[tokio::test]
async fn unload_lets_running_answers_finish_and_frees_the_name() {
    const LONG: usize = 200;
    let root = adapters([("one", 2, 1), ("two", 3, 2)]);
    let harness = Arc::new(with_root(&root, 1, 1));
    let [one, two] = ["one", "two"].map(|name| root.path().join(name));
    let (status, text) = load(&harness, "mine", "one").await;
    assert_eq!(status, 200, "{text}");
    assert_eq!(text, "Success: LoRA adapter 'mine' added successfully.");
    // One adapter is the limit, and the name is taken.
    let (status, text) = load(&harness, "mine", "two").await;
    assert!(status == 400 && text.contains("loaded already"), "{text}");
    let (status, text) = load(&harness, "other", "two").await;
    assert!(status == 400 && text.contains("limit of 1"), "{text}");
    let running = tokio::spawn({
        let harness = harness.clone();
        async move { answer(&harness, "tiny:mine", LONG).await.0 }
    });
    harness.wait_for("gemma4_running_answers", 1.0).await;
    let (status, text) = unload(&harness, "mine").await;
    assert_eq!(text, "Success: LoRA adapter 'mine' removed successfully.");
    assert_eq!(status, 200);
    assert_eq!(harness.metric("gemma4_running_answers").await, 1.0);
    assert_eq!(unload(&harness, "mine").await.0, 404);
    let new = request("tiny:mine", 1);
    let refused = harness.post("/v1/completions", &new).await;
    assert_eq!(refused.status, 404);
    let text = running.await.expect("the answer finishes");
    assert_eq!(text, merged(&one, LONG));
    // The engine frees the adapter just after its last answer.
    for _ in 0..2000 {
        if load(&harness, "mine", "two").await.0 == 200 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    let (text, cached) = answer(&harness, "tiny:mine", TOKENS).await;
    assert_eq!(text, merged(&two, TOKENS));
    assert_eq!(
        cached, 0,
        "keys and values of the earlier adapter are reused"
    );
}

#[tokio::test]
async fn load_of_an_adapter_that_does_not_fit_is_refused() {
    let root = adapters([("one", 2, 1)]);
    let folder = root.path().join("one");
    let harness = Harness::plain();
    for path in ["load", "unload"] {
        let path = format!("/v1/{path}_lora_adapter");
        let answer = harness.post(&path, &json!({})).await;
        assert_eq!(answer.status, 404, "{}", answer.text);
        assert!(answer.text.contains("--adapter-root"), "{}", answer.text);
    }
    let harness = with_root(&root, 8, 1);
    for (name, path, part) in [
        ("a", "../one", "outside"),
        ("a", "/etc", "outside"),
        ("a", "two", "two"),
        ("", "one", "lora_name"),
        ("a:b", "one", "lora_name"),
    ] {
        let (status, text) = load(&harness, name, path).await;
        assert_eq!(status, 400, "{text}");
        assert!(text.contains(part), "{part}: {text}");
    }
    let config = folder.join("adapter_config.json");
    let weights = folder.join("adapter_model.safetensors");
    let original = fs::read_to_string(&config).expect("the file exists");
    for (field, value) in [
        ("use_dora", json!(true)),
        ("bias", json!("all")),
        ("peft_type", json!("LOHA")),
        ("r", json!(3)),
    ] {
        let mut changed: Value = serde_json::from_str(&original).expect("JSON");
        changed[field] = value;
        fs::write(&config, changed.to_string()).expect("the file is written");
        let (status, text) = load(&harness, "a", "one").await;
        assert!(status == 400 && text.contains(field), "{field}: {text}");
    }
    fs::write(&config, original).expect("the file is written");
    let tensor = |module: &str, part: &str, shape: [usize; 2], number: f32| {
        let name = format!("base_model.model.{module}.lora_{part}.weight");
        let bytes = number.to_le_bytes().repeat(shape[0] * shape[1]);
        (name, shape.to_vec(), bytes)
    };
    let sizes = gemma();
    let sizes = sizes.config();
    let shape = (sizes.vocab_size, sizes.hidden_size);
    for (module, number, part) in [
        ("lm_head", 1.0, "lm_head"),
        ("model.embed_tokens", 1.0, "embed_tokens"),
        ("model.layers.0.no_proj", 1.0, "no_proj"),
        ("vision_tower.q_proj", 1.0, "towers"),
    ] {
        let tensors = [
            tensor(module, "A", [2, shape.1], number),
            tensor(module, "B", [shape.0, 2], number),
        ];
        write(&weights, &tensors);
        let (status, text) = load(&harness, "a", "one").await;
        assert!(status == 400 && text.contains(part), "{module}: {text}");
    }
    assert_eq!(harness.get("/v1/models").await.ok()["data"], {
        let base = harness.get("/v1/models/tiny").await.ok();
        json!([base])
    });
}
