//! Tests adapters that each sequence of a batch selects. A sequence must generate the same tokens as a model into which
//! the sequence's adapter is merged, whatever adapters the other sequences have.

use crate::{
    devices::devices,
    fixture::{folder, greedy},
};
use burn::tensor::{DType, Device};
use burn_gemma4::{
    Adapter, AdapterTargets, Batch, CacheKind, Gemma4, Gemma4Error, LoadOptions, LoadedAdapter,
    Prefill, PrefixCache, Quantization, RowChoice, RowResult,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use safetensors::{Dtype, SafeTensors, serialize, tensor::TensorView};
use std::{collections::BTreeMap, fs, ops::ControlFlow, path::Path, sync::Arc};
use tempfile::TempDir;

const TOKENS: usize = 8;
const PROMPT: [u32; 19] = [
    2, 24, 301, 33, 47, 210, 111, 85, 90, 24, 301, 34, 47, 25, 26, 310, 44, 45, 99,
];
/// The name of a projection that [`Adapter::attach`] does not adapt, but PEFT's `all-linear` does.
const PER_LAYER: &str = "base_model.model.model.per_layer_model_projection";

/// The tensors of a safetensors file: the shape and the f32 numbers of each tensor.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn read(path: &Path) -> Tensors {
    let bytes = fs::read(path).expect("the file exists");
    let tensors = SafeTensors::deserialize(&bytes).expect("the file is safetensors");
    let number = |bytes: &[u8; 4]| f32::from_le_bytes(*bytes);
    let numbers = |data: &[u8]| data.as_chunks::<4>().0.iter().map(number).collect();
    let tensors = tensors.iter();
    let tensors = tensors.map(|(name, view)| {
        let shape = view.shape().to_vec();
        (name.to_owned(), (shape, numbers(view.data())))
    });
    tensors.collect()
}

fn write(path: &Path, tensors: &Tensors) {
    let bytes: Vec<(&String, &Vec<usize>, Vec<u8>)> = tensors
        .iter()
        .map(|(name, (shape, numbers))| {
            let bytes = numbers.iter().flat_map(|number| number.to_le_bytes());
            (name, shape, bytes.collect())
        })
        .collect();
    let views = bytes.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::F32, (*shape).clone(), bytes);
        (name.as_str(), view.expect("the bytes fit the shape"))
    });
    let file = serialize(views, None).expect("the tensors are valid");
    fs::write(path, file).expect("the file is written");
}

/// Writes an adapter of the fixture `name` with random numbers.
fn adapter(name: &str, adapter: &Adapter, per_layer: bool, seed: u64) -> TempDir {
    let model = Gemma4::load(
        folder(name),
        &Device::flex().autodiff(),
        LoadOptions::new().dtype(DType::F32),
    );
    let model = model.expect("the model is valid").model().clone();
    let config = model.config().clone();
    let attached = adapter.attach(model).expect("the adapter is valid");
    let written = TempDir::new().expect("a temporary folder");
    adapter
        .save(&attached, written.path(), "base")
        .expect("the adapter is written");
    let path = written.path().join("adapter_model.safetensors");
    let mut tensors = read(&path);
    if per_layer {
        let columns = config.num_layers() * config.hidden_size_per_layer_input;
        for (part, shape) in [
            ("A", [adapter.rank, config.hidden_size]),
            ("B", [columns, adapter.rank]),
        ] {
            let numbers = vec![0.0; shape[0] * shape[1]];
            let name = format!("{PER_LAYER}.lora_{part}.weight");
            tensors.insert(name, (shape.into(), numbers));
        }
    }
    let mut rng = StdRng::seed_from_u64(seed);
    for (_, numbers) in tensors.values_mut() {
        numbers.fill_with(|| rng.random_range(-0.2..0.2));
    }
    write(&path, &tensors);
    written
}

/// Returns two adapters of a fixture, which differ in their modules. The first has the rank 2, and the second has the
/// rank `narrow`.
fn two_adapters(name: &str, narrow: usize) -> [TempDir; 2] {
    let has_per_layer = name.contains("ple");
    let mut wide = Adapter::new(2, 3.0);
    if has_per_layer {
        for module in ["per_layer_input_gate", "per_layer_projection"] {
            wide.modules.push(module.into());
        }
    }
    let narrow = Adapter {
        modules: ["q_proj", "down_proj"].map(String::from).into(),
        ..Adapter::new(narrow, 4.0 * narrow as f64)
    };
    [
        adapter(name, &wide, has_per_layer, 1),
        adapter(name, &narrow, false, 2),
    ]
}

fn load(gemma: &Gemma4, folder: &TempDir) -> Arc<LoadedAdapter> {
    let weights = AdapterTargets::of(gemma.model()).read(folder.path());
    let loaded = weights
        .expect("the adapter fits")
        .upload(gemma.model())
        .expect("the upload succeeds");
    assert!(loaded.bytes() > 0);
    Arc::new(loaded)
}

fn token(results: &[RowResult]) -> u32 {
    results[0].token().expect("the logits are finite")
}

/// Runs the prefill to its end, at most `chunk` tokens at a time, and returns the first token of the answer.
fn first_token(prefill: &mut Prefill, chunk: usize) -> u32 {
    loop {
        if let Some(logits) = prefill.advance(chunk).expect("the device works") {
            return token(&logits.choose(&[RowChoice::Argmax]).expect("one row"));
        }
    }
}

fn prefill(gemma: &Gemma4, adapter: Option<&Arc<LoadedAdapter>>) -> Prefill {
    let prefill = gemma.prefill(PROMPT.to_vec(), CacheKind::default());
    let prefill = prefill.expect("the prompt fits");
    match adapter {
        Some(adapter) => prefill.with_adapter(adapter).expect("the adapter fits"),
        None => prefill,
    }
}

/// A batch with the answers of its sequences so far.
struct Answers {
    batch: Batch,
    /// The largest number of prompt tokens in one call of the model.
    chunk: usize,
    /// The index of the sequence's adapter, and the tokens of its answer.
    running: Vec<(usize, Vec<u32>)>,
}

impl Answers {
    fn join(&mut self, gemma: &Gemma4, choice: usize, adapter: Option<&Arc<LoadedAdapter>>) {
        let mut prefill = prefill(gemma, adapter);
        let first = first_token(&mut prefill, self.chunk);
        self.batch.join(&prefill).expect("all is read");
        self.running.push((choice, vec![first]));
    }

    fn step(&mut self, goes_on: bool) {
        let last = |(_, tokens): &(usize, Vec<u32>)| tokens[tokens.len() - 1];
        let last: Vec<u32> = self.running.iter().map(last).collect();
        let choices = vec![RowChoice::Argmax; last.len()];
        let next = self.batch.follow(&last, &choices, goes_on);
        let next = next.expect("the device works");
        for ((_, tokens), next) in self.running.iter_mut().zip(next) {
            tokens.push(next.token().expect("the logits are finite"));
        }
    }

    fn leave(&mut self, index: usize) -> (usize, Vec<u32>) {
        self.batch.leave(index);
        self.running.swap_remove(index)
    }
}

#[test]
fn step_of_a_batch_with_several_adapters_equals_merged_models() {
    // CubeCL devices run the case with equal ranks. Their prompts then run matmuls of the same shapes as the tests of
    // QLoRA, so the device tunes each matmul once.
    for (name, form, narrow) in [
        ("dense-ple", Quantization::Stored, 5),
        ("dense-ple", Quantization::Q4, 2),
        ("dense-keqv", Quantization::Q8, 9),
        ("moe", Quantization::Stored, 3),
    ] {
        let folders = two_adapters(name, narrow);
        let open = |device: &Device| {
            let options = LoadOptions::new().dtype(DType::F32).quantization(form);
            Gemma4::load(folder(name), device, options).expect("the model is valid")
        };
        let answer = |gemma: Gemma4| {
            let options = greedy(&gemma, 2 * TOKENS);
            let generation =
                gemma.generate(PROMPT.to_vec(), &options, |_| ControlFlow::Continue(()));
            generation.expect("the generation succeeds").tokens
        };
        let mut expected = vec![answer(open(&Device::flex()))];
        for folder in &folders {
            let attached = open(&Device::flex()).attach_adapter(folder.path());
            expected.push(answer(attached.expect("the adapter fits")));
        }
        assert!(
            expected[0] != expected[1] && expected[1] != expected[2],
            "the adapters change nothing"
        );
        for device in devices() {
            // A software driver compiles the kernels of each model and of each number of rows, which takes long.
            let is_fast = !device.is_cube();
            if !is_fast && form != Quantization::Q4 {
                continue;
            }
            let what = format!("{name}, {form:?} on {}", device.name);
            let gemma = open(&device.device);
            let loaded = folders.each_ref().map(|folder| load(&gemma, folder));
            let adapter = |choice: usize| choice.checked_sub(1).map(|index| &loaded[index]);
            let batch = Batch::new(gemma.model(), CacheKind::default());
            let mut answers = Answers {
                batch: batch.expect("the format is supported"),
                chunk: if is_fast { 7 } else { usize::MAX },
                running: Vec::new(),
            };
            let mut ended = Vec::new();
            for choice in [1, 0, 2, 1] {
                answers.join(&gemma, choice, adapter(choice));
            }
            for step in 0..TOKENS {
                answers.step(step % 3 > 0);
            }
            // The last sequence moves to row 0, and a sequence with another adapter takes its row.
            ended.push(answers.leave(0));
            answers.join(&gemma, 2, adapter(2));
            // The batch keeps an adapter that a sequence uses.
            answers.batch.forget_adapter(loaded[0].id());
            for step in 0..TOKENS / 2 {
                answers.step(step % 3 > 0);
            }
            ended.push(answers.leave(0));
            // No sequence uses the first adapter, but two sequences use the second.
            answers.batch.forget_adapter(loaded[0].id());
            for step in 0..3 {
                answers.step(step % 3 > 0);
            }
            while !answers.running.is_empty() {
                ended.push(answers.leave(0));
            }
            assert_eq!(ended.len(), 5);
            for (choice, tokens) in ended {
                let expected = &expected[choice][..tokens.len()];
                assert_eq!(tokens, expected, "{what}, adapter {choice}");
            }
        }
    }
}

#[test]
fn prefix_cache_separates_adapters() {
    let [one, two] = two_adapters("dense-ple", 3);
    let options = LoadOptions::new().dtype(DType::F32);
    let gemma = Gemma4::load(folder("dense-ple"), &Device::flex(), options);
    let gemma = gemma.expect("the model is valid");
    let [first, second, again] = [&one, &two, &one].map(|folder| load(&gemma, folder));
    assert_ne!(first.id(), again.id());
    let mut prefixes = PrefixCache::new(gemma.model(), usize::MAX, usize::MAX);
    let reused = |prefixes: &mut PrefixCache, adapter: Option<&Arc<LoadedAdapter>>| {
        let mut prefill = prefill(&gemma, adapter);
        prefixes.resume(&mut prefill);
        let reused = prefill.reused();
        let token = first_token(&mut prefill, usize::MAX);
        prefixes.keep(prefill);
        (reused, token)
    };
    let all = [None, Some(&first), Some(&second), Some(&again)];
    let fresh = all.map(|adapter| reused(&mut prefixes, adapter));
    assert!(fresh.iter().all(|(reused, _)| *reused == 0), "{fresh:?}");
    assert_eq!(fresh[1].1, fresh[3].1);
    let repeated = all.map(|adapter| reused(&mut prefixes, adapter));
    for ((_, expected), (reused, found)) in fresh.into_iter().zip(repeated) {
        assert_eq!((reused, found), (PROMPT.len() - 1, expected));
    }
    let bytes = prefixes.bytes();
    prefixes.forget_adapter(first.id());
    assert_eq!(prefixes.bytes(), bytes / 4 * 3);
    assert_eq!(reused(&mut prefixes, Some(&first)).0, 0);
    assert_eq!(reused(&mut prefixes, Some(&again)).0, PROMPT.len() - 1);
}

#[test]
fn adapter_that_cannot_apply_is_refused_with_its_tensors() {
    let written = adapter("dense-ple", &Adapter::new(2, 4.0), false, 1);
    let options = || LoadOptions::new().dtype(DType::F32);
    let open = || Gemma4::load(folder("dense-ple"), &Device::flex(), options());
    let gemma = open().expect("the model is valid");
    let targets = AdapterTargets::of(gemma.model());
    let path = written.path().join("adapter_model.safetensors");
    let tensors = read(&path);
    let check = |tensors: &Tensors, words: &[&str]| {
        write(&path, tensors);
        let error = targets.read(written.path()).expect_err("a refusal");
        for word in words {
            let error = error.to_string();
            assert!(error.contains(word), "{word:?} is missing from {error}");
        }
    };
    let renamed = |from: &str, to: &str| -> Tensors {
        let tensors = tensors.clone().into_iter();
        tensors
            .map(|(name, tensor)| (name.replace(from, to), tensor))
            .collect()
    };
    check(
        &renamed("mlp.up_proj", "router.proj"),
        &["router.proj", "merge"],
    );
    check(
        &renamed("mlp.up_proj", "mlp.other"),
        &["mlp.other", "not part"],
    );
    check(&renamed("layers.0.", "layers.90."), &["layers.90."]);
    // Layers that share the keys of earlier layers have no key projection.
    let shared = |(name, _): &(String, _)| name.contains("layers.5.self_attn.k_proj");
    let last_layer = renamed("layers.0.self_attn.k_proj", "layers.5.self_attn.k_proj");
    let only_shared: Tensors = last_layer.into_iter().filter(shared).collect();
    assert_eq!(only_shared.len(), 2);
    assert!(gemma.config().is_shared(5));
    check(
        &only_shared,
        &["none of its tensors changes the model", "2"],
    );
    for number in [f32::NAN, f32::INFINITY, f32::MAX] {
        let mut wrong = tensors.clone();
        let (name, (_, numbers)) = wrong
            .iter_mut()
            .find(|(name, _)| name.contains("lora_B"))
            .expect("the adapter has factors");
        let name = name.clone();
        numbers[3] = number;
        check(&wrong, &[&name, "not finite"]);
    }
    // An adapter belongs to the model for which it was read.
    write(&path, &tensors);
    let other = open().expect("the model is valid");
    let refused = |error: Gemma4Error| error.to_string().starts_with("adapter");
    let weights = targets.read(written.path()).expect("the adapter fits");
    assert!(refused(
        weights.upload(other.model()).expect_err("another model")
    ));
    let loaded = load(&gemma, &written);
    let of_other = other.prefill(PROMPT.to_vec(), CacheKind::default());
    let of_other = of_other.expect("the prompt fits").with_adapter(&loaded);
    assert!(refused(of_other.expect_err("another model")));
    let mut begun = prefill(&gemma, None);
    assert!(begun.advance(3).expect("the device works").is_none());
    assert!(refused(begun.with_adapter(&loaded).expect_err("begun")));
    let mut packed = prefill(&gemma, None);
    Prefill::read_packed(&mut [&mut packed]).expect("one prompt is a pack");
    assert!(refused(packed.with_adapter(&loaded).expect_err("packed")));
}
