//! Tests prompts, checkpoints and clips that are refused.

use super::{audio, conversation};
use crate::altered::{altered, with_tensor};
use crate::fixture::{Fixture, greedy};
use crate::media::{self, generated};
use burn::tensor::{DType, Device};
use burn_gemma4::{
    Adapter, AdapterTargets, Audio, CacheKind, ChatOptions, Gemma4, Image, LoadOptions, Message,
    MessagePart, Prompt,
};
use safetensors::{Dtype, SafeTensors, serialize, tensor::TensorView};
use serde_json::{Value, json};
use std::{fs, sync::Arc};

fn refused(gemma: &Gemma4, prompt: impl Into<Prompt>) -> String {
    media::refused(gemma, prompt, ChatOptions::default())
}

/// Returns a prompt with a clip and no image.
fn clip() -> Vec<Message> {
    let clip = MessagePart::Audio(audio("audio-ple", "short.wav"));
    vec![Message::user(vec![clip])]
}

#[test]
fn prompt_with_audio_for_model_without_audio_is_refused() {
    let device = Device::flex();
    let embedded = Gemma4::embedded(&device, LoadOptions::new()).expect("the model is loadable");
    let vision = Fixture::open("vision-ple").load(&device, DType::F32);
    for (gemma, reason) in [
        (embedded, "embedded"),
        (vision, "the checkpoint has no audio"),
    ] {
        let error = refused(&gemma, clip());
        assert!(
            error.contains("hears no audio") && error.contains(reason),
            "{error}"
        );
        assert!(gemma.check_audio().is_err());
        let error = gemma.audio_soft_tokens(&audio("audio-ple", "short.wav"));
        let error = error.expect_err("the model hears no audio").to_string();
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn prompt_with_other_numbers_of_placeholders_and_clips_is_refused() {
    let fixture = Fixture::open("audio-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let special = ChatOptions {
        special_tokens: true,
        ..ChatOptions::default()
    };
    let with_text = |text: &str| {
        let clip = MessagePart::Audio(audio(fixture.name, "short.wav"));
        vec![Message::user(vec![clip, text.into()])]
    };
    let error = media::refused(&gemma, with_text("an <|audio|>"), special);
    assert!(
        error.contains("2 audio placeholders, but 1 audio clips"),
        "{error}"
    );
    let error = refused(&gemma, "hear <|audio|>");
    assert!(error.contains("but 0 audio clips"), "{error}");
    let error = refused(&gemma, "see <|video|>");
    assert!(error.contains("video"), "{error}");
    // Without special tokens in messages, a placeholder in a message is plain text.
    generated(&gemma, with_text("an <|audio|>"), &greedy(&gemma, 1));
}

#[test]
fn prompt_with_clip_shorter_than_a_frame_is_refused() {
    let gemma = Fixture::open("audio-ple").load(&Device::flex(), DType::F32);
    let short = Audio::from_samples(&[0.5; 160], 16_000).expect("the samples are valid");
    let error = refused(&gemma, vec![Message::user(vec![short.into()])]);
    assert!(error.contains("at least 161"), "{error}");
}

#[test]
fn load_with_unsupported_audio_answers_text_and_refuses_audio() {
    let tower = "audio-ple";
    for (fixture, field, value, reason) in [
        (tower, "hidden_act", json!("gelu"), "hidden_act"),
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
        (
            tower,
            "attention_context_right",
            json!(1),
            "attention_context_right",
        ),
        (
            tower,
            "subsampling_conv_channels",
            json!([64, 16]),
            "feature_size",
        ),
        (tower, "conv_kernel_size", json!(7), "has the shape"),
        (
            "audio-unified",
            "audio_embed_dim",
            json!(640),
            "audio_samples_per_token",
        ),
    ] {
        let folder = tempfile::tempdir().expect("a folder is creatable");
        altered(
            fixture,
            |config| config["audio_config"][field] = value,
            folder.path(),
        );
        let options = LoadOptions::new().dtype(DType::F32);
        let gemma = Gemma4::load(folder.path(), &Device::flex(), options)
            .unwrap_or_else(|error| panic!("{fixture} {field}: {error}"));
        generated(&gemma, vec![Message::user("no audio")], &greedy(&gemma, 1));
        let error = refused(&gemma, clip());
        assert!(error.contains(reason), "{fixture} {field}: {error}");
        gemma.check_vision().expect("the vision is not changed");
        // No clip can replace the placeholder.
        let error = refused(&gemma, "hear <|audio|>");
        assert!(error.contains("placeholder of audio"), "{error}");
    }
}

#[test]
fn load_with_unsupported_feature_extractor_refuses_audio() {
    let folder = tempfile::tempdir().expect("a folder is creatable");
    altered("audio-ple", |_| (), folder.path());
    let path = folder.path().join("processor_config.json");
    for (field, value) in [
        ("sampling_rate", json!(8000)),
        ("dither", json!(0.1)),
        ("feature_size", json!(64)),
        ("frame_length", json!(400)),
    ] {
        let processor = json!({"feature_extractor": {field: value}});
        fs::write(&path, processor.to_string()).expect("the file is writable");
        let gemma = Gemma4::load(folder.path(), &Device::flex(), LoadOptions::new());
        let error = gemma.expect("the text model is loadable").check_audio();
        let error = error.expect_err("the extractor is refused").to_string();
        assert!(error.contains(field), "{error}");
    }
}

#[test]
fn load_with_crossed_bounds_refuses_audio() {
    let folder = tempfile::tempdir().expect("a folder is creatable");
    let name = "model.audio_tower.layers.0.self_attn.post.input_min";
    with_tensor("audio-ple", name, |_| 2.0, folder.path());
    let gemma = Gemma4::load(folder.path(), &Device::flex(), LoadOptions::new());
    let gemma = gemma.expect("the text model is loadable");
    let error = refused(&gemma, clip());
    assert!(
        error.contains("post.input_min") && error.contains("input_max"),
        "{error}"
    );
}

/// Audio would run through a tower that lacks the adapter's changes: `B` is missing. Images still run.
#[test]
fn audio_with_unfit_adapter_of_the_audio_is_refused() {
    let load = |device: &Device| Fixture::open("audio-ple").load(device, DType::F32);
    let written = tempfile::tempdir().expect("a folder is creatable");
    let adapter = Adapter::new(2, 4.0);
    let attached = adapter.attach(load(&Device::flex().autodiff()).model().clone());
    let attached = attached.expect("the adapter is valid");
    adapter
        .save(&attached, written.path(), "base")
        .expect("the adapter is written");
    let adapted = || {
        let gemma = load(&Device::flex()).attach_adapter(written.path());
        gemma.expect("the adapter fits")
    };
    let gemma = adapted();
    generated(&gemma, conversation("audio-ple"), &greedy(&gemma, 1));

    let path = written.path().join("adapter_model.safetensors");
    let file = fs::read(&path).expect("the file is readable");
    let tensors = SafeTensors::deserialize(&file).expect("the tensors parse");
    let numbers = [0; 4 * 8];
    let view = TensorView::new(Dtype::F32, vec![1, 8], &numbers).expect("the tensor is a matrix");
    let name = "base_model.model.model.audio_tower.layers.0.self_attn.q_proj.linear.lora_A.weight";
    let views = tensors
        .tensors()
        .into_iter()
        .chain([(name.to_owned(), view)]);
    let file = serialize(views, None).expect("the tensors are valid");
    fs::write(&path, file).expect("the file is writable");
    let gemma = adapted();
    gemma
        .check_vision()
        .expect("the adapter does not change the vision");
    let error = refused(&gemma, clip());
    assert!(
        error.contains("the adapter") && error.contains("changes the audio"),
        "{error}"
    );

    // An adapter of one request refuses audio in the prompt of this request, and images still run.
    let gemma = load(&Device::flex());
    let weights = AdapterTargets::of(gemma.model()).read(written.path());
    let loaded = weights.expect("the adapter fits").upload(gemma.model());
    let loaded = Arc::new(loaded.expect("the device works"));
    let encoder = gemma.prompt_encoder();
    let id = |name: &str| gemma.tokenizer().id(name).expect("a special token");
    let image = Image::from_rgb(48, 48, vec![90; 3 * 48 * 48]).expect("the bytes are right");
    let image = encoder.prepare(&image).expect("the model sees images");
    let clip = encoder.prepare_audio(&audio("audio-ple", "short.wav"));
    let clip = clip.expect("the model hears audio");
    for (tokens, images, clips) in [
        (vec![2, id("<|image|>")], vec![image], vec![]),
        (vec![2, id("<|audio|>")], vec![], vec![clip]),
    ] {
        let prompt = encoder.encode(tokens, &images, &clips);
        let prompt = prompt.expect("the prompt is valid");
        let prefill = gemma.prefill(prompt, CacheKind::default());
        match prefill.expect("the prompt fits").with_adapter(&loaded) {
            Ok(_) => assert!(clips.is_empty()),
            Err(error) => {
                assert!(!clips.is_empty(), "{error}");
                assert!(error.to_string().contains("changes the audio"), "{error}");
            }
        }
    }
}

/// The configuration of a checkpoint without `audio_config`, whose files have the audio's tensors.
#[test]
fn load_without_audio_config_refuses_audio() {
    let folder = tempfile::tempdir().expect("a folder is creatable");
    let null = |config: &mut Value| config["audio_config"] = Value::Null;
    altered("audio-ple", null, folder.path());
    let gemma = Gemma4::load(folder.path(), &Device::flex(), LoadOptions::new());
    let error = refused(&gemma.expect("the text model is loadable"), clip());
    assert!(error.contains("the checkpoint has no audio"), "{error}");
}
