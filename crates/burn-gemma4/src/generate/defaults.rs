//! What a checkpoint's `generation_config.json` says about generation.

use crate::config::Tokens;
use crate::error::read;
use crate::text::stop;
use crate::{Gemma4Config, Gemma4Error, Sampling};
use serde::Deserialize;
use std::path::Path;

/// How the checkpoint's makers mean it to be sampled, and where its texts end. What the file leaves out is
/// as in transformers.
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
    /// Whether tokens are drawn at random; else the likeliest is taken. Default: false.
    pub do_sample: bool,
    /// See [`Sampling::temperature`]. Default: 1.
    pub temperature: f32,
    /// See [`Sampling::top_k`]. Default: 50; `null` and 0 in the file are none.
    pub top_k: Option<usize>,
    /// See [`Sampling::top_p`]. Default: none.
    pub top_p: Option<f32>,
    /// See [`Sampling::min_p`]. Default: none.
    pub min_p: Option<f32>,
    /// See [`Sampling::repetition_penalty`]. Default: 1.
    pub repetition_penalty: f32,
    /// See [`Sampling::suppress_tokens`]. Default: none.
    pub suppress_tokens: Vec<u32>,
    /// The texts that end a text. Default: none.
    pub stop_strings: Vec<String>,
    /// The tokens that end a text, `eos_token_id` in the file. Default: none.
    pub stop_tokens: Vec<u32>,
    /// The token that begins a text. Default: none.
    pub bos_token: Option<u32>,
    /// The token that fills up shorter texts of a batch. Default: none.
    pub pad_token: Option<u32>,
    /// How many tokens to generate at most. Default: none.
    pub max_new_tokens: Option<usize>,
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
    /// [`Gemma4Error::Io`] where the file cannot be read, [`Gemma4Error::Malformed`] where it is not JSON of
    /// that kind or asks for no tokens, or for what [`Sampling::validate`] refuses.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        let path = path.as_ref();
        let bytes = read(path)?;
        Self::parse(&bytes, path)
    }

    /// Reads the contents of a `generation_config.json`.
    ///
    /// # Errors
    /// [`Gemma4Error::Malformed`] where they are not JSON of that kind or ask for no tokens, or for what
    /// [`Sampling::validate`] refuses.
    pub fn from_json(json: &str) -> Result<Self, Gemma4Error> {
        Self::parse(json.as_bytes(), Path::new("generation_config.json"))
    }

    /// As [`from_json`](Self::from_json), of the file at `path`.
    pub(crate) fn parse(bytes: &[u8], path: &Path) -> Result<Self, Gemma4Error> {
        let malformed = |reason: String| Gemma4Error::Malformed {
            path: path.into(),
            reason,
        };
        let file: File =
            serde_json::from_slice(bytes).map_err(|error| malformed(error.to_string()))?;
        let defaults = Self::from(file);
        if defaults.max_new_tokens == Some(0) {
            return Err(malformed("max_new_tokens is 0".into()));
        }
        defaults
            .sampling()
            .validate()
            .and_then(|()| stop::validate(&defaults.stop_strings))
            .map_err(|error| malformed(error.to_string()))?;
        Ok(defaults)
    }

    /// With the tokens that end texts from the model's configuration where the file named none.
    pub(crate) fn or_of(mut self, config: &Gemma4Config) -> Self {
        if self.stop_tokens.is_empty() {
            self.stop_tokens.clone_from(&config.eos_tokens);
        }
        self
    }

    /// The sampling, without a seed; greedy where `do_sample` is false. The penalty and the suppressed tokens hold
    /// for both.
    pub fn sampling(&self) -> Sampling {
        let greedy = Sampling {
            repetition_penalty: self.repetition_penalty,
            suppress_tokens: self.suppress_tokens.clone(),
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

/// The file's fields. Each may be `null`.
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
}

/// One text or several.
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
        }
    }
}

impl From<File> for GenerationDefaults {
    fn from(file: File) -> Self {
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
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> GenerationDefaults {
        GenerationDefaults::from_json(json).unwrap_or_else(|error| panic!("{json}: {error}"))
    }

    #[test]
    fn an_instruction_tuned_checkpoint() {
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
    fn without_do_sample_it_is_greedy() {
        let defaults = read(r#"{"eos_token_id": 1, "temperature": 0.7, "max_new_tokens": 20}"#);
        assert_eq!(defaults.stop_tokens, [1]);
        assert_eq!(defaults.max_new_tokens, Some(20));
        assert_eq!(defaults.sampling(), Sampling::greedy());
    }

    #[test]
    fn what_is_left_out_is_as_in_transformers() {
        let sampling = read(r#"{"do_sample": true}"#).sampling();
        assert_eq!(
            (sampling.temperature, sampling.top_k, sampling.top_p),
            (1.0, Some(50), None)
        );
        assert_eq!(read("{}"), GenerationDefaults::default());
    }

    #[test]
    fn null_and_zero_turn_off() {
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
    fn errors_name_the_file_and_what_is_wrong() {
        for (json, wrong) in [
            ("{", "EOF"),
            ("3", "invalid type"),
            (
                r#"{"eos_token_id": "<eos>"}"#,
                "a token or a list of tokens",
            ),
            (r#"{"do_sample": true, "temperature": -1.0}"#, "temperature"),
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
        let absent = absent.expect_err("absent");
        assert!(matches!(&absent, Gemma4Error::Io { .. }), "{absent}");
    }
}
