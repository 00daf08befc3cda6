//! The arguments of the programs that run a Gemma 4 model, and what they ask for.

use crate::cache_file::CacheFile;
use crate::device::{Chosen, DeviceName, choose};
use crate::hub;
use crate::terminal::note;
use crate::{Dtype, Error};
use burn::tensor::DType;
use burn_gemma4::{
    Drafts, Gemma4, Gemma4Error, Gemma4Model, GenerateOptions, Generation, GenerationDefaults,
    KvPrecision, LoadOptions, LoadProgress, PerLayerTable, Quantization, Sampling,
};
use clap::builder::NonEmptyStringValueParser;
use indicatif::{ProgressBar, ProgressStyle};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Which model, and where it runs.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Model")]
pub struct ModelArguments {
    /// A checkpoint's folder, as Hugging Face has it, a GGUF file, or the name of a model that `hf download` has downloaded, such as
    /// google/gemma-4-E2B-it [default: a tiny checkpoint in this program].
    #[arg(long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// The folder of a low-rank adapter: it is added to whole weights, and stays beside those of layers that are quantized.
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// Where to run.
    #[arg(long, value_enum, default_value_t)]
    pub device: DeviceName,
    /// Dtype of weights and activations [default: the checkpoint's; on a processor f32].
    #[arg(long, value_enum)]
    pub dtype: Option<Dtype>,
    /// Quantizes weights that the checkpoint has whole, in blocks of 32 numbers as llama.cpp's Q8_0 or Q4_0, while they are loaded; `none` makes
    /// quantized ones whole [default: as the checkpoint has them].
    #[arg(long, value_enum, value_name = "FORM")]
    pub quantize: Option<Quantize>,
    /// Where the table of per-layer embeddings goes, half of a small model's weights, of which a token takes a row.
    #[arg(
        long,
        value_enum,
        value_name = "PLACE",
        default_value_t,
        help_heading = "Memory"
    )]
    pub per_layer_table: Table,
}

/// Where a table is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Table {
    /// On the device, if that holds it beside the other weights; else on the host.
    #[default]
    Auto,
    /// In the checkpoint's files, mapped into memory; rows go to the device when they are read.
    Host,
    /// On the device, in parts where one of its buffers does not hold it.
    Device,
}

impl From<Table> for PerLayerTable {
    fn from(table: Table) -> Self {
        match table {
            Table::Auto => Self::Auto,
            Table::Host => Self::Host,
            Table::Device => Self::Device,
        }
    }
}

impl Table {
    /// Says where a model's table went, if it was asked for or it matters.
    pub fn tell(self, model: &Gemma4Model) {
        /// Bytes of a table that is worth a line.
        const LARGE: usize = 1 << 28;
        if let Some(placement) = model.per_layer_table()
            && (self != Self::Auto || placement.is_on_host || placement.bytes >= LARGE)
        {
            note(placement);
        }
    }
}

/// In what form a model's weights are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Quantize {
    /// Whole.
    None,
    /// 8 bits and a scale for every 32 numbers.
    Q8,
    /// 4 bits and a scale for every 32 numbers.
    Q4,
}

impl From<Quantize> for Quantization {
    fn from(form: Quantize) -> Self {
        match form {
            Quantize::None => Self::Whole,
            Quantize::Q8 => Self::Q8,
            Quantize::Q4 => Self::Q4,
        }
    }
}

/// A model on its device.
pub struct Loaded {
    /// The model.
    pub gemma: Gemma4,
    /// The device.
    pub chosen: Chosen,
    /// How long loading took.
    pub time: Duration,
}

impl Loaded {
    /// The dtype that the model computes in, for people.
    pub fn dtype(&self) -> String {
        let dtype = self.gemma.dtype();
        Dtype::of(dtype).map_or_else(|| format!("{dtype:?}"), |dtype| dtype.to_string())
    }
}

impl ModelArguments {
    /// Loads the model, with a progress bar on standard error if that is a terminal.
    ///
    /// # Errors
    /// Where there is no such device, or what is wrong with the checkpoint.
    pub fn load(&self) -> Result<Loaded, Error> {
        let path = self.model.as_deref().map(hub::resolve).transpose()?;
        let chosen = choose(self.device)?;
        note(&chosen);
        let bar = progress_bar()?;
        let mut options = LoadOptions::new().on_progress(|progress: LoadProgress<'_>| {
            bar.set_length(progress.total_bytes as u64);
            bar.set_position(progress.bytes as u64);
            bar.set_message(progress.tensor.to_string());
        });
        if let Some(dtype) = self.dtype {
            options = options.dtype(chosen.dtype(Some(dtype))?.burn());
        }
        if let Some(form) = self.quantize {
            options = options.quantization(form.into());
        }
        options = options.per_layer_table(self.per_layer_table.into());
        let start = Instant::now();
        let gemma = match &path {
            Some(path) => Gemma4::load(path, &chosen.device, options),
            None => {
                note(
                    "no --model: this is the small model in this program, which learned this project's own text",
                );
                Gemma4::embedded(&chosen.device, options)
            }
        };
        bar.finish_and_clear();
        let mut gemma = gemma?;
        self.per_layer_table.tell(gemma.model());
        if path.is_some() && self.dtype.is_none() {
            tell_dtype(gemma.model());
        }
        if let Some(folder) = &self.adapter {
            gemma = gemma.attach_adapter(folder)?;
        }
        for warning in gemma.warnings() {
            note(format_args!("warning: {warning}"));
        }
        if chosen.name != DeviceName::Flex {
            note("note: compiling kernels; the first run on a device takes up to a minute longer");
        }
        Ok(Loaded {
            gemma,
            chosen,
            time: start.elapsed(),
        })
    }
}

/// Says that a model in half precision computes in f32, what that costs, and what else there is. Nothing where it computes in
/// the checkpoint's dtype.
pub fn tell_dtype(model: &Gemma4Model) {
    let Some(written) = model.written_dtype().and_then(Dtype::of) else {
        return;
    };
    if model.dtype() != DType::F32 || written == Dtype::F32 {
        return;
    }
    let memory = match model.is_quantized() {
        true => String::new(),
        false => format!(
            ", which takes {:.2} GB for the weights, twice the checkpoint's",
            model.parameter_bytes() as f64 / 1e9
        ),
    };
    note(format_args!(
        "note: the checkpoint is in {written}, and the model computes in f32{memory}; --dtype f16 takes half and is faster on a processor where \
         no activation exceeds 65504, --dtype {written} keeps the checkpoint's"
    ));
}

/// Says why a text ended where the model or the options had no more tokens for it.
pub fn tell_length(gemma: &Gemma4, generation: &Generation) {
    let positions = gemma.config().max_position_embeddings;
    let used = generation.prompt_tokens.len() + generation.tokens.len();
    match used >= positions {
        true => note(format_args!(
            "ended: the model's {positions} positions are used up, {} of them by the prompt",
            generation.prompt_tokens.len()
        )),
        false => note(format_args!(
            "ended after {} tokens; --max-tokens sets how many",
            generation.tokens.len()
        )),
    }
}

/// A bar of bytes on standard error, if that is a terminal.
///
/// # Errors
/// Never: the style is known.
pub fn progress_bar() -> Result<ProgressBar, Error> {
    let style = "{bar:30} {bytes}/{total_bytes} {bytes_per_sec} {wide_msg}";
    Ok(ProgressBar::new(0).with_style(ProgressStyle::with_template(style)?))
}

/// How much to generate, and how tokens are drawn. What is left out is as the checkpoint says.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Sampling")]
pub struct GenerationArguments {
    /// Stops after so many tokens [default: the checkpoint's, or 256].
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true, value_parser = positive)]
    pub max_tokens: Option<usize>,
    /// Below 1, likely tokens become likelier; 0 always takes the likeliest [default: the checkpoint's].
    #[arg(long, allow_negative_numbers = true, value_parser = temperature)]
    pub temperature: Option<f32>,
    /// Draws from so many of the likeliest tokens only [default: the checkpoint's].
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true, value_parser = positive)]
    pub top_k: Option<usize>,
    /// Draws from the likeliest tokens only whose probabilities reach it [default: the checkpoint's].
    #[arg(long, value_name = "PROBABILITY", allow_negative_numbers = true, value_parser = top_p)]
    pub top_p: Option<f32>,
    /// Draws from tokens only that are at least this share as likely as the likeliest [default: the checkpoint's].
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true, value_parser = min_p)]
    pub min_p: Option<f32>,
    /// Above 1, tokens that the prompt or the text has already become less likely; also without sampling [default: the checkpoint's].
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true, value_parser = repetition_penalty)]
    pub repetition_penalty: Option<f32>,
    /// Stops where the text has this text, which it keeps; may be given several times [default: the checkpoint's].
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
    /// The same seed draws the same tokens [default: other ones each time].
    #[arg(long, allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// Where a model's values are made of what its keys are made of, keeps of the keys only the rotated channels: five eighths of
    /// those layers' memory.
    #[arg(long, help_heading = "Memory")]
    pub compact_keys: bool,
    /// In what keys and values are kept: in the model's dtype, or in int8 with a scale a token and head, which is half of bf16's memory. A
    /// session of another kind that --cache has is read anew.
    #[arg(
        long,
        value_enum,
        value_name = "PRECISION",
        default_value_t,
        help_heading = "Memory"
    )]
    pub kv: Kv,
    /// Reads a prompt by this many tokens at a time, so that the memory of what is computed does not grow with it [default: 8192, on a
    /// processor 512].
    #[arg(long, help_heading = "Memory", value_name = "COUNT", allow_negative_numbers = true, value_parser = positive)]
    pub chunk: Option<usize>,
    /// Guesses tokens ahead by what came after the last ones earlier in the text, so that several are read in one pass. The text
    /// stays the same; it comes faster where answers repeat what was said.
    #[arg(long, help_heading = "Speculative decoding", group = "drafts")]
    pub lookup: bool,
    /// The folder of a drafter, a small model made for this one, which guesses tokens ahead instead.
    #[arg(
        long,
        help_heading = "Speculative decoding",
        value_name = "DIR",
        group = "drafts"
    )]
    pub draft: Option<PathBuf>,
    /// So many guesses for a pass, from 1 to 8; with 8, a pass reads more tokens than decoding's kernels take [default: 1 to 7, by
    /// how many were right so far].
    #[arg(long, help_heading = "Speculative decoding", value_name = "COUNT", allow_negative_numbers = true, value_parser = positive, requires = "drafts")]
    pub draft_tokens: Option<usize>,
    /// Keeps what was read, with its keys and values, in this file: goes on with it where it is there, so that only what is new is read, and
    /// writes it at the end. A chat keeps its conversation, too, and writes all of the file after each answer: of E2B in bf16, 12 MB and 6 KB
    /// a token.
    #[arg(long, help_heading = "Memory", value_name = "FILE")]
    pub cache: Option<PathBuf>,
    /// Whether the model thinks before it answers a message. Thoughts go to standard error.
    #[arg(long, help_heading = "Output", value_enum, value_name = "SWITCH")]
    pub thinking: Option<Switch>,
    /// Takes special tokens in messages, such as <turn|>, for what they mean to the model rather than for text.
    #[arg(long, help_heading = "Advanced")]
    pub special_tokens: bool,
}

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Switch {
    /// Yes.
    On,
    /// No.
    Off,
}

/// In what keys and values are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kv {
    /// The model's dtype.
    #[default]
    Model,
    /// int8, with a scale a token and head.
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

impl GenerationArguments {
    /// The model with its drafter, if there is to be one.
    ///
    /// # Errors
    /// What is wrong with the drafter.
    pub fn with_drafter(&self, gemma: Gemma4) -> Result<Gemma4, Error> {
        Ok(match &self.draft {
            Some(folder) => gemma.with_drafter(folder)?,
            None => gemma,
        })
    }

    /// The file of `--cache`, which is checked before a model is loaded.
    ///
    /// # Errors
    /// As [`CacheFile::open`].
    pub fn cache_file(&self) -> Result<Option<CacheFile>, Error> {
        self.cache.as_deref().map(CacheFile::open).transpose()
    }

    /// The checkpoint's options, with those that were given in their place. A note names an option that has no effect.
    pub fn options(&self, gemma: &Gemma4) -> GenerateOptions {
        let config = gemma.config();
        let mut layers = 0..config.num_layers();
        if self.compact_keys && !layers.any(|layer| config.values_are_keys(layer)) {
            note(
                "note: --compact-keys has no effect: no layer of this model makes its values of what its keys are made of",
            );
        }
        let mut options = gemma.options();
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
        // Who asks for a choice among several tokens asks for sampling, by what the checkpoint says of that.
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

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("it has to be at least 1".into()),
        Ok(number) => Ok(number),
        Err(_) => Err("it has to be a whole number of at least 1".into()),
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
    text.parse().map_err(|_| "it has to be a number".into())
}

/// The parser names the argument, so the message is to be without its name.
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

    /// One that says how tokens are drawn, and draws none.
    fn greedy() -> GenerationDefaults {
        GenerationDefaults {
            do_sample: false,
            ..checkpoint()
        }
    }

    #[test]
    fn what_is_left_out_is_the_checkpoints() {
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
    fn temperature_0_is_greedy() {
        assert!(sampling(&["--temperature", "0"], checkpoint()).is_greedy());
    }

    #[test]
    fn somebody_guesses_at_most() {
        let parse =
            |arguments: &[&str]| Cli::try_parse_from(["program"].iter().chain(arguments)).is_ok();
        assert!(parse(&["--lookup", "--draft-tokens", "3"]));
        assert!(parse(&["--draft", "folder", "--draft-tokens", "3"]));
        assert!(!parse(&["--draft-tokens", "3"]));
        assert!(!parse(&["--lookup", "--draft", "folder"]));
    }

    #[test]
    fn asking_for_a_choice_asks_for_sampling() {
        for (name, value) in [("--top-k", "3"), ("--top-p", "0.5"), ("--min-p", "0.1")] {
            let drawn = sampling(&[name, value], GenerationDefaults::default());
            assert_eq!(drawn.temperature, 1.0);
            let arguments = [name, value, "--temperature", "0"];
            assert!(sampling(&arguments, GenerationDefaults::default()).is_greedy());
        }
    }
}
