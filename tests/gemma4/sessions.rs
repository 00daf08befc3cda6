//! Tests sessions, which keep the KV cache between prompts. A session prefills only the tokens after the common
//! beginning of the new and the old text. The generated text equals the text of a new session. Sliding layers overwrite
//! old tokens in ring buffers. To go back in its text, a session restores the ring buffers from checkpoints, which a
//! session file contains too.

use crate::devices::devices;
use crate::fixture::{Fixture, folder, greedy};
use crate::programs::folder::Folder;
use burn::tensor::{DType, Device};
use burn_gemma4::{
    Drafts, Gemma4, Gemma4Error, GenerateOptions, Generation, LoadOptions, Message, PerLayerTable,
    Prompt, Quantization, SavedSession, Session,
};
use std::{fs, ops::ControlFlow, path::Path};
use tempfile::TempDir;

/// The number of tokens between the last checkpoint of a prompt and the end of the prompt. This number is for plain
/// prompts. The checkpoints of conversations lie elsewhere.
const MARGIN: usize = 8;

fn generate(
    session: &mut Session<'_>,
    prompt: impl Into<Prompt>,
    options: &GenerateOptions,
) -> Generation {
    let generation = session.generate(prompt, options, |_| ControlFlow::Continue(()));
    generation.expect("the generation succeeds")
}

fn alone(gemma: &Gemma4, prompt: impl Into<Prompt>, options: &GenerateOptions) -> Generation {
    let generation = gemma.generate(prompt, options, |_| ControlFlow::Continue(()));
    generation.expect("the generation succeeds")
}

/// Returns `count` pseudo-random tokens that depend on `seed`.
fn text(seed: u32, count: usize) -> Vec<u32> {
    (0..count as u32)
        .map(|index| 20 + (index * 7 + seed * 31 + index * index % 11) % 290)
        .collect()
}

/// If a prompt branches off from a session's text, the session prefills the prompt from the last checkpoint before the
/// branch. The tested options need ring buffers of different sizes.
#[test]
fn session_branch_is_read_from_the_last_checkpoint() {
    for device in devices() {
        let is_flex = device.device == Device::flex();
        let names: &[&'static str] = match is_flex {
            true => &["dense-ple", "dense-keqv", "moe"],
            false => &["dense-ple"],
        };
        for name in names {
            let gemma = Fixture::open(name).load(&device.device, DType::F32);
            let plain = GenerateOptions {
                // On devices that run CubeCL kernels, each prefill chunk has one token, because these devices compile and
                // tune new kernels for every number of rows.
                prefill_chunk: (!is_flex).then_some(1),
                ..greedy(&gemma, if is_flex { 12 } else { 5 })
            };
            let compact = GenerateOptions {
                compact_keys: true,
                ..plain.clone()
            };
            let lookup = GenerateOptions {
                drafts: Drafts::Lookup,
                prefill_chunk: Some(5),
                ..plain.clone()
            };
            let kinds = match is_flex {
                true => vec![plain, compact, lookup],
                false => vec![plain],
            };
            for options in kinds {
                let what = format!("{name} {} {:?}", device.name, options.drafts);
                let mut session = gemma.session();
                let trunk = text(0, 40);
                let branch = |at: usize, seed| [&trunk[..at], &text(seed, 9)].concat();
                let expect = |session: &mut Session<'_>, prompt: Vec<u32>, read: usize| {
                    let found = generate(session, prompt.clone(), &options);
                    let expected = alone(&gemma, prompt, &options);
                    assert_eq!(found.tokens, expected.tokens, "{what}");
                    assert_eq!(found.timings.prefill_tokens, read, "{what}");
                    found
                };
                let first = expect(&mut session, trunk.clone(), 40);
                // The KV cache contains the answer except for its last token. The session therefore prefills this token
                // and the 3 new tokens.
                if is_flex {
                    let longer = [&trunk[..], &first.tokens, &text(1, 3)].concat();
                    expect(&mut session, longer, 4);
                }
                // The checkpoint of a prompt is 8 tokens before the end of the prompt. If the session reuses cached
                // tokens up to this position or beyond, the prompt adds no checkpoint.
                let at = trunk.len() - MARGIN;
                expect(&mut session, branch(36, 2), 45 - at);
                if !is_flex {
                    continue;
                }
                expect(&mut session, branch(34, 3), 43 - at);
                // If a prompt branches off before the first checkpoint, the whole prompt is prefilled.
                expect(&mut session, branch(20, 4), 29);
                // For a repeated prompt, only the tokens after the checkpoint are prefilled.
                expect(&mut session, branch(20, 4), MARGIN);
            }
        }
    }
}

/// A session can go back to any token position of its text as long as the text is shorter than the window.
#[test]
fn session_of_short_texts_needs_no_checkpoint() {
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let options = greedy(&gemma, 2);
    let mut session = gemma.session();
    generate(&mut session, text(0, 6), &options);
    let branch = [&text(0, 2)[..], &text(1, 3)].concat();
    let found = generate(&mut session, branch.clone(), &options);
    assert_eq!(found.timings.prefill_tokens, 3);
    assert_eq!(found.tokens, alone(&gemma, branch, &options).tokens);
}

/// A ring buffer is restored from a file with fewer tokens than the ring buffer has slots, with as many tokens, and
/// with more tokens.
#[test]
fn session_full_ring_buffer_is_restored_from_disk() {
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let folder = TempDir::new().expect("a temporary folder");
    let path = folder.path().join("session");
    let window = gemma.config().sliding_window;
    let plain = greedy(&gemma, 1);
    let lookup = GenerateOptions {
        drafts: Drafts::Lookup,
        ..plain.clone()
    };
    for (options, slots) in [(plain, window), (lookup, window + 8)] {
        let longer = GenerateOptions {
            max_tokens: 12,
            ..options.clone()
        };
        for count in slots - 1..=slots + 1 {
            let mut session = gemma.session();
            generate(&mut session, text(0, count), &options);
            assert_eq!(session.len(), count);
            session.save(&path, &[]).expect("the file is written");
            let saved = SavedSession::read(gemma.model(), &path).expect("the session is readable");
            let branch = [&text(0, 2)[..], &text(1, 3)].concat();
            let found = generate(&mut gemma.resume(saved), branch.clone(), &longer);
            let expected = alone(&gemma, branch, &longer);
            assert_eq!(found.tokens, expected.tokens, "{count} of {slots}");
        }
    }
}

/// A session with a window of one token continues from its file. Each ring buffer has one slot, which the decode kernels
/// overwrite in place.
#[test]
fn session_window_of_one_column_is_restored_from_disk() {
    let copy = Folder::copy("dense-ple");
    copy.set("config.json", "sliding_window", 1);
    let path = copy.file("session");
    for device in devices() {
        let options = LoadOptions::new().dtype(DType::F32);
        let gemma = Gemma4::load(copy.path(), &device.device, options).expect("the model is valid");
        let mut session = gemma.session();
        let first = generate(&mut session, text(0, 9), &greedy(&gemma, 2));
        session.save(&path, &[]).expect("the file is written");
        let saved = SavedSession::read(gemma.model(), &path).expect("the session is readable");
        let mut cache = saved.into_cache();
        let mut decoder = gemma.model().decoder(&mut cache);
        let mut tokens = first.tokens;
        for _ in 0..4 {
            let next = decoder
                .step(&tokens[tokens.len() - 1..])
                .expect("the step succeeds");
            tokens.push(next.argmax().expect("there is a token")[0]);
        }
        let expected = alone(&gemma, text(0, 9), &greedy(&gemma, 6));
        assert_eq!(tokens, expected.tokens, "{}", device.name);
    }
}

/// The chat templates of the test. The first template only appends turns. The second template begins an answer with an
/// empty thought, and omits this thought from earlier answers. The third template formats the last question differently
/// from earlier questions.
const TEMPLATES: [&str; 3] = [
    // The empty string stands for the template of the checkpoint.
    "",
    "{{ bos_token }}{% for message in messages %}<|turn>{{ message.role }}\n{{ message.content }}<turn|>\n{% endfor %}\
     {% if add_generation_prompt %}<|turn>model\n<|channel>thought\n<channel|>{% endif %}",
    "{{ bos_token }}{% for message in messages %}<|turn>{{ message.role }}{% if loop.last %}!{% endif %}\n{{ message.content }}<turn|>\n{% endfor %}\
     {% if add_generation_prompt %}<|turn>model\n{% endif %}",
];

#[test]
fn session_turns_read_only_new_tokens_with_every_template() {
    for (index, template) in TEMPLATES.into_iter().enumerate() {
        let copy = TempDir::new().expect("a temporary folder");
        for file in [
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ] {
            fs::copy(folder("dense-ple").join(file), copy.path().join(file))
                .expect("the file is written");
        }
        if !template.is_empty() {
            fs::write(copy.path().join("chat_template.jinja"), template)
                .expect("the file is written");
        }
        let gemma = Gemma4::load(copy.path(), &Device::flex(), LoadOptions::new());
        let gemma = gemma.expect("the model is valid");
        for thinking in [false, true] {
            let mut options = greedy(&gemma, 10);
            options.chat.enable_thinking = thinking;
            let mut session = gemma.session();
            let mut messages = vec![Message::system("Be brief, and say what the cat says.")];
            for turn in 0..4 {
                messages.push(Message::user(format!("the cat {turn} and the other cat")));
                let prompt = gemma.tokens(&messages.clone().into(), options.chat);
                let prompt = prompt.expect("the prompt is valid");
                let found = generate(&mut session, messages.clone(), &options);
                let expected = alone(&gemma, messages.clone(), &options);
                assert_eq!(found.tokens, expected.tokens, "{index} turn {turn}");
                // The next prompt contains the text `answer` instead of the generated answer. The tokens of `answer` differ
                // from the generated tokens in the session's cache.
                let answer = "what the cat says";
                let read = found.timings.prefill_tokens;
                // The third template changes the text of a question as soon as another question follows. The session
                // then goes back to an earlier checkpoint. In the first two turns, there may be no such checkpoint.
                let rewrites = index == 2;
                let turns = if rewrites { 5 } else { 3 };
                if turn == 0 || (rewrites && turn == 1) {
                    assert!(read <= prompt.len());
                } else {
                    let last = messages[messages.len() - turns..].to_vec();
                    let of_turns = gemma
                        .tokens(&last.into(), options.chat)
                        .expect("the turns have tokens");
                    let most = of_turns.len() + MARGIN;
                    assert!(
                        read <= most && read < prompt.len(),
                        "{index} turn {turn}: {read}"
                    );
                }
                messages.push(Message::assistant(answer));
            }
        }
    }
}

fn refused(gemma: &Gemma4, path: &Path) -> Gemma4Error {
    SavedSession::read(gemma.model(), path).expect_err("the session does not fit")
}

#[test]
fn session_is_continued_from_its_file() {
    for device in devices() {
        let gemma = Fixture::open("dense-ple").load(&device.device, DType::F32);
        let is_flex = device.device == Device::flex();
        let options = LoadOptions::new().dtype(DType::F32);
        let words = Gemma4::load(folder("gguf/dense-ple.Q8_0.gguf"), &device.device, options);
        let words = words.expect("the model is valid");
        let compact = Fixture::open("dense-keqv").load(&Device::flex(), DType::F32);
        let kept = TempDir::new().expect("a temporary folder");
        let path = kept.path().join("session.safetensors");
        for (gemma, drafts) in [
            (&gemma, Drafts::None),
            (&gemma, Drafts::Lookup),
            (&compact, Drafts::None),
            (&words, Drafts::None),
        ] {
            if !is_flex && (drafts != Drafts::None || !std::ptr::eq(gemma, &words)) {
                continue;
            }
            let options = GenerateOptions {
                compact_keys: true,
                drafts,
                ..greedy(gemma, 6)
            };
            let messages = vec![Message::user("the <turn|> cat")];
            let mut session = gemma.session();
            let trunk = text(0, 30);
            let first = generate(&mut session, trunk.clone(), &options);
            session.save(&path, &messages).expect("the save succeeds");
            // The restored session continues like the original session, both from the end of its text and from its checkpoint.
            for prompt in [
                [&trunk[..], &first.tokens, &text(1, 3)].concat(),
                [&trunk[..25], &text(2, 5)].concat(),
            ] {
                let saved =
                    SavedSession::read(gemma.model(), &path).expect("the session is readable");
                assert_eq!(saved.messages, messages);
                assert_eq!(saved.tokens().len(), session.len());
                let mut again = gemma.resume(saved);
                let found = generate(&mut again, prompt.clone(), &options);
                assert_eq!(found.tokens, alone(gemma, prompt.clone(), &options).tokens);
                assert!(found.timings.prefill_tokens < 10, "{:?}", found.timings);
            }
        }
        // A session that has not generated anything can be saved and restored, too. It has no token in its cache.
        let session = gemma.session();
        session.save(&path, &[]).expect("the save succeeds");
        let saved = SavedSession::read(gemma.model(), &path).expect("the session is readable");
        assert!(saved.tokens().is_empty());
        let options = greedy(&gemma, 3);
        let found = generate(&mut gemma.resume(saved), text(0, 5), &options);
        assert_eq!(found.tokens, alone(&gemma, text(0, 5), &options).tokens);
    }
}

/// A session file matches the model that wrote the file, whatever numbers the model's configuration contains. This test
/// uses a number that a JSON parser may round to a neighboring floating-point number.
#[test]
fn session_file_matches_its_model_with_any_config_number() {
    let config = fs::read(folder("dense-ple").join("config.json")).expect("the file is readable");
    let mut config: serde_json::Value = serde_json::from_slice(&config).expect("the text is JSON");
    config["rms_norm_eps"] = serde_json::json!(1.1867152238664858e-07);
    let copy = TempDir::new().expect("a temporary folder");
    for file in [
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        fs::copy(folder("dense-ple").join(file), copy.path().join(file))
            .expect("the file is written");
    }
    fs::write(copy.path().join("config.json"), config.to_string()).expect("the file is written");
    let gemma = Gemma4::load(copy.path(), &Device::flex(), LoadOptions::new());
    let gemma = gemma.expect("the model is valid");
    let path = copy.path().join("session");
    let mut session = gemma.session();
    generate(&mut session, text(0, 20), &greedy(&gemma, 2));
    session.save(&path, &[]).expect("the save succeeds");
    SavedSession::read(gemma.model(), &path).expect("the model is the same");
}

#[test]
fn session_of_another_model_is_refused() {
    let device = Device::flex();
    let load = |name: &str, options: LoadOptions<'_>| {
        Gemma4::load(folder(name), &device, options).expect("the model is valid")
    };
    let gemma = load("dense-ple", LoadOptions::new());
    let kept = TempDir::new().expect("a temporary folder");
    let path = kept.path().join("session");
    let mut session = gemma.session();
    generate(&mut session, text(0, 20), &greedy(&gemma, 2));
    session.save(&path, &[]).expect("the save succeeds");

    // A model with its table of per-layer embeddings on the host counts as the same model.
    let on_host = LoadOptions::new().per_layer_table(PerLayerTable::Host);
    SavedSession::read(load("dense-ple", on_host).model(), &path).expect("the model is the same");

    let other = refused(&load("dense-keqv", LoadOptions::new()), &path);
    assert!(matches!(other, Gemma4Error::Unsupported { .. }), "{other}");
    assert!(other.to_string().contains("another model"), "{other}");
    let half = load("dense-ple", LoadOptions::new().dtype(DType::BF16));
    let other = refused(&half, &path).to_string();
    assert!(other.contains("another model"), "{other}");
    for word in ["dtype", "f32", "bf16"] {
        assert!(other.contains(word), "{other}");
    }
    let eight = load(
        "dense-ple",
        LoadOptions::new().quantization(Quantization::Q8),
    );
    let other = refused(&eight, &path).to_string();
    for word in ["whole", "quantized to 8 bits"] {
        assert!(other.contains(word), "{other}");
    }
    // The changed checkpoint differs in one weight, either in a layer or in the per-layer table.
    for name in [
        "model.layers.1.mlp.up_proj.weight",
        "model.embed_tokens_per_layer.weight",
    ] {
        let copy = TempDir::new().expect("a temporary folder");
        for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
            fs::copy(folder("dense-ple").join(file), copy.path().join(file))
                .expect("the file is written");
        }
        let bytes =
            fs::read(folder("dense-ple").join("model.safetensors")).expect("the file is readable");
        let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("the tensors parse");
        let view = tensors.tensor(name).expect("the tensor is valid");
        let doubled: Vec<u8> = view
            .data()
            .as_chunks::<4>()
            .0
            .iter()
            .flat_map(|bytes| (2.0 * f32::from_le_bytes(*bytes)).to_le_bytes())
            .collect();
        let changed =
            safetensors::tensor::TensorView::new(view.dtype(), view.shape().into(), &doubled);
        let others = tensors.iter().filter(|(other, _)| *other != name);
        let all = others.chain([(name, changed.expect("the tensor is valid"))]);
        let written = copy.path().join("model.safetensors");
        safetensors::serialize_to_file(all, None, &written).expect("the file is written");
        let changed =
            Gemma4::load(copy.path(), &device, LoadOptions::new()).expect("the model is valid");
        let error = refused(&changed, &path).to_string();
        let path = name
            .trim_start_matches("model.")
            .trim_end_matches(".weight");
        assert!(
            error.contains(path) && error.contains("other weights"),
            "{error}"
        );
    }

    // Truncated session files and files of another kind are refused.
    let whole = fs::read(&path).expect("the file is readable");
    for end in [0, 3, 8, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..end]).expect("the file is written");
        let error = refused(&gemma, &path);
        assert!(
            matches!(error, Gemma4Error::Malformed { .. }),
            "{end}: {error}"
        );
    }
    let error = refused(&gemma, &folder("dense-ple").join("model.safetensors"));
    assert!(error.to_string().contains("no session"), "{error}");
    let error = refused(&gemma, &kept.path().join("none"));
    assert!(matches!(error, Gemma4Error::Io { .. }), "{error}");
}
