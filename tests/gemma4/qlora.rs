//! Adapters over quantized weights: they learn what they would over the same numbers as whole weights, in the memory of the words.

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

/// Of all bits, with smallest numbers, zero points and none, experts, per-layer embeddings and a head that is the table.
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

/// Adapters' factors by their paths, the same in every model.
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

/// The gradients of adapters' factors by their paths, of a backward as a whole.
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

/// The checkpoint of that name with weights in this form.
fn dense_ple(form: Quantization, device: &Device) -> Gemma4Model {
    let options = LoadOptions::new().quantization(form);
    Gemma4Model::load(fixture::folder("dense-ple"), device, options).expect("a model")
}

/// With an adapter of its own of which nothing is zero.
pub fn adapted(model: Gemma4Model) -> Gemma4Model {
    let mut drawn = Drawn::default();
    let model = Adapter::new(2, 4.0).attach(model).expect("an adapter");
    let model = model.map(&mut drawn);
    assert!(drawn.count > 0);
    model
}

/// A loss and the gradients of the factors: by a backward as a whole, or by layers.
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
            .expect("gradients"),
        false => {
            let hidden = model.hidden(read(), Logits::All).expect("states");
            let loss = model.loss(hidden, next).expect("a loss");
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
fn adapters_learn_what_they_learn_over_whole_weights() {
    for device in devices() {
        // Elsewhere every format and operator is a kernel to compile; what is around them is the same.
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
                let quantized = model.expect("a model");
                assert!(quantized.is_quantized());
                let whole = quantized.clone().quantize(Quantization::Whole);
                let whole = adapted(whole.expect("a model"));
                assert!(!whole.is_quantized());
                let bytes = quantized.parameter_bytes();
                let quantized = adapted(quantized);
                assert!(quantized.is_quantized());
                // The factors alone are added.
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

/// Also where a token is read alone, by other kernels than a text.
#[test]
fn a_token_is_read_with_the_adapter() {
    for device in devices() {
        let path = fixture::folder("gguf/dense-ple.Q8_0.gguf");
        let options = LoadOptions::new().dtype(DType::F32);
        let tracked = device.device.clone().autodiff();
        let model = Gemma4Model::load(path, &tracked, options).expect("a model");
        let model = adapted(model).valid();
        let read = |tokens_read: &[u32]| tokens(&[tokens_read], &device.device);
        let (last, before) = PROMPT.split_last().expect("a prompt");
        let all = values(model.forward(read(&PROMPT)).expect("tokens within"));
        let mut cache = model.cache(vec![0]);
        let step = model.step(read(before), &mut cache, Logits::None);
        assert!(step.expect("a step").is_none());
        let step = model.step(read(&[*last]), &mut cache, Logits::Last(1));
        let found = values(step.expect("a step").expect("logits"));
        let expected = &all[all.len() - found.len()..];
        fixture::assert_close(&found, expected, device.name);
    }
}

/// What is saved has the adapter in it; the adapter alone is what it is over whole weights.
#[test]
fn it_is_saved_whole_or_alone() {
    let device = Device::flex().autodiff();
    let name = "dense-ple";
    let options = LoadOptions::new().quantization(Quantization::Q4);
    let quantized = Gemma4Model::load(fixture::folder(name), &device, options).expect("a model");
    let base = quantized.clone().valid();
    let model = adapted(quantized);
    let plain = Device::flex();
    let logits = |model: &Gemma4Model| {
        let logits = model.forward(tokens(&[&PROMPT], &plain));
        values(logits.expect("tokens within"))
    };
    let expected = logits(&model.valid());
    assert_ne!(expected, logits(&base));
    let folder = TempDir::new().expect("a folder");
    let saved = folder.path().join("saved");
    model
        .save_like(fixture::folder(name), &saved, None)
        .expect("saved");
    let found = Gemma4Model::load(&saved, &plain, LoadOptions::new()).expect("a model");
    assert!(!found.is_quantized());
    fixture::assert_close(&logits(&found), &expected, "saved");
    let alone = folder.path().join("adapter");
    Adapter::new(2, 4.0)
        .save(&model, &alone, name)
        .expect("saved");
    let found = base.merge_adapter(&alone).expect("merged");
    fixture::assert_close(&logits(&found), &expected, "merged");
}

/// An adapter that is loaded over quantized weights is what it was when it was trained over them, in prompts and in decoding: it is not
/// rounded with them.
#[test]
fn it_stays_beside_quantized_weights() {
    let name = "dense-ple";
    let load = |device: &Device| dense_ple(Quantization::Q4, device);
    let mut adapter = Adapter::new(2, 3.0);
    for module in ["per_layer_input_gate", "per_layer_projection"] {
        adapter.modules.push(module.into());
    }
    let trained = adapter.attach(load(&Device::flex().autodiff()));
    let trained = trained.expect("an adapter").map(&mut Drawn::default());
    let folder = TempDir::new().expect("a folder");
    adapter.save(&trained, folder.path(), name).expect("saved");
    let plain = load(&Device::flex());
    let without = values(
        plain
            .forward(tokens(&[&PROMPT], &Device::flex()))
            .expect("logits"),
    );
    let merged = plain.merge_adapter(folder.path()).expect("merged");
    let expected = values(
        merged
            .forward(tokens(&[&PROMPT], &Device::flex()))
            .expect("logits"),
    );
    let far = expected
        .iter()
        .zip(&without)
        .any(|(one, other)| (one - other).abs() > 0.1);
    assert!(far, "the adapter adds something");

    for device in devices() {
        let base = load(&device.device);
        let bytes = base.parameter_bytes();
        let model = base.attach_adapter(folder.path()).expect("attached");
        let held = model.parameter_bytes();
        assert!(bytes < held && held < merged.parameter_bytes());
        let read = |read: &[u32]| tokens(&[read], &device.device);
        let all = values(model.forward(read(&PROMPT)).expect("tokens within"));
        fixture::assert_close(&all, &expected, device.name);

        let (begun, rest) = PROMPT.split_at(PROMPT.len() - 4);
        let mut cache = model.cache(vec![0]);
        let step = model.step(read(begun), &mut cache, Logits::None);
        assert!(step.expect("a step").is_none());
        let mut decoder = model.decoder(&mut cache);
        let vocabulary = model.config().vocab_size;
        for (index, token) in rest.iter().enumerate() {
            let found = decoder.step(&[*token]).expect("a step").logits();
            let expected = &expected[(begun.len() + index) * vocabulary..][..vocabulary];
            fixture::assert_close(&found.expect("logits"), expected, device.name);
        }
        let by_layers = decoder.mode() == DecodeMode::Layers;
        assert_eq!(by_layers, !device.is_cube(), "{}", device.name);
    }
}

/// A second adapter finds the first one's weights whole.
#[test]
fn one_may_come_after_another() {
    let device = Device::flex();
    let load = |device: &Device| dense_ple(Quantization::Q8, device);
    let (model, tracked) = (load(&device), load(&device.clone().autodiff()));
    let adapter = Adapter::new(2, 4.0);
    let trained = adapter.attach(tracked).expect("an adapter");
    let trained = trained.map(&mut Drawn::default());
    let folder = TempDir::new().expect("a folder");
    adapter
        .save(&trained, folder.path(), "dense-ple")
        .expect("saved");
    let twice = |model: Gemma4Model, attach: bool| {
        let add = |model: Gemma4Model| match attach {
            true => model.attach_adapter(folder.path()),
            false => model.merge_adapter(folder.path()),
        };
        let model = add(add(model).expect("once")).expect("twice");
        values(model.forward(tokens(&[&PROMPT], &device)).expect("logits"))
    };
    let expected = twice(model.clone(), false);
    fixture::assert_close(&twice(model, true), &expected, "twice");
}

/// Neither over words nor over whole weights, one of which would lose the first and the other the second.
#[test]
fn a_second_one_is_not_trained_beside_the_first() {
    let device = Device::flex().autodiff();
    for form in [Quantization::Q8, Quantization::Stored] {
        let model = adapted(dense_ple(form, &device));
        let error = Adapter::new(2, 4.0).attach(model).map(|_| ());
        let error = error.expect_err("a second adapter").to_string();
        assert!(
            error.starts_with("model") && error.contains("merged"),
            "{error}"
        );
    }
}

/// A model that is being trained becomes whole, with what its adapter has learned.
#[test]
fn what_is_trained_over_words_becomes_whole() {
    let device = Device::flex().autodiff();
    let load = || dense_ple(Quantization::Q8, &device);
    let model = adapted(load());
    let logits = |model: &Gemma4Model| {
        let logits = model.forward(tokens(&[&PROMPT], &device));
        values(logits.expect("tokens within"))
    };
    let expected = logits(&model);
    let whole = model.clone().quantize(Quantization::Whole).expect("whole");
    assert!(!whole.is_quantized());
    fixture::assert_close(&logits(&whole), &expected, "whole");
    // Over nothing but zeros it stays what it is.
    let folder = TempDir::new().expect("a folder");
    let adapter = Adapter::new(2, 4.0);
    let untrained = adapter.attach(load()).expect("an adapter");
    adapter
        .save(&untrained, folder.path(), "dense-ple")
        .expect("saved");
    for found in [
        model.clone().merge_adapter(folder.path()),
        model.attach_adapter(folder.path()),
    ] {
        fixture::assert_close(&logits(&found.expect("merged")), &expected, "merged");
    }
}

/// Norms have no factors.
#[test]
fn modules_without_a_matrix_are_refused() {
    let device = Device::flex().autodiff();
    for form in [Quantization::Q8, Quantization::Stored] {
        let adapter = Adapter {
            modules: vec!["q_norm".into()],
            ..Adapter::new(2, 4.0)
        };
        let error = adapter.attach(dense_ple(form, &device)).map(|_| ());
        let error = error.expect_err("no matrix").to_string();
        assert!(error.starts_with("modules"), "{error}");
    }
}
