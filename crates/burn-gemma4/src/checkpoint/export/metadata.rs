//! The metadata keys of an exported GGUF file, as llama.cpp's converter and quantizer write them.

use super::{Export, tokenizer};
use crate::checkpoint::gguf::writer::Written;
use crate::config::{Gemma4Config, LayerType, RopeConfig};
use crate::error::{Gemma4Error, existing, read};
use crate::text::chat::source_of_folder;
use serde_json::Value;

/// The value of the metadata key `general.quantization_version`: the version of ggml's block formats.
const QUANTIZATION_VERSION: usize = 2;

impl Export<'_> {
    /// Returns the metadata keys of the written file, with their values.
    pub(super) fn values(&self) -> Result<Vec<(String, Written)>, Gemma4Error> {
        let generation = match existing(self.from, "generation_config.json")? {
            Some(path) => {
                serde_json::from_slice(&read(&path)?).map_err(|error| Gemma4Error::Malformed {
                    path,
                    reason: error.to_string(),
                })?
            }
            None => Value::Null,
        };
        let mut values = Values(Vec::new());
        values.add("general.architecture", Written::Text("gemma4".into()));
        values.add("general.type", Written::Text("model".into()));
        values.sampling(&generation);
        let name = self.from.canonicalize();
        let name = name.as_deref().unwrap_or(self.from).file_name();
        if let Some(name) = name.and_then(|name| name.to_str()) {
            values.add("general.name", Written::Text(name.into()));
        }
        values.shape(self.config);
        let tokens = tokenizer::Tokens::read(self.from, self.config)?;
        tokens.add_to(&mut values.0);
        if let Some(tokens) = generation.get("suppress_tokens").and_then(Value::as_array) {
            let tokens = tokens.iter().filter_map(Value::as_i64);
            let tokens = tokens.filter_map(|token| i32::try_from(token).ok());
            values.add(
                "tokenizer.ggml.suppress_tokens",
                Written::I32s(tokens.collect()),
            );
        }
        if let Some(source) = source_of_folder(self.from)? {
            values.add("tokenizer.chat_template", Written::Text(source));
        }
        values.number("general.quantization_version", QUANTIZATION_VERSION);
        values.number("general.file_type", self.options.form.file_type());
        Ok(values.0)
    }
}

/// The metadata keys and values of the file to write, in the order in which the file stores them.
struct Values(Vec<(String, Written)>);

impl Values {
    fn add(&mut self, key: &str, value: Written) {
        self.0.push((key.into(), value));
    }

    fn number(&mut self, key: &str, number: usize) {
        // A number that does not fit into u32 becomes the largest u32. The later comparison with the source's configuration
        // then finds a difference.
        self.add(key, Written::U32(u32::try_from(number).unwrap_or(u32::MAX)));
    }

    fn of_model(&mut self, key: &str, number: usize) {
        self.number(&format!("gemma4.{key}"), number);
    }

    fn float(&mut self, key: &str, number: f64) {
        self.add(&format!("gemma4.{key}"), Written::F32(number as f32));
    }

    /// Adds a list with one number per layer, or a single number if all layers have the same number.
    fn of_layers(&mut self, key: &str, numbers: Vec<usize>) {
        if numbers.windows(2).all(|pair| pair[0] == pair[1]) {
            self.of_model(key, numbers[0]);
            return;
        }
        let numbers = numbers.into_iter();
        let numbers = numbers.map(|number| i32::try_from(number).unwrap_or(i32::MAX));
        self.add(&format!("gemma4.{key}"), Written::I32s(numbers.collect()));
    }

    /// Adds the sampling settings of `generation_config.json` if its `do_sample` is true.
    fn sampling(&mut self, generation: &Value) {
        if generation.get("do_sample").and_then(Value::as_bool) != Some(true) {
            return;
        }
        if let Some(top_k) = generation.get("top_k").and_then(Value::as_i64) {
            let top_k = i32::try_from(top_k).unwrap_or(i32::MAX);
            self.add("general.sampling.top_k", Written::I32(top_k));
        }
        for (field, key) in [
            ("top_p", "top_p"),
            ("min_p", "min_p"),
            ("temperature", "temp"),
            ("repetition_penalty", "penalty_repeat"),
        ] {
            if let Some(number) = generation.get(field).and_then(Value::as_f64) {
                let key = format!("general.sampling.{key}");
                self.add(&key, Written::F32(number as f32));
            }
        }
    }

    fn shape(&mut self, config: &Gemma4Config) {
        let layers = 0..config.num_layers();
        self.of_model("block_count", config.num_layers());
        self.of_model("context_length", config.max_position_embeddings);
        self.of_model("embedding_length", config.hidden_size);
        let widths = layers.clone().map(|layer| config.intermediate_size(layer));
        self.of_layers("feed_forward_length", widths.collect());
        self.of_model("attention.head_count", config.num_attention_heads);
        let heads = layers.map(|layer| config.key_value_heads(layer));
        self.of_layers("attention.head_count_kv", heads.collect());
        let RopeConfig { theta, .. } = config.global_rope;
        self.float("rope.freq_base", theta);
        self.float("rope.freq_base_swa", config.sliding_rope.theta);
        self.float("attention.layer_norm_rms_epsilon", config.rms_norm_eps);
        if let Some(experts) = &config.experts {
            self.of_model("expert_count", experts.num_experts);
            self.of_model("expert_used_count", experts.top_k_experts);
        }
        self.of_model("attention.key_length", config.global_head_dim);
        self.of_model("attention.value_length", config.global_head_dim);
        self.float(
            "final_logit_softcapping",
            config.final_logit_softcapping.unwrap_or(0.0),
        );
        self.of_model("attention.sliding_window", config.sliding_window);
        self.of_model("attention.shared_kv_layers", config.num_kv_shared_layers);
        self.of_model(
            "embedding_length_per_layer_input",
            config.hidden_size_per_layer_input,
        );
        let slides = config.layer_types.iter();
        let slides = slides.map(|kind| *kind == LayerType::Sliding).collect();
        self.add(
            "gemma4.attention.sliding_window_pattern",
            Written::Booleans(slides),
        );
        self.of_model("attention.key_length_swa", config.sliding_head_dim);
        self.of_model("attention.value_length_swa", config.sliding_head_dim);
        if let Some(experts) = &config.experts {
            self.of_model("expert_feed_forward_length", experts.moe_intermediate_size);
        }
        self.of_model("rope.dimension_count", config.global_head_dim);
        self.of_model("rope.dimension_count_swa", config.sliding_head_dim);
    }
}
