//! Tests the table of per-layer embeddings on the host, on the device in one buffer, and on the device in several buffers.
//! All three give bitwise equal embeddings and the same texts. By default, the table is on the device if it fits, and
//! otherwise on the host.

use crate::devices::devices;
use crate::fixture::{Fixture, folder, greedy, tokens, values};
use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{DType, Device, Int, Tensor},
};
use burn_gemma4::{
    Adapter, DecodeMode, DeviceMemory, Drafts, Gemma4, Gemma4Error, Gemma4Model, GenerateOptions,
    LoadOptions, Logits, PerLayerTable, Prompt, Quantization, TensorProblem,
    observe::{Observer, Site},
};
use safetensors::{Dtype, tensor::TensorView};
use std::{collections::BTreeMap, fs, ops::ControlFlow};
use tempfile::TempDir;

const TABLE: &str = "model.embed_tokens_per_layer.weight";

/// The checkpoints of every file format, each with the quantization option with which it is loaded.
const CASES: [(&str, Quantization); 6] = [
    ("dense-ple", Quantization::Stored),
    ("dense-ple-mm-bf16", Quantization::Stored),
    ("dense-ple", Quantization::Q8),
    ("gguf/dense-ple.Q8_0.gguf", Quantization::Stored),
    ("gguf/dense-ple.Q8_0.gguf", Quantization::Whole),
    ("compressed/mixed", Quantization::Stored),
];

/// Returns a memory limit for a model. Under this limit, the table of per-layer embeddings needs several buffers, but
/// every other weight fits into one buffer.
fn small_buffers((name, quantization): (&str, Quantization), dtype: DType) -> DeviceMemory {
    let options = LoadOptions::new().dtype(dtype).quantization(quantization);
    let model = load(name, &Device::flex(), options).model().clone();
    let mut largest = Largest::default();
    model.visit(&mut largest);
    DeviceMemory {
        largest_buffer: Some(largest.bytes),
        total: None,
    }
}

/// A visitor that finds the size in bytes of the largest weight except the table.
#[derive(Default)]
struct Largest {
    path: Vec<String>,
    bytes: usize,
}

impl ModuleVisitor for Largest {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.path[0] != "embed_tokens_per_layer" {
            let bytes = param.val().into_data().as_bytes().len();
            self.bytes = self.bytes.max(bytes);
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        if self.path[0] != "embed_tokens_per_layer" {
            let bytes = param.val().into_data().as_bytes().len();
            self.bytes = self.bytes.max(bytes);
        }
    }
}

fn load(name: &str, device: &Device, options: LoadOptions<'_>) -> Gemma4 {
    Gemma4::load(folder(name), device, options).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Returns the model three times: with its table on the device in one buffer, on the host, and on the device in several
/// buffers.
fn everywhere(case: (&str, Quantization), device: &Device, dtype: DType) -> [Gemma4; 3] {
    let (name, quantization) = case;
    // The option `quantization` quantizes only a table on the device, not a table on the host. If the file itself is
    // quantized, the table has the same elements on the host as on the device.
    let form = || LoadOptions::new().dtype(dtype).quantization(quantization);
    let on_device = form().per_layer_table(PerLayerTable::Device);
    let on_host = form().per_layer_table(PerLayerTable::Host);
    let split = form()
        .per_layer_table(PerLayerTable::Device)
        .memory(small_buffers(case, dtype));
    [on_device, on_host, split].map(|options| load(name, device, options))
}

/// Records the per-layer embeddings of a forward.
#[derive(Default)]
struct Embeddings(Vec<f32>);

impl Observer for Embeddings {
    fn observe<const D: usize>(&mut self, site: Site, tensor: impl FnOnce() -> Tensor<D>) {
        if let Site::PerLayerEmbeddings = site {
            self.0 = values(tensor());
        }
    }
}

fn embeddings(model: &Gemma4Model, prompt: &[u32]) -> Vec<f32> {
    let mut found = Embeddings::default();
    let input = tokens(&[prompt], &model.device());
    model
        .forward_observed(input, &mut found)
        .expect("the tokens are in the vocabulary");
    found.0
}

/// Returns a prompt that contains the first and the last token of the vocabulary, and some tokens twice.
fn prompt(gemma: &Gemma4) -> Vec<u32> {
    let last = gemma.config().vocab_size as u32 - 1;
    let mut prompt: Vec<u32> = (0..=last).step_by(7).collect();
    prompt.extend([last, last - 1, 0, 0, last]);
    prompt
}

fn generated(gemma: &Gemma4, prompt: &[u32], options: &GenerateOptions) -> Vec<u32> {
    gemma
        .generate(prompt.to_vec(), options, |_| ControlFlow::Continue(()))
        .expect("the generation succeeds")
        .tokens
}

#[test]
fn per_layer_table_gives_equal_bits_and_texts_everywhere() {
    for device in devices() {
        for case in CASES {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let is_plain = case == CASES[0];
                // On devices that run CubeCL kernels, only the unquantized format runs, because other tests cover the
                // kernels of the quantized formats.
                let is_of_kernels = device.device == Device::flex() || is_plain;
                if !device.device.supports_dtype(dtype)
                    || !is_of_kernels
                    || (dtype != DType::F32 && !is_plain)
                {
                    continue;
                }
                let what = format!("{case:?} {} {dtype:?}", device.name);
                let [on_device, on_host, split] = everywhere(case, &device.device, dtype);
                let placed =
                    |gemma: &Gemma4| gemma.model().per_layer_table().expect("there is a table");
                assert!(!placed(&on_device).is_on_host, "{what}");
                assert_eq!(placed(&on_device).buffers, 1, "{what}");
                assert!(placed(&on_host).is_on_host, "{what}");
                assert!(!placed(&split).is_on_host, "{what}");
                assert_eq!(placed(&split).buffers, 2, "{what}");
                let prompt = prompt(&on_device);
                let expected = embeddings(on_device.model(), &prompt);
                let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
                let expected: Vec<u32> = bits(expected);
                let options = greedy(&on_device, 4);
                let text = |gemma| match dtype {
                    DType::F32 => generated(gemma, &prompt, &options),
                    _ => Vec::new(),
                };
                let expected_text = text(&on_device);
                assert_eq!(bits(embeddings(split.model(), &prompt)), expected, "{what}");
                assert_eq!(text(&split), expected_text, "{what}");
                if case.1 == Quantization::Q8 {
                    // The table on the host stores the unquantized elements, but the table on the device is quantized to
                    // Q8_0. Their embeddings therefore differ.
                    continue;
                }
                assert_eq!(
                    bits(embeddings(on_host.model(), &prompt)),
                    expected,
                    "{what}"
                );
                assert_eq!(text(&on_host), expected_text, "{what}");
            }
        }
    }
}

/// Captured decode passes can read a table that is on the host. Before each replay, the host provides the table rows
/// for the tokens of the pass. The test decodes two sequences, with one token of each sequence per pass.
#[test]
fn per_layer_table_on_host_is_read_by_decode_steps() {
    for device in devices() {
        let options = LoadOptions::new().dtype(DType::F32);
        let options = options.per_layer_table(PerLayerTable::Host);
        let gemma = load("dense-ple", &device.device, options);
        let fixture = Fixture::open("dense-ple");
        let text = [&fixture.prompt[..], &fixture.generated].concat();
        let text = &text[..14];
        let vocabulary = gemma.config().vocab_size;
        let batch = 2;
        let what = format!("{batch} sequences, {}", device.name);
        let rows: Vec<Vec<u32>> = (0..batch)
            .map(|row| {
                let mut text = text.to_vec();
                text.rotate_left(row);
                text
            })
            .collect();
        let mut cache = gemma.model().cache(vec![0; batch]);
        let first: Vec<&[u32]> = rows.iter().map(|row| &row[..5]).collect();
        let read = tokens(&first, &device.device);
        let step = gemma.model().step(read, &mut cache, Logits::None);
        step.expect("the step succeeds");
        let mut decoder = gemma.model().decoder(&mut cache);
        let mut found = Vec::new();
        for column in 5..text.len() {
            let column: Vec<u32> = rows.iter().map(|row| row[column]).collect();
            let next = decoder.step(&column).expect("the step succeeds");
            found.push(next.logits().expect("the logits are readable"));
        }
        if device.device != Device::flex() {
            assert_eq!(decoder.mode(), DecodeMode::Graph, "{what}");
        }
        for (row, text) in rows.iter().enumerate() {
            let input = tokens(&[text], &device.device);
            let expected = values(
                gemma
                    .model()
                    .forward(input)
                    .expect("the tokens are in the vocabulary"),
            );
            for (step, found) in found.iter().enumerate() {
                crate::fixture::assert_close(
                    &found[row * vocabulary..][..vocabulary],
                    &expected[(5 + step) * vocabulary..][..vocabulary],
                    &format!("{what} row {row} step {step}"),
                );
            }
        }
    }
}

#[test]
fn per_layer_table_with_drafts_and_batches_gives_equal_texts() {
    for device in devices() {
        let prompts = [vec![2, 50, 60, 50, 60, 50], vec![2, 7], vec![2, 50, 60, 50]];
        let [expected, found] = [PerLayerTable::Device, PerLayerTable::Host].map(|table| {
            let options = LoadOptions::new().dtype(DType::F32).per_layer_table(table);
            let gemma = load("dense-ple", &device.device, options);
            let gemma = gemma.with_drafter(folder("assistant-ple"));
            let gemma = gemma.expect("the drafter is valid");
            let plain = greedy(&gemma, 8);
            let with = |drafts| GenerateOptions {
                drafts,
                ..plain.clone()
            };
            let mut texts = vec![generated(&gemma, &prompts[0], &plain)];
            texts.push(generated(&gemma, &prompts[0], &with(Drafts::Drafter)));
            let chunked = GenerateOptions {
                prefill_chunk: Some(4),
                ..with(Drafts::Lookup)
            };
            texts.push(generated(&gemma, &prompts[0], &chunked));
            assert!(texts.iter().all(|text| *text == texts[0]), "{table:?}");
            let prompts = prompts.clone().map(Prompt::Tokens);
            let batch = gemma.generate_batch(&prompts, &plain);
            texts.extend(
                batch
                    .expect("the generations succeed")
                    .into_iter()
                    .map(|one| one.tokens),
            );
            texts
        });
        assert_eq!(found, expected, "{}", device.name);
    }
}

/// A table on the host has no gradient. All other trained parameters have the same gradients as with the table on the
/// device. The first case trains all weights, and the second case trains only an adapter.
#[test]
fn per_layer_table_on_host_leaves_other_gradients_unchanged() {
    /// A visitor that collects the gradients, keyed by the paths of their parameters.
    struct Found<'a> {
        path: Vec<String>,
        gradients: &'a burn::optim::GradientsParams,
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
            if let Some(gradient) = self.gradients.get::<D>(param.id) {
                self.found.insert(self.path.join("."), values(gradient));
            }
        }
    }
    let device = Device::flex().autodiff();
    for adapts in [false, true] {
        let [on_device, on_host] = [PerLayerTable::Device, PerLayerTable::Host].map(|table| {
            let options = LoadOptions::new().per_layer_table(table);
            let model = Gemma4Model::load(folder("dense-ple"), &device, options)
                .expect("the model is valid");
            device.seed(7);
            let model = match adapts {
                true => Adapter::new(4, 8.0)
                    .attach(model)
                    .expect("the adapter is attached"),
                false => model,
            };
            let ids = [2, 50, 60, 50, 60, 7, 319, 0];
            let read = tokens(&[&ids[..7]], &device);
            let next = tokens(&[&ids[1..]], &device);
            let (_, gradients) = model
                .gradients(read, None, Logits::All, |hidden| model.loss(hidden, next))
                .expect("the gradients are computed");
            let mut found = Found {
                path: Vec::new(),
                gradients: &gradients,
                found: BTreeMap::new(),
            };
            model.visit(&mut found);
            found.found
        });
        assert!(on_host.len() > 10);
        let mut expected = on_device;
        let of_table = expected.remove("embed_tokens_per_layer.weight");
        assert_eq!(of_table.is_some(), !adapts);
        assert_eq!(on_host, expected);
    }
}

#[test]
fn per_layer_table_is_saved_from_everywhere() {
    let device = Device::flex();
    for case in [
        ("dense-ple", Quantization::Stored),
        ("gguf/dense-ple.Q8_0.gguf", Quantization::Stored),
    ] {
        for dtype in [None, Some(DType::BF16)] {
            let [expected, on_host, split] = everywhere(case, &device, DType::F32).map(|gemma| {
                let saved = TempDir::new().expect("a temporary folder");
                gemma
                    .model()
                    .save(saved.path(), dtype)
                    .expect("the save succeeds");
                crate::fixture::read(saved.path().join("model.safetensors"))
                    .into_iter()
                    .map(|(name, tensor)| (name, tensor.values))
                    .collect::<BTreeMap<_, _>>()
            });
            assert!(expected.contains_key(TABLE));
            assert_eq!(on_host, expected, "{case:?}");
            assert_eq!(split, expected, "{case:?}");
        }
    }
    let options = LoadOptions::new().per_layer_table(PerLayerTable::Host);
    let model = load("dense-ple-mm-bf16", &device, options);
    let saved = TempDir::new().expect("a temporary folder");
    let base = folder("dense-ple-mm-bf16");
    let like = model.model().save_like(&base, saved.path(), None);
    like.expect("the save succeeds");
    let table = |path| {
        let tensors = crate::fixture::read(path);
        let name = "model.language_model.embed_tokens_per_layer.weight";
        tensors[name].values.clone()
    };
    let written = table(saved.path().join("model.safetensors"));
    assert_eq!(written, table(base.join("model.safetensors")));
}

/// By default, the table is on the device if the device reports enough memory for the table. Otherwise the table is on the
/// host.
#[test]
fn per_layer_table_goes_where_it_fits() {
    let device = Device::flex();
    let placed = |memory| {
        let options = LoadOptions::new().memory(memory);
        load("dense-ple", &device, options)
            .model()
            .per_layer_table()
            .expect("the model has a table")
    };
    let unknown = DeviceMemory::default();
    let all = placed(unknown);
    assert_eq!(all.bytes, 320 * 96 * 4);
    assert!(!all.is_on_host);
    let whole = all.bytes + all.other_bytes;
    for (memory, is_on_host, words) in [
        (unknown, false, &["on the device"][..]),
        (
            DeviceMemory {
                largest_buffer: Some(all.bytes),
                total: Some(whole.div_ceil(7) * 8),
            },
            false,
            &["122.9 KB on the device"],
        ),
        (
            DeviceMemory {
                largest_buffer: Some(all.bytes - 1),
                total: None,
            },
            true,
            &["stay in the file", "122.9 KB in a buffer"],
        ),
        (
            DeviceMemory {
                largest_buffer: None,
                total: Some(whole),
            },
            true,
            &["stay in the file", "122.9 KB more"],
        ),
    ] {
        let placement = placed(memory);
        assert_eq!(placement.is_on_host, is_on_host, "{memory:?}");
        for word in words {
            let said = placement.to_string();
            assert!(said.contains(word), "{said}");
        }
    }
    // A model without per-layer embeddings has no table.
    let other = load("dense-keqv", &device, LoadOptions::new());
    assert_eq!(other.model().per_layer_table(), None);
}

#[test]
fn per_layer_table_beyond_the_largest_buffer_is_refused() {
    let load = |device: &Device, largest_buffer, table| {
        let memory = DeviceMemory {
            largest_buffer: Some(largest_buffer),
            total: None,
        };
        let options = LoadOptions::new().memory(memory).per_layer_table(table);
        match Gemma4Model::load(folder("dense-ple"), device, options) {
            Err(Gemma4Error::Device(reason)) => reason,
            other => panic!("{other:?}"),
        }
    };
    let flex = Device::flex();
    for table in [PerLayerTable::Auto, PerLayerTable::Host] {
        let reason = load(&flex, 70_000, table);
        assert!(
            reason.contains("model.embed_tokens.weight takes 81.9 KB in f32"),
            "{reason}"
        );
    }
    // A table in several buffers cannot be trained.
    let reason = load(&flex.autodiff(), 100_000, PerLayerTable::Device);
    assert!(
        reason.contains(TABLE) && reason.contains("not be trained"),
        "{reason}"
    );
}

/// If a file is truncated, or its table has a wrong shape or dtype, the file is refused before the table is read. A token
/// that has no row in the table is also refused.
#[test]
fn per_layer_table_of_wrong_file_or_token_is_refused() {
    let from = folder("dense-ple");
    let bytes = fs::read(from.join("model.safetensors")).expect("the file is readable");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("the file is safetensors");
    let copy = TempDir::new().expect("a temporary folder");
    let path = copy.path().join("model.safetensors");
    fs::copy(from.join("config.json"), copy.path().join("config.json"))
        .expect("the file is written");
    let open = || {
        let options = LoadOptions::new().per_layer_table(PerLayerTable::Host);
        Gemma4Model::load(copy.path(), &Device::flex(), options)
    };

    for kept in [0, 7, bytes.len() / 2, bytes.len() - 1] {
        fs::write(&path, &bytes[..kept]).expect("the file is written");
        let error = open().expect_err("the truncated file is refused");
        assert!(error.to_string().contains("model.safetensors"), "{error}");
    }
    for (shape, dtype) in [
        (vec![320, 0], Dtype::F32),
        (vec![0, 96], Dtype::F32),
        (vec![319, 96], Dtype::F32),
        (vec![96, 320], Dtype::F32),
        (vec![320, 96], Dtype::I32),
    ] {
        let size: usize = shape.iter().product::<usize>() * 4;
        let data = vec![0; size];
        let others = tensors.iter().filter(|(name, _)| *name != TABLE);
        let table = TensorView::new(dtype, shape.clone(), &data).expect("the tensor is valid");
        let all = others.chain([(TABLE, table)]);
        safetensors::serialize_to_file(all, None, &path).expect("the file is written");
        let error = open().expect_err("the table is refused");
        let Gemma4Error::Tensors { problems, .. } = error else {
            panic!("{shape:?}: {error}");
        };
        let [TensorProblem::Shape { name, .. } | TensorProblem::Dtype { name, .. }] = &problems[..]
        else {
            panic!("{shape:?}: {problems:?}");
        };
        assert_eq!(name, TABLE);
    }

    fs::write(&path, &bytes).expect("the file is written");
    let model = open().expect("the model is valid");
    for ids in [[2u32, 320], [u32::MAX, 2]] {
        let error = model.forward(tokens(&[&ids], &Device::flex()));
        let error = error
            .expect_err("the token is outside the vocabulary")
            .to_string();
        assert!(error.contains("tokens: has the token"), "{error}");
        let mut cache = model.cache(vec![0]);
        let step = model.decoder(&mut cache).step(&ids[1..]).map(|_| ());
        assert_eq!(step.is_err(), ids[1] >= 320);
    }
}
