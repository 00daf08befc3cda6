//! Tests that folders without a drafter, drafters for other models, and wrong calls give errors. Each error names the problem.

use super::{PAIRS, load};
use crate::fixture::{Fixture, folder, tokens};
use crate::programs::folder::Folder;
use burn::tensor::{DType, Device, Tensor};
use burn_gemma4::{Drafter, DrafterConfig, Gemma4Config, Gemma4Error, LoadOptions, Logits};
use safetensors::tensor::Dtype;
use serde_json::json;

/// Changes a drafter's folder by calling `spoil`, and asserts that loading the drafter fails. The error must contain each
/// string in `words`.
#[track_caller]
fn refused(spoil: impl FnOnce(&Folder), words: &[&str]) {
    let folder = Folder::drafter("assistant-ple");
    spoil(&folder);
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let error = gemma
        .with_drafter(folder.path())
        .expect_err("the input is refused")
        .to_string();
    for word in words {
        assert!(error.contains(word), "{word:?} is missing from: {error}");
    }
}

/// Returns a function that sets a field of `text_config` in a drafter's folder. `text_config` is the configuration of the
/// drafter's layers.
fn text(field: &'static str, value: serde_json::Value) -> impl FnOnce(&Folder) {
    move |folder| {
        let path = folder.file("config.json");
        let config = std::fs::read_to_string(path).expect("the file is readable");
        let mut config: serde_json::Value =
            serde_json::from_str(&config).expect("the text is JSON");
        config["text_config"][field] = value;
        folder.write("config.json", config.to_string());
    }
}

fn top(field: &'static str, value: serde_json::Value) -> impl FnOnce(&Folder) {
    move |folder| folder.set("config.json", field, value)
}

#[test]
fn drafter_for_another_model_is_refused() {
    for (field, value) in [
        ("vocab_size", json!(640)),
        ("head_dim", json!(16)),
        ("global_head_dim", json!(32)),
        ("num_key_value_heads", json!(2)),
        ("sliding_window", json!(16)),
    ] {
        refused(
            text(field, value),
            &["drafter: is not for this model", field],
        );
    }
    refused(
        top("backbone_hidden_size", json!(32)),
        &["backbone_hidden_size is 32 rather than 64"],
    );
    let gemma = Fixture::open("dense-keqv").load(&Device::flex(), DType::F32);
    let error = gemma
        .with_drafter(folder("assistant-ple"))
        .expect_err("the drafter is for another model");
    assert!(
        error
            .to_string()
            .contains("num_key_value_heads is 1 rather than 2"),
        "{error}"
    );
}

#[test]
fn drafter_with_unsupported_configuration_is_refused() {
    refused(
        text("num_kv_shared_layers", json!(2)),
        &["config.json", "num_kv_shared_layers"],
    );
    refused(
        text("hidden_size_per_layer_input", json!(16)),
        &["hidden_size_per_layer_input"],
    );
    refused(
        text("use_double_wide_mlp", json!(true)),
        &["use_double_wide_mlp"],
    );
    refused(top("num_centroids", json!(7)), &["num_centroids 7"]);
    refused(
        top("centroid_intermediate_top_k", json!(17)),
        &["centroid_intermediate_top_k 17"],
    );
    refused(
        top("model_type", json!("gemma4")),
        &["model_type is \"gemma4\"", "no drafter's"],
    );
    refused(
        |folder| {
            text("tie_word_embeddings", json!(null))(folder);
            top("tie_word_embeddings", json!(false))(folder);
        },
        &["tie_word_embeddings is false"],
    );
    refused(
        |folder| folder.remove("model.safetensors"),
        &["model.safetensors"],
    );
    refused(|folder| folder.remove("config.json"), &["config.json"]);
    let gguf = folder("gguf").join("dense-ple.Q8_0.gguf");
    let error = Drafter::load(&gguf, &Device::flex(), LoadOptions::new())
        .expect_err("a drafter is not a single file");
    assert!(
        error.to_string().contains("Q8_0.gguf: is a file"),
        "{error}"
    );
    refused(|folder| folder.write("config.json", "{"), &["config.json"]);
    // The weights in the folder include centroids of token groups, but a head without token groups must not have centroids.
    refused(
        top("use_ordered_embeddings", json!(false)),
        &["masked_embedding.centroids.weight is not part of the model"],
    );
    refused(
        top("num_centroids", json!(32)),
        &["masked_embedding.centroids.weight has the shape [16, 32]"],
    );
    let config = DrafterConfig::from_file(folder("assistant-keqv").join("config.json"));
    assert_eq!(
        config.expect("the drafter is valid").ordered_embeddings,
        None
    );
    // The configuration file from the Hugging Face Hub and the file that Hugging Face Transformers 5 writes give the
    // same configuration.
    for (name, _) in PAIRS {
        let [hub, saved] = ["config.json", "config.transformers5.json"]
            .map(|file| DrafterConfig::from_file(folder(name).join(file)).expect("is valid"));
        assert_eq!(hub, saved);
    }
    assert!(Gemma4Config::from_file(folder("assistant-ple").join("config.json")).is_err());
}

#[test]
fn drafter_token_ordering_with_duplicates_is_refused() {
    const ORDERING: &str = "masked_embedding.token_ordering";
    let second = |number: i64| {
        move |folder: &Folder| {
            folder.edit(|tensors| {
                let ordering = tensors
                    .get_mut(ORDERING)
                    .expect("the drafter has this tensor");
                let first = ordering.bytes[..8].to_vec();
                ordering.bytes[8..16].copy_from_slice(&match number {
                    0 => first,
                    _ => number.to_le_bytes().to_vec(),
                });
            });
        }
    };
    refused(second(0), &[ORDERING, "twice"]);
    refused(second(-1), &[ORDERING, "the token -1"]);
    refused(second(320), &[ORDERING, "the token 320"]);
    let missing = |folder: &Folder| {
        folder.edit(|tensors| drop(tensors.remove(ORDERING)));
    };
    refused(missing, &[ORDERING, "missing"]);
    let short = |folder: &Folder| {
        folder.edit(|tensors| {
            let ordering = tensors
                .get_mut(ORDERING)
                .expect("the drafter has this tensor");
            ordering.bytes.truncate(8 * 319);
            ordering.shape = vec![319];
        });
    };
    refused(short, &[ORDERING, "[319]"]);
    let floats = |folder: &Folder| {
        folder.edit(|tensors| tensors.get_mut(ORDERING).expect("tensor exists").dtype = Dtype::F64);
    };
    refused(floats, &[ORDERING, "F64"]);
}

#[test]
fn drafter_wrong_arguments_are_refused() {
    let device = Device::flex();
    let gemma = load("assistant-ple", "dense-ple", &device);
    let (model, drafter) = (
        gemma.model(),
        gemma.drafter().expect("the drafter is loaded"),
    );
    let mut cache = model.cache(vec![0]);
    let hidden = || Tensor::<2>::zeros([1, 64], &device);
    let words = |error: Result<_, Gemma4Error>| match error {
        Err(error @ Gemma4Error::Argument { .. }) => error.to_string(),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("the call should be refused"),
    };
    let empty = drafter.draft(model, &cache, 5, hidden(), 1).map(drop);
    assert!(words(empty).starts_with("cache: has 0 columns"));
    let row = tokens(&[&[2, 50]], &device);
    model
        .step(row, &mut cache, Logits::None)
        .expect("the step succeeds");
    let mut padded = model.cache(vec![1]);
    let row = tokens(&[&[0, 50]], &device);
    model
        .step(row, &mut padded, Logits::None)
        .expect("the step succeeds");
    let wrong = drafter.draft(model, &padded, 5, hidden(), 1).map(drop);
    assert!(words(wrong).starts_with("cache: begins with padding"));
    let draft = |token, hidden, count| drafter.draft(model, &cache, token, hidden, count).map(drop);
    assert!(words(draft(320, hidden(), 1)).starts_with("tokens: has the token 320"));
    assert!(words(draft(5, hidden(), 0)).starts_with("count: is 0"));
    let narrow = Tensor::<2>::zeros([1, 32], &device);
    assert!(words(draft(5, narrow, 1)).starts_with("hidden: has the shape [1, 32]"));
    assert!(draft(5, hidden(), 3).is_ok());
    let other = Fixture::open("dense-keqv").load(&device, DType::F32);
    let wrong = drafter
        .draft(other.model(), &cache, 5, hidden(), 1)
        .map(drop);
    assert!(words(wrong).contains("is not for this model"));
    let options = LoadOptions::new().dtype(DType::F16);
    let half =
        Drafter::load(folder("assistant-ple"), &device, options).expect("the drafter is valid");
    let wrong = half.draft(model, &cache, 5, hidden(), 1).map(drop);
    assert!(words(wrong).starts_with("drafter: is in f16"));
    let mut decoder = model.decoder(&mut cache);
    let wrong = decoder.guess(5, hidden(), 1).map(drop);
    assert!(words(wrong).starts_with("drafter: is missing"));
    assert!(words(decoder.read(&[]).map(drop)).starts_with("tokens: are none"));
    assert!(words(decoder.read(&[5, 320]).map(drop)).contains("the token 320"));
    assert!(words(decoder.with_drafter(&half).map(drop)).starts_with("drafter: is in f16"));
    let mut two = model.cache(vec![0, 0]);
    model
        .step(tokens(&[&[2], &[2]], &device), &mut two, Logits::None)
        .expect("the step succeeds");
    let mut decoder = model
        .decoder(&mut two)
        .with_drafter(drafter)
        .expect("the drafter fits the model");
    assert!(words(decoder.read(&[5, 6]).map(drop)).contains("the cache has 2"));
    assert!(
        words(decoder.guess(5, hidden(), 1).map(drop)).starts_with("cache: has 1 columns of 2")
    );
}
