//! Reads a checkpoint's `generation_config.json`.

use super::unsupported::{sentence, unsupported};
use crate::config::Gemma4Config;
use crate::config::Tokens;
use crate::config::sampling::Sampling;
use crate::error::Gemma4Error;
use crate::error::read;
use crate::json;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::path::Path;

/// The sampling settings that the checkpoint's authors recommend, and the tokens and strings that end a generation.
///
/// A field that is missing in the file gets the default of Hugging Face Transformers.
///
/// # Examples
/// ```
/// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
/// use burn_gemma4::GenerationDefaults;
///
/// let json = r#"{"do_sample": true, "top_k": 64, "top_p": 0.95, "eos_token_id": [1, 106]}"#;
/// let defaults = GenerationDefaults::from_json(json)?;
/// assert_eq!(defaults.stop_tokens, [1, 106]);
/// assert_eq!(defaults.sampling().temperature, 1.0);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationDefaults {
    /// True if tokens are sampled at random, and false for greedy decoding. Default: false.
    pub do_sample: bool,
    /// See [`Sampling::temperature`]. Default: 1.
    pub temperature: f32,
    /// See [`Sampling::top_k`]. Default: 50. In the file, `null` and 0 mean no limit.
    pub top_k: Option<usize>,
    /// See [`Sampling::top_p`]. Default: none.
    pub top_p: Option<f32>,
    /// See [`Sampling::min_p`]. Default: none.
    pub min_p: Option<f32>,
    /// See [`Sampling::repetition_penalty`]. Default: 1.
    pub repetition_penalty: f32,
    /// See [`Sampling::suppress_tokens`]. Default: none.
    pub suppress_tokens: Vec<u32>,
    /// The stop strings, which end a generation. Default: none.
    pub stop_strings: Vec<String>,
    /// The stop tokens, which end a generation. The file calls them `eos_token_id`. Default: none.
    pub stop_tokens: Vec<u32>,
    /// The token at the beginning of every text. Default: none.
    pub bos_token: Option<u32>,
    /// The token that pads the shorter texts in a batch. Default: none.
    pub pad_token: Option<u32>,
    /// The maximum number of generated tokens. Default: none.
    pub max_new_tokens: Option<usize>,
    /// See [`GenerateOptions::max_length`](crate::generate::GenerateOptions::max_length). Ignored if `max_new_tokens` is
    /// set. Default: none.
    pub max_length: Option<usize>,
    /// See [`GenerateOptions::min_new_tokens`](crate::generate::GenerateOptions::min_new_tokens). Default: none.
    pub min_new_tokens: Option<usize>,
    /// See [`GenerateOptions::min_length`](crate::generate::GenerateOptions::min_length). Ignored if `min_new_tokens` is
    /// set. Default: none.
    pub min_length: Option<usize>,
    /// See [`GenerateOptions::begin_suppress_tokens`](crate::generate::GenerateOptions::begin_suppress_tokens). Default: none.
    pub begin_suppress_tokens: Vec<u32>,
    /// Tokens that are never sampled. Stop tokens in this list can be sampled nevertheless. The list holds those
    /// entries of `bad_words_ids` that consist of one token. Default: none.
    pub bad_words: Vec<u32>,
    /// Warnings to the user about settings in the file that this crate does not support. Default: none.
    pub unsupported: Vec<String>,
}

impl Default for GenerationDefaults {
    fn default() -> Self {
        File::default().into()
    }
}

impl GenerationDefaults {
    /// Reads a `generation_config.json`.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Io`] if the file cannot be read. Returns [`Gemma4Error::Malformed`] if the JSON is invalid, if
    /// the settings allow no generated tokens, or if [`Sampling::validate`] refuses them.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        let path = path.as_ref();
        let bytes = read(path)?;
        Self::parse(&bytes, path)
    }

    /// Parses the contents of a `generation_config.json`.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Malformed`] if the JSON is invalid, if the settings allow no generated tokens, or if
    /// [`Sampling::validate`] refuses them.
    pub fn from_json(json: &str) -> Result<Self, Gemma4Error> {
        Self::parse(json.as_bytes(), Path::new("generation_config.json"))
    }

    /// Parses the bytes of a `generation_config.json`, with the checks and errors of [`from_json`](Self::from_json). An
    /// error names the file at `path`.
    pub(crate) fn parse(bytes: &[u8], path: &Path) -> Result<Self, Gemma4Error> {
        let malformed = |reason: String| Gemma4Error::Malformed {
            path: path.into(),
            reason,
        };
        let file: File = json::from_slice(bytes).map_err(malformed)?;
        let defaults = Self::from(file);
        if defaults.max_new_tokens == Some(0) {
            return Err(malformed("max_new_tokens is 0".into()));
        }
        if defaults.max_length == Some(0) {
            return Err(malformed("max_length is 0".into()));
        }
        defaults
            .sampling()
            .validate()
            .and_then(|()| validate_stop_strings(&defaults.stop_strings))
            .map_err(|error| malformed(error.to_string()))?;
        Ok(defaults)
    }

    /// Uses the stop tokens of the model's configuration if the `generation_config.json` lists none.
    pub(crate) fn or_of(mut self, config: &Gemma4Config) -> Self {
        if self.stop_tokens.is_empty() {
            self.stop_tokens.clone_from(&config.eos_tokens);
        }
        self
    }

    /// Returns the sampling settings, without a seed. If `do_sample` is false, the settings are those of greedy decoding.
    pub fn sampling(&self) -> Sampling {
        let mut suppress_tokens = self.suppress_tokens.clone();
        let bad_words = self.bad_words.iter();
        suppress_tokens.extend(bad_words.filter(|token| !self.stop_tokens.contains(token)));
        let greedy = Sampling {
            repetition_penalty: self.repetition_penalty,
            suppress_tokens,
            ..Sampling::greedy()
        };
        if !self.do_sample {
            return greedy;
        }
        Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            ..greedy
        }
    }
}

/// The fields of the file. Each field may be missing or `null`.
#[derive(Deserialize)]
#[serde(default)]
struct File {
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    suppress_tokens: Option<Vec<u32>>,
    stop_strings: Option<Strings>,
    eos_token_id: Option<Tokens>,
    bos_token_id: Option<u32>,
    pad_token_id: Option<u32>,
    max_new_tokens: Option<usize>,
    max_length: Option<usize>,
    min_new_tokens: Option<usize>,
    min_length: Option<usize>,
    begin_suppress_tokens: Option<Vec<u32>>,
    bad_words_ids: Option<Vec<Vec<u32>>>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// One text or a list of texts.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "stop_strings should be a text or a list of texts"
)]
enum Strings {
    One(String),
    Several(Vec<String>),
}

impl Strings {
    fn into_vec(self) -> Vec<String> {
        match self {
            Self::One(string) => vec![string],
            Self::Several(strings) => strings,
        }
    }
}

impl Default for File {
    fn default() -> Self {
        Self {
            do_sample: None,
            temperature: None,
            top_k: Some(50),
            top_p: None,
            min_p: None,
            repetition_penalty: None,
            suppress_tokens: None,
            stop_strings: None,
            eos_token_id: None,
            bos_token_id: None,
            pad_token_id: None,
            max_new_tokens: None,
            max_length: None,
            min_new_tokens: None,
            min_length: None,
            begin_suppress_tokens: None,
            bad_words_ids: None,
            others: Map::new(),
        }
    }
}

impl From<File> for GenerationDefaults {
    fn from(file: File) -> Self {
        let mut unsupported = unsupported(&file.others);
        let bad_words = file.bad_words_ids.unwrap_or_default();
        let (single, longer): (Vec<_>, Vec<_>) =
            bad_words.into_iter().partition(|word| word.len() == 1);
        // Report the entries of `bad_words_ids` with several tokens as unsupported. A sampler may forbid the last token
        // of such an entry only after the entry's other tokens. The sampler that runs on the device cannot do this,
        // because it does not see earlier tokens.
        if !longer.is_empty() {
            unsupported.push(sentence("bad_words_ids", &json!(longer)));
        }
        Self {
            do_sample: file.do_sample.unwrap_or(false),
            temperature: file.temperature.unwrap_or(1.0),
            top_k: file.top_k.filter(|&top_k| top_k > 0),
            top_p: file.top_p,
            min_p: file.min_p,
            repetition_penalty: file.repetition_penalty.unwrap_or(1.0),
            suppress_tokens: file.suppress_tokens.unwrap_or_default(),
            stop_strings: file.stop_strings.map_or_else(Vec::new, Strings::into_vec),
            stop_tokens: file.eos_token_id.map_or_else(Vec::new, Tokens::into_vec),
            bos_token: file.bos_token_id,
            pad_token: file.pad_token_id,
            max_new_tokens: file.max_new_tokens,
            max_length: file.max_length,
            min_new_tokens: file.min_new_tokens,
            min_length: file.min_length,
            begin_suppress_tokens: file.begin_suppress_tokens.unwrap_or_default(),
            bad_words: single.concat(),
            unsupported,
        }
    }
}

/// Refuses empty stop strings, because every text contains the empty string.
pub(crate) fn validate_stop_strings(strings: &[String]) -> Result<(), Gemma4Error> {
    match strings.iter().any(String::is_empty) {
        true => Err(Gemma4Error::Argument {
            argument: "stop_strings",
            reason: "one of them is empty".into(),
        }),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> GenerationDefaults {
        GenerationDefaults::from_json(json).unwrap_or_else(|error| panic!("{json}: {error}"))
    }

    #[test]
    fn read_of_instruction_tuned_checkpoint_gives_all_fields() {
        let defaults = read(
            r#"{"bos_token_id": 2, "do_sample": true, "eos_token_id": [1, 106, 50], "pad_token_id": 0,
                "temperature": 1.0, "top_k": 64, "top_p": 0.95, "transformers_version": "5.5.0"}"#,
        );
        assert_eq!(
            defaults,
            GenerationDefaults {
                do_sample: true,
                temperature: 1.0,
                top_k: Some(64),
                top_p: Some(0.95),
                stop_tokens: vec![1, 106, 50],
                bos_token: Some(2),
                pad_token: Some(0),
                ..GenerationDefaults::default()
            }
        );
        assert_eq!(
            defaults.sampling(),
            Sampling {
                temperature: 1.0,
                top_k: Some(64),
                top_p: Some(0.95),
                ..Sampling::greedy()
            }
        );
    }

    #[test]
    fn sampling_without_do_sample_is_greedy() {
        let defaults = read(r#"{"eos_token_id": 1, "temperature": 0.7, "max_new_tokens": 20}"#);
        assert_eq!(defaults.stop_tokens, [1]);
        assert_eq!(defaults.max_new_tokens, Some(20));
        assert_eq!(defaults.sampling(), Sampling::greedy());
    }

    #[test]
    fn read_of_missing_fields_gives_defaults_of_transformers() {
        let sampling = read(r#"{"do_sample": true}"#).sampling();
        assert_eq!(
            (sampling.temperature, sampling.top_k, sampling.top_p),
            (1.0, Some(50), None)
        );
        assert_eq!(read("{}"), GenerationDefaults::default());
    }

    #[test]
    fn read_of_null_or_zero_turns_setting_off() {
        for json in [
            r#"{"do_sample": true, "top_k": 0}"#,
            r#"{"do_sample": true, "top_k": null, "top_p": null, "temperature": null}"#,
        ] {
            let sampling = read(json).sampling();
            assert_eq!(
                (sampling.temperature, sampling.top_k, sampling.top_p),
                (1.0, None, None)
            );
        }
        assert!(read(r#"{"eos_token_id": null}"#).stop_tokens.is_empty());
    }

    #[test]
    fn read_of_length_and_word_fields_succeeds() {
        let defaults = read(
            r#"{"eos_token_id": [1, 106], "max_length": 40, "min_new_tokens": 3, "min_length": 9, "suppress_tokens": [7],
                "begin_suppress_tokens": [8, 9], "bad_words_ids": [[5], [106], [6]]}"#,
        );
        assert_eq!(
            (defaults.max_length, defaults.max_new_tokens),
            (Some(40), None)
        );
        assert_eq!(
            (defaults.min_new_tokens, defaults.min_length),
            (Some(3), Some(9))
        );
        assert_eq!(defaults.begin_suppress_tokens, [8, 9]);
        // A stop token in `bad_words_ids` can still be sampled, as in Hugging Face Transformers.
        assert_eq!(defaults.sampling().suppress_tokens, [7, 5, 6]);
        assert!(
            defaults.unsupported.is_empty(),
            "{:?}",
            defaults.unsupported
        );
    }

    #[test]
    fn read_of_unsupported_field_warns_with_name_and_value() {
        for (name, value) in [
            ("no_repeat_ngram_size", "2"),
            ("encoder_no_repeat_ngram_size", "3"),
            ("bad_words_ids", "[[5,6]]"),
            ("forced_bos_token_id", "2"),
            ("forced_eos_token_id", "[1]"),
            ("typical_p", "0.2"),
            ("epsilon_cutoff", "0.0003"),
            ("eta_cutoff", "0.0003"),
            ("top_h", "0.4"),
            ("num_beams", "4"),
            ("num_beam_groups", "2"),
            ("num_return_sequences", "2"),
            ("penalty_alpha", "0.6"),
            ("guidance_scale", "1.5"),
            ("sequence_bias", "[[[5],-1.0]]"),
            ("exponential_decay_length_penalty", "[5,1.1]"),
            ("encoder_repetition_penalty", "1.2"),
            ("force_words_ids", "[[5]]"),
            ("constraints", "[1]"),
            ("dola_layers", r#""high""#),
            ("watermarking_config", r#"{"bias":2.5}"#),
            ("token_healing", "true"),
            ("remove_invalid_values", "true"),
            ("max_time", "3.5"),
        ] {
            let defaults = read(&format!(r#"{{"{name}": {value}}}"#));
            let expected = format!(
                "generation_config.json: {name} is {value}, which is not supported and has no effect"
            );
            assert_eq!(defaults.unsupported, [expected]);
        }
        let longer = read(r#"{"bad_words_ids": [[5], [6, 7]]}"#);
        assert_eq!(longer.bad_words, [5]);
        assert!(longer.unsupported[0].contains("bad_words_ids is [[6,7]],"));
        let hostile = read(r#"{"dola_layers": "a\u001b[2J\u009b2J"}"#);
        assert!(!hostile.unsupported[0].contains(|one: char| one.is_control()));
    }

    /// Checks that settings without an effect cause no warning. Each setting has the value that means "off" in Hugging
    /// Face Transformers.
    #[test]
    fn read_of_neutral_values_gives_no_warning() {
        let defaults = read(
            r#"{"no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": null, "forced_bos_token_id": null,
                "forced_eos_token_id": null, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": null,
                "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "penalty_alpha": null, "guidance_scale": null,
                "sequence_bias": null, "exponential_decay_length_penalty": null, "encoder_repetition_penalty": 1.0,
                "force_words_ids": null, "constraints": null, "dola_layers": null, "watermarking_config": null,
                "token_healing": false, "remove_invalid_values": false, "max_time": null, "length_penalty": 1.0,
                "diversity_penalty": 0.0, "early_stopping": false, "renormalize_logits": false, "use_cache": true,
                "cache_implementation": "hybrid", "output_scores": false, "return_dict_in_generate": false,
                "min_new_tokens": null, "min_length": 0, "max_length": null, "begin_suppress_tokens": null,
                "_from_model_config": true, "transformers_version": "5.24.0"}"#,
        );
        let expected = GenerationDefaults {
            min_length: Some(0),
            ..GenerationDefaults::default()
        };
        assert_eq!(defaults, expected);
    }

    #[test]
    fn errors_of_malformed_file_name_file_and_problem() {
        for (json, wrong) in [
            ("{", "EOF"),
            ("3", "invalid type"),
            (
                r#"{"eos_token_id": "<eos>"}"#,
                "eos_token_id: invalid type: expected a token or a list of tokens",
            ),
            (r#"{"do_sample": true, "temperature": -1.0}"#, "temperature"),
            (r#"{"temperature": "hot"}"#, "temperature: invalid type"),
            (
                r#"{"bad_words_ids": [5]}"#,
                "bad_words_ids[0]: invalid type",
            ),
            (r#"{"max_length": 0}"#, "max_length is 0"),
            (r#"{"do_sample": true, "top_p": 1.5}"#, "top_p"),
        ] {
            let error = GenerationDefaults::from_json(json).expect_err(json);
            assert!(matches!(&error, Gemma4Error::Malformed { .. }), "{error}");
            let text = error.to_string();
            assert!(
                text.starts_with("generation_config.json: ") && text.contains(wrong),
                "{text}"
            );
        }
        let absent = GenerationDefaults::from_file("no/such/generation_config.json");
        let absent = absent.expect_err("the file does not exist");
        assert!(matches!(&absent, Gemma4Error::Io { .. }), "{absent}");
    }
}
