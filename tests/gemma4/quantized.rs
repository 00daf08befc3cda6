//! Tests models whose weights stay quantized. Such a model gives the same results as a model with the dequantized
//! weights, but its weights need only the memory of the packed format.

use crate::devices::devices;
use crate::fixture::{self, Fixture, TOLERANCE, greedy, largest, tokens, values};
use attention_workspace::{
    Dtype,
    device::DeviceName,
    model::{ModelArguments, Table, WeightForm},
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

/// The test cases: checkpoints that are already quantized, and checkpoints that the loader quantizes. The cases cover
/// every format, tied output heads, per-layer embeddings, experts, and heads as wide as in real models.
const CASES: [(&str, Quantization); 14] = [
    ("gguf/dense-ple.Q8_0.gguf", Quantization::Stored),
    ("gguf/moe.Q4_0.gguf", Quantization::Stored),
    ("gguf/wide.Q4_K_M.gguf", Quantization::Stored),
    ("compressed/w4a16-grouped", Quantization::Stored),
    ("compressed/mixed", Quantization::Stored),
    ("compressed/experts", Quantization::Stored),
    ("compressed/float4", Quantization::Stored),
    ("compressed/float8", Quantization::Q8),
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

/// Returns the quantized model of a case, and the same model with dequantized weights.
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

/// Saves the model and loads the saved checkpoint. Saving dequantizes the weights.
fn dequantized(gemma: &Gemma4, name: &str, device: &Device) -> Gemma4 {
    let saved = TempDir::new().expect("a temporary folder");
    gemma
        .model()
        .save(saved.path(), None)
        .expect("the save succeeds");
    let tokenizer = fixture::folder(name).join("tokenizer.json");
    std::fs::copy(tokenizer, saved.path().join("tokenizer.json")).expect("the file is written");
    let options = LoadOptions::new().dtype(DType::F32);
    Gemma4::load(saved.path(), device, options).expect("the model is valid")
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
fn quantized_model_tokens_and_logits_equal_the_dequantized_model() {
    for device in devices() {
        for case in CASES {
            let what = format!("{case:?} {}", device.name);
            let models = both(case, &device.device);
            let [found, expected] = models.each_ref().map(|gemma| {
                let prompt = tokens(&[&PROMPT], &device.device);
                values(
                    gemma
                        .model()
                        .forward(prompt)
                        .expect("the tokens are in the vocabulary"),
                )
            });
            assert_close(&found, &expected, &what);
            let [found, expected] = models.each_ref().map(|gemma| {
                let options = greedy(gemma, 12);
                let prompt = PROMPT.to_vec();
                let generation = gemma.generate(prompt, &options, |_| ControlFlow::Continue(()));
                generation.expect("the generation succeeds").tokens
            });
            assert_eq!(found, expected, "{what}");
        }
    }
}

/// The decode kernels over quantized weights give the logits of the dequantized model. The tested batches have one
/// sequence, a few sequences, as many sequences as the decode kernels support, and more sequences than that.
#[test]
fn quantized_decode_by_kernels_equals_the_dequantized_model() {
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
                step.expect("the step succeeds");
                let mut decoder = gemma.model().decoder(&mut cache);
                let mut logits = Vec::new();
                for token in &PROMPT[5..11] {
                    let next = decoder
                        .step(&vec![*token; batch])
                        .expect("the step succeeds");
                    logits.extend(next.logits().expect("the logits are readable"));
                }
                let by_kernels = device.device != Device::flex() && batch <= 8;
                assert_eq!(decoder.mode() != DecodeMode::Layers, by_kernels, "{what}");
                logits
            });
            assert_close(&found, &expected, &what);
        }
    }
}

/// A visitor that collects the packed weights of a model, each with its number of rows and its number of 32-bit words per
/// row. The visitor also adds up the bytes of the unquantized weights.
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

/// The memory of a quantized model is the sum of its packed rows and its unquantized weights. The 64 columns of a row
/// take 16 words (32 bits each) with 8-bit codes, or 8 words with 4-bit codes. One more word holds two scales. The row
/// is then padded to a multiple of 4 words.
#[test]
fn quantized_model_bytes_are_those_of_the_packed_rows() {
    for (form, words) in [(Quantization::Q8, 20), (Quantization::Q4, 12)] {
        let gemma = load("dense-ple", &Device::flex(), form).expect("the model is valid");
        let mut held = Words::default();
        gemma.model().visit(&mut held);
        let table = ("embed_tokens.weight.words".to_owned(), [320, words]);
        assert!(held.found.contains(&table), "{:?}", held.found);
        let of_words = |[rows, words]: [usize; 2]| 4 * rows * words;
        let all: usize = held.found.iter().map(|(_, shape)| of_words(*shape)).sum();
        assert_eq!(gemma.model().parameter_bytes(), all + held.whole);

        let mut of_whole = Words::default();
        let whole =
            load("dense-ple", &Device::flex(), Quantization::Stored).expect("the model is valid");
        whole.model().visit(&mut of_whole);
        assert_eq!(whole.model().parameter_bytes(), of_whole.whole);
        // A row of the per-layer table is shorter than a quantization block, so the table stays unquantized. Every packed
        // row of `words` words replaces at least 64 f32 elements. The packed bytes are therefore at most `words / 64` of the
        // bytes of the replaced elements.
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

/// A model may be quantized after loading or while loading, and the logits are the same. The test also dequantizes the
/// model that was quantized after loading.
#[test]
fn quantize_of_a_loaded_model_equals_quantizing_while_loading() {
    let device = Device::flex();
    let prompt = || tokens(&[&PROMPT], &device);
    let logits = |model: &Gemma4Model| values(model.forward(prompt()).expect("valid tokens"));
    for form in [Quantization::Q8, Quantization::Q4] {
        let loaded = load("moe", &device, form).expect("the model is valid");
        let whole = load("moe", &device, Quantization::Whole).expect("the model is valid");
        let quantized = whole
            .model()
            .clone()
            .quantize(form)
            .expect("the model is valid");
        assert_eq!(logits(&quantized), logits(loaded.model()));
        let again = quantized
            .quantize(Quantization::Whole)
            .expect("the model is valid");
        assert!(!again.is_quantized());
        assert_eq!(again.parameter_bytes(), whole.model().parameter_bytes());
        assert_close(&logits(&again), &logits(loaded.model()), "whole again");
    }
}

#[test]
fn quantized_model_in_f16_is_as_close_to_f32_as_the_dequantized() {
    for device in devices() {
        if !device.device.supports_dtype(DType::F16) {
            continue;
        }
        let fixture = Fixture::open("dense-ple");
        let logits = |dtype: DType, form: Quantization| {
            let options = LoadOptions::new().dtype(dtype).quantization(form);
            let path = fixture::folder("gguf/dense-ple.Q8_0.gguf");
            let model =
                Gemma4Model::load(path, &device.device, options).expect("the model is valid");
            let mut cache = model.cache(vec![0]);
            let prompt = tokens(&[&fixture.prompt], &device.device);
            let step = model
                .step(prompt, &mut cache, Logits::Last(1))
                .expect("the step succeeds");
            values(step.expect("logits were requested").cast(DType::F32))
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

/// Over quantized weights, only adapters can be trained. Training any other parameter is an error.
#[test]
fn quantized_model_full_training_is_refused() {
    let plain = Device::flex();
    let device = plain.clone().autodiff();
    let is_refused = |found: Result<(), Gemma4Error>| {
        assert!(matches!(found, Err(Gemma4Error::Quantized)), "{found:?}");
    };
    let prompt = || tokens(&[&PROMPT], &device);
    let loaded = load("gguf/dense-ple.Q8_0.gguf", &device, Quantization::Stored)
        .expect("the model is valid");
    let quantized = load("dense-ple", &plain, Quantization::Q8).expect("the model is valid");
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
        let hidden = model
            .hidden(prompt(), Logits::All)
            .expect("the hidden states are computed");
        assert!(hidden.is_tracked());
        is_refused(model.loss(hidden, targets.clone()).map(drop));
    }

    // A forward without gradients works.
    let hidden = quantized
        .model()
        .hidden(tokens(&[&PROMPT], &plain), Logits::All);
    let loss = quantized.model().loss(
        hidden.expect("the hidden states are computed"),
        tokens(&[&PROMPT], &plain),
    );
    assert!(loss.expect("the loss is computed").into_scalar::<f32>() > 0.0);
}

/// Merging an adapter dequantizes only the matrices that the adapter changes.
#[test]
fn quantized_model_merge_dequantizes_the_adapters_matrices() {
    let name = "dense-ple";
    let device = Device::flex();
    let trained =
        load(name, &device.clone().autodiff(), Quantization::Stored).expect("the model is valid");
    let adapter = Adapter {
        rank: 2,
        alpha: 4.0,
        modules: ["q_proj", "down_proj"].map(String::from).into(),
        ..Adapter::new(1, 1.0)
    };
    let model = adapter
        .attach(trained.model().clone())
        .expect("the adapter is valid");
    let folder = TempDir::new().expect("a temporary folder");
    adapter
        .save(&model, folder.path(), name)
        .expect("the save succeeds");

    let quantized = load(name, &device, Quantization::Q8).expect("the model is valid");
    let before = quantized.model().parameter_bytes();
    let prompt = || tokens(&[&PROMPT], &device);
    let logits = |gemma: &Gemma4| values(gemma.model().forward(prompt()).expect("valid tokens"));
    let expected = logits(&quantized);
    let merged = quantized
        .merge_adapter(folder.path())
        .expect("the merge succeeds");
    assert!(merged.model().parameter_bytes() > before);
    assert!(merged.model().is_quantized());
    assert_close(&logits(&merged), &expected, "an adapter that adds nothing");

    // A program that quantizes while loading attaches the adapter instead of merging it, because a merge would
    // dequantize the weights that the adapter changes.
    let arguments = ModelArguments {
        model: Some(fixture::folder(name)),
        device: DeviceName::Flex.into(),
        dtype: Some(Dtype::F32),
        quantize: Some(WeightForm::Q8),
        per_layer_table: Table::Auto,
    };
    let loaded = arguments
        .load(Some(folder.path()))
        .expect("the model is valid")
        .gemma;
    let (held, whole) = (
        loaded.model().parameter_bytes(),
        merged.model().parameter_bytes(),
    );
    assert!(before < held && held < whole, "{before}, {held}, {whole}");
    assert_eq!(logits(&loaded), expected);
}

/// A quantized model gives the same hidden states on a device with autodiff as on a device without autodiff. Gradient
/// checkpointing does not change the hidden states either.
#[test]
fn quantized_model_on_autodiff_device_gives_equal_states() {
    let plain = Device::flex();
    let quantized = load("dense-ple", &plain, Quantization::Q4).expect("the model is valid");
    let states = |model: &Gemma4Model, device: &Device| {
        let hidden = model.hidden(tokens(&[&PROMPT], device), Logits::All);
        values(hidden.expect("the hidden states are computed"))
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

/// Quantization hardly changes the cross entropy of a text in the small trained model that `burn-gemma4` embeds. The cross
/// entropy changes by at most 1 % with 8 bits, and by at most 10 % with 4 bits.
#[test]
fn quantized_trained_model_keeps_its_loss() {
    let device = Device::flex();
    let loss = |form: Quantization| {
        let options = LoadOptions::new().dtype(DType::F32).quantization(form);
        let gemma = Gemma4::embedded(&device, options).expect("the model is valid");
        assert_eq!(gemma.model().is_quantized(), form != Quantization::Stored);
        let text: String = include_str!("../../LICENSE-APACHE")
            .chars()
            .take(2000)
            .collect();
        let text = gemma.tokenizer().encode(&text).expect("the text encodes");
        let (read, next) = (&text[..text.len() - 1], &text[1..]);
        let hidden = gemma.model().hidden(tokens(&[read], &device), Logits::All);
        let loss = gemma.model().loss(
            hidden.expect("the hidden states are computed"),
            tokens(&[next], &device),
        );
        loss.expect("the loss is computed").into_scalar::<f32>()
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
