//! Tests prompts, checkpoints and images that are refused, and numbers at the limits of a dtype.

use super::{conversation, image};
use crate::altered::{altered, with_tensor};
use crate::fixture::{Fixture, greedy};
use crate::media::{generated, refused};
use burn::tensor::{DType, Device};
use burn_gemma4::{
    Adapter, AdapterTargets, CacheKind, ChatOptions, Gemma4, Image, LoadOptions, Logits, Message,
    MessagePart,
};
use safetensors::{Dtype, SafeTensors, serialize, tensor::TensorView};
use serde_json::{Value, json};
use std::{fs, sync::Arc};

#[test]
fn prompt_with_image_for_model_without_vision_is_refused() {
    let device = Device::flex();
    let embedded = Gemma4::embedded(&device, LoadOptions::new()).expect("the model is loadable");
    let text = Fixture::open("dense-ple-mm-bf16").load(&device, DType::F32);
    for (gemma, reason) in [(embedded, "embedded"), (text, "no vision")] {
        let error = refused(&gemma, conversation("vision-ple"), ChatOptions::default());
        assert!(error.contains(reason), "{error}");
        let error = gemma
            .check_vision()
            .expect_err("the model sees no images")
            .to_string();
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn prompt_with_placeholders_but_no_images_is_refused() {
    let fixture = Fixture::open("vision-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let special = ChatOptions {
        special_tokens: true,
        ..ChatOptions::default()
    };
    let with_text = |text: &str| {
        let image = MessagePart::Image(image(fixture.name, "wide.png"));
        vec![Message::user(vec![image, text.into()])]
    };
    let error = refused(&gemma, with_text("a <|image|>"), special);
    assert!(
        error.contains("2 image placeholders, but 1 images"),
        "{error}"
    );
    let error = refused(&gemma, fixture.prompt.clone(), ChatOptions::default());
    assert!(error.contains("but 0 images"), "{error}");
    // Without special tokens in messages, a placeholder in a message is plain text.
    let options = greedy(&gemma, 1);
    generated(&gemma, with_text("a <|image|>"), &options);
}

#[test]
fn load_with_unsupported_vision_answers_text_and_refuses_images() {
    let tower = "vision-ple";
    for (fixture, field, value, reason) in [
        (
            tower,
            "hidden_activation",
            json!("silu"),
            "hidden_activation",
        ),
        (tower, "hidden_size", json!(32), "has the shape"),
        (tower, "num_hidden_layers", json!(3), "layers.2"),
        (
            tower,
            "num_hidden_layers",
            json!(1),
            "not part of the model",
        ),
        (
            tower,
            "use_clipped_linears",
            json!(false),
            "not part of the model",
        ),
        (tower, "standardize", json!(true), "std_bias is missing"),
        (tower, "patch_size", json!(8), "patch_size"),
        (tower, "head_dim", json!(66), "head_dim"),
        (
            "vision-keqv",
            "use_clipped_linears",
            json!(true),
            "input_min is missing",
        ),
        (
            "vision-unified",
            "mm_embed_dim",
            json!(48),
            "output_proj_dims",
        ),
    ] {
        let folder = tempfile::tempdir().expect("a folder is creatable");
        altered(
            fixture,
            |config| config["vision_config"][field] = value,
            folder.path(),
        );
        let options = LoadOptions::new().dtype(DType::F32);
        let gemma = Gemma4::load(folder.path(), &Device::flex(), options)
            .unwrap_or_else(|error| panic!("{fixture} {field}: {error}"));
        generated(&gemma, vec![Message::user("no image")], &greedy(&gemma, 1));
        let error = refused(&gemma, conversation(fixture), ChatOptions::default());
        assert!(error.contains(reason), "{fixture} {field}: {error}");
    }
}

#[test]
fn image_with_more_rows_than_positions_is_refused() {
    let gemma = Fixture::open("vision-ple").load(&Device::flex(), DType::F32);
    let pixels =
        Image::from_rgb(4000, 10, vec![9; 4000 * 10 * 3]).expect("the number of bytes is right");
    let error = gemma
        .soft_tokens(&pixels)
        .expect_err("the tower has 128 positions for patches")
        .to_string();
    assert!(error.contains("42 positions"), "{error}");
}

#[test]
fn prompt_with_placeholder_of_audio_or_video_for_model_without_audio_is_refused() {
    for fixture in ["vision-ple", "vision-unified"] {
        let gemma = Fixture::open(fixture).load(&Device::flex(), DType::F32);
        for medium in ["audio", "video"] {
            let prompt = format!("see <|{medium}|>");
            let error = refused(&gemma, prompt, ChatOptions::default());
            assert!(error.contains(medium), "{error}");
        }
    }
}

/// The vision of this checkpoint is not supported, so no image can replace the placeholder.
#[test]
fn prompt_with_placeholder_for_unsupported_vision_is_refused() {
    let folder = tempfile::tempdir().expect("a folder is creatable");
    let silu = |config: &mut Value| config["vision_config"]["hidden_activation"] = json!("silu");
    altered("vision-ple", silu, folder.path());
    let gemma = Gemma4::load(folder.path(), &Device::flex(), LoadOptions::new());
    let gemma = gemma.expect("the text model is loadable");
    let error = refused(&gemma, "see <|image|>", ChatOptions::default());
    assert!(error.contains("placeholder of image"), "{error}");
}

#[test]
fn logits_of_wrong_prompt_are_refused() {
    let gemma = Fixture::open("vision-ple").load(&Device::flex(), DType::F32);
    let vocab_size = gemma.config().vocab_size as u32;
    let positions = gemma.config().max_position_embeddings;
    for (tokens, words) in [
        (vec![], "no tokens"),
        (vec![1, vocab_size], "vocabulary"),
        (vec![1; positions + 1], "positions"),
    ] {
        let logits = gemma.logits(tokens, ChatOptions::default(), Logits::Last(1));
        let error = logits.expect_err("the prompt is refused").to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// Images would run through a vision that lacks the adapter's changes: `B` is missing. An adapter of a request does not
/// change the vision.
#[test]
fn image_with_unfit_adapter_of_the_vision_is_refused() {
    let load = |device: &Device| Fixture::open("vision-ple").load(device, DType::F32);
    let written = tempfile::tempdir().expect("a folder is creatable");
    let adapter = Adapter::new(2, 4.0);
    let attached = adapter.attach(load(&Device::flex().autodiff()).model().clone());
    let attached = attached.expect("the adapter is valid");
    adapter
        .save(&attached, written.path(), "base")
        .expect("the adapter is written");
    let adapted = |vision: bool| {
        let gemma = load(&Device::flex()).attach_adapter(written.path());
        let gemma = gemma.expect("the adapter fits");
        assert_eq!(gemma.check_vision().is_err(), vision);
        gemma
    };
    generated(
        &adapted(false),
        conversation("vision-ple"),
        &greedy(&load(&Device::flex()), 1),
    );

    let path = written.path().join("adapter_model.safetensors");
    let file = fs::read(&path).expect("the file is readable");
    let tensors = SafeTensors::deserialize(&file).expect("the tensors parse");
    let numbers = [0; 4 * 8];
    let view = TensorView::new(Dtype::F32, vec![1, 8], &numbers).expect("the tensor is a matrix");
    let name = "base_model.model.model.embed_vision.embedding_projection.lora_A.weight";
    let views = tensors
        .tensors()
        .into_iter()
        .chain([(name.to_owned(), view)]);
    let file = serialize(views, None).expect("the tensors are valid");
    fs::write(&path, file).expect("the file is writable");
    let gemma = adapted(true);
    assert!(
        gemma
            .warnings()
            .any(|warning| warning.contains("images are refused"))
    );
    let error = refused(&gemma, conversation("vision-ple"), ChatOptions::default());
    assert!(
        error.contains("the adapter") && error.contains("changes the vision"),
        "{error}"
    );

    // An adapter of one request refuses images in the prompt of this request.
    let gemma = load(&Device::flex());
    let weights = AdapterTargets::of(gemma.model()).read(written.path());
    let loaded = weights.expect("the adapter fits").upload(gemma.model());
    let loaded = Arc::new(loaded.expect("the device works"));
    let image = image("vision-ple", "wide.png");
    let encoder = gemma.prompt_encoder();
    let image = encoder.prepare(&image).expect("the model sees images");
    let placeholder = gemma.tokenizer().id("<|image|>").expect("a special token");
    for (tokens, images) in [(vec![2, 40], vec![]), (vec![2, placeholder], vec![image])] {
        let prompt = encoder
            .encode(tokens, &images, &[])
            .expect("the prompt is valid");
        let prefill = gemma
            .prefill(prompt, CacheKind::default())
            .expect("the prompt fits");
        match prefill.with_adapter(&loaded) {
            Ok(_) => assert!(images.is_empty()),
            Err(error) => {
                assert!(!images.is_empty(), "{error}");
                assert!(error.to_string().contains("changes the vision"), "{error}");
            }
        }
    }
}

#[test]
fn prefill_of_image_of_another_encoder_is_refused() {
    let load = |name| Fixture::open(name).load(&Device::flex(), DType::F32);
    // The patches of the two models have 16 and 4 pixels.
    let (own, other) = (load("vision-ple"), load("vision-unified"));
    for (gemma, of_image) in [(&own, &other), (&other, &own)] {
        let encoder = of_image.prompt_encoder();
        let image = encoder.prepare(&image("vision-ple", "wide.png"));
        let image = image.expect("the model sees images");
        let placeholder = gemma.tokenizer().id("<|image|>").expect("a special token");
        let prompt = encoder.encode(vec![2, placeholder], &[image], &[]);
        let prefill = gemma.prefill(prompt.expect("one placeholder"), CacheKind::default());
        let mut prefill = prefill.expect("the prompt fits");
        let error = prefill
            .advance(1000)
            .expect_err("other patches")
            .to_string();
        assert!(error.contains("encoder of this checkpoint"), "{error}");
    }
}

#[test]
fn prefill_of_placeholder_without_image_is_refused() {
    let gemma = Fixture::open("vision-ple").load(&Device::flex(), DType::F32);
    for name in ["<|image|>", "<|audio|>"] {
        let placeholder = gemma.tokenizer().id(name).expect("a special token");
        let prefill = gemma.prefill(vec![2, placeholder, 7], CacheKind::default());
        let error = prefill.expect_err("there is no medium").to_string();
        assert!(error.contains("a placeholder of"), "{error}");
    }
}

#[test]
fn load_with_crossed_bounds_answers_text_and_refuses_images() {
    let folder = tempfile::tempdir().expect("a folder is creatable");
    let name = "model.vision_tower.encoder.layers.0.mlp.up_proj.input_min";
    with_tensor("vision-ple", name, |_| 2.0, folder.path());
    let gemma = Gemma4::load(folder.path(), &Device::flex(), LoadOptions::new());
    let gemma = gemma.expect("the text model is loadable");
    generated(&gemma, vec![Message::user("no image")], &greedy(&gemma, 1));
    let error = refused(&gemma, conversation("vision-ple"), ChatOptions::default());
    assert!(
        error.contains("up_proj.input_min") && error.contains("input_max"),
        "{error}"
    );
}

/// The averages of the tower's rows exceed the range of f16 once they are scaled.
#[test]
fn soft_tokens_of_large_rows_in_f16_are_finite() {
    let folder = tempfile::tempdir().expect("a folder is creatable");
    let name = "model.vision_tower.patch_embedder.position_embedding_table";
    with_tensor(
        "vision-ple",
        name,
        |number| number * 16_384.0,
        folder.path(),
    );
    let soft_tokens = |dtype: DType| {
        let options = LoadOptions::new().dtype(dtype);
        let gemma = Gemma4::load(folder.path(), &Device::flex(), options);
        let gemma = gemma.expect("the checkpoint is loadable");
        let tokens = gemma.soft_tokens(&image("vision-ple", "wide.png"));
        let tokens = tokens.expect("the model sees images").cast(DType::F32);
        let tokens = tokens.into_data();
        tokens.iter::<f32>().collect::<Vec<f32>>()
    };
    let (half, single) = (soft_tokens(DType::F16), soft_tokens(DType::F32));
    let largest = single.iter().fold(0.0f32, |most, one| most.max(one.abs()));
    let differences = half
        .iter()
        .zip(&single)
        .map(|(one, other)| (one - other).abs());
    let error = differences.fold(0.0f32, |most, one| match one.is_nan() {
        true => f32::NAN,
        false => most.max(one),
    });
    assert!(error <= 0.025 * largest, "{error} of {largest}");
}

#[test]
fn load_with_normalizing_image_processor_refuses_images() {
    let folder = tempfile::tempdir().expect("a folder is creatable");
    altered("vision-ple", |_| (), folder.path());
    let path = folder.path().join("processor_config.json");
    for (field, value) in [
        ("do_normalize", json!(true)),
        ("do_resize", json!(false)),
        ("resample", json!(2)),
        ("rescale_factor", json!(0.5)),
        ("max_soft_tokens", json!(71)),
        ("patch_size", json!(14)),
    ] {
        let processor = json!({"image_processor": {field: value}});
        fs::write(&path, processor.to_string()).expect("the file is writable");
        let gemma = Gemma4::load(folder.path(), &Device::flex(), LoadOptions::new());
        let error = gemma.expect("the text model is loadable").check_vision();
        let error = error.expect_err("the processor is refused").to_string();
        assert!(error.contains(field), "{error}");
    }
}
