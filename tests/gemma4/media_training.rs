//! Tests training on conversations with images and audio. Tokens, losses and gradients equal those of Hugging Face
//! Transformers (`make_media_gradients.py`).

use crate::fixture::{Fixture, Reference, folder, values};
use crate::gradients::relative;
use burn::data::dataloader::DataLoader;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};
use burn_gemma4::{Gemma4, Gemma4Model, GradientRecorder, TrainBatch};
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
use std::sync::Arc;

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

/// A fixture with its conversation, on a device with autodiff.
struct Lesson {
    name: &'static str,
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
            name,
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

    /// Returns the loss of a batch, and the gradients of the text model.
    fn gradients(&self, batch: Batch, by_layer: bool) -> (f32, BTreeMap<String, Vec<f32>>) {
        let model = self.gemma.model();
        let towers = self
            .gemma
            .media_towers(Document::media_kinds(&self.documents));
        let towers = towers.expect("the towers are valid");
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
        let outcome = recorder.gradients(model, lesson, 1.0);
        let (loss, gradients) = outcome.expect("the batch is valid");
        (values(loss)[0], collected(model, &gradients))
    }
}

/// A visitor that collects the gradients of a model by the paths of its parameters.
struct Collected<'a> {
    gradients: &'a GradientsParams,
    path: Vec<String>,
    found: BTreeMap<String, Vec<f32>>,
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

fn collected(model: &Gemma4Model, gradients: &GradientsParams) -> BTreeMap<String, Vec<f32>> {
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
        assert_eq!(tokens, lesson.expected["tokens"].values, "{name}");
        let learned: Vec<f32> = example
            .learned
            .iter()
            .map(|learned| f32::from(*learned))
            .collect();
        assert_eq!(learned, lesson.expected["learned"].values, "{name}");
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
    std::fs::write(&path, line).expect("the file is written");
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
