//! The command `gemma4 embed`: embeddings of texts as lines of JSON.

use crate::{
    Dtype, Error,
    device_list::{DeviceList, DeviceListParser},
    embedding,
    generation::positive,
    hub,
    signals::Stopped,
    terminal::{Interrupt, Output, WrongArgument, exit_code, note},
};
use burn_gemma4::{EmbedOptions, EmbeddingGemma};
use clap::Parser;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Compute embeddings of texts with an embedding model, such as google/embeddinggemma-2.
///
/// Each output line is a JSON object with the index of a text, its embedding and its number of tokens.
#[derive(Parser)]
#[command(version)]
pub struct Embed {
    /// Checkpoint of an embedding model: a folder in Hugging Face's layout, or the name of a model on the Hugging Face
    /// Hub. The model is downloaded if the Hub's cache lacks it.
    #[arg(long, value_name = "PATH", help_heading = "Model")]
    model: PathBuf,
    /// Device to run on. NAME:NUMBER takes one of several devices, such as cuda:1.
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = DeviceListParser, help_heading = "Model")]
    device: DeviceList,
    /// Compute type [default: the checkpoint's; on a CPU f32].
    #[arg(long, value_enum, help_heading = "Model")]
    dtype: Option<Dtype>,
    /// Name of the checkpoint's prompt that stands before each text, such as SearchQuery or Document [default: the
    /// checkpoint's default prompt, usually none].
    #[arg(long, value_name = "NAME")]
    prompt_name: Option<String>,
    /// Number of elements to which embeddings are truncated. Truncated embeddings are normalized again if the checkpoint
    /// normalizes embeddings [default: all].
    #[arg(long, value_name = "COUNT", value_parser = positive)]
    dimensions: Option<usize>,
    /// Drop the last tokens of texts that have more tokens than the model reads, or the first tokens if the checkpoint's
    /// truncation_side is left [default: such a text is an error].
    #[arg(long)]
    truncate: bool,
    /// Text to embed. The option may be repeated.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    text: Vec<String>,
    /// File with one text per line, or one JSON object per line (.jsonl, .ndjson): {"text": "…"}, with an optional "id"
    /// that the output repeats, and an optional "prompt_name" that takes precedence. An empty text is an error [default:
    /// lines of standard input].
    #[arg(value_name = "FILE", conflicts_with = "text")]
    file: Option<PathBuf>,
}

/// The texts of one call of the model have together about this many tokens.
const CALL_TOKENS: usize = 8192;

/// The mark at the start of some files in UTF-8.
const BYTE_ORDER_MARK: char = '\u{feff}';

/// A line of a JSONL file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    text: String,
    /// The id as it is written, so that the digits of a number stay.
    id: Option<Box<RawValue>>,
    prompt_name: Option<String>,
}

/// The texts of the input, each with the name of its source for errors.
type Texts = Box<dyn Iterator<Item = Result<(Line, String), Error>>>;

/// A line of the output.
#[derive(Serialize)]
struct Embedded<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a RawValue>,
    embedding: &'a [f32],
    tokens: usize,
}

/// A text that waits for its embedding.
struct Waiting {
    id: Option<Box<RawValue>>,
    tokens: Vec<u32>,
    place: String,
}

impl Embed {
    /// Executes the command and returns its exit code.
    pub fn execute(&self) -> ExitCode {
        exit_code(|| run(self))
    }

    fn options(&self, prompt_name: Option<String>) -> EmbedOptions {
        let mut options = EmbedOptions::new().truncate(self.truncate);
        if let Some(name) = prompt_name.or_else(|| self.prompt_name.clone()) {
            options = options.prompt(name);
        }
        if let Some(dimensions) = self.dimensions {
            options = options.dimensions(dimensions);
        }
        options
    }

    /// Opens the input.
    fn texts(&self) -> Result<Texts, Error> {
        let of_text = |text: String| Line {
            text,
            id: None,
            prompt_name: None,
        };
        if !self.text.is_empty() {
            let texts = self.text.clone().into_iter().enumerate();
            return Ok(Box::new(texts.map(move |(index, text)| {
                let place = format!("--text, number {}", index + 1);
                Ok((of_text(text), place))
            })));
        }
        let (name, input): (String, Box<dyn BufRead>) = match &self.file {
            Some(path) => {
                let file = File::open(path)
                    .map_err(|error| WrongArgument(format!("{}: {error}", path.display())))?;
                (path.display().to_string(), Box::new(BufReader::new(file)))
            }
            None => (
                "standard input".into(),
                Box::new(BufReader::new(io::stdin())),
            ),
        };
        let is_jsonl = self.file.as_deref().is_some_and(is_jsonl);
        let lines = input.lines().enumerate();
        Ok(Box::new(lines.filter_map(move |(index, line)| {
            let place = format!("{name}: line {}", index + 1);
            let wrong = |error: &dyn std::fmt::Display| WrongArgument(format!("{place}: {error}"));
            let line = match &line {
                Ok(line) if index == 0 => line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(line),
                Ok(line) => line.as_str(),
                Err(error) => return Some(Err(wrong(error).into())),
            };
            let line = match is_jsonl {
                true if line.trim().is_empty() => return None,
                true => serde_json::from_str(line).map_err(|error| wrong(&error).into()),
                false => Ok(of_text(line.to_owned())),
            };
            Some(line.map(|line| (line, place)))
        })))
    }
}

fn is_jsonl(path: &Path) -> bool {
    let end = path.extension().unwrap_or_default();
    end.eq_ignore_ascii_case("jsonl") || end.eq_ignore_ascii_case("ndjson")
}

/// The progress of the command.
struct Embedder<'a> {
    cli: &'a Embed,
    model: EmbeddingGemma,
    output: Output,
    waiting: Vec<Waiting>,
    waiting_tokens: usize,
    texts: usize,
    tokens: usize,
    /// The time in the model, without the reading and the encoding of texts.
    time: Duration,
}

fn run(cli: &Embed) -> Result<(), Error> {
    let interrupt = Interrupt::new()?;
    // Open the file before the model is loaded, so that a wrong path is reported early.
    let texts = cli.texts()?;
    let path = hub::resolve_folder("--model", &cli.model)?;
    let chosen = cli.device.choose_one()?;
    note(&chosen);
    let start = Instant::now();
    let model = embedding::load(&path, &chosen, cli.dtype)?;
    let loaded = start.elapsed();
    if let Some(dimensions) = cli.dimensions {
        model.config().check_dimensions(dimensions)?;
    }
    let dtype = model.model().dtype();
    let mut embedder = Embedder {
        cli,
        model,
        output: Output::default(),
        waiting: Vec::new(),
        waiting_tokens: 0,
        texts: 0,
        tokens: 0,
        time: Duration::ZERO,
    };
    interrupt.catch(|| -> Result<(), Error> {
        for text in texts {
            if let Err(error) = text.and_then(|(line, place)| embedder.push(line, place)) {
                // The texts before the error are embedded, so that the output is the same for any size of passes.
                embedder.embed()?;
                return Err(error);
            }
            if interrupt.flow().is_break() || embedder.output.is_closed() {
                return Ok(());
            }
        }
        embedder.embed()
    })?;
    note(format_args!(
        "loaded in {:.2} s as {}; {} texts with {} tokens in {:.2} s, {:.0} tokens/s",
        loaded.as_secs_f64(),
        dtype.name(),
        embedder.texts,
        embedder.tokens,
        embedder.time.as_secs_f64(),
        embedder.tokens as f64 / embedder.time.as_secs_f64().max(1e-9),
    ));
    match interrupt.rest() {
        Some(signal) => Err(Stopped(signal).into()),
        None => embedder.output.finish(),
    }
}

impl Embedder<'_> {
    /// Encodes a text. When enough tokens wait, embeds all texts that wait.
    fn push(&mut self, line: Line, place: String) -> Result<(), Error> {
        if line.text.is_empty() {
            return Err(WrongArgument(format!("{place}: is empty; expected a text")).into());
        }
        let options = self.cli.options(line.prompt_name);
        let tokens = self.model.tokens(&line.text, &options);
        let tokens = tokens.map_err(|error| WrongArgument(format!("{place}: {error}")))?;
        if self.waiting_tokens + tokens.len() > CALL_TOKENS {
            self.embed()?;
        }
        self.waiting_tokens += tokens.len();
        self.waiting.push(Waiting {
            id: line.id,
            tokens,
            place,
        });
        Ok(())
    }

    /// Embeds the texts that wait, and prints their lines, up to the first text whose embedding is not finite.
    fn embed(&mut self) -> Result<(), Error> {
        let waiting = std::mem::take(&mut self.waiting);
        self.tokens += std::mem::take(&mut self.waiting_tokens);
        let mut sources = Vec::with_capacity(waiting.len());
        let mut tokens = Vec::with_capacity(waiting.len());
        for text in waiting {
            sources.push((text.id, text.place));
            tokens.push(text.tokens);
        }
        let start = Instant::now();
        let embeddings = self.model.try_embed_tokens(&tokens)?;
        self.time += start.elapsed();
        for (((id, place), tokens), embedding) in sources.iter().zip(&tokens).zip(embeddings) {
            let embedding =
                embedding.map_err(|error| WrongArgument(format!("{place}: {error}")))?;
            let embedding = match self.cli.dimensions {
                Some(dimensions) => self.model.truncated(embedding, dimensions),
                None => embedding,
            };
            let line = Embedded {
                index: self.texts,
                id: id.as_deref(),
                embedding: &embedding,
                tokens: tokens.len(),
            };
            self.texts += 1;
            let line = serde_json::to_string(&line)?;
            if self.output.write(&format!("{line}\n")).is_break() {
                break;
            }
        }
        Ok(())
    }
}
