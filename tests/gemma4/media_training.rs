//! Tests training on conversations with images and audio. Tokens, losses and gradients equal those of Hugging Face
//! Transformers (`make_media_gradients.py`).

use crate::fixture::{Fixture, Reference, folder, values};
use crate::gradients::relative;
use crate::programs::refused::check;
use crate::programs::report;
use crate::programs::training::validation;
use attention_workspace::testing::program::{gemma4, run, succeed};
use burn::data::dataloader::DataLoader;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_gemma4::{
    Adapter, Gemma4, GradientRecorder, LoadOptions, MediaTowers, TowerTargets, TrainBatch,
};
use gemma4_train::{
    checkpoint::stop::Stop,
    data::{
        documents::{Document, read_documents},
        loader::{Batch, Data, ValidationLoader},
        packing::{Example, Row, pack},
    },
    evaluation::{Windows, evaluate},
};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;

/// The fixtures: models like E2B, 31B and 12B with images, and like E2B and 12B with audio.
const ALL: [&str; 5] = [
    "vision-ple",
    "vision-keqv",
    "vision-unified",
    "audio-ple",
    "audio-unified",
];

/// The maximum difference from a gradient of Hugging Face Transformers, relative to the gradient's norm.
const TOLERANCE: f64 = 1e-3;

/// Gradients by the paths of their parameters.
type Gradients = BTreeMap<String, Vec<f32>>;

/// A fixture with its conversation, on a device with autodiff.
struct Lesson {
    gemma: Gemma4,
    documents: Vec<Document>,
    expected: HashMap<String, Reference>,
}

impl Lesson {
    fn open(name: &'static str) -> Self {
        let fixture = Fixture::open(name);
        let gemma = fixture.load(&Device::flex().autodiff(), DType::F32);
        let documents = read_documents(&folder(name).join("train.jsonl"), &gemma);
        Self {
            documents: documents.expect("the conversation is valid"),
            gemma,
            expected: fixture.gradients().expect("the fixture has gradients"),
        }
    }

    fn example(&self) -> &Example {
        &self.documents[0].examples[0]
    }

    /// Returns rows as one batch. Each row is a list of examples.
    fn batch(&self, rows: &[Vec<Example>], positions: usize) -> Batch {
        let data = Data {
            rows: rows.iter().map(Row::of).collect(),
            positions,
            batch: rows.len(),
            padding: self.gemma.config().pad_token,
            encoder: Some(Arc::new(self.gemma.prompt_encoder())),
        };
        let loader = ValidationLoader::new(Arc::new(data), Stop::default(), &self.gemma.device());
        let batch = loader.iter().next().expect("there is a batch");
        batch.expect("the images and clips are valid")
    }

    /// Returns the towers, which are frozen.
    fn towers(&self) -> MediaTowers {
        let kinds = Document::media_kinds(&self.documents);
        self.gemma
            .media_towers(kinds)
            .expect("the towers are valid")
    }

    /// Returns the loss of a batch, and the gradients of the text model.
    fn gradients(&self, batch: Batch, by_layer: bool) -> (f32, Gradients) {
        let (loss, of_text, _) = self.gradients_with(&self.towers(), batch, by_layer);
        (loss, of_text)
    }

    /// Returns the loss of a batch, the gradients of the text model, and those of the towers.
    fn gradients_with(
        &self,
        towers: &MediaTowers,
        batch: Batch,
        by_layer: bool,
    ) -> (f32, Gradients, Gradients) {
        let model = self.gemma.model();
        let media = batch.media.expect("the data set has images or audio");
        let media = towers.place(&media, model, batch.tokens.dims());
        let media = media.expect("the media are within the rows");
        let lesson = TrainBatch {
            tokens: batch.tokens,
            packing: Some(&batch.packing),
            media: Some(&media),
            targets: batch.targets,
        };
        let mut recorder = GradientRecorder::new().by_layer(by_layer);
        let outcome = recorder.gradients_with_towers(model, towers, lesson, 1.0);
        let (loss, gradients) = outcome.expect("the batch is valid");
        let of_text = collected(model, &gradients);
        (values(loss)[0], of_text, collected(towers, &gradients))
    }
}

/// A visitor that collects the gradients of a model by the paths of its parameters.
struct Collected<'a> {
    gradients: &'a GradientsParams,
    path: Vec<String>,
    found: Gradients,
}

impl ModuleVisitor for Collected<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.get::<D>(param.id) {
            self.found.insert(self.path.join("."), values(gradient));
        }
    }
}

fn collected(model: &impl Module, gradients: &GradientsParams) -> Gradients {
    let mut collected = Collected {
        gradients,
        path: Vec::new(),
        found: BTreeMap::new(),
    };
    model.visit(&mut collected);
    collected.found
}

#[track_caller]
fn assert_near(found: f32, expected: f32, what: &str) {
    let error = (found - expected).abs();
    assert!(
        error <= 2e-4 * expected.abs(),
        "{what}: {found}, not {expected}"
    );
}

#[test]
fn tokens_and_answers_of_media_conversation_equal_transformers() {
    for name in ALL {
        let lesson = Lesson::open(name);
        let example = lesson.example();
        let tokens: Vec<f32> = example.tokens.iter().map(|token| *token as f32).collect();
        let expected = &lesson.expected["tokens"].values;
        // The line break after the last turn is left out, because the model does not generate it.
        assert_eq!(tokens, expected[..expected.len() - 1], "{name}");
        let learned = example.learned.iter();
        let learned: Vec<f32> = learned.map(|learned| f32::from(*learned)).collect();
        let expected = &lesson.expected["learned"].values;
        assert_eq!(learned, expected[..expected.len() - 1], "{name}");
        for medium in &example.media {
            let tokens = &example.tokens[medium.tokens.clone()];
            assert!(tokens.iter().all(|token| *token == tokens[0]), "{name}");
        }
    }
}

#[test]
fn gradients_of_media_conversation_equal_transformers() {
    for name in ALL {
        let lesson = Lesson::open(name);
        let example = lesson.example().clone();
        for (positions, by_layer) in [(example.tokens.len(), false), (256, false), (256, true)] {
            let what = format!("{name} in {positions} positions, by layer: {by_layer}");
            let batch = lesson.batch(&[vec![example.clone()]], positions);
            let (loss, found) = lesson.gradients(batch, by_layer);
            assert_near(loss, lesson.expected["loss"].values[0], &what);
            let prefix = "grad.model.language_model.";
            let of_text = lesson.expected.keys();
            let of_text = of_text.filter(|name| name.starts_with(prefix)).count();
            let mut compared = 0;
            for (path, found) in &found {
                let Some(expected) = lesson.expected.get(&format!("{prefix}{path}")) else {
                    // Transformers does not train the scalar of a layer.
                    assert!(path.ends_with("layer_scalar"), "{what}: {path}");
                    continue;
                };
                let error = relative(found, &expected.values);
                assert!(error <= TOLERANCE, "{what}: {path} is off by {error:e}");
                compared += 1;
            }
            assert_eq!(compared, of_text, "{what}");
        }
    }
}

/// Returns a conversation without images.
fn text(lesson: &Lesson) -> Example {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("text.jsonl");
    let line = r#"{"messages": [{"role": "user", "content": "the hat"}, {"role": "assistant", "content": "and a mat"}]}"#;
    fs::write(&path, line).expect("the file is written");
    let documents = read_documents(&path, &lesson.gemma).expect("the conversation is valid");
    documents[0].examples[0].clone()
}

/// A batch has the mean loss and the mean gradients of its conversations, however they are packed into rows.
#[test]
fn packed_rows_with_and_without_media_equal_separate_rows() {
    for name in ALL {
        let lesson = Lesson::open(name);
        let (media, text) = (lesson.example().clone(), text(&lesson));
        let alone = |example: &Example| {
            let batch = lesson.batch(&[vec![example.clone()]], example.tokens.len());
            let count = batch.counted as f32;
            let (loss, gradients) = lesson.gradients(batch, false);
            (count, loss, gradients)
        };
        let (of_media, of_text) = (alone(&media), alone(&text));
        let mean = |one: f32, other: f32| {
            (of_media.0 * one + of_text.0 * other) / (of_media.0 + of_text.0)
        };
        let (image, words) = (vec![media.clone()], vec![text.clone()]);
        let empty = Vec::new();
        for (rows, positions) in [
            (vec![[words.clone(), image.clone()].concat()], 260),
            (vec![[image.clone(), words.clone()].concat()], 300),
            (vec![words.clone(), image.clone()], 256),
            (vec![image.clone(), empty.clone(), words.clone()], 256),
        ] {
            for by_layer in [false, true] {
                let what = format!("{name} with {} rows, by layer: {by_layer}", rows.len());
                let batch = lesson.batch(&rows, positions);
                let (loss, found) = lesson.gradients(batch, by_layer);
                assert_near(loss, mean(of_media.1, of_text.1), &what);
                for (path, found) in found {
                    let pairs = of_media.2[&path].iter().zip(&of_text.2[&path]);
                    let expected: Vec<f32> = pairs.map(|(one, other)| mean(*one, *other)).collect();
                    let error = relative(&found, &expected);
                    assert!(error <= TOLERANCE, "{what}: {path} is off by {error:e}");
                }
            }
        }
    }
}

/// Rows of padding see nothing but padding, and an image at the end of a row has no targets.
#[test]
fn rows_without_targets_give_zero_gradients_and_no_nan() {
    for name in ALL {
        let lesson = Lesson::open(name);
        let mut untold = lesson.example().clone();
        untold.learned.fill(false);
        for by_layer in [false, true] {
            let rows = [vec![untold.clone()], Vec::new()];
            let (loss, found) = lesson.gradients(lesson.batch(&rows, 256), by_layer);
            assert_eq!(loss, 0.0, "{name}");
            for (path, gradient) in found {
                assert!(gradient.iter().all(|value| *value == 0.0), "{name}: {path}");
            }
        }
    }
}

#[test]
fn evaluation_of_media_conversation_equals_transformers() {
    for name in ALL {
        let fixture = Fixture::open(name);
        let gemma = fixture.load(&Device::flex(), DType::F32);
        let documents = read_documents(&folder(name).join("train.jsonl"), &gemma);
        let documents = documents.expect("the conversation is valid");
        let windows = |length| Windows {
            length,
            stride: length / 2,
        };
        let costs = evaluate(&gemma, &documents, windows(512), |_, _| ());
        let summary = costs.expect("the costs are computed")[0].summary();
        let expected = fixture.gradients().expect("the fixture has gradients");
        let found = summary.expect("tokens are learned").cross_entropy;
        assert_near(found as f32, expected["loss"].values[0], name);
        let error = evaluate(&gemma, &documents, windows(100), |_, _| ()).expect_err("too long");
        let error = error.to_string();
        assert!(
            error.contains("line 1") && error.contains("--length 100"),
            "{error}"
        );
    }
}

/// A row never ends within an image: the example ends before an image that does not fit.
#[test]
fn pack_of_too_long_media_conversation_cuts_before_the_image() {
    let lesson = Lesson::open("vision-ple");
    let example = lesson.example().clone();
    let second = example.media[1].tokens.clone();
    for positions in second.start..=second.end + 2 {
        let (rows, too_long) = pack(vec![example.clone()], positions);
        let fits = positions > second.end;
        let expected = if fits { positions } else { second.start - 1 };
        assert_eq!(rows[0].tokens.len(), expected, "{positions}");
        assert_eq!(rows[0].media.len(), 1 + usize::from(fits), "{positions}");
        assert_eq!(too_long, 1);
    }
    let (rows, _) = pack(vec![example.clone()], example.media[0].tokens.start);
    assert_eq!(rows, []);
}

/// A mapper that trains every parameter.
struct Trained;

impl ModuleMapper for Trained {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.detach().require_grad())
    }
}

/// Returns the name of a parameter in Transformers, whose modules of 12B's vision have other names than its checkpoint.
fn name_in_transformers(path: &str) -> String {
    // The first two parts are a field and a variant of the module.
    let in_checkpoint = path.splitn(3, '.').nth(2).expect("a path in the towers");
    match path.starts_with("vision.Projected.") {
        true => in_checkpoint
            .replace("embed_vision.", "embed_vision.multimodal_embedder.")
            .replace("vision_embedder.", "embed_vision."),
        false => in_checkpoint.into(),
    }
}

#[test]
fn gradients_of_towers_equal_transformers() {
    for name in ALL {
        let lesson = Lesson::open(name);
        let example = lesson.example().clone();
        let towers = lesson.towers();
        assert!(!towers.is_trained(), "{name}");
        let towers = towers.map(&mut Trained);
        for by_layer in [false, true] {
            let what = format!("{name}, by layer: {by_layer}");
            let batch = lesson.batch(&[vec![example.clone()]], 256);
            let (loss, of_text, of_towers) = lesson.gradients_with(&towers, batch, by_layer);
            assert_near(loss, lesson.expected["loss"].values[0], &what);
            for (path, found) in &of_text {
                let expected = &lesson
                    .expected
                    .get(&format!("grad.model.language_model.{path}"));
                if let Some(expected) = expected {
                    let error = relative(found, &expected.values);
                    assert!(error <= TOLERANCE, "{what}: {path} is off by {error:e}");
                }
            }
            let mut compared = 0;
            for (path, found) in &of_towers {
                let path = name_in_transformers(path);
                let Some(expected) = lesson.expected.get(&format!("grad.model.{path}")) else {
                    // Transformers does not train the standardization.
                    let is_constant = path.ends_with("std_bias") || path.ends_with("std_scale");
                    assert!(is_constant, "{what}: {path}");
                    continue;
                };
                let error = relative(found, &expected.values);
                assert!(error <= TOLERANCE, "{what}: {path} is off by {error:e}");
                compared += 1;
            }
            let expected = lesson.expected.keys();
            let expected = expected.filter(|name| name.starts_with("grad.model."));
            let expected = expected.filter(|name| !name.contains(".language_model."));
            assert_eq!(compared, expected.count(), "{what}");
        }
    }
}

/// Returns the cross entropy of the conversation of a fixture.
fn cross_entropy(gemma: &Gemma4, name: &str) -> f64 {
    let documents = read_documents(&folder(name).join("train.jsonl"), gemma);
    let windows = Windows {
        length: 256,
        stride: 128,
    };
    let costs = evaluate(gemma, &documents.expect("valid"), windows, |_, _| ());
    let summary = costs.expect("the costs are computed")[0].summary();
    summary.expect("tokens are learned").cross_entropy
}

/// A command of the program on the conversation of a fixture.
fn program(command: &str, model: &Path, name: &str, arguments: &[&str]) -> Command {
    let mut program = gemma4(command);
    program
        .arg("--model")
        .arg(model)
        .arg("--data")
        .arg(folder(name).join("train.jsonl"));
    program
        .args(["--device", "flex", "--length", "256"])
        .args(arguments);
    program.env("BURN_DEVICE", "flex");
    program
}

/// The loss falls, and the adapter has the same effect if it is read again or merged, with factors of every part.
#[test]
fn finetune_on_images_and_audio_lowers_the_loss_of_evaluate() {
    for (name, targets) in [
        ("vision-ple", "text"),
        ("vision-keqv", "text,projector,towers"),
        ("vision-unified", "projector,towers"),
        ("audio-ple", "text,projector,towers"),
        ("audio-unified", "projector"),
    ] {
        let written = tempfile::tempdir().expect("a folder");
        let path = |part: &str| written.path().join(part);
        let arguments = [
            "--targets",
            targets,
            "--steps",
            "20",
            "--batch",
            "1",
            "--rank",
            "4",
            "--warmup",
            "1",
            "--learning-rate",
            "0.01",
            "--checkpoint-every",
            "10",
            "--log-every",
            "1",
        ];
        let out = |part: &str| path(part).display().to_string();
        let train = |part: &str, more: &[&str]| {
            let arguments = [&arguments[..], more].concat();
            let mut command = program("finetune", &folder(name), name, &arguments);
            succeed(command.args(["--out", &out(part)]))
        };
        let evaluation = |model: &Path, arguments: &[&str]| -> f64 {
            let arguments = [arguments, &["--json"]].concat();
            let ended = succeed(&mut program("evaluate", model, name, &arguments));
            report(&ended)["cross_entropy"].as_f64().expect("a number")
        };
        let before = evaluation(&folder(name), &[]);
        let ended = train("adapter", &[]);
        let validations = validation(&ended.stdout);
        let after = evaluation(&folder(name), &["--adapter", &out("adapter")]);
        assert!(after < 0.9 * before, "{name}: {after} after {before}");
        let last = validations[validations.len() - 1].1;
        assert!(
            (after - last).abs() < 1e-2 * last,
            "{name}: {after} and {last}"
        );
        train("merged", &["--merge"]);
        let merged = evaluation(&path("merged"), &[]);
        // The merged weights are rounded to the dtype of the checkpoint.
        assert!(
            (merged - after).abs() < 0.02 * before,
            "{name}: {merged} and {after}"
        );
        // A longer run goes on from the factors of all parts.
        let longer = ["--steps", "22", "--resume"];
        train("adapter", &longer);
        let longer = evaluation(&folder(name), &["--adapter", &out("adapter")]);
        assert!(longer < 0.9 * before, "{name}: {longer} after {before}");
    }
}

/// Adapters of biased layers compute in the dtype of the activations.
#[test]
fn finetune_of_towers_in_half_precision_has_finite_losses() {
    for (name, dtype) in [
        ("vision-unified", "bf16"),
        ("vision-unified", "f16"),
        ("audio-ple", "bf16"),
        ("audio-ple", "f16"),
    ] {
        let written = tempfile::tempdir().expect("a folder");
        let out = written.path().join("out").display().to_string();
        let arguments = [
            "--targets",
            "text,projector,towers",
            "--dtype",
            dtype,
            "--steps",
            "12",
            "--batch",
            "1",
            "--rank",
            "4",
            "--warmup",
            "1",
            "--learning-rate",
            "0.01",
            "--checkpoint-every",
            "4",
            "--lines",
            "--out",
            &out,
        ];
        let ended = succeed(&mut program("finetune", &folder(name), name, &arguments));
        let losses = validation(&ended.stdout);
        let [first, last] = [losses[0].1, losses[losses.len() - 1].1];
        assert!(last < first, "{name} in {dtype}: {losses:?}");
    }
}

/// Returns a folder with the conversation of a fixture, its images and clips, and texts that fill rows of their own.
fn mixed_data(name: &str) -> TempDir {
    let data = tempfile::tempdir().expect("a folder");
    for entry in fs::read_dir(folder(name)).expect("the folder is read") {
        let from = entry.expect("the folder is read").path();
        let kind = from.extension().and_then(|kind| kind.to_str());
        if kind.is_some_and(|kind| ["png", "wav"].contains(&kind)) {
            let to = data.path().join(from.file_name().expect("a file"));
            fs::copy(&from, to).expect("the file is copied");
        }
    }
    let conversation = fs::read_to_string(folder(name).join("train.jsonl")).expect("read");
    let text = format!("{{\"text\": \"{}\"}}\n", "the cat sat ".repeat(80));
    let all = format!("{}\n{}", conversation.trim_end(), text.repeat(3)).repeat(2);
    fs::write(data.path().join("mixed.jsonl"), all).expect("the file is written");
    data
}

/// Without adapted parts of the text model, a batch of texts has no gradients.
#[test]
fn finetune_of_projector_on_images_and_texts_skips_batches_of_texts() {
    for (name, targets) in [
        ("vision-ple", "projector"),
        ("audio-ple", "projector,towers"),
    ] {
        let data = mixed_data(name);
        let file = data.path().join("mixed.jsonl").display().to_string();
        for (accumulate, checkpointing) in [("1", "none"), ("2", "none"), ("1", "layers")] {
            let out = data.path().join(format!("{accumulate}-{checkpointing}"));
            let out = out.display().to_string();
            let arguments = [
                "--data",
                &file,
                "--targets",
                targets,
                "--accumulate",
                accumulate,
                "--checkpointing",
                checkpointing,
                "--steps",
                "8",
                "--batch",
                "1",
                "--rank",
                "4",
                "--lines",
                "--out",
                &out,
            ];
            let ended = succeed(&mut program("finetune", &folder(name), name, &arguments));
            assert!(!ended.stderr.contains("left out"), "{}", ended.stderr);
        }
    }
}

/// The loss of a batch without gradients is that of the same batch with gradients.
#[test]
fn batch_of_texts_with_trained_towers_only_has_a_loss_and_no_gradients() {
    let lesson = Lesson::open("vision-unified");
    let batch = || lesson.batch(&[vec![text(&lesson)]], 256);
    let towers = lesson.towers().map(&mut Trained);
    let model = lesson.gemma.model().clone().no_grad();
    for by_layer in [false, true] {
        let (expected, gradients, _) = lesson.gradients_with(&towers, batch(), by_layer);
        assert!(!gradients.is_empty());
        let Batch {
            tokens,
            packing,
            media,
            targets,
            ..
        } = batch();
        let media = media.expect("the data set has images");
        assert!(media.is_empty());
        let media = towers.place(&media, &model, tokens.dims());
        let media = media.expect("the media are within the rows");
        let batch = TrainBatch {
            tokens,
            packing: Some(&packing),
            media: Some(&media),
            targets,
        };
        let mut recorder = GradientRecorder::new().by_layer(by_layer);
        let outcome = recorder.gradients_with_towers(&model, &towers, batch, 1.0);
        let (loss, gradients) = outcome.expect("the batch is valid");
        assert!(gradients.is_empty(), "by layer: {by_layer}");
        assert_near(values(loss)[0], expected, &format!("by layer: {by_layer}"));
    }
}

/// `--resume` compares a hash of the data. It depends on the contents of images, and not on their paths.
#[test]
fn hash_of_media_is_that_of_their_contents() {
    let gemma = Fixture::open("vision-ple").load(&Device::flex(), DType::F32);
    let hash = |file: &Path| {
        let documents = read_documents(file, &gemma).expect("the conversation is valid");
        let mut hasher = DefaultHasher::new();
        documents[0].examples[0].media.hash(&mut hasher);
        hasher.finish()
    };
    let expected = hash(&folder("vision-ple").join("train.jsonl"));
    let data = mixed_data("vision-ple");
    let file = data.path().join("mixed.jsonl");
    assert_eq!(hash(&file), expected);
    let text = fs::read_to_string(&file).expect("the file is read");
    let image = data.path().join("wide.png");
    let renamed = text.replace("wide.png", &image.display().to_string());
    fs::write(&file, renamed).expect("the file is written");
    assert_eq!(hash(&file), expected);
    // Bytes after the end of an image change nothing but the contents.
    let contents = fs::read(&image).expect("the image is read");
    fs::write(&image, [&contents[..], b"end"].concat()).expect("the image is written");
    assert_ne!(hash(&file), expected);
}

/// A pipe has no folder and is read once, so its lines may have texts only.
#[cfg(unix)]
#[test]
fn read_documents_of_pipe_reads_texts_and_refuses_images() {
    let written = tempfile::tempdir().expect("a folder");
    let pipe = written.path().join("data.jsonl");
    let made = Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("mkfifo runs").success());
    let gemma = Fixture::open("vision-ple").load(&Device::flex(), DType::F32);
    let conversation = fs::read_to_string(folder("vision-ple").join("train.jsonl")).expect("read");
    let text = "{\"text\": \"the cat\"}\n\n";
    for (lines, expected) in [
        (text.to_owned(), Ok(1)),
        (
            format!("{text}{conversation}"),
            Err(["line 3", "expected a regular file"]),
        ),
    ] {
        let to = pipe.clone();
        let writer = std::thread::spawn(move || fs::write(to, lines));
        let found = read_documents(&pipe, &gemma);
        // The reader may close the pipe before its end.
        writer.join().expect("the writer ends").ok();
        match (found, expected) {
            (Ok(documents), Ok(count)) => assert_eq!(documents.len(), count),
            (Err(error), Err(words)) => {
                let error = error.to_string();
                assert!(words.iter().all(|word| error.contains(word)), "{error}");
            }
            (found, expected) => panic!("{found:?}, not {expected:?}"),
        }
    }
}

#[test]
fn finetune_of_media_with_wrong_arguments_is_refused() {
    let written = tempfile::tempdir().expect("a folder");
    let out = written.path().join("out").display().to_string();
    let data = written.path().join("text.jsonl");
    fs::write(&data, "{\"text\": \"the cat\"}\n").expect("the file is written");
    let data = data.display().to_string();
    for (arguments, code, words) in [
        (&["--devices", "0,0"][..], 2, "one device only"),
        (&["--full", "--targets", "towers"], 2, "--targets"),
        (
            &["--targets", "projector", "--data", &data],
            2,
            "no images and no audio",
        ),
    ] {
        let arguments = [arguments, &["--out", &out, "--steps", "1"]].concat();
        let ended = run(&mut program(
            "finetune",
            &folder("vision-ple"),
            "vision-ple",
            &arguments,
        ));
        check(words, &ended, code, &[words]);
    }
}

/// A saved adapter of all parts gives the loss of the attached adapter.
#[test]
fn adapter_of_towers_is_read_as_it_was_written() {
    for name in ["vision-ple", "vision-unified", "audio-ple", "audio-unified"] {
        let lesson = Lesson::open(name);
        let adapter = Adapter {
            towers: TowerTargets {
                projectors: true,
                towers: true,
            },
            ..Adapter::new(3, 6.0)
        };
        let model = adapter
            .attach(lesson.gemma.model().clone())
            .expect("attached");
        let towers = adapter.attach_towers(lesson.towers()).expect("attached");
        assert!(towers.is_trained(), "{name}");
        let again = adapter
            .attach_towers(towers.clone())
            .expect_err("attached already");
        assert!(again.to_string().contains("adapter already"), "{again}");
        // `A` or `B` is zero until it is trained.
        let mut varied = Varied(0);
        let (model, towers) = (model.map(&mut varied), towers.map(&mut varied));
        let batch = lesson.batch(&[vec![lesson.example().clone()]], 256);
        let media = batch.media.expect("the data set has images or audio");
        let media = towers
            .place(&media, &model, batch.tokens.dims())
            .expect("placed");
        let hidden = model.hidden_packed_with_media(batch.tokens, &batch.packing, &media);
        let loss = model
            .loss(hidden.expect("valid"), batch.targets)
            .expect("valid");
        let loss = values(loss)[0];
        let written = tempfile::tempdir().expect("a folder");
        let base = folder(name).display().to_string();
        let saved = adapter.save_with_towers(&model, Some(&towers), written.path(), &base);
        saved.expect("the adapter is written");
        let load = || {
            let options = LoadOptions::new().dtype(DType::F32);
            Gemma4::load(folder(name), &Device::flex(), options).expect("the fixture")
        };
        let before = cross_entropy(&load(), name);
        for gemma in [
            load().attach_adapter(written.path()),
            load().merge_adapter(written.path()),
        ] {
            let gemma = gemma.expect("the adapter fits");
            assert_eq!(gemma.warnings().count(), 0, "{:?}", gemma.warnings().next());
            let found = cross_entropy(&gemma, name);
            assert!((found - before).abs() > 1e-3 * before, "{name}: {found}");
            assert_near(found as f32, loss, name);
        }
    }
}

/// A mapper that gives adapters other values than zero.
struct Varied(usize);

impl ModuleMapper for Varied {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.base().is_require_grad() {
            return param;
        }
        self.0 += 1;
        let seed = self.0;
        param.map(|tensor| {
            let shape = tensor.shape();
            let value = |index: usize| ((index * 31 + seed * 17) as f32).sin() * 0.05;
            let count = shape.iter().product::<usize>();
            let data = TensorData::new((0..count).map(value).collect(), shape);
            Tensor::from_data(data, (&tensor.device(), tensor.dtype())).require_grad()
        })
    }
}

/// Each error names the line, the message and the part.
#[test]
fn read_documents_with_unreadable_media_names_line_and_part() {
    let written = tempfile::tempdir().expect("a folder");
    let path = written.path().join("data.jsonl");
    fs::write(written.path().join("text.png"), "not an image").expect("the file is written");
    let whole = fs::read(folder("vision-ple").join("wide.png")).expect("the image is read");
    fs::write(written.path().join("cut.png"), &whole[..whole.len() - 30]).expect("written");
    fs::copy(
        folder("vision-ple").join("wide.png"),
        written.path().join("wide.png"),
    )
    .expect("the file is copied");
    let load = |name: &'static str| Fixture::open(name).load(&Device::flex(), DType::F32);
    let (sees, reads) = (load("vision-ple"), load("dense-ple"));
    let line = |part: &str| {
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": [{part}]}}, {{\"role\": \"assistant\", \"content\": \"a\"}}]}}\n"
        )
    };
    let image = |name: &str| format!(r#"{{"type": "image", "image": "{name}"}}"#);
    for (gemma, part, words) in [
        (&sees, image("none.png"), "none.png"),
        (&sees, image("text.png"), "PNG, JPEG or WebP"),
        (&sees, image("cut.png"), "the file is truncated"),
        (&sees, image("."), "not a regular file"),
        (&sees, image("https://a/b.png"), "nothing from the network"),
        (
            &sees,
            image("data:image/png;base64,YWJj"),
            "PNG, JPEG or WebP",
        ),
        (
            &sees,
            r#"{"type": "audio", "audio": "a.wav"}"#.into(),
            "hears no audio",
        ),
        (
            &sees,
            r#"{"type": "video", "video": "a.mp4"}"#.into(),
            "\"video\"",
        ),
        (&reads, image("wide.png"), "sees no images"),
    ] {
        let text = line(r#"{"type": "text", "text": "b"}"#) + &line(&part);
        fs::write(&path, text).expect("the file is written");
        let error = read_documents(&path, gemma).expect_err(&part).to_string();
        for word in ["line 2", "message 1, part 1", words] {
            assert!(error.contains(word), "{part}: {error}");
        }
    }
    // An image that changes after the file was read is refused when a batch needs it.
    fs::write(&path, line(&image("wide.png"))).expect("the file is written");
    let documents = read_documents(&path, &sees).expect("the image is valid");
    fs::copy(
        folder("vision-ple").join("tall.png"),
        written.path().join("wide.png"),
    )
    .expect("the file is copied");
    let windows = Windows {
        length: 256,
        stride: 128,
    };
    let error = evaluate(&sees, &documents, windows, |_, _| ()).expect_err("it has changed");
    let error = error.to_string();
    assert!(
        error.contains("line 1") && error.contains("part 1: has changed"),
        "{error}"
    );
}
