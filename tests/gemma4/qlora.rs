//! Tests LoRA adapters over quantized weights (QLoRA). The gradients equal the gradients of the same adapters over
//! dequantized weights. The quantized weights stay packed in memory, even during training.

use crate::{
    devices::devices,
    fixture::{self, tokens, values},
    gradients::{relative, tracked},
};
use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{DType, Device, Int, Tensor, TensorData},
};
use burn_gemma4::{Adapter, DecodeMode, Gemma4Model, LoadOptions, Logits, Quantization};
use std::collections::BTreeMap;
use tempfile::TempDir;

/// The test cases. Each case is a checkpoint and the way in which its weights are quantized. The cases cover all bit
/// widths, zero points, block minima, experts, per-layer embeddings and tied output heads.
const CASES: [(&str, Quantization); 7] = [
    ("dense-ple", Quantization::Q4),
    ("moe", Quantization::Q8),
    ("gguf/dense-ple.Q8_0.gguf", Quantization::Stored),
    ("gguf/wide.Q4_K_M.gguf", Quantization::Stored),
    ("gguf/moe.Q4_0.gguf", Quantization::Stored),
    ("compressed/mixed", Quantization::Stored),
    ("compressed/experts", Quantization::Stored),
];
const PROMPT: [u32; 21] = [
    2, 24, 301, 33, 47, 210, 111, 85, 90, 24, 301, 34, 47, 25, 26, 310, 44, 45, 99, 100, 7,
];

/// Fills the LoRA matrices A and B with pseudo-random numbers. The numbers depend only on the paths of the matrices, so
/// all models get equal matrices.
#[derive(Default)]
struct Drawn {
    path: Vec<String>,
    count: usize,
}

impl ModuleMapper for Drawn {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        if !path.contains(".lora.") {
            assert!(!param.base().is_require_grad(), "{path} is trained");
            return param;
        }
        assert!(param.is_require_grad(), "{path} is not trained");
        self.count += 1;
        let seed = path.bytes().fold(7u32, |seed, byte| {
            seed.wrapping_mul(31).wrapping_add(u32::from(byte))
        });
        param.map(|factor| {
            let shape = factor.dims();
            let count = shape.iter().product::<usize>() as u32;
            let number = |index: u32| (seed.wrapping_add(index * index * 7919) % 2003) as f32;
            let numbers = (0..count).map(|index| number(index).sin() * 0.2).collect();
            let data = TensorData::new::<f32, _>(numbers, shape);
            Tensor::from_data(data, (&factor.device(), DType::F32)).require_grad()
        })
    }
}

/// A visitor that collects the gradients of the LoRA matrices A and B, each under the path of its matrix. The visitor
/// panics if any other parameter has a gradient.
struct Found<'a> {
    gradients: &'a GradientsParams,
    path: Vec<String>,
    found: BTreeMap<String, Vec<f32>>,
}

impl ModuleVisitor for Found<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        match (self.gradients.get::<D>(param.id), path.contains(".lora.")) {
            (Some(gradient), true) => {
                self.found.insert(path, values(gradient));
            }
            (found, is_adapter) => assert!(found.is_none() && !is_adapter, "{path}"),
        }
    }
}

/// Loads the checkpoint `dense-ple` with the quantization `form`.
fn dense_ple(form: Quantization, device: &Device) -> Gemma4Model {
    let options = LoadOptions::new().quantization(form);
    Gemma4Model::load(fixture::folder("dense-ple"), device, options).expect("the model is valid")
}

/// Attaches an adapter to `model`, and fills both of its matrices, A and B, with numbers. In an untrained adapter, B
/// would be zero and the adapter would have no effect.
pub fn adapted(model: Gemma4Model) -> Gemma4Model {
    let mut drawn = Drawn::default();
    let model = Adapter::new(2, 4.0)
        .attach(model)
        .expect("the adapter is valid");
    let model = model.map(&mut drawn);
    assert!(drawn.count > 0);
    model
}

/// Returns a loss and the gradients of the LoRA matrices. If `by_layer` is true, the function runs a separate backward
/// for each layer. Otherwise, it runs one backward through the whole model.
pub fn learned(
    model: &Gemma4Model,
    device: &Device,
    by_layer: bool,
) -> (f32, BTreeMap<String, Vec<f32>>) {
    let read = || tokens(&[&PROMPT[..PROMPT.len() - 1]], device);
    let next: Tensor<2, Int> = tokens(&[&PROMPT[1..]], device);
    let (loss, gradients) = match by_layer {
        true => model
            .gradients(read(), None, Logits::All, |hidden| model.loss(hidden, next))
            .expect("the gradients are computed"),
        false => {
            let hidden = model
                .hidden(read(), Logits::All)
                .expect("the hidden states are computed");
            let loss = model.loss(hidden, next).expect("the loss is computed");
            let gradients = GradientsParams::from_grads(loss.backward(), model);
            (loss, gradients)
        }
    };
    let mut found = Found {
        gradients: &gradients,
        path: Vec::new(),
        found: BTreeMap::new(),
    };
    model.visit(&mut found);
    (values(loss)[0], found.found)
}

#[test]
fn qlora_gradients_equal_those_over_dequantized_weights() {
    for device in devices() {
        // All devices except the CPU device `flex` compile kernels for every format and operator. To save compile time,
        // these devices run only one case with one checkpointing strategy.
        let is_flex = device.name == "flex";
        let (cases, ways) = if is_flex {
            (&CASES[..], 2)
        } else {
            (&CASES[2..3], 1)
        };
        for (name, form) in cases {
            for (strategy, tracked) in tracked(&device).into_iter().take(ways) {
                let options = LoadOptions::new().dtype(DType::F32).quantization(*form);
                let model = Gemma4Model::load(fixture::folder(name), &tracked, options);
                let quantized = model.expect("the model is valid");
                assert!(quantized.is_quantized());
                let whole = quantized.clone().quantize(Quantization::Whole);
                let whole = adapted(whole.expect("the model is valid"));
                assert!(!whole.is_quantized());
                let bytes = quantized.parameter_bytes();
                let quantized = adapted(quantized);
                assert!(quantized.is_quantized());
                // The LoRA matrices are the only bytes that attaching the adapter adds.
                let added = quantized.parameter_bytes() - bytes;
                let (expected_loss, expected) = learned(&whole, &tracked, false);
                let numbers: usize = expected.values().map(Vec::len).sum();
                assert_eq!(added, 4 * numbers, "{name}");
                for by_layer in [false, true] {
                    let what = format!("{name} on {strategy}, by layer: {by_layer}");
                    let (loss, found) = learned(&quantized, &tracked, by_layer);
                    let error = (loss - expected_loss).abs();
                    assert!(error <= 1e-5 * expected_loss, "{what}: {loss}");
                    assert!(found.keys().eq(expected.keys()), "{what}");
                    for (path, found) in found {
                        let error = relative(&found, &expected[&path]);
                        assert!(error <= 1e-4, "{what}: {path} is off by {error:e}");
                    }
                }
            }
        }
    }
}

/// A decode step of a single token also uses the adapter, although this step runs other kernels than a longer text.
#[test]
fn qlora_decode_of_one_token_uses_the_adapter() {
    for device in devices() {
        let path = fixture::folder("gguf/dense-ple.Q8_0.gguf");
        let options = LoadOptions::new().dtype(DType::F32);
        let tracked = device.device.clone().autodiff();
        let model = Gemma4Model::load(path, &tracked, options).expect("the model is valid");
        let model = adapted(model).valid();
        let read = |tokens_read: &[u32]| tokens(&[tokens_read], &device.device);
        let (last, before) = PROMPT.split_last().expect("the prompt is valid");
        let all = values(
            model
                .forward(read(&PROMPT))
                .expect("the tokens are in the vocabulary"),
        );
        let mut cache = model.cache(vec![0]);
        let step = model.step(read(before), &mut cache, Logits::None);
        assert!(step.expect("the step succeeds").is_none());
        let step = model.step(read(&[*last]), &mut cache, Logits::Last(1));
        let found = values(
            step.expect("the step succeeds")
                .expect("logits were requested"),
        );
        let expected = &all[all.len() - found.len()..];
        fixture::assert_close(&found, expected, device.name);
    }
}

/// A saved model includes the adapter. An adapter that is saved without the model can later be merged into the
/// quantized model.
#[test]
fn qlora_model_and_adapter_are_saved() {
    let device = Device::flex().autodiff();
    let name = "dense-ple";
    let options = LoadOptions::new().quantization(Quantization::Q4);
    let quantized =
        Gemma4Model::load(fixture::folder(name), &device, options).expect("the model is valid");
    let base = quantized.clone().valid();
    let model = adapted(quantized);
    let plain = Device::flex();
    let logits = |model: &Gemma4Model| {
        let logits = model.forward(tokens(&[&PROMPT], &plain));
        values(logits.expect("the tokens are in the vocabulary"))
    };
    let expected = logits(&model.valid());
    assert_ne!(expected, logits(&base));
    let folder = TempDir::new().expect("a temporary folder");
    let saved = folder.path().join("saved");
    model
        .save_like(fixture::folder(name), &saved, None)
        .expect("the save succeeds");
    let found = Gemma4Model::load(&saved, &plain, LoadOptions::new()).expect("the model is valid");
    assert!(!found.is_quantized());
    fixture::assert_close(&logits(&found), &expected, "saved");
    let alone = folder.path().join("adapter");
    Adapter::new(2, 4.0)
        .save(&model, &alone, name)
        .expect("the save succeeds");
    let found = base.merge_adapter(&alone).expect("the merge succeeds");
    fixture::assert_close(&logits(&found), &expected, "merged");
}

/// In prefill and in decode, an adapter that is loaded over quantized weights gives the results that the model had in
/// training. The adapter's matrices stay in f32 and are not quantized with the weights.
#[test]
fn qlora_attached_adapter_stays_unrounded_beside_quantized_weights() {
    let name = "dense-ple";
    let load = |device: &Device| dense_ple(Quantization::Q4, device);
    let mut adapter = Adapter::new(2, 3.0);
    for module in ["per_layer_input_gate", "per_layer_projection"] {
        adapter.modules.push(module.into());
    }
    let trained = adapter.attach(load(&Device::flex().autodiff()));
    let trained = trained
        .expect("the adapter is valid")
        .map(&mut Drawn::default());
    let folder = TempDir::new().expect("a temporary folder");
    adapter
        .save(&trained, folder.path(), name)
        .expect("the save succeeds");
    let plain = load(&Device::flex());
    let without = values(
        plain
            .forward(tokens(&[&PROMPT], &Device::flex()))
            .expect("the tokens are in the vocabulary"),
    );
    let merged = plain
        .merge_adapter(folder.path())
        .expect("the merge succeeds");
    let expected = values(
        merged
            .forward(tokens(&[&PROMPT], &Device::flex()))
            .expect("the tokens are in the vocabulary"),
    );
    let far = expected
        .iter()
        .zip(&without)
        .any(|(one, other)| (one - other).abs() > 0.1);
    assert!(far, "the adapter adds something");

    for device in devices() {
        let base = load(&device.device);
        let bytes = base.parameter_bytes();
        let model = base
            .attach_adapter(folder.path())
            .expect("the adapter is attached");
        let held = model.parameter_bytes();
        assert!(bytes < held && held < merged.parameter_bytes());
        let read = |read: &[u32]| tokens(&[read], &device.device);
        let all = values(
            model
                .forward(read(&PROMPT))
                .expect("the tokens are in the vocabulary"),
        );
        fixture::assert_close(&all, &expected, device.name);

        let (begun, rest) = PROMPT.split_at(PROMPT.len() - 4);
        let mut cache = model.cache(vec![0]);
        let step = model.step(read(begun), &mut cache, Logits::None);
        assert!(step.expect("the step succeeds").is_none());
        let mut decoder = model.decoder(&mut cache);
        let vocabulary = model.config().vocab_size;
        for (index, token) in rest.iter().enumerate() {
            let found = decoder.step(&[*token]).expect("the step succeeds").logits();
            let expected = &expected[(begun.len() + index) * vocabulary..][..vocabulary];
            fixture::assert_close(
                &found.expect("logits were requested"),
                expected,
                device.name,
            );
        }
        let by_layers = decoder.mode() == DecodeMode::Layers;
        assert_eq!(by_layers, !device.is_cube(), "{}", device.name);
    }
}

/// If an adapter is merged or attached a second time, the product of its matrices A and B is added to the weights once
/// more. The first merge dequantizes the weights, and the second merge adds to these dequantized weights.
#[test]
fn qlora_second_merged_adapter_adds_to_the_first() {
    let device = Device::flex();
    let load = |device: &Device| dense_ple(Quantization::Q8, device);
    let (model, tracked) = (load(&device), load(&device.clone().autodiff()));
    let adapter = Adapter::new(2, 4.0);
    let trained = adapter.attach(tracked).expect("the adapter is valid");
    let trained = trained.map(&mut Drawn::default());
    let folder = TempDir::new().expect("a temporary folder");
    adapter
        .save(&trained, folder.path(), "dense-ple")
        .expect("the save succeeds");
    let twice = |model: Gemma4Model, attach: bool| {
        let add = |model: Gemma4Model| match attach {
            true => model.attach_adapter(folder.path()),
            false => model.merge_adapter(folder.path()),
        };
        let model = add(add(model).expect("the first adapter is added"))
            .expect("the second adapter is added");
        values(
            model
                .forward(tokens(&[&PROMPT], &device))
                .expect("the tokens are in the vocabulary"),
        )
    };
    let expected = twice(model.clone(), false);
    fixture::assert_close(&twice(model, true), &expected, "twice");
}

/// Training a second adapter in addition to the first is refused, over quantized and over unquantized weights. Such training
/// would lose one of the two adapters.
#[test]
fn qlora_training_a_second_adapter_is_refused() {
    let device = Device::flex().autodiff();
    for form in [Quantization::Q8, Quantization::Stored] {
        let model = adapted(dense_ple(form, &device));
        let error = Adapter::new(2, 4.0).attach(model).map(|_| ());
        let error = error.expect_err("a second adapter is refused").to_string();
        assert!(
            error.starts_with("model") && error.contains("merged"),
            "{error}"
        );
    }
}

/// Dequantizing a model with an adapter leaves its logits unchanged, because the dequantized weights include the
/// adapter.
#[test]
fn qlora_dequantized_model_includes_the_adapter() {
    let device = Device::flex().autodiff();
    let load = || dense_ple(Quantization::Q8, &device);
    let model = adapted(load());
    let logits = |model: &Gemma4Model| {
        let logits = model.forward(tokens(&[&PROMPT], &device));
        values(logits.expect("the tokens are in the vocabulary"))
    };
    let expected = logits(&model);
    let whole = model
        .clone()
        .quantize(Quantization::Whole)
        .expect("the model is dequantized");
    assert!(!whole.is_quantized());
    fixture::assert_close(&logits(&whole), &expected, "whole");
    // An untrained adapter changes nothing, because its matrices B are zero.
    let folder = TempDir::new().expect("a temporary folder");
    let adapter = Adapter::new(2, 4.0);
    let untrained = adapter.attach(load()).expect("the adapter is valid");
    adapter
        .save(&untrained, folder.path(), "dense-ple")
        .expect("the save succeeds");
    for found in [
        model.clone().merge_adapter(folder.path()),
        model.attach_adapter(folder.path()),
    ] {
        fixture::assert_close(
            &logits(&found.expect("the merge succeeds")),
            &expected,
            "merged",
        );
    }
}

/// An adapter for norms is refused, because a norm has no weight matrix to which the product of A and B could be added.
#[test]
fn qlora_module_without_a_matrix_is_refused() {
    let device = Device::flex().autodiff();
    for form in [Quantization::Q8, Quantization::Stored] {
        let adapter = Adapter {
            modules: vec!["q_norm".into()],
            ..Adapter::new(2, 4.0)
        };
        let error = adapter.attach(dense_ple(form, &device)).map(|_| ());
        let error = error.expect_err("norms have no matrix").to_string();
        assert!(error.starts_with("modules"), "{error}");
    }
}
