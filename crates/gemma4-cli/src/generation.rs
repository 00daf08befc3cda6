//! The arguments for generation: sampling, the KV cache and speculative decoding.

use crate::cache_file::CacheFile;
use crate::terminal::note;
use crate::{Error, hub};
use burn_gemma4::{
    Drafts, Gemma4, Gemma4Error, GenerateOptions, Generation, GenerationDefaults, KvPrecision,
    Sampling,
};
use clap::builder::NonEmptyStringValueParser;
use std::path::PathBuf;

/// Prints a note if a text ended because it reached the context length or the token limit.
pub fn tell_length(gemma: &Gemma4, generation: &Generation) {
    let positions = gemma.config().max_position_embeddings;
    let used = generation.prompt_tokens.len() + generation.tokens.len();
    match used >= positions {
        true => note(format_args!(
            "ended: the model's {positions} positions are used up, {} of them by the prompt",
            generation.prompt_tokens.len()
        )),
        false => note(format_args!(
            "ended after {} tokens; --max-tokens sets the limit",
            generation.tokens.len()
        )),
    }
}

/// The arguments for generation and sampling. A missing argument has the value of the checkpoint's settings.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Sampling")]
pub struct GenerationArguments {
    /// Largest number of tokens to generate [default: the checkpoint's, or 256].
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true, value_parser = positive)]
    pub max_tokens: Option<usize>,
    /// Sampling temperature. Values below 1 make likely tokens more likely; 0 is greedy decoding [default: the checkpoint's].
    #[arg(long, allow_negative_numbers = true, value_parser = temperature)]
    pub temperature: Option<f32>,
    /// Number of most likely tokens from which to sample [default: the checkpoint's].
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true, value_parser = positive)]
    pub top_k: Option<usize>,
    /// Sample from the smallest set of most likely tokens whose probabilities sum up to this value [default: the checkpoint's].
    #[arg(long, value_name = "PROBABILITY", allow_negative_numbers = true, value_parser = top_p)]
    pub top_p: Option<f32>,
    /// Sample only from tokens whose probability is at least this fraction of the highest probability [default: the
    /// checkpoint's].
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true, value_parser = min_p)]
    pub min_p: Option<f32>,
    /// Penalty for tokens that the prompt or the generated text already contains. Values above 1 make these tokens less likely,
    /// even in greedy decoding [default: the checkpoint's].
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true, value_parser = repetition_penalty)]
    pub repetition_penalty: Option<f32>,
    /// Text at which generation stops. The text itself is kept. The option may be repeated [default: the checkpoint's].
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
    /// Seed for sampling. The same seed gives the same tokens [default: a new seed for each run].
    #[arg(long, allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// Store only the rotated quarter of each key in layers that use one projection for both keys and values. The KV cache of
    /// these layers then takes five eighths of the memory.
    #[arg(long, help_heading = "Memory")]
    pub compact_keys: bool,
    /// KV cache type: the model's dtype, or int8 with one scale per token and head. Int8 takes half of the memory of bf16.
    /// If the session in --cache has another type, the session's text is processed again.
    #[arg(
        long,
        value_enum,
        value_name = "PRECISION",
        default_value_t,
        help_heading = "Memory"
    )]
    pub kv: Kv,
    /// Number of prompt tokens to process at a time. A smaller number needs less memory for activations [default: 8192; on a
    /// CPU 512].
    #[arg(long, help_heading = "Memory", value_name = "COUNT", allow_negative_numbers = true, value_parser = positive)]
    pub chunk: Option<usize>,
    /// Use speculative decoding by prompt lookup. The draft tokens are those after an earlier occurrence of the text's last
    /// tokens. The generated text stays the same. Decoding is faster if answers repeat parts of the prompt.
    #[arg(long, help_heading = "Speculative decoding", group = "drafts")]
    pub lookup: bool,
    /// Drafter for speculative decoding: a folder, or the name of a model on the Hugging Face Hub, as for --model. A
    /// drafter is a small model that was trained for the chosen model.
    #[arg(
        long,
        help_heading = "Speculative decoding",
        value_name = "PATH",
        group = "drafts"
    )]
    pub draft: Option<PathBuf>,
    /// Number of draft tokens per decode step, 1 to 8; 8 is slower than 7 [default: adaptive, 1 to 7].
    #[arg(long, help_heading = "Speculative decoding", value_name = "COUNT", allow_negative_numbers = true, value_parser = positive, requires = "drafts")]
    pub draft_tokens: Option<usize>,
    /// File that stores the session between runs. The file is read at the start, so that only new text must be processed,
    /// and written at the end. A chat also stores its conversation, and writes the file after each answer. For E2B in bf16,
    /// the file has 12 MB plus 6 KB per token.
    #[arg(long, help_heading = "Memory", value_name = "FILE")]
    pub cache: Option<PathBuf>,
    /// Let the model think before it answers. Thoughts are printed on standard error.
    #[arg(long, help_heading = "Output", value_enum, value_name = "SWITCH")]
    pub thinking: Option<Switch>,
    /// Parse special tokens in messages, such as <turn|>. By default they are treated as plain text.
    #[arg(long, help_heading = "Advanced")]
    pub special_tokens: bool,
}

/// The values of a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Switch {
    /// Enable the feature.
    On,
    /// Disable the feature.
    Off,
}

/// The values of `--kv`: the element type of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kv {
    /// Use the model's dtype.
    #[default]
    Model,
    /// Use int8, with one scale per token and head.
    Q8,
}

impl From<Kv> for KvPrecision {
    fn from(kv: Kv) -> Self {
        match kv {
            Kv::Model => Self::Model,
            Kv::Q8 => Self::Q8,
        }
    }
}

/// Returns the model, together with the drafter in `folder` if there is one.
///
/// # Errors
/// Returns an error if the drafter is invalid.
pub fn with_drafter(gemma: Gemma4, folder: Option<PathBuf>) -> Result<Gemma4, Error> {
    Ok(match folder {
        Some(folder) => gemma.with_drafter(folder)?,
        None => gemma,
    })
}

impl GenerationArguments {
    /// Returns the folder of the drafter, if the arguments name one. A drafter that the Hub's cache lacks is
    /// downloaded. Commands call this function before they load the model, so that errors appear early.
    ///
    /// # Errors
    /// Passes on the errors of [`hub::resolve_folder`].
    pub fn drafter_folder(&self) -> Result<Option<PathBuf>, Error> {
        let draft = self.draft.as_deref();
        draft
            .map(|draft| hub::resolve_folder("--draft", draft))
            .transpose()
    }

    /// Opens the file of `--cache`. Commands open the file before they load the model, so that errors appear early.
    ///
    /// # Errors
    /// Passes on the errors of [`CacheFile::open`].
    pub fn cache_file(&self) -> Result<Option<CacheFile>, Error> {
        self.cache.as_deref().map(CacheFile::open).transpose()
    }

    /// Returns the generation options. An option without an argument has the checkpoint's value. The function prints a
    /// note about each argument that has no effect. If `is_chat` is true, an answer stops at the end of a turn.
    pub fn options(&self, gemma: &Gemma4, is_chat: bool) -> GenerateOptions {
        let config = gemma.config();
        let mut layers = 0..config.num_layers();
        if self.compact_keys && !layers.any(|layer| config.values_are_keys(layer)) {
            note(
                "note: --compact-keys has no effect: no layer of this model has the same projection for keys and values",
            );
        }
        let mut options = match is_chat {
            true => gemma.chat_options(),
            false => gemma.options(),
        };
        if let Some(max_tokens) = self.max_tokens {
            options.max_tokens = max_tokens;
            options.max_length = None;
        }
        options.sampling = self.sampling(gemma.defaults());
        if !self.stop.is_empty() {
            options.stop_strings.clone_from(&self.stop);
        }
        options.compact_keys = self.compact_keys;
        options.kv_precision = self.kv.into();
        options.prefill_chunk = self.chunk;
        options.drafts = match (self.lookup, &self.draft) {
            (true, _) => Drafts::Lookup,
            (false, Some(_)) => Drafts::Drafter,
            (false, None) => Drafts::None,
        };
        options.draft_tokens = self.draft_tokens;
        options.chat.enable_thinking = self.thinking == Some(Switch::On);
        options.chat.special_tokens = self.special_tokens;
        options
    }

    fn sampling(&self, defaults: &GenerationDefaults) -> Sampling {
        // An argument that restricts the candidate tokens enables sampling, even if the checkpoint disables it. All other
        // settings keep the checkpoint's values.
        let draws = self.top_k.is_some() || self.top_p.is_some() || self.min_p.is_some();
        let checkpoint = GenerationDefaults {
            do_sample: defaults.do_sample || draws || self.temperature.is_some(),
            ..defaults.clone()
        };
        let checkpoint = checkpoint.sampling();
        let usual = match checkpoint.temperature {
            0.0 if draws => 1.0,
            temperature => temperature,
        };
        Sampling {
            temperature: self.temperature.unwrap_or(usual),
            top_k: self.top_k.or(checkpoint.top_k),
            top_p: self.top_p.or(checkpoint.top_p),
            min_p: self.min_p.or(checkpoint.min_p),
            repetition_penalty: self
                .repetition_penalty
                .unwrap_or(checkpoint.repetition_penalty),
            suppress_tokens: checkpoint.suppress_tokens,
            seed: self.seed.or(checkpoint.seed),
        }
    }
}

/// Parses a whole number of at least 1.
pub(crate) fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("expected at least 1".into()),
        Ok(number) => Ok(number),
        Err(_) => Err("expected a whole number of at least 1".into()),
    }
}

fn temperature(text: &str) -> Result<f32, String> {
    let temperature = number(text)?;
    check(Sampling {
        temperature,
        ..Sampling::greedy()
    })?;
    Ok(temperature)
}

fn top_p(text: &str) -> Result<f32, String> {
    let top_p = number(text)?;
    check(Sampling {
        top_p: Some(top_p),
        ..Sampling::greedy()
    })?;
    Ok(top_p)
}

fn min_p(text: &str) -> Result<f32, String> {
    let min_p = number(text)?;
    check(Sampling {
        min_p: Some(min_p),
        ..Sampling::greedy()
    })?;
    Ok(min_p)
}

fn repetition_penalty(text: &str) -> Result<f32, String> {
    let repetition_penalty = number(text)?;
    check(Sampling {
        repetition_penalty,
        ..Sampling::greedy()
    })?;
    Ok(repetition_penalty)
}

fn number(text: &str) -> Result<f32, String> {
    text.parse().map_err(|_| "expected a number".into())
}

/// Validates the sampling settings. The messages omit the argument's name, because the command line's parser adds the name.
fn check(sampling: Sampling) -> Result<(), String> {
    match sampling.validate() {
        Ok(()) => Ok(()),
        Err(Gemma4Error::Argument { reason, .. }) => Err(reason),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        generation: GenerationArguments,
    }

    fn sampling(arguments: &[&str], checkpoint: GenerationDefaults) -> Sampling {
        let arguments = ["program"].iter().chain(arguments);
        let cli = Cli::try_parse_from(arguments).expect("arguments");
        cli.generation.sampling(&checkpoint)
    }

    fn checkpoint() -> GenerationDefaults {
        GenerationDefaults {
            do_sample: true,
            temperature: 0.9,
            top_k: Some(64),
            top_p: Some(0.95),
            repetition_penalty: 1.1,
            suppress_tokens: vec![7],
            ..GenerationDefaults::default()
        }
    }

    /// Returns defaults that have sampling settings, but disable sampling.
    fn greedy() -> GenerationDefaults {
        GenerationDefaults {
            do_sample: false,
            ..checkpoint()
        }
    }

    #[test]
    fn sampling_without_arguments_uses_the_checkpoint() {
        assert_eq!(sampling(&[], checkpoint()), checkpoint().sampling());
        assert_eq!(sampling(&[], greedy()), greedy().sampling());
        assert!(sampling(&[], greedy()).is_greedy());
        let expected = Sampling {
            top_k: Some(3),
            seed: Some(5),
            ..checkpoint().sampling()
        };
        for checkpoint in [checkpoint(), greedy()] {
            let found = sampling(&["--top-k", "3", "--seed", "5"], checkpoint);
            assert_eq!(found, expected);
        }
        let warm = sampling(&["--temperature", "2"], greedy());
        assert_eq!((warm.temperature, warm.top_k), (2.0, Some(64)));
    }

    #[test]
    fn sampling_with_temperature_0_is_greedy() {
        assert!(sampling(&["--temperature", "0"], checkpoint()).is_greedy());
    }

    #[test]
    fn draft_arguments_with_lookup_and_drafter_conflict() {
        let parse =
            |arguments: &[&str]| Cli::try_parse_from(["program"].iter().chain(arguments)).is_ok();
        assert!(parse(&["--lookup", "--draft-tokens", "3"]));
        assert!(parse(&["--draft", "folder", "--draft-tokens", "3"]));
        assert!(!parse(&["--draft-tokens", "3"]));
        assert!(!parse(&["--lookup", "--draft", "folder"]));
    }

    #[test]
    fn candidate_limits_without_temperature_enable_sampling() {
        for (name, value) in [("--top-k", "3"), ("--top-p", "0.5"), ("--min-p", "0.1")] {
            let drawn = sampling(&[name, value], GenerationDefaults::default());
            assert_eq!(drawn.temperature, 1.0);
            let arguments = [name, value, "--temperature", "0"];
            assert!(sampling(&arguments, GenerationDefaults::default()).is_greedy());
        }
    }
}
