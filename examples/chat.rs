//! A conversation with a Gemma 4 model, in the terminal.
//!
//! ```text
//! cargo run --release --example chat -- --model gemma-4-E2B-it
//! ```

use attention_workspace::{
    Error,
    model::{GenerationArguments, ModelArguments},
    terminal::{Interrupt, Output, WrongArgument, exit_code, note, prompt, read_line},
};
use burn_gemma4::{FinishReason, GenerateOptions, Message, Role, Session};
use clap::Parser;
use std::io::{IsTerminal, stdin};
use std::process::ExitCode;

const COMMANDS: &str =
    "Ctrl-C stops an answer, /reset forgets the conversation, /exit or Ctrl-D ends it.";

/// A conversation with a Gemma 4 model. Ctrl-C stops an answer, /reset forgets the conversation, /exit or
/// Ctrl-D ends it.
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    model: ModelArguments,
    /// Instructions for the whole conversation.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
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
    let mut loaded = cli.model.load()?;
    loaded.gemma = cli.generation.with_drafter(loaded.gemma)?;
    let (session, messages) = cli.generation.session(&loaded.gemma)?;
    let mut conversation = Conversation {
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
    // Whatever has ended it, what was said before is kept.
    let Conversation {
        session, messages, ..
    } = &conversation;
    let kept = cli.generation.keep(session, messages);
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
        let Some(line) = read_line()? else {
            break;
        };
        match line.trim() {
            "" => (),
            "/exit" => break,
            "/reset" => conversation.reset(),
            word if word.starts_with('/') && !word.contains(char::is_whitespace) => {
                note(format_args!("{word} is no command. {COMMANDS}"));
            }
            message => match conversation.answer(message, output, interrupt) {
                // A person can say something else; a script cannot.
                Err(error) if is_interactive => note(format_args!("error: {error}")),
                outcome => outcome?,
            },
        }
    }
    Ok(())
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
                    note(format_args!(
                        "ended after {} tokens; --max-tokens sets how many",
                        answer.tokens.len()
                    ));
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
