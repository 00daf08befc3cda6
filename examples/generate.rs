//! Goes on from a prompt with a Gemma 4 model.
//!
//! ```text
//! cargo run --release --example generate
//! cargo run --release --example generate -- --model gemma-4-E2B --prompt "The capital of France is"
//! cargo run --release --example generate -- --model gemma-4-E2B-it --chat --prompt "Why is the sky blue?"
//! ```

use attention_workspace::{
    Error,
    model::{GenerationArguments, Loaded, ModelArguments, tell_length},
    signals::Stopped,
    terminal::{Interrupt, Output, WrongArgument, exit_code, note, read_input, read_input_within},
};
use burn_gemma4::{
    DraftCounts, FinishReason, Gemma4, Generation, Message, Prompt, Token, TokenLogprobs,
};
use clap::Parser;
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{IsTerminal, stdin};
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::time::Duration;

/// What the checkpoint in this program goes on from where nobody says otherwise.
const SAMPLE: &str = "fn main";
/// How long it waits for a prompt from a pipe where it could do without.
const PATIENCE: Duration = Duration::from_secs(1);

/// Goes on from a prompt with a Gemma 4 model. Without options: a tiny model that is part of this program, and
/// a prompt to try it with.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(flatten)]
    model: ModelArguments,
    /// What to go on from; `-` reads it from standard input, and so does a pipe without it.
    #[arg(
        long,
        help_heading = "Prompt",
        value_name = "TEXT",
        allow_hyphen_values = true
    )]
    prompt: Option<String>,
    /// Takes the prompt as a message that the model answers, by the checkpoint's chat template.
    #[arg(long, help_heading = "Prompt")]
    chat: bool,
    /// Instructions before the message; implies --chat, as --thinking does.
    #[arg(
        long,
        help_heading = "Prompt",
        value_name = "TEXT",
        allow_hyphen_values = true
    )]
    system: Option<String>,
    /// The prompt as numbers of tokens, taken as they are, such as 2,224,316.
    #[arg(
        long,
        help_heading = "Prompt",
        value_name = "TOKENS",
        value_delimiter = ',',
        allow_negative_numbers = true,
        conflicts_with_all = ["prompt", "chat", "system", "thinking"]
    )]
    prompt_tokens: Option<Vec<u32>>,
    #[command(flatten)]
    generation: GenerationArguments,
    /// Tells of every token the logarithm of its probability, and so many of the likeliest in its place: with --json in the
    /// report, else on standard error. Of the model's own probabilities, before temperature and the other options.
    #[arg(
        long,
        help_heading = "Output",
        value_name = "COUNT",
        allow_negative_numbers = true
    )]
    logprobs: Option<usize>,
    /// Goes on after tokens that end a text.
    #[arg(long, help_heading = "Sampling")]
    ignore_eos: bool,
    /// Prints one JSON object at the end: the tokens, the text, why it ended, and times.
    #[arg(long, help_heading = "Output")]
    json: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    exit_code(|| run(&cli))
}

fn run(cli: &Cli) -> Result<(), Error> {
    let interrupt = Interrupt::new()?;
    let mut cache = cli.generation.cache_file()?;
    let prompt = prompt(cli)?;
    let mut loaded = cli.model.load()?;
    loaded.gemma = cli.generation.with_drafter(loaded.gemma)?;
    let gemma = &loaded.gemma;
    let mut options = cli.generation.options(gemma);
    options.ignore_stop_tokens = cli.ignore_eos;
    options.logprobs = cli.logprobs;
    options.cancellation = Some(interrupt.cancellation());

    let mut output = Output::default();
    let (mut session, messages) = match &mut cache {
        Some(cache) => cache.read(gemma)?,
        None => (gemma.session(), Vec::new()),
    };
    let generate = |on_token: &mut dyn FnMut(&Token<'_>) -> ControlFlow<()>| match cli
        .generation
        .cache
        .is_some()
    {
        true => session.generate(prompt, &options, on_token),
        false => gemma.generate(prompt, &options, on_token),
    };
    let generation = if cli.json {
        let silently = || generate(&mut |_| interrupt.flow());
        let generation = interrupt.catch(silently)?;
        let report = serde_json::to_string(&Report::new(&loaded, &generation))?;
        // A reader that has gone is seen below.
        let _ = output.write(&(report + "\n"));
        generation
    } else {
        output.stream(&interrupt, |on_token| generate(on_token))?
    };
    // A conversation in the file stays there.
    let mut kept = Ok(());
    if let Some(cache) = &mut cache {
        cache.write(&session, &messages)?;
        kept = cache.finish();
    }
    let signal = interrupt.rest();
    output.finish()?;
    if !cli.json {
        list_logprobs(gemma, &generation)?;
    }
    summarise(&loaded, &generation);
    kept?;
    match signal {
        Some(signal) => Err(Stopped(signal).into()),
        None => Ok(()),
    }
}

/// The prompt that the arguments or standard input give.
fn prompt(cli: &Cli) -> Result<Prompt, Error> {
    if let Some(tokens) = &cli.prompt_tokens {
        return Ok(Prompt::Tokens(tokens.clone()));
    }
    let is_embedded = cli.model.model.is_none();
    let given = match cli.prompt.as_deref() {
        Some("-") => read_input()?,
        Some(text) => text.to_owned(),
        None if stdin().is_terminal() => String::new(),
        // The bare command is to show something, whatever its standard input is.
        None if is_embedded => read_input_within(PATIENCE)?.unwrap_or_default(),
        None => {
            note("no --prompt: reading it from standard input");
            read_input()?
        }
    };
    let text = match given.is_empty() {
        false => given,
        true if is_embedded && cli.prompt.is_none() => {
            note(format_args!("the prompt is {SAMPLE:?}"));
            SAMPLE.to_owned()
        }
        true => {
            let reason = "the prompt is empty: give --prompt TEXT, or text on standard input";
            return Err(WrongArgument(reason.into()).into());
        }
    };
    if !cli.chat && cli.system.is_none() && cli.generation.thinking.is_none() {
        return Ok(text.into());
    }
    let mut messages = Vec::new();
    messages.extend(cli.system.as_ref().map(Message::system));
    messages.push(Message::user(text));
    Ok(messages.into())
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    prompt_tokens: &'a [u32],
    tokens: &'a [u32],
    text: &'a str,
    thoughts: &'a str,
    tool_calls: &'a [String],
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    logprobs: &'a [TokenLogprobs],
    finish_reason: FinishReason,
    timings: Times,
    #[serde(skip_serializing_if = "Option::is_none")]
    drafts: Option<Guesses>,
    device: &'static str,
    device_name: &'a str,
    dtype: String,
}

/// How well tokens were guessed ahead.
#[derive(Serialize)]
struct Guesses {
    #[serde(flatten)]
    counts: DraftCounts,
    acceptance: f64,
    tokens_per_pass: f64,
}

impl Guesses {
    /// Nothing where there was no pass with guesses.
    fn of(counts: DraftCounts) -> Option<Self> {
        (counts.passes > 0).then(|| Self {
            acceptance: counts.acceptance(),
            tokens_per_pass: counts.tokens_per_pass(),
            counts,
        })
    }
}

#[derive(Serialize)]
struct Times {
    load_seconds: f64,
    prefill_seconds: f64,
    prefill_tokens: usize,
    prefill_tokens_per_second: f64,
    decode_seconds: f64,
    decode_tokens: usize,
    decode_tokens_per_second: f64,
}

impl<'a> Report<'a> {
    fn new(loaded: &'a Loaded, generation: &'a Generation) -> Self {
        let timings = &generation.timings;
        Self {
            prompt_tokens: &generation.prompt_tokens,
            tokens: &generation.tokens,
            text: &generation.text,
            thoughts: &generation.thoughts,
            tool_calls: &generation.tool_calls,
            logprobs: &generation.logprobs,
            finish_reason: generation.finish_reason,
            timings: Times {
                load_seconds: loaded.time.as_secs_f64(),
                prefill_seconds: timings.prefill.as_secs_f64(),
                prefill_tokens: timings.prefill_tokens,
                prefill_tokens_per_second: timings.prefill_rate(),
                decode_seconds: timings.decode.as_secs_f64(),
                decode_tokens: timings.decode_tokens,
                decode_tokens_per_second: timings.decode_rate(),
            },
            drafts: Guesses::of(generation.drafts),
            device: loaded.chosen.name.as_str(),
            device_name: &loaded.chosen.description,
            dtype: loaded.dtype(),
        }
    }
}

/// Prints how likely each token was, and which were likeliest in its place.
fn list_logprobs(gemma: &Gemma4, generation: &Generation) -> Result<(), Error> {
    let name = |token: u32| gemma.tokenizer().decode(&[token], false);
    for (token, logprobs) in generation.tokens.iter().zip(&generation.logprobs) {
        let mut line = format!("{:?} {:.4}", name(*token)?, logprobs.logprob);
        for (token, logprob) in &logprobs.top {
            write!(line, "  {:?} {logprob:.4}", name(*token)?)?;
        }
        note(line);
    }
    Ok(())
}

/// Prints what it took.
fn summarise(loaded: &Loaded, generation: &Generation) {
    let timings = &generation.timings;
    note(format_args!(
        "loaded in {:.2} s as {}; prefill {} tokens in {:.3} s, {:.1} tokens/s; decode {} tokens in {:.3} s, {:.1} tokens/s",
        loaded.time.as_secs_f64(),
        loaded.dtype(),
        timings.prefill_tokens,
        timings.prefill.as_secs_f64(),
        timings.prefill_rate(),
        timings.decode_tokens,
        timings.decode.as_secs_f64(),
        timings.decode_rate(),
    ));
    if let Some(guesses) = Guesses::of(generation.drafts) {
        note(format_args!(
            "{} tokens guessed ahead, {:.0} % right: {:.2} tokens a pass",
            guesses.counts.drafted,
            100.0 * guesses.acceptance,
            guesses.tokens_per_pass,
        ));
    }
    match generation.finish_reason {
        FinishReason::Stop => (),
        FinishReason::Length => tell_length(&loaded.gemma, generation),
        FinishReason::Cancelled => note("stopped"),
    }
}
