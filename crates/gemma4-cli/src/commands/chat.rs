//! The command `gemma4 chat`: a conversation in the terminal.

use crate::{
    Error,
    cache_file::CacheFile,
    generation::{GenerationArguments, tell_length, with_drafter},
    media::{ImageSize, VideoSampling, check_sampling, content},
    model::AdaptedModelArguments,
    signals::{Signal, Stopped},
    terminal::{Interrupt, Output, WrongArgument, exit_code, note, prompt, read_line},
};
use burn_gemma4::{
    Audio, FinishReason, Gemma4, GenerateOptions, Message, MessagePart, Role, Session,
};
use clap::Parser;
use std::io::{IsTerminal, stdin};
use std::path::Path;
use std::process::ExitCode;

const COMMANDS: &str = "Ctrl-C stops an answer, /image FILE shows an image with the next message, /video PATH shows a video with it, /audio FILE plays a recording with it, /reset forgets the conversation, /exit or Ctrl-D ends the chat.";

/// Talk to a Gemma 4 model in the terminal.
///
/// Ctrl-C stops an answer. /image FILE shows a PNG, JPEG or WebP file with the next message. /video PATH shows an animated GIF, PNG or WebP file with it, or a folder of frames with --fps. /audio FILE plays a WAV, FLAC, MP3 or Ogg Vorbis file with it. /reset starts a new conversation. /exit or Ctrl-D ends the chat.
///
/// If messages come from a file or a pipe, one on each line, an empty line separates the answers.
#[derive(Parser)]
#[command(version)]
pub struct Chat {
    #[command(flatten)]
    model: AdaptedModelArguments,
    /// System instructions for the whole conversation.
    #[arg(
        long,
        value_name = "TEXT",
        allow_hyphen_values = true,
        help_heading = "Prompt"
    )]
    system: Option<String>,
    #[command(flatten)]
    image_size: ImageSize,
    #[command(flatten)]
    video_sampling: VideoSampling,
    #[command(flatten)]
    generation: GenerationArguments,
}

impl Chat {
    /// Executes the command and returns its exit code.
    pub fn execute(&self) -> ExitCode {
        exit_code(|| run(self))
    }
}

fn run(cli: &Chat) -> Result<(), Error> {
    let interrupt = Interrupt::new()?;
    let mut cache = cli.generation.cache_file()?;
    let drafter = cli.generation.drafter_folder()?;
    let mut loaded = cli.model.load()?;
    loaded.gemma = with_drafter(loaded.gemma, drafter)?;
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
        media: Vec::new(),
        image_size: &cli.image_size,
        video_sampling: &cli.video_sampling,
        options: GenerateOptions {
            cancellation: Some(interrupt.cancellation()),
            ..cli.generation.options(&loaded.gemma, true)
        },
    };
    if conversation.messages.is_empty() {
        // The file may contain a session without messages. The conversation then begins with the system message, if
        // there is one, even if the KV cache already contains this message.
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

/// Answers the user's messages until the input ends or the user exits.
fn talk(
    conversation: &mut Conversation<'_>,
    output: &mut Output,
    interrupt: &Interrupt,
) -> Result<(), Error> {
    let is_interactive = stdin().is_terminal();
    if is_interactive {
        note(COMMANDS);
    }
    let mut is_first = true;
    while !output.is_closed() {
        if is_interactive {
            prompt("> ");
        }
        let line = match read_line() {
            Err(error) if is_interactive && error.is::<WrongArgument>() => {
                note(format_args!("error: {error}; the line was ignored"));
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
            command if let Some((medium, path)) = medium(command) => {
                match conversation.add(medium, path) {
                    Err(error) if is_interactive => note(format_args!("error: {error}")),
                    outcome => outcome?,
                }
            }
            word if word.starts_with('/') && !word.contains(char::is_whitespace) => {
                note(format_args!("{word} is no command. {COMMANDS}"));
            }
            message => {
                if !is_interactive && !is_first {
                    // Ignore the result: if the output is closed, the loop's condition is false and the loop ends.
                    let _ = output.write("\n");
                }
                is_first = false;
                let answered = conversation.answer(message, output, interrupt);
                let was_answered = answered.is_ok();
                match answered {
                    // At a terminal, an error is only printed, because the user can enter another message. In a script, the
                    // error ends the program.
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

/// Ends the program if it received `SIGTERM` or `SIGHUP` during the answer. Ctrl-C ends only the answer.
fn end_of(interrupt: &Interrupt) -> Result<(), Error> {
    match interrupt.rest() {
        None | Some(Signal::Interrupt) => Ok(()),
        Some(signal) => Err(Stopped(signal).into()),
    }
}

/// Returns the system message with which the conversation begins, if there is one. A conversation in the file of
/// `--cache` keeps its system message, and a different `--system` is refused. A new conversation has the message of
/// `--system`.
fn beginning(cli: &Chat, messages: &[Message]) -> Result<Vec<Message>, Error> {
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
            let reason = "--system: differs from the system message in --cache; expected the same";
            Err(WrongArgument(reason.into()).into())
        }
    }
}

/// A kind of file that precedes the next message.
#[derive(Clone, Copy)]
enum Medium {
    Image,
    Video,
    Audio,
}

impl Medium {
    /// The command that reads a file of this kind.
    fn command(self) -> &'static str {
        match self {
            Self::Image => "/image",
            Self::Video => "/video",
            Self::Audio => "/audio",
        }
    }
}

/// Returns the kind and the path of the file that a command reads, or `None` for other lines.
fn medium(line: &str) -> Option<(Medium, &str)> {
    [Medium::Image, Medium::Video, Medium::Audio]
        .into_iter()
        .find_map(|medium| {
            let rest = line.strip_prefix(medium.command())?;
            let is_command = rest.is_empty() || rest.starts_with(' ');
            is_command.then(|| (medium, rest.trim()))
        })
}

struct Conversation<'a> {
    gemma: &'a Gemma4,
    /// The file that `--cache` names.
    cache: Option<CacheFile>,
    /// The system message with which every conversation begins, if there is one.
    beginning: Vec<Message>,
    messages: Vec<Message>,
    /// The session, which holds the KV cache of the conversation so far.
    session: Session<'a>,
    /// The images, videos and audio that precede the next message, in the order of the commands.
    media: Vec<MessagePart>,
    image_size: &'a ImageSize,
    video_sampling: &'a VideoSampling,
    options: GenerateOptions,
}

impl Conversation<'_> {
    fn reset(&mut self) {
        self.messages.clone_from(&self.beginning);
        self.media.clear();
        self.session.reset();
    }

    /// Reads an image, a video or audio, which precedes the next message.
    fn add(&mut self, medium: Medium, path: &str) -> Result<(), Error> {
        let command = medium.command();
        let refuse = |reason: &str| Err(WrongArgument(format!("{command}: {reason}")).into());
        if path.is_empty() {
            return refuse("expected the path of a file");
        }
        if self.cache.is_some() {
            return refuse(
                "the file of --cache cannot hold images, videos or audio; start the chat without --cache",
            );
        }
        self.media.push(match medium {
            Medium::Image => {
                self.gemma.check_vision()?;
                self.image_size.open(Path::new(path))?.into()
            }
            Medium::Video => {
                self.gemma.check_video()?;
                let video = self.video_sampling.open(Path::new(path))?;
                check_sampling(self.gemma, [&video])?;
                video.into()
            }
            Medium::Audio => {
                self.gemma.check_audio()?;
                Audio::open(path)?.into()
            }
        });
        Ok(())
    }

    /// Writes the conversation to the file of `--cache`. If the program received a signal during the write, the program
    /// then ends.
    fn keep(&mut self, interrupt: &Interrupt) -> Result<(), Error> {
        if let Some(cache) = &mut self.cache {
            cache.write(&self.session, &self.messages)?;
        }
        end_of(interrupt)
    }

    /// Prints the model's answer to `message`. If the model gives no answer, `message` is removed from the conversation.
    fn answer(
        &mut self,
        message: &str,
        output: &mut Output,
        interrupt: &Interrupt,
    ) -> Result<(), Error> {
        let content = content(self.media.clone(), message.to_owned());
        self.messages.push(Message::user(content));
        let prompt = self.messages.clone();
        let answer = output.stream(interrupt, |on_token| {
            self.session.generate(prompt, &self.options, on_token)
        });
        match answer {
            Ok(answer) => {
                if answer.finish_reason == FinishReason::Length {
                    tell_length(self.gemma, &answer);
                }
                // Only the answer's text becomes part of the conversation. Thoughts are dropped, as in the checkpoints' chat
                // templates.
                match answer.text.is_empty() {
                    true => drop(self.messages.pop()),
                    false => {
                        self.messages.push(Message::assistant(answer.text));
                        self.media.clear();
                    }
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
