//! The formats that are fuzzed: how an input of each format is read, and which checks run on the result.

use crate::mutation::{BETWEEN, Format};
use burn::tensor::{Device, Int, Tensor};
use burn_gemma4::{
    ChatOptions, ChatTemplate, Drafter, DrafterConfig, Gemma4, Gemma4Config, Gemma4Model,
    GenerationDefaults, LayerType, LoadOptions, Logits, Message, Prompt, SavedSession, Tokenizer,
};
use gemma4_train::data::{documents::read_documents, packing::pack};
use std::{fs, path::Path};
use tempfile::TempDir;

/// A function that reads an input and returns a short description of the result or of the error. The worker keeps each input
/// that gives a new description, to mutate the input further.
pub type Read = Box<dyn FnMut(&[u8]) -> Result<String, String>>;

/// A file format to fuzz.
pub struct Target {
    /// The name of the format, which is also the name of its folder in the corpus.
    pub name: &'static str,
    /// The structure of the format's files.
    pub format: Format,
    /// Prepares the data that are needed for all inputs, and returns the function that reads one input.
    pub prepare: fn() -> Read,
}

pub const TARGETS: &[Target] = &[
    Target {
        name: "safetensors",
        format: Format::Safetensors,
        prepare: safetensors,
    },
    Target {
        name: "gguf",
        format: Format::Gguf,
        prepare: gguf,
    },
    Target {
        name: "packed",
        format: Format::JsonAndSafetensors,
        prepare: packed,
    },
    Target {
        name: "index",
        format: Format::Json,
        prepare: index,
    },
    Target {
        name: "config",
        format: Format::Json,
        prepare: config,
    },
    Target {
        name: "drafter",
        format: Format::Json,
        prepare: drafter,
    },
    Target {
        name: "tokenizer",
        format: Format::Json,
        prepare: tokenizer,
    },
    Target {
        name: "template",
        format: Format::Template,
        prepare: template,
    },
    Target {
        name: "adapter",
        format: Format::JsonAndSafetensors,
        prepare: adapter,
    },
    Target {
        name: "session",
        format: Format::Safetensors,
        prepare: session,
    },
    Target {
        name: "conversations",
        format: Format::JsonLines,
        prepare: jsonl,
    },
];

fn text(input: &[u8]) -> String {
    String::from_utf8_lossy(input).into_owned()
}

fn said<T>(outcome: Result<T, impl ToString>) -> Result<T, String> {
    outcome.map_err(|error| error.to_string())
}

/// Returns a tiny model configuration with one layer of each kind: sliding, full attention, and shared KV.
fn smallest() -> Gemma4Config {
    Gemma4Config {
        vocab_size: 8,
        vocab_size_per_layer_input: 8,
        hidden_size: 4,
        intermediate_size: 4,
        layer_types: vec![LayerType::Sliding, LayerType::Full, LayerType::Full],
        num_kv_shared_layers: 1,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        num_global_key_value_heads: 1,
        sliding_head_dim: 2,
        global_head_dim: 4,
        sliding_window: 2,
        hidden_size_per_layer_input: 2,
        dtype: Some(burn::tensor::DType::F32),
        ..Gemma4Config::e2b()
    }
}

/// Returns the model's logits for three tokens. The middle token is the last token of the vocabulary.
fn logits(model: &Gemma4Model) -> Result<Vec<f32>, String> {
    let last = model.config().vocab_size as i32 - 1;
    let tokens = Tensor::<2, Int>::from_data([[0, last, 0]], &model.device());
    let logits = said(model.forward(tokens))?;
    Ok(logits.into_data().iter::<f32>().collect())
}

/// Removes the file at `path` and then writes it. Overwriting the file would take a hundred times as long on some file systems,
/// which flush overwritten files to disk at once.
fn write(path: &Path, contents: &[u8]) {
    // The removal may fail, because the file does not exist before the first write. This error is ignored.
    let _ = fs::remove_file(path);
    fs::write(path, contents).expect("the file is writable");
}

/// Writes `input` to a file named `file` in a model folder, and loads the model from the folder.
fn load(folder: &TempDir, file: &str, input: &[u8]) -> Result<String, String> {
    write(&folder.path().join(file), input);
    let model = said(Gemma4Model::load(
        folder.path(),
        &Device::flex(),
        LoadOptions::new(),
    ))?;
    logits(&model)?;
    Ok("a model".into())
}

/// Returns a folder with a `config.json` that holds the configuration of [`smallest`].
fn with_config() -> TempDir {
    let folder = TempDir::new().expect("a temporary folder");
    let json = smallest()
        .to_json()
        .expect("the configuration is written as JSON");
    fs::write(folder.path().join("config.json"), json).expect("the file is writable");
    folder
}

fn safetensors() -> Read {
    let folder = with_config();
    Box::new(move |input| load(&folder, "model.safetensors", input))
}

/// Returns a reader of GGUF checkpoints. The reader loads the model, computes logits, and uses the checkpoint's chat
/// template and tokenizer.
fn gguf() -> Read {
    let folder = TempDir::new().expect("a temporary folder");
    let path = folder.path().join("model.gguf");
    Box::new(move |input| {
        write(&path, input);
        let _holds = &folder;
        let gemma = said(Gemma4::load(&path, &Device::flex(), LoadOptions::new()))?;
        logits(gemma.model())?;
        let chat = Prompt::Chat(vec![Message::user("the <|turn> cat\n")]);
        let tokens = said(gemma.tokens(&chat, ChatOptions::default()))?;
        said(gemma.tokenizer().decode(&tokens, false))?;
        Ok("a model".into())
    })
}

/// Returns a reader of checkpoints in the format compressed-tensors. An input holds the contents of `config.json` and
/// `model.safetensors`.
fn packed() -> Read {
    let folder = TempDir::new().expect("a temporary folder");
    Box::new(move |input| {
        let (json, tensors) = apart(input);
        let config = said(Gemma4Config::from_json(&text(json)))?;
        if !is_small(&config) {
            return Ok("a large model".into());
        }
        write(&folder.path().join("config.json"), json);
        load(&folder, "model.safetensors", tensors)
    })
}

/// Splits an input at the first byte [`BETWEEN`]. Returns the JSON text before this byte and the safetensors file after it.
fn apart(input: &[u8]) -> (&[u8], &[u8]) {
    let end = input.iter().position(|byte| *byte == BETWEEN);
    let (json, tensors) = input.split_at(end.unwrap_or(input.len()));
    (json, tensors.get(1..).unwrap_or_default())
}

/// Returns a reader of `model.safetensors.index.json`. The folder has the files `first.safetensors` and `second.safetensors`,
/// which together form one model.
fn index() -> Read {
    let folder = with_config();
    let corpus = crate::worker::corpus("safetensors");
    let whole = fs::read(corpus.join("smallest.safetensors")).expect("the corpus is readable");
    let whole = safetensors::SafeTensors::deserialize(&whole).expect("the tensors parse");
    let mut tensors: Vec<_> = whole.iter().collect();
    tensors.sort_by_key(|(name, _)| *name);
    let (first, second) = tensors.split_at(tensors.len() / 2);
    for (name, tensors) in [("first", first), ("second", second)] {
        let path = folder.path().join(format!("{name}.safetensors"));
        let tensors = tensors.iter().map(|(name, view)| (*name, view));
        safetensors::serialize_to_file(tensors, None, &path).expect("the file is writable");
    }
    Box::new(move |input| load(&folder, "model.safetensors.index.json", input))
}

/// Returns a reader of `config.json` and `generation_config.json`. A valid model configuration must give finite logits. The
/// configuration must also stay the same if it is written and read again.
fn config() -> Read {
    Box::new(|input| {
        let json = text(input);
        let defaults = said(GenerationDefaults::from_json(&json));
        let config = match said(Gemma4Config::from_json(&json)) {
            Ok(config) => config,
            // An input that is not a model configuration may still be a valid `generation_config.json`.
            Err(error) => return defaults.map(|_| error),
        };
        if let Ok(json) = config.to_json() {
            let again = Gemma4Config::from_json(&json).expect("the written configuration is valid");
            assert_eq!(
                again, config,
                "the configuration changed by writing and reading"
            );
        }
        if !is_small(&config) {
            return Ok("a large model".into());
        }
        // A configuration may set any `initializer_range`, even one that gives infinite weights. The check of the logits needs
        // an ordinary range.
        let config = Gemma4Config {
            initializer_range: 0.02,
            ..config
        };
        let logits = logits(&Gemma4Model::new(&config, &Device::flex()))?;
        assert!(
            logits.iter().all(|logit| logit.is_finite()),
            "logits are not finite"
        );
        Ok("a small model".into())
    })
}

/// Returns true if the model is so small that drawing its random weights takes little time.
fn is_small(config: &Gemma4Config) -> bool {
    let experts = config.experts.as_ref().map_or(0, |experts| {
        experts
            .num_experts
            .saturating_mul(experts.moe_intermediate_size)
    });
    let sizes = [
        config.vocab_size,
        config.vocab_size_per_layer_input * usize::from(config.has_per_layer_embeddings()),
        config.hidden_size,
        config.intermediate_size,
        config.hidden_size_per_layer_input,
        config.num_attention_heads * config.sliding_head_dim.max(config.global_head_dim),
        experts,
    ];
    config.num_layers() <= 8 && sizes.iter().all(|size| *size <= 512)
}

/// Returns a reader of a drafter's `config.json`. If the configuration is valid, a drafter with this configuration must
/// draft tokens for a model whose KV cache fits the drafter.
fn drafter() -> Read {
    Box::new(|input| {
        let config = said(DrafterConfig::from_json(&text(input)))?;
        // A drafter with a long window is skipped, because the cache of its target model allocates a whole window at the first
        // token.
        let is_short = config.text.sliding_window <= 8192;
        if !is_small(&config.text) || config.backbone_hidden_size > 512 || !is_short {
            return Ok("a large drafter".into());
        }
        let of_text = Gemma4Config {
            initializer_range: 0.02,
            ..config.text.clone()
        };
        let target = Gemma4Config {
            hidden_size: config.backbone_hidden_size,
            num_kv_shared_layers: 0,
            ..of_text.clone()
        };
        said(target.validate())?;
        let config = DrafterConfig {
            text: of_text,
            ..config
        };
        said(config.check_target(&target))?;
        let device = Device::flex();
        let (model, drafter) = (
            Gemma4Model::new(&target, &device),
            Drafter::new(&config, &device),
        );
        let mut cache = model.cache(vec![0]);
        let prompt = Tensor::<2, Int>::from_data([[0, 0, 0]], &device);
        said(model.step(prompt, &mut cache, Logits::None))?;
        let hidden = Tensor::<2>::ones([1, target.hidden_size], &device);
        let guesses = said(drafter.draft(&model, &cache, 0, hidden, 2))?;
        let tokens = said(guesses.tokens())?;
        assert!(
            tokens
                .iter()
                .all(|token| (*token as usize) < target.vocab_size),
            "tokens outside the vocabulary"
        );
        Ok("a drafter".into())
    })
}

fn tokenizer() -> Read {
    let texts = [
        "",
        "the cat",
        "<bos><|turn>user\nhi<turn|>\n",
        "  a\u{0}é\u{301}▁\u{10FFFF}日本\t\r\n",
        &"a b ".repeat(200),
    ]
    .map(String::from);
    Box::new(move |input| {
        let tokenizer = said(Tokenizer::from_bytes(input))?;
        let mut ends = format!("{:?}", tokenizer.id("<bos>").is_some());
        for text in &texts {
            let tokens = match tokenizer.encode(text) {
                Ok(tokens) => tokens,
                Err(error) => {
                    ends += &error.to_string();
                    continue;
                }
            };
            let decoded = tokenizer.decode(&tokens, true);
            let mut stream = tokenizer.stream();
            for token in tokens {
                said(stream.push(token))?;
            }
            said(stream.finish())?;
            ends += &decoded
                .err()
                .map_or_else(String::new, |error| error.to_string());
        }
        said(tokenizer.decode(&[0, 1, 7, u32::MAX], false))?;
        Ok(ends)
    })
}

fn template() -> Read {
    let conversation = [
        Message::system(" Be brief. "),
        Message::user("One\ntwo"),
        Message::assistant("<|channel>thought\nhm<channel|> Three. "),
        Message::user("And then?"),
    ];
    Box::new(move |input| {
        let template = said(ChatTemplate::from_source(&text(input)))?;
        let rendered = said(template.render(&conversation, ChatOptions::default()))?;
        said(template.render(&conversation[1..2], ChatOptions::default()))?;
        // The description is a run of letters as long as the rendered text, up to a limit. So texts of different
        // lengths have different descriptions, and the worker keeps an input for each length.
        Ok("a".repeat(rendered.len().min(1 << 10)))
    })
}

/// Loads a model with the configuration of [`smallest`] and with weights from the corpus of the format `safetensors`.
/// Returns the folder from which the model was loaded, and the model.
fn of_corpus() -> (TempDir, Gemma4Model) {
    let base = with_config();
    let corpus = crate::worker::corpus("safetensors");
    let weights = base.path().join("model.safetensors");
    fs::copy(corpus.join("smallest.safetensors"), weights).expect("the file is writable");
    let model = Gemma4Model::load(base.path(), &Device::flex(), LoadOptions::new());
    (base, model.expect("the model is valid"))
}

/// Returns a reader of session files for the model of [`of_corpus`]. The reader continues each session by one token.
fn session() -> Read {
    let (folder, model) = of_corpus();
    let path = folder.path().join("session.safetensors");
    Box::new(move |input| {
        write(&path, input);
        let _holds = &folder;
        let saved = said(SavedSession::read(&model, &path))?;
        let count = saved.tokens().len();
        let mut cache = saved.into_cache();
        let token = Tensor::<2, Int>::from_data([[1]], &model.device());
        said(model.step(token, &mut cache, Logits::Last(1)))?;
        Ok("a".repeat(count))
    })
}

/// Returns a reader of LoRA adapters. An input holds `adapter_config.json` and `adapter_model.safetensors`. The reader merges
/// the adapter into the model of [`of_corpus`].
fn adapter() -> Read {
    let (base, model) = of_corpus();
    Box::new(move |input| {
        let (json, tensors) = apart(input);
        for (file, contents) in [
            ("adapter_config.json", json),
            ("adapter_model.safetensors", tensors),
        ] {
            write(&base.path().join(file), contents);
        }
        let merged = said(model.clone().merge_adapter(base.path()))?;
        logits(&merged)?;
        Ok("an adapter".into())
    })
}

/// Returns a reader of JSON Lines files that hold examples for fine-tuning.
fn jsonl() -> Read {
    let folder = TempDir::new().expect("a temporary folder");
    let path = folder.path().join("data.jsonl");
    let gemma = Gemma4::embedded(&Device::flex(), LoadOptions::new()).expect("the model is valid");
    Box::new(move |input| {
        write(&path, input);
        let documents = said(read_documents(&path, &gemma))?.into_iter();
        let examples = documents.flat_map(|document| document.examples);
        let (rows, _) = pack(examples.collect(), 64);
        let _holds = &folder;
        Ok("a".repeat(rows.len()))
    })
}
