//! Writes a GGUF file of the text model. The file has the keys and tensors that llama.cpp's converter and quantizer
//! write.

use super::{Export, QuantizedCheckpoint, tokenizer};
use crate::checkpoint::gguf::types::Encoding;
use crate::checkpoint::gguf::writer::{Planned, Written};
use crate::checkpoint::gguf::{Gguf, names, writer};
use crate::checkpoint::save::replace;
use crate::checkpoint::source::{PORTION, Source};
use crate::config::generation::GenerationDefaults;
use crate::config::{Gemma4Config, LayerType, RopeConfig};
use crate::error::Gemma4Error;
use crate::error::{existing, read};
use crate::quant::quantize::QuantTarget;
use crate::quant::rows::written;
use crate::text::chat::source_of_folder;
use burn::tensor::DType;
use serde_json::Value;
use std::{
    fs::File,
    io::{self, BufWriter, Write},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

/// The name of the tensor that holds one number for each channel pair. The number divides the rotary angle of the
/// channel pair. A divisor of 1e30 means no rotation.
const ROPE_FREQUENCIES: &str = "rope_freqs.weight";
const STANDS_STILL: f32 = 1e30;
/// The value of the metadata key `general.quantization_version`: the version of ggml's block formats.
const QUANTIZATION_VERSION: usize = 2;

impl Export<'_> {
    pub(super) fn write_gguf(&self, to: &Path) -> Result<QuantizedCheckpoint, Gemma4Error> {
        let values = self.values()?;
        // Parse the generation defaults first, so that an error in the defaults is reported before the long write
        // begins.
        let defaults = existing(self.from, "generation_config.json")?;
        let defaults = defaults.map(GenerationDefaults::from_file).transpose()?;
        let (paths, mut tensors): (Vec<&str>, Vec<Planned>) = self.planned().into_iter().unzip();
        let divisors = self.divisors();
        if let Some(divisors) = &divisors {
            tensors.push(Planned {
                name: ROPE_FREQUENCIES.into(),
                shape: vec![divisors.len()],
                encoding: Encoding::Floats(DType::F32),
            });
        }
        let write = |partial: &Path| {
            let mut paths = paths.iter();
            let file = BufWriter::new(File::create(partial)?);
            let file = writer::write(file, &values, &tensors, |tensor, file| {
                match (paths.next(), &divisors) {
                    (Some(path), _) => self.write_parameter(path, tensor, file),
                    (None, Some(divisors)) => divisors
                        .iter()
                        .try_for_each(|divisor| file.write_all(&divisor.to_le_bytes())),
                    (None, None) => Ok(()),
                }
            })?;
            file.into_inner()?;
            if self.report.borrow().problem.is_some() {
                return Err(io::Error::other("a weight cannot be written"));
            }
            self.refuse_what_reads_otherwise(partial)
        };
        self.finish(replace(to, write))?;
        Ok(self.written(to, self.left_out(to, defaults)?))
    }

    /// Returns the tensors to write, each with its parameter's path.
    fn planned(&self) -> Vec<(&str, Planned)> {
        let plan = |(path, shape): &(String, Vec<usize>)| {
            let name = names::in_file(path, |_| false).swap_remove(0);
            Planned {
                name,
                shape: shape.clone(),
                encoding: self.encoding(path, shape),
            }
        };
        let parameters = self.parameters.iter();
        parameters
            .map(|parameter| (parameter.0.as_str(), plan(parameter)))
            .collect()
    }

    fn encoding(&self, path: &str, shape: &[usize]) -> Encoding {
        if self.is_quantized(path, shape) {
            return Encoding::Blocks(self.target.format());
        }
        Encoding::Floats(match self.quantized.contains(path) {
            // Do not quantize a matrix whose rows do not consist of whole blocks.
            true => match self.source(path).dtype() {
                Some(dtype @ (DType::F16 | DType::BF16)) => dtype,
                _ => DType::F32,
            },
            // Norms, scalars and routers are written in f32, because programs that read GGUF files compute with these
            // tensors in f32.
            false => DType::F32,
        })
    }

    fn write_parameter(
        &self,
        path: &str,
        tensor: &Planned,
        file: &mut dyn Write,
    ) -> io::Result<()> {
        let source = self.source(path);
        let slices = tensor.shape[0];
        let of_slice: usize = tensor.shape[1..].iter().product();
        let at_once = (PORTION / (of_slice * size_of::<f32>())).clamp(1, slices);
        for start in (0..slices).step_by(at_once) {
            let range = start..(start + at_once).min(slices);
            let bytes = match tensor.encoding {
                Encoding::Floats(dtype) => {
                    let numbers = source.slices(range, dtype);
                    if numbers.iter::<f32>().any(|number| !number.is_finite()) {
                        self.is_no_number(path);
                    }
                    numbers.into_bytes().to_vec()
                }
                Encoding::Blocks(_) => self.blocks(path, &source, range),
            };
            file.write_all(&bytes)?;
        }
        self.is_written(&tensor.name, source.len());
        Ok(())
    }

    /// Quantizes the slices `range` of a parameter, and returns the quantized blocks. A slice is the part of the
    /// parameter at one index of its first dimension.
    fn blocks(&self, path: &str, source: &Source<'_>, range: std::ops::Range<usize>) -> Vec<u8> {
        let columns = source.shape.last().copied().unwrap_or(1);
        let numbers: Vec<f32> = source.slices(range, DType::F32).iter().collect();
        let target = self.target;
        let format = target.format();
        let row_bytes = columns / format.numbers() * format.bytes();
        let are_numbers = AtomicBool::new(true);
        let rows = numbers.len() / columns;
        let bytes = written(
            0..rows,
            row_bytes,
            || (),
            |row, (), bytes| {
                if !target.write(&numbers[row * columns..][..columns], bytes) {
                    are_numbers.store(false, Ordering::Relaxed);
                }
            },
        );
        if !are_numbers.load(Ordering::Relaxed) {
            self.is_no_number(path);
        }
        bytes
    }

    /// Returns the numbers that divide the rotary angles, one per channel pair. Returns `None` if the model has no
    /// full-attention layers.
    fn divisors(&self) -> Option<Vec<f32>> {
        let config = self.config;
        let rope = &config.global_rope;
        let rotated = rope.rotated_pairs(config.global_head_dim);
        let divisor = |pair| match pair < rotated {
            true => rope.factor as f32,
            false => STANDS_STILL,
        };
        let pairs = 0..config.global_head_dim / 2;
        let has_full = config.layer_types.contains(&LayerType::Full);
        has_full.then(|| pairs.map(divisor).collect())
    }

    /// Returns the metadata keys of the written file, with their values.
    fn values(&self) -> Result<Vec<(String, Written)>, Gemma4Error> {
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
        let file_type = match self.target {
            QuantTarget::Q8 => 7,
            QuantTarget::Q4 => 2,
        };
        values.number("general.file_type", file_type);
        Ok(values.0)
    }

    /// Returns an error if the configuration in the written file differs from the source's configuration. GGUF's keys
    /// cannot express every configuration.
    fn refuse_what_reads_otherwise(&self, path: &Path) -> io::Result<()> {
        let alike = |config: &Gemma4Config| Gemma4Config {
            // Ignore differences in fields that do not change the model's outputs.
            dtype: None,
            initializer_range: 0.0,
            eos_tokens: Vec::new(),
            ..config.clone()
        };
        let found = Gguf::at(path)
            .map_err(io::Error::other)?
            .ok_or_else(|| io::Error::other("is not a GGUF file"))?
            .config()
            .map_err(io::Error::other)?;
        match alike(&found) == alike(self.config) {
            true => Ok(()),
            false => Err(io::Error::other(format!(
                "GGUF has no words for the configuration: the file would be read as {:?} instead of {:?}",
                alike(&found),
                alike(self.config)
            ))),
        }
    }

    /// Returns descriptions of everything in the source that the GGUF file lacks, such as the vision tower.
    fn left_out(
        &self,
        written: &Path,
        defaults: Option<GenerationDefaults>,
    ) -> Result<Vec<String>, Gemma4Error> {
        let json: Value = serde_json::from_str(self.json)
            .map_err(|error| Gemma4Error::Config(error.to_string()))?;
        let towers = ["vision_config", "audio_config"].into_iter();
        let towers = towers.filter(|part| json.get(part).is_some_and(|part| !part.is_null()));
        let mut left_out: Vec<String> = towers.map(|part| format!("the tower of {part}")).collect();
        let Some(expected) = defaults else {
            return Ok(left_out);
        };
        let found = match Gguf::at(written)? {
            Some(gguf) => gguf.generation_defaults()?,
            None => GenerationDefaults::default(),
        };
        let lost = |token: &&u32| !found.stop_tokens.contains(token);
        let tokens: Vec<&u32> = expected.stop_tokens.iter().filter(lost).collect();
        if !tokens.is_empty() {
            left_out.push(format!("{tokens:?} as ends of a text"));
        }
        for (name, is_set) in [
            ("the sampling", found.sampling() != expected.sampling()),
            ("stop_strings", !expected.stop_strings.is_empty()),
            ("max_new_tokens", expected.max_new_tokens.is_some()),
            ("max_length", expected.max_length.is_some()),
            ("min_new_tokens", expected.min_new_tokens.is_some()),
            (
                "min_length",
                expected.min_length.is_some_and(|most| most > 0),
            ),
            (
                "begin_suppress_tokens",
                !expected.begin_suppress_tokens.is_empty(),
            ),
        ] {
            left_out.extend(is_set.then(|| format!("{name} of generation_config.json")));
        }
        Ok(left_out)
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
