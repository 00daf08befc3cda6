//! Answers a file of prompts for the command `gemma4 run`. The server's engine answers many prompts together.

use super::served_media::folder;
use crate::{
    Error,
    generation::GenerationArguments,
    model::AdaptedModelArguments,
    signals::Stopped,
    terminal::{Interrupt, WrongArgument, note},
};
use burn_gemma4::CacheKind;
use gemma4_serve::{MediaOptions, engine::EngineOptions, run_batch_file};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The arguments for answering a file of prompts.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Prompt")]
pub struct PromptsArguments {
    /// File of prompts, one JSON object per line: {"prompt": "…"}, {"messages": […]}, or OpenAI's batch form. The options of
    /// a line take precedence over the arguments. Many prompts are answered together.
    #[arg(
        long,
        value_name = "FILE",
        requires = "out",
        conflicts_with_all = [
            "text", "images", "videos", "audio", "prompt", "chat", "system", "prompt_tokens", "thinking", "special_tokens", "cache", "lookup", "draft", "json",
            "logprobs", "ignore_eos"
        ]
    )]
    prompts: Option<PathBuf>,
    /// File for the answers of --prompts, one JSON object per line, in the same order.
    #[arg(long, value_name = "FILE", requires = "prompts")]
    out: Option<PathBuf>,
    /// Largest number of prompts of --prompts to answer together.
    #[arg(long, value_name = "COUNT", default_value_t = 32, value_parser = crate::generation::positive)]
    max_running: usize,
    /// Folder whose image and audio files the prompts of --prompts can name, by a path or a file: URL [default: prompts
    /// cannot name files].
    #[arg(long, value_name = "DIR", requires = "prompts")]
    media_root: Option<PathBuf>,
}

impl PromptsArguments {
    /// Returns the files of prompts and answers, if the arguments name them.
    pub fn files(&self) -> Option<(&Path, &Path)> {
        self.prompts.as_deref().zip(self.out.as_deref())
    }

    /// Answers all prompts of a file.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or written, or if the model or the device fails.
    pub fn run(
        &self,
        (prompts, out): (&Path, &Path),
        model: &AdaptedModelArguments,
        generation: &GenerationArguments,
    ) -> Result<(), Error> {
        let interrupt = Interrupt::new()?;
        let wrong = |name: &str, path: &Path, error: std::io::Error| {
            WrongArgument(format!("{name}: {}: {error}", path.display()))
        };
        let media = MediaOptions {
            root: folder(self.media_root.as_deref())?,
            ..MediaOptions::default()
        };
        let input = File::open(prompts).map_err(|error| wrong("--prompts", prompts, error))?;
        if out.exists() && same_file(prompts, out) {
            let reason = "--out: is the file of --prompts, whose prompts would be lost".to_owned();
            return Err(WrongArgument(reason).into());
        }
        let output = File::create(out).map_err(|error| wrong("--out", out, error))?;
        let loaded = model.load()?;
        let engine = EngineOptions {
            max_running: self.max_running,
            context: loaded.gemma.config().max_position_embeddings,
            prefill_chunk: generation.chunk,
            cache: CacheKind {
                compact_keys: generation.compact_keys,
                precision: generation.kv.into(),
            },
            ..EngineOptions::default()
        };
        let cancellation = interrupt.cancellation();
        let start = Instant::now();
        let counts = interrupt.catch(|| {
            run_batch_file(
                loaded.gemma,
                engine,
                media,
                BufReader::new(input),
                BufWriter::new(output),
                &defaults(generation),
                || cancellation.is_cancelled(),
            )
        })?;
        let seconds = start.elapsed().as_secs_f64();
        note(format_args!(
            "{} prompts answered, {} failed; {} prompt tokens and {} tokens in {seconds:.2} s, {:.1} tokens/s",
            counts.answered,
            counts.failed,
            counts.prompt_tokens,
            counts.generated_tokens,
            counts.generated_tokens as f64 / seconds.max(1e-9),
        ));
        match interrupt.rest() {
            Some(signal) => Err(Stopped(signal).into()),
            None => Ok(()),
        }
    }
}

/// True if both paths lead to one file.
fn same_file(one: &Path, other: &Path) -> bool {
    matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
}

/// Returns the request fields that the command line arguments set in every request.
fn defaults(generation: &GenerationArguments) -> Map<String, Value> {
    let mut fields = Map::new();
    let mut set = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            fields.insert(name.into(), value);
        }
    };
    set(
        "max_tokens",
        generation.max_tokens.map(|count| json!(count)),
    );
    set(
        "temperature",
        generation.temperature.map(|value| json!(value)),
    );
    set("top_k", generation.top_k.map(|count| json!(count)));
    set("top_p", generation.top_p.map(|value| json!(value)));
    set("min_p", generation.min_p.map(|value| json!(value)));
    let penalty = generation.repetition_penalty;
    set("repetition_penalty", penalty.map(|value| json!(value)));
    set("seed", generation.seed.map(|seed| json!(seed as i64)));
    let stop = (!generation.stop.is_empty()).then(|| json!(generation.stop));
    set("stop", stop);
    fields
}
