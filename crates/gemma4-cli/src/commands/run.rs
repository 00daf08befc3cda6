//! The command `gemma4 run`: continues a prompt.

use crate::{
    Error,
    generation::{GenerationArguments, tell_length, with_drafter},
    loading::Loaded,
    media::{MediaArguments, content},
    model::AdaptedModelArguments,
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

/// The default prompt for the small checkpoint that the program contains.
const SAMPLE: &str = "fn main";
/// The longest time to wait for a prompt from a pipe if the prompt is optional.
const PATIENCE: Duration = Duration::from_secs(1);

/// Continue a prompt with a Gemma 4 model.
///
/// Without options, a tiny model that the program contains continues a sample prompt.
#[derive(Parser)]
#[command(version)]
pub struct Run {
    /// Text to continue, as with --prompt.
    #[arg(value_name = "TEXT", help_heading = "Prompt")]
    text: Option<String>,
    #[command(flatten)]
    model: AdaptedModelArguments,
    #[command(flatten)]
    media: MediaArguments,
    /// Text to continue; `-` reads the text from standard input. Without this option, standard input is read if it is a
    /// pipe.
    #[arg(
        long,
        help_heading = "Prompt",
        value_name = "TEXT",
        allow_hyphen_values = true
    )]
    prompt: Option<String>,
    /// Answer the prompt as a chat message, with the checkpoint's chat template.
    #[arg(long, help_heading = "Prompt")]
    chat: bool,
    /// System instructions before the message. This option implies --chat, and so do --thinking, --image, --video and
    /// --audio.
    #[arg(
        long,
        help_heading = "Prompt",
        value_name = "TEXT",
        allow_hyphen_values = true
    )]
    system: Option<String>,
    /// Prompt as token ids, such as 2,224,316.
    #[arg(
        long,
        help_heading = "Prompt",
        value_name = "TOKENS",
        value_delimiter = ',',
        allow_negative_numbers = true,
        conflicts_with_all = ["prompt", "chat", "system", "thinking"]
    )]
    prompt_tokens: Option<Vec<u32>>,
    #[cfg(feature = "serve")]
    #[command(flatten)]
    prompts: super::prompts::PromptsArguments,
    #[command(flatten)]
    generation: GenerationArguments,
    /// Print the log probability of each token and of the COUNT most likely alternatives, in the report with --json, and
    /// otherwise on standard error. The probabilities are those before temperature and other sampling options.
    #[arg(
        long,
        help_heading = "Output",
        value_name = "COUNT",
        allow_negative_numbers = true
    )]
    logprobs: Option<usize>,
    /// Continue generating after end-of-text tokens.
    #[arg(long, help_heading = "Sampling")]
    ignore_eos: bool,
    /// Print one JSON object at the end, with the tokens, the text, the reason for the end, and times.
    #[arg(long, help_heading = "Output")]
    json: bool,
}

impl Run {
    /// True if the prompt is a message of a conversation.
    fn is_chat(&self) -> bool {
        self.chat
            || self.system.is_some()
            || self.generation.thinking.is_some()
            || !self.media.is_empty()
    }

    /// Executes the command and returns its exit code.
    pub fn execute(&self) -> ExitCode {
        exit_code(|| run(self))
    }
}

fn run(cli: &Run) -> Result<(), Error> {
    cli.media.check()?;
    #[cfg(feature = "serve")]
    if let Some(files) = cli.prompts.files() {
        return cli.prompts.run(files, &cli.model, &cli.generation);
    }
    let interrupt = Interrupt::new()?;
    let mut cache = cli.generation.cache_file()?;
    let prompt = prompt(cli)?;
    let drafter = cli.generation.drafter_folder()?;
    let mut loaded = cli.model.load()?;
    loaded.gemma = with_drafter(loaded.gemma, drafter)?;
    let gemma = &loaded.gemma;
    cli.media.check_model(gemma, &prompt)?;
    let mut options = cli.generation.options(gemma, cli.is_chat());
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
        // The result is ignored, because `output.finish` below returns any error of the output.
        let _ = output.write(&(report + "\n"));
        generation
    } else {
        output.stream(&interrupt, |on_token| generate(on_token))?
    };
    // Write the session to the file of `--cache`. If the file already contains a conversation, the file keeps the
    // conversation.
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

/// Returns the prompt from the arguments or standard input.
fn prompt(cli: &Run) -> Result<Prompt, Error> {
    let has_other = cli.prompt.is_some() || cli.prompt_tokens.is_some();
    if let Some(text) = cli.text.as_ref().filter(|_| has_other) {
        let reason =
            format!("TEXT: is {text:?} beside --prompt or --prompt-tokens; expected one prompt");
        return Err(WrongArgument(reason).into());
    }
    if let Some(tokens) = &cli.prompt_tokens {
        return Ok(Prompt::Tokens(tokens.clone()));
    }
    let is_embedded = cli.model.model.model.is_none();
    // Read images, videos and audio first. An error in them is then reported before the prompt is read from a pipe.
    let media = cli.media.open()?;
    let argument = cli.text.as_deref().or(cli.prompt.as_deref());
    let given = match argument {
        Some("-") => read_input()?,
        Some(text) => text.to_owned(),
        None if stdin().is_terminal() => String::new(),
        // The prompt is optional, because the program can continue a sample instead. The program therefore waits for a
        // prompt only for [`PATIENCE`].
        None if is_embedded => read_input_within(PATIENCE)?.unwrap_or_default(),
        None => {
            note("no --prompt: reading the prompt from standard input");
            read_input()?
        }
    };
    let text = match given.is_empty() {
        false => given,
        true if is_embedded && argument.is_none() => {
            note(format_args!("the prompt is {SAMPLE:?}"));
            SAMPLE.to_owned()
        }
        true => {
            let reason = "the prompt is empty; expected --prompt TEXT, or text on standard input";
            return Err(WrongArgument(reason.into()).into());
        }
    };
    if !cli.is_chat() {
        return Ok(text.into());
    }
    let mut messages = Vec::new();
    messages.extend(cli.system.as_ref().map(Message::system));
    messages.push(Message::user(content(media, text)));
    Ok(messages.into())
}

/// The JSON object that `--json` prints.
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

/// The statistics of speculative decoding.
#[derive(Serialize)]
struct Guesses {
    #[serde(flatten)]
    counts: DraftCounts,
    acceptance: f64,
    tokens_per_pass: f64,
}

impl Guesses {
    /// Returns the statistics, or `None` if no forward pass verified draft tokens.
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

/// Prints the log probability of each token and of the most likely alternatives.
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

/// Prints times, statistics and the reason why the text ended.
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
            "{} tokens drafted, {:.0} % accepted: {:.2} tokens a pass",
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
