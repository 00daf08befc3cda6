//! A conversation with a Gemma 4 model, in the terminal.
//!
//! ```text
//! cargo run --release --example chat -- --model gemma-4-E2B-it
//! ```

use attention_workspace::{
    Error,
    cache_file::CacheFile,
    model::{GenerationArguments, ModelArguments, tell_length},
    signals::{Signal, Stopped},
    terminal::{Interrupt, Output, WrongArgument, exit_code, note, prompt, read_line},
};
use burn_gemma4::{FinishReason, Gemma4, GenerateOptions, Message, Role, Session};
use clap::Parser;
use std::io::{IsTerminal, stdin};
use std::process::ExitCode;

const COMMANDS: &str =
    "Ctrl-C stops an answer, /reset forgets the conversation, /exit or Ctrl-D ends it.";

/// A conversation with a Gemma 4 model. Ctrl-C stops an answer, /reset forgets the conversation, /exit or
/// Ctrl-D ends it.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(flatten)]
    model: ModelArguments,
    /// Instructions for the whole conversation.
    #[arg(
        long,
        value_name = "TEXT",
        allow_hyphen_values = true,
        help_heading = "Prompt"
    )]
    system: Option<String>,
    #[command(flatten)]
    generation: GenerationArguments,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    exit_code(|| run(&cli))
}

fn run(cli: &Cli) -> Result<(), Error> {
    let interrupt = Interrupt::new()?;
    let mut cache = cli.generation.cache_file()?;
    let mut loaded = cli.model.load()?;
    loaded.gemma = cli.generation.with_drafter(loaded.gemma)?;
    let (session, messages) = match &mut cache {
        Some(cache) => cache.read(&loaded.gemma)?,
        None => (loaded.gemma.session(), Vec::new()),
    };
    let mut conversation = Conversation {
        gemma: &loaded.gemma,
        cache,
        beginning: beginning(cli, &messages)?,
        messages,
        session,
        options: GenerateOptions {
            cancellation: Some(interrupt.cancellation()),
            ..cli.generation.options(&loaded.gemma)
        },
    };
    if conversation.messages.is_empty() {
        // What was read without one may be what this one begins with.
        conversation.messages.clone_from(&conversation.beginning);
    }
    let mut output = Output::default();
    let talked = talk(&mut conversation, &mut output, &interrupt);
    let kept = conversation
        .cache
        .as_ref()
        .map_or(Ok(()), CacheFile::finish);
    talked.and(kept)?;
    output.finish()
}

/// Answers until nothing more is said.
fn talk(
    conversation: &mut Conversation<'_>,
    output: &mut Output,
    interrupt: &Interrupt,
) -> Result<(), Error> {
    let is_interactive = stdin().is_terminal();
    if is_interactive {
        note(COMMANDS);
    }
    while !output.is_closed() {
        if is_interactive {
            prompt("> ");
        }
        let line = match read_line() {
            Err(error) if is_interactive && error.is::<WrongArgument>() => {
                note(format_args!("error: {error}; the line was not taken"));
                continue;
            }
            line => line?,
        };
        let Some(line) = line else {
            break;
        };
        match line.trim() {
            "" => (),
            "/exit" => break,
            "/reset" => {
                interrupt.catch(|| conversation.reset());
                conversation.keep(interrupt)?;
            }
            word if word.starts_with('/') && !word.contains(char::is_whitespace) => {
                note(format_args!("{word} is no command. {COMMANDS}"));
            }
            message => {
                let answered = conversation.answer(message, output, interrupt);
                let was_answered = answered.is_ok();
                match answered {
                    // A person can say something else; a script cannot.
                    Err(error) if is_interactive => note(format_args!("error: {error}")),
                    outcome => outcome?,
                }
                match was_answered {
                    true => conversation.keep(interrupt)?,
                    false => end_of(interrupt)?,
                }
            }
        }
    }
    Ok(())
}

/// Ends the program where `SIGTERM` or `SIGHUP` came during the answer. Ctrl-C has ended the answer alone.
fn end_of(interrupt: &Interrupt) -> Result<(), Error> {
    match interrupt.rest() {
        None | Some(Signal::Interrupt) => Ok(()),
        Some(signal) => Err(Stopped(signal).into()),
    }
}

/// What the conversation begins with: what is asked for, or what one from a file began with.
fn beginning(cli: &Cli, messages: &[Message]) -> Result<Vec<Message>, Error> {
    let asked: Vec<Message> = cli.system.iter().map(Message::system).collect();
    let first = messages.iter().take(1);
    let kept: Vec<Message> = first
        .filter(|message| message.role == Role::System)
        .cloned()
        .collect();
    match messages.is_empty() || asked.is_empty() || asked == kept {
        true if messages.is_empty() => Ok(asked),
        true => Ok(kept),
        false => {
            let reason = "--system is not what the conversation in --cache began with";
            Err(WrongArgument(reason.into()).into())
        }
    }
}

struct Conversation<'a> {
    gemma: &'a Gemma4,
    /// The file that it is kept in.
    cache: Option<CacheFile>,
    /// What every conversation begins with.
    beginning: Vec<Message>,
    messages: Vec<Message>,
    /// Holds what the model has read of the conversation.
    session: Session<'a>,
    options: GenerateOptions,
}

impl Conversation<'_> {
    fn reset(&mut self) {
        self.messages.clone_from(&self.beginning);
        self.session.reset();
    }

    /// Writes the conversation to its file. Signals that came meanwhile then end the program.
    fn keep(&mut self, interrupt: &Interrupt) -> Result<(), Error> {
        if let Some(cache) = &mut self.cache {
            cache.write(&self.session, &self.messages)?;
        }
        end_of(interrupt)
    }

    /// Prints the model's answer to `message`. Where there is none, the message has not been said.
    fn answer(
        &mut self,
        message: &str,
        output: &mut Output,
        interrupt: &Interrupt,
    ) -> Result<(), Error> {
        self.messages.push(Message::user(message));
        let prompt = self.messages.clone();
        let answer = output.stream(interrupt, |on_token| {
            self.session.generate(prompt, &self.options, on_token)
        });
        match answer {
            Ok(answer) => {
                if answer.finish_reason == FinishReason::Length {
                    tell_length(self.gemma, &answer);
                }
                // Thoughts are not part of a conversation, as in the checkpoints' own templates.
                match answer.text.is_empty() {
                    true => drop(self.messages.pop()),
                    false => self.messages.push(Message::assistant(answer.text)),
                }
                Ok(())
            }
            Err(error) => {
                self.messages.pop();
                Err(error.into())
            }
        }
    }
}
