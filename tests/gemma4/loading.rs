//! Tests the loading of checkpoints in every format, and the errors for invalid checkpoints.

use crate::fixture::{Fixture, folder, tokens, values};
use burn::tensor::{DType, Device};
use burn_gemma4::{Gemma4Config, Gemma4Error, Gemma4Model, LoadOptions, TensorProblem};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::{fs, path::Path};
use tempfile::TempDir;

/// The `config.json` from the Hugging Face Hub and the file that Hugging Face Transformers 5 writes describe the same
/// model.
#[test]
fn load_both_config_dialects_give_the_same_model() {
    for fixture in Fixture::all() {
        let read = |name| Gemma4Config::from_file(fixture.folder().join(name)).expect("is valid");
        assert_eq!(
            read("config.json"),
            read("config.transformers5.json"),
            "{}",
            fixture.name
        );
    }
}

/// A multimodal checkpoint gives the same logits as the checkpoint of its text model. The multimodal checkpoint also
/// contains key and value weights of shared KV layers, which no layer uses.
#[test]
fn load_multimodal_file_gives_its_text_model() {
    let device = Device::flex();
    let fixture = Fixture::open("dense-ple");
    let logits = |name| {
        let model = Gemma4Model::load(folder(name), &device, LoadOptions::new().dtype(DType::F32));
        values(
            model
                .expect("the model is valid")
                .forward(tokens(&[&fixture.prompt], &device))
                .expect("the tokens are in the vocabulary"),
        )
    };
    assert_eq!(logits("dense-ple"), logits("dense-ple-mm-bf16"));
}

/// On a CPU, the default dtype is f32. In bf16, a CPU rounds each result separately, which takes 30 times as long.
#[test]
fn load_dtype_on_processor_is_f32_by_default() {
    let device = Device::flex();
    let load = |name, options: LoadOptions<'_>| {
        Gemma4Model::load(folder(name), &device, options).expect("the model is valid")
    };
    for (name, written) in [
        ("dense-ple", DType::F32),
        ("dense-ple-mm-bf16", DType::BF16),
    ] {
        let model = load(name, LoadOptions::new());
        assert_eq!(model.dtype(), DType::F32);
        assert_eq!(model.written_dtype(), Some(written));
    }
    for asked in [DType::BF16, DType::F16] {
        let model = load("dense-ple-mm-bf16", LoadOptions::new().dtype(asked));
        assert_eq!(model.dtype(), asked);
    }
}

#[test]
fn load_progress_reaches_the_end() {
    let mut seen = Vec::new();
    let options = LoadOptions::new().on_progress(|progress| {
        seen.push((
            progress.tensor.to_owned(),
            progress.bytes,
            progress.total_bytes,
        ));
    });
    Gemma4Model::load(folder("dense-ple"), &Device::flex(), options).expect("the model is valid");
    assert!(seen.windows(2).all(|pair| pair[0].1 < pair[1].1));
    let (name, bytes, total) = seen.last().expect("progress is reported");
    assert_eq!(bytes, total);
    assert!(name.starts_with("model."), "{name}");
}

type Config = serde_json::Map<String, serde_json::Value>;
/// A text that the error must contain, and the function that spoils the configuration.
type Case = (&'static str, fn(&mut Config));

/// A copy of a fixture's checkpoint that a test can change.
struct Copy {
    folder: TempDir,
    tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)>,
}

impl Copy {
    fn of(name: &str) -> Self {
        let copy = TempDir::new().expect("a temporary folder");
        for file in ["config.json", "tokenizer.json", "generation_config.json"] {
            fs::copy(folder(name).join(file), copy.path().join(file)).expect("the file is copied");
        }
        let bytes = fs::read(folder(name).join("model.safetensors")).expect("the file is readable");
        let tensors = SafeTensors::deserialize(&bytes)
            .expect("the file is safetensors")
            .iter()
            .map(|(name, view)| {
                (
                    name.to_owned(),
                    view.dtype(),
                    view.shape().to_vec(),
                    view.data().to_vec(),
                )
            })
            .collect();
        Self {
            folder: copy,
            tensors,
        }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn position(&self, name: &str) -> usize {
        let position = self.tensors.iter().position(|tensor| tensor.0 == name);
        position.unwrap_or_else(|| panic!("there is no {name}"))
    }

    fn save(&self) {
        write(&self.tensors, &self.path().join("model.safetensors"));
    }

    fn load(&self) -> Result<Gemma4Model, Gemma4Error> {
        Gemma4Model::load(self.path(), &Device::flex(), LoadOptions::new())
    }

    fn error(&self) -> Gemma4Error {
        self.load().expect_err("the checkpoint is refused")
    }

    fn problems(&self) -> Vec<TensorProblem> {
        self.save();
        match self.error() {
            Gemma4Error::Tensors { problems, .. } => problems,
            other => panic!("{other}"),
        }
    }

    fn config(&self, change: impl FnOnce(&mut Config)) -> String {
        let path = self.path().join("config.json");
        let text = fs::read_to_string(&path).expect("the file is readable");
        let mut config = serde_json::from_str(&text).expect("the configuration is valid");
        change(&mut config);
        fs::write(
            &path,
            serde_json::to_string(&config).expect("the text is JSON"),
        )
        .expect("the file is written");
        let error = self.error();
        error.to_string()
    }
}

fn write(tensors: &[(String, Dtype, Vec<usize>, Vec<u8>)], path: &Path) {
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (
            name,
            TensorView::new(*dtype, shape.clone(), data).expect("a view"),
        )
    });
    safetensors::serialize_to_file(views, None, path).expect("the file is written");
}

#[test]
fn load_several_files_give_one_checkpoint() {
    let copy = Copy::of("dense-ple");
    let (first, second) = copy.tensors.split_at(copy.tensors.len() / 2);
    let names = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ];
    let mut map = serde_json::Map::new();
    for (tensors, name) in [(first, names[0]), (second, names[1])] {
        write(tensors, &copy.path().join(name));
        map.extend(tensors.iter().map(|tensor| (tensor.0.clone(), name.into())));
    }
    let index = serde_json::json!({ "metadata": {}, "weight_map": map });
    let index_path = copy.path().join("model.safetensors.index.json");
    fs::write(&index_path, index.to_string()).expect("the file is written");

    let device = Device::flex();
    let fixture = Fixture::open("dense-ple");
    let input = tokens(&[&fixture.prompt], &device);
    let found = values(
        copy.load()
            .expect("the model is valid")
            .forward(input)
            .expect("the tokens are in the vocabulary"),
    );
    fixture.reference("logits").assert_close(
        burn::tensor::Tensor::<1>::from_floats(found.as_slice(), &device),
        "several files",
    );

    fs::remove_file(copy.path().join(names[1])).expect("the file is removed");
    assert!(copy.error().to_string().contains(names[1]));
    fs::write(
        &index_path,
        r#"{"weight_map": {"a": "../elsewhere.safetensors"}}"#,
    )
    .expect("the file is written");
    assert!(
        copy.error()
            .to_string()
            .contains("../elsewhere.safetensors")
    );
    fs::write(&index_path, "{").expect("the file is written");
    assert!(
        copy.error()
            .to_string()
            .contains("model.safetensors.index.json")
    );

    // A single file comes before an index, as in Hugging Face Transformers.
    copy.save();
    copy.load().expect("the single file is valid");
}

/// A checkpoint loads if `_orig_mod` occurs in its tensor names. `torch.compile` puts `_orig_mod` before or inside the names of
/// the saved tensors.
#[test]
fn load_compiled_model_ignores_orig_mod() {
    let expected = Copy::of("dense-ple");
    expected.save();
    let numbers = |model: Gemma4Model| values(model.layers[1].mlp.up_proj.weight.val());
    let expected = numbers(expected.load().expect("the model is valid"));
    for (plain, compiled) in [
        ("model.", "_orig_mod.model."),
        ("model.", "model._orig_mod."),
        (".mlp.", "._orig_mod.mlp._orig_mod."),
    ] {
        let mut copy = Copy::of("dense-ple");
        for tensor in &mut copy.tensors {
            tensor.0 = tensor.0.replacen(plain, compiled, 1);
        }
        copy.save();
        assert_eq!(
            numbers(copy.load().expect(compiled)),
            expected,
            "{compiled}"
        );
    }
    let mut twice = Copy::of("dense-ple");
    let mut tensor = twice.tensors[0].clone();
    tensor.0 = format!("_orig_mod.{}", tensor.0);
    twice.tensors.push(tensor);
    twice.save();
    assert!(twice.error().to_string().contains("twice"));
}

/// For a checkpoint, `written_dtype` returns the dtype of most elements, because training programs often leave the
/// embedding, a norm or a router in f32.
#[test]
fn load_written_dtype_is_that_of_most_numbers() {
    let halved = |tensor: &mut (String, Dtype, Vec<usize>, Vec<u8>)| {
        tensor.1 = Dtype::BF16;
        tensor.3 = tensor
            .3
            .chunks_exact(4)
            .flat_map(|one| [one[2], one[3]])
            .collect();
    };
    let table = "model.embed_tokens.weight";
    let copy = |is_halved: &dyn Fn(&str) -> bool| {
        let mut copy = Copy::of("dense-ple");
        let chosen = copy
            .tensors
            .iter_mut()
            .filter(|tensor| is_halved(&tensor.0));
        chosen.for_each(halved);
        copy.save();
        copy.load().expect("the model is valid").written_dtype()
    };
    assert_eq!(copy(&|name| name != table), Some(DType::BF16));
    assert_eq!(copy(&|name| !name.contains("norm")), Some(DType::BF16));
    assert_eq!(copy(&|name| name == table), Some(DType::F32));
    assert_eq!(copy(&|name| name.contains("norm")), Some(DType::F32));
}

#[test]
fn load_wrong_tensors_are_named() {
    let mut copy = Copy::of("dense-ple");
    let name = "model.layers.1.mlp.up_proj.weight";
    let position = copy.position(name);
    let whole = copy.tensors[position].clone();

    copy.tensors.remove(position);
    assert_eq!(
        copy.problems(),
        [TensorProblem::Missing { name: name.into() }]
    );

    copy.tensors.push((
        name.into(),
        whole.1,
        vec![whole.2[1], whole.2[0]],
        whole.3.clone(),
    ));
    assert_eq!(
        copy.problems(),
        [TensorProblem::Shape {
            name: name.into(),
            found: vec![64, 96],
            expected: vec![96, 64]
        }]
    );

    copy.tensors.pop();
    copy.tensors
        .push((name.into(), Dtype::I32, whole.2.clone(), whole.3.clone()));
    assert_eq!(
        copy.problems(),
        [TensorProblem::Dtype {
            name: name.into(),
            found: "I32".into()
        }]
    );

    copy.tensors.pop();
    copy.tensors.push(whole.clone());
    copy.tensors.push((
        "model.layers.6.mlp.up_proj.weight".into(),
        whole.1,
        whole.2.clone(),
        whole.3.clone(),
    ));
    copy.tensors.push((
        "model.layers.0.mlp.extra".into(),
        whole.1,
        whole.2.clone(),
        whole.3,
    ));
    let extra = |name: &str| TensorProblem::Extra { name: name.into() };
    assert_eq!(
        copy.problems(),
        [
            extra("model.layers.0.mlp.extra"),
            extra("model.layers.6.mlp.up_proj.weight")
        ]
    );
}

#[test]
fn load_truncated_or_missing_file_is_named() {
    let copy = Copy::of("dense-ple");
    let path = copy.path().join("model.safetensors");
    assert!(copy.error().to_string().contains("model.safetensors"));
    copy.save();
    copy.load().expect("a whole copy");
    let bytes = fs::read(&path).expect("the file is readable");
    for length in [0, 5, 100, bytes.len() / 2, bytes.len() - 1] {
        fs::write(&path, &bytes[..length]).expect("the file is written");
        let text = copy.error().to_string();
        assert!(
            text.contains("model.safetensors") && text.contains("not a whole"),
            "{text}"
        );
    }
    fs::remove_file(copy.path().join("config.json")).expect("the file is removed");
    assert!(copy.error().to_string().contains("config.json"));
}

#[test]
fn load_config_of_another_model_is_refused_by_name() {
    let spoiled = |change: fn(&mut Config)| {
        let copy = Copy::of("moe");
        copy.save();
        copy.config(change)
    };
    let cases: [Case; 14] = [
        ("model_type is \"llama\"", |c| {
            drop(c.insert("model_type".into(), "llama".into()))
        }),
        ("model_type is missing", |c| drop(c.remove("model_type"))),
        ("hidden_size", |c| drop(c.remove("hidden_size"))),
        ("hidden_size is 0", |c| {
            drop(c.insert("hidden_size".into(), 0.into()))
        }),
        ("hidden_activation", |c| {
            drop(c.insert("hidden_activation".into(), "silu".into()))
        }),
        ("attention_bias", |c| {
            drop(c.insert("attention_bias".into(), true.into()))
        }),
        ("use_bidirectional_attention", |c| {
            drop(c.insert("use_bidirectional_attention".into(), "all".into()))
        }),
        ("layer_types has 4 entries", |c| {
            drop(c.insert("num_hidden_layers".into(), 5.into()))
        }),
        ("\"mamba\"", |c| {
            c["layer_types"][0] = "mamba".into();
        }),
        ("global_head_dim is 1026", |c| {
            drop(c.insert("global_head_dim".into(), 1026.into()))
        }),
        ("not a multiple of num_key_value_heads", |c| {
            drop(c.insert("num_key_value_heads".into(), 3.into()))
        }),
        ("num_kv_shared_layers", |c| {
            drop(c.insert("num_kv_shared_layers".into(), 4.into()))
        }),
        ("num_experts is missing", |c| drop(c.remove("num_experts"))),
        ("\"yarn\"", |c| {
            c["rope_parameters"]["full_attention"]["rope_type"] = "yarn".into();
        }),
    ];
    for (words, change) in cases {
        let text = spoiled(change);
        assert!(
            text.contains("config.json") && text.contains(words),
            "{words}: {text}"
        );
    }
}

#[test]
fn load_integer_dtype_is_refused() {
    let options = LoadOptions::new().dtype(DType::I32);
    let error = Gemma4Model::load(folder("dense-ple"), &Device::flex(), options)
        .expect_err("i32 is refused");
    assert!(error.to_string().contains("dtype: is i32"), "{error}");
}
