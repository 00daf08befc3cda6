//! Models whose weights stay quantized: they give what their dequantized weights give, in the memory of the words, and are not
//! trained (adapters over them are: `qlora.rs`).

use crate::devices::devices;
use crate::fixture::{self, Fixture, TOLERANCE, greedy, largest, tokens, values};
use attention_workspace::{
    Dtype,
    device::DeviceName,
    model::{ModelArguments, Quantize, Table},
};
use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{DType, Device, Int, Tensor},
};
use burn_gemma4::{
    Adapter, DecodeMode, Gemma4, Gemma4Error, Gemma4Model, LoadOptions, Logits, Quantization,
};
use std::ops::ControlFlow;
use tempfile::TempDir;

/// Checkpoints that are quantized, and others with what is made of them: every format, embeddings that are the head, per-layer embeddings,
/// experts, heads as wide as real ones.
const CASES: [(&str, Quantization); 12] = [
    ("gguf/dense-ple.Q8_0.gguf", Quantization::Stored),
    ("gguf/moe.Q4_0.gguf", Quantization::Stored),
    ("gguf/wide.Q4_K_M.gguf", Quantization::Stored),
    ("compressed/w4a16-grouped", Quantization::Stored),
    ("compressed/mixed", Quantization::Stored),
    ("compressed/experts", Quantization::Stored),
    ("dense-ple", Quantization::Q8),
    ("dense-ple", Quantization::Q4),
    ("dense-keqv", Quantization::Q4),
    ("moe", Quantization::Q8),
    ("moe", Quantization::Q4),
    ("realhead-ple", Quantization::Q4),
];

fn load(name: &str, device: &Device, quantization: Quantization) -> Result<Gemma4, Gemma4Error> {
    let options = LoadOptions::new()
        .dtype(DType::F32)
        .quantization(quantization);
    Gemma4::load(fixture::folder(name), device, options)
}

/// A case's model, and the same with whole weights.
fn both(case: (&str, Quantization), device: &Device) -> [Gemma4; 2] {
    let (name, quantization) = case;
    let quantized = load(name, device, quantization).expect(name);
    let whole = match quantization {
        Quantization::Stored => load(name, device, Quantization::Whole).expect(name),
        _ => dequantized(&quantized, name, device),
    };
    assert!(quantized.model().is_quantized(), "{name}");
    assert!(!whole.model().is_quantized(), "{name}");
    [quantized, whole]
}

/// The model saved, which makes it whole.
fn dequantized(gemma: &Gemma4, name: &str, device: &Device) -> Gemma4 {
    let saved = TempDir::new().expect("a folder");
    gemma.model().save(saved.path(), None).expect("saved");
    let tokenizer = fixture::folder(name).join("tokenizer.json");
    std::fs::copy(tokenizer, saved.path().join("tokenizer.json")).expect("a file");
    let options = LoadOptions::new().dtype(DType::F32);
    Gemma4::load(saved.path(), device, options).expect("a model")
}

const PROMPT: [u32; 24] = [
    2, 240, 79, 111, 203, 47, 44, 298, 31, 105, 66, 250, 190, 87, 28, 140, 222, 61, 93, 175, 38,
    301, 266, 119,
];

fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let error = largest(found.iter().zip(expected).map(|(a, b)| a - b));
    let scale = largest(expected.iter().copied());
    assert!(error <= TOLERANCE * scale, "{what}: {error:e} of {scale:e}");
}

#[test]
fn tokens_and_logits_are_those_of_the_dequantized_model() {
    for device in devices() {
        for case in CASES {
            let what = format!("{case:?} {}", device.name);
            let models = both(case, &device.device);
            let [found, expected] = models.each_ref().map(|gemma| {
                let prompt = tokens(&[&PROMPT], &device.device);
                values(gemma.model().forward(prompt).expect("tokens within"))
            });
            assert_close(&found, &expected, &what);
            let [found, expected] = models.each_ref().map(|gemma| {
                let options = greedy(gemma, 12);
                let prompt = PROMPT.to_vec();
                let generation = gemma.generate(prompt, &options, |_| ControlFlow::Continue(()));
                generation.expect("a generation").tokens
            });
            assert_eq!(found, expected, "{what}");
        }
    }
}

/// One sequence, a few, as many as the kernels take, and more.
#[test]
fn decoding_is_by_kernels_that_read_words() {
    for device in devices() {
        for batch in [1, 3, 8, 9] {
            let what = format!("{batch} sequences, {}", device.name);
            let models = both(
                ("gguf/dense-ple.Q8_0.gguf", Quantization::Stored),
                &device.device,
            );
            let [found, expected] = models.each_ref().map(|gemma| {
                let row: Vec<u32> = PROMPT[..5].into();
                let rows: Vec<&[u32]> = vec![&row; batch];
                let mut cache = gemma.model().cache(vec![0; batch]);
                let read = tokens(&rows, &device.device);
                let step = gemma.model().step(read, &mut cache, Logits::None);
                step.expect("a step");
                let mut decoder = gemma.model().decoder(&mut cache);
                let mut logits = Vec::new();
                for token in &PROMPT[5..11] {
                    let next = decoder.step(&vec![*token; batch]).expect("a step");
                    logits.extend(next.logits().expect("logits"));
                }
                let by_kernels = device.device != Device::flex() && batch <= 8;
                assert_eq!(decoder.mode() != DecodeMode::Layers, by_kernels, "{what}");
                logits
            });
            assert_close(&found, &expected, &what);
        }
    }
}

/// Words of a model: how many of a row, and the rows.
#[derive(Default)]
struct Words {
    path: Vec<String>,
    found: Vec<(String, [usize; 2])>,
    whole: usize,
}

impl ModuleVisitor for Words {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.whole += param.val().dims().iter().product::<usize>() * 4;
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let dims = param.val().dims();
        let path = self.path.join(".");
        self.found.push((path, [dims[0], dims[D - 1]]));
    }
}

/// Rows of 64 columns: 16 words of 8 bits or 8 of 4, and a word of two scales, filled up to 4 words.
#[test]
fn memory_is_that_of_the_words() {
    for (form, words) in [(Quantization::Q8, 20), (Quantization::Q4, 12)] {
        let gemma = load("dense-ple", &Device::flex(), form).expect("a model");
        let mut held = Words::default();
        gemma.model().visit(&mut held);
        let table = ("embed_tokens.weight.words".to_owned(), [320, words]);
        assert!(held.found.contains(&table), "{:?}", held.found);
        let of_words = |[rows, words]: [usize; 2]| 4 * rows * words;
        let all: usize = held.found.iter().map(|(_, shape)| of_words(*shape)).sum();
        assert_eq!(gemma.model().parameter_bytes(), all + held.whole);

        let mut of_whole = Words::default();
        let whole = load("dense-ple", &Device::flex(), Quantization::Stored).expect("a model");
        whole.model().visit(&mut of_whole);
        assert_eq!(whole.model().parameter_bytes(), of_whole.whole);
        // 16 columns of per-layer embeddings are no block. All that is words would be 64 numbers or more.
        let saved = of_whole.whole - held.whole;
        assert!(all * 64 <= saved * words, "{all} bytes for {saved}");
        let kept: Vec<&str> = ["router", "norm", "layer_scalar"].into();
        assert!(
            held.found
                .iter()
                .all(|(path, _)| !kept.iter().any(|name| path.contains(name)))
        );
    }
}

/// Also where the model is there already, and back.
#[test]
fn a_model_is_quantized_as_a_checkpoint_is() {
    let device = Device::flex();
    let prompt = || tokens(&[&PROMPT], &device);
    let logits = |model: &Gemma4Model| values(model.forward(prompt()).expect("tokens within"));
    for form in [Quantization::Q8, Quantization::Q4] {
        let loaded = load("moe", &device, form).expect("a model");
        let whole = load("moe", &device, Quantization::Whole).expect("a model");
        let quantized = whole.model().clone().quantize(form).expect("a model");
        assert_eq!(logits(&quantized), logits(loaded.model()));
        let again = quantized.quantize(Quantization::Whole).expect("a model");
        assert!(!again.is_quantized());
        assert_eq!(again.parameter_bytes(), whole.model().parameter_bytes());
        assert_close(&logits(&again), &logits(loaded.model()), "whole again");
    }
}

#[test]
fn half_precision_is_as_close_as_whole_weights_are() {
    for device in devices() {
        if !device.device.supports_dtype(DType::F16) {
            continue;
        }
        let fixture = Fixture::open("dense-ple");
        let logits = |dtype: DType, form: Quantization| {
            let options = LoadOptions::new().dtype(dtype).quantization(form);
            let path = fixture::folder("gguf/dense-ple.Q8_0.gguf");
            let model = Gemma4Model::load(path, &device.device, options).expect("a model");
            let mut cache = model.cache(vec![0]);
            let prompt = tokens(&[&fixture.prompt], &device.device);
            let step = model
                .step(prompt, &mut cache, Logits::Last(1))
                .expect("a step");
            values(step.expect("logits").cast(DType::F32))
        };
        let exact = logits(DType::F32, Quantization::Whole);
        let [quantized, whole] = [Quantization::Stored, Quantization::Whole].map(|form| {
            let found = logits(DType::F16, form);
            largest(found.iter().zip(&exact).map(|(a, b)| a - b))
        });
        let scale = largest(exact.iter().copied());
        assert!(
            quantized <= 2.0 * whole.max(1e-3 * scale),
            "{}: {quantized:e}, whole {whole:e}",
            device.name
        );
    }
}

/// What is quantized is not trained: with more than an adapter to be trained, that is said.
#[test]
fn it_is_not_trained() {
    let plain = Device::flex();
    let device = plain.clone().autodiff();
    let is_refused = |found: Result<(), Gemma4Error>| {
        assert!(matches!(found, Err(Gemma4Error::Quantized)), "{found:?}");
    };
    let prompt = || tokens(&[&PROMPT], &device);
    let loaded = load("gguf/dense-ple.Q8_0.gguf", &device, Quantization::Stored).expect("a model");
    let quantized = load("dense-ple", &plain, Quantization::Q8).expect("a model");
    for model in [loaded.model().clone(), quantized.model().clone().train()] {
        assert!(model.is_quantized());
        let targets = prompt();
        is_refused(
            model
                .gradients(prompt(), None, Logits::All, |hidden| {
                    model.loss(hidden, targets.clone())
                })
                .map(drop),
        );
        let hidden = model.hidden(prompt(), Logits::All).expect("states");
        assert!(hidden.is_tracked());
        is_refused(model.loss(hidden, targets.clone()).map(drop));
    }

    // What is only looked at is computed.
    let hidden = quantized
        .model()
        .hidden(tokens(&[&PROMPT], &plain), Logits::All);
    let loss = quantized
        .model()
        .loss(hidden.expect("states"), tokens(&[&PROMPT], &plain));
    assert!(loss.expect("a loss").into_scalar::<f32>() > 0.0);
}

/// An adapter's products are added to whole weights: those that it adds to become such.
#[test]
fn adapters_are_merged_into_whole_weights() {
    let name = "dense-ple";
    let device = Device::flex();
    let trained = load(name, &device.clone().autodiff(), Quantization::Stored).expect("a model");
    let adapter = Adapter {
        rank: 2,
        alpha: 4.0,
        modules: ["q_proj", "down_proj"].map(String::from).into(),
    };
    let model = adapter.attach(trained.model().clone()).expect("an adapter");
    let folder = TempDir::new().expect("a folder");
    adapter.save(&model, folder.path(), name).expect("saved");

    let quantized = load(name, &device, Quantization::Q8).expect("a model");
    let before = quantized.model().parameter_bytes();
    let prompt = || tokens(&[&PROMPT], &device);
    let logits = |gemma: &Gemma4| values(gemma.model().forward(prompt()).expect("tokens within"));
    let expected = logits(&quantized);
    let merged = quantized.merge_adapter(folder.path()).expect("merged");
    assert!(merged.model().parameter_bytes() > before);
    assert!(merged.model().is_quantized());
    assert_close(&logits(&merged), &expected, "an adapter that adds nothing");

    // Of a program's model that is to be quantized, it stays beside the weights.
    let arguments = ModelArguments {
        model: Some(fixture::folder(name)),
        adapter: Some(folder.path().into()),
        device: DeviceName::Flex,
        dtype: Some(Dtype::F32),
        quantize: Some(Quantize::Q8),
        per_layer_table: Table::Auto,
    };
    let loaded = arguments.load().expect("a model").gemma;
    let (held, whole) = (
        loaded.model().parameter_bytes(),
        merged.model().parameter_bytes(),
    );
    assert!(before < held && held < whole, "{before}, {held}, {whole}");
    assert_eq!(logits(&loaded), expected);
}

/// Whatever a tracked device does with what it computes, numbers of words are constants there.
#[test]
fn it_is_computed_where_gradients_are_checkpointed() {
    let plain = Device::flex();
    let quantized = load("dense-ple", &plain, Quantization::Q4).expect("a model");
    let states = |model: &Gemma4Model, device: &Device| {
        let hidden = model.hidden(tokens(&[&PROMPT], device), Logits::All);
        values(hidden.expect("states"))
    };
    let expected = states(quantized.model(), &plain);
    for device in [
        plain.clone().autodiff(),
        plain.clone().autodiff().gradient_checkpointing(),
    ] {
        let model = quantized.model().clone().fork(&device);
        assert_close(&states(&model, &device), &expected, "tracked");
    }
}

/// The cross entropy of a text under the small model that has learned something: of 8 bits within 1 %, of 4 within what they cost it.
#[test]
fn a_model_that_has_learned_keeps_what_it_knows() {
    let device = Device::flex();
    let loss = |form: Quantization| {
        let options = LoadOptions::new().dtype(DType::F32).quantization(form);
        let gemma = Gemma4::embedded(&device, options).expect("a model");
        assert_eq!(gemma.model().is_quantized(), form != Quantization::Stored);
        let text: String = include_str!("../../LICENSE-APACHE")
            .chars()
            .take(2000)
            .collect();
        let text = gemma.tokenizer().encode(&text).expect("tokens");
        let (read, next) = (&text[..text.len() - 1], &text[1..]);
        let hidden = gemma.model().hidden(tokens(&[read], &device), Logits::All);
        let loss = gemma
            .model()
            .loss(hidden.expect("states"), tokens(&[next], &device));
        loss.expect("a loss").into_scalar::<f32>()
    };
    let whole = loss(Quantization::Stored);
    for (form, most) in [(Quantization::Q8, 0.01), (Quantization::Q4, 0.1)] {
        let found = loss(form);
        assert!(
            (found - whole).abs() <= most * whole,
            "{form:?}: {found} for {whole}"
        );
    }
}
