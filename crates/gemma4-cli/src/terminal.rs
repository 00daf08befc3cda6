//! Helpers for terminal programs: output that tolerates closed pipes, handling of Ctrl-C, and exit codes.

pub use crate::messages::{fault, note, speak_as};

use crate::{
    Error,
    mesa_layer::leave_out_device_selection,
    messages::install_logger,
    signals::{self, Signal, Stopped},
};
use burn_gemma4::{Cancellation, Gemma4Error, Generation, TextKind, Token, catch_panic};
use std::fmt::Display;
use std::io::{self, ErrorKind, Read, Write};
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

/// The exit code for wrong arguments. clap uses the same code.
const USAGE: u8 = 2;
/// The exit code for all other failures.
const FAILURE: u8 = 1;

/// An invalid argument that the command line's parser cannot detect.
#[derive(Debug)]
pub struct WrongArgument(pub String);

impl Display for WrongArgument {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongArgument {}

/// Runs a program, and prints the program's error if the program fails. Returns the program's exit code: 0 for success,
/// and 2 for wrong arguments. If a signal [`Stopped`] the program, the exit code is the signal's code. Otherwise it is
/// 1.
pub fn exit_code(program: impl FnOnce() -> Result<(), Error>) -> ExitCode {
    leave_out_device_selection();
    install_logger();
    let outcome = catch_panic(program).unwrap_or_else(|panic| Err(panic.into()));
    let Err(error) = outcome else {
        return ExitCode::SUCCESS;
    };
    if !error.is::<Stopped>() {
        fault(&error.to_string());
    }
    ExitCode::from(code_of(&error))
}

/// Returns the exit code for an error: 2 for wrong arguments, the signal's code for [`Stopped`], and 1 for all others.
pub fn code_of(error: &Error) -> u8 {
    if let Some(Stopped(signal)) = error.downcast_ref() {
        return signal.exit_code();
    }
    match is_wrong_argument(error) {
        true => USAGE,
        false => FAILURE,
    }
}

/// True if the error is about an argument of the user.
pub(crate) fn is_wrong_argument(error: &Error) -> bool {
    let wrong_argument = error.is::<WrongArgument>()
        || matches!(error.downcast_ref(), Some(Gemma4Error::Argument { .. }));
    #[cfg(feature = "training")]
    let wrong_argument = wrong_argument || error.is::<gemma4_train::InvalidArgument>();
    wrong_argument
}

/// Prints a prompt for the user's input on standard error, because the prompt is not part of the program's output.
pub fn prompt(text: &str) {
    let _ = write!(io::stderr(), "{text}");
}

/// Reads all of standard input, without the final newline.
///
/// # Errors
/// Returns [`WrongArgument`] if the input is not UTF-8, and the system's error if the input cannot be read.
pub fn read_input() -> Result<String, Error> {
    let mut bytes = Vec::new();
    io::stdin().lock().read_to_end(&mut bytes)?;
    let mut text = utf8(bytes)?;
    trim_newline(&mut text);
    Ok(text)
}

/// Reads all of standard input, as [`read_input`] does. Returns `None` if the input does not end within `patience`,
/// because a parent process may leave a pipe open without writing.
///
/// # Errors
/// Passes on the errors of [`read_input`].
pub fn read_input_within(patience: Duration) -> Result<Option<String>, Error> {
    let (sender, receiver) = mpsc::channel();
    // If the pipe stays open, this thread keeps waiting until the program ends.
    thread::spawn(move || sender.send(read_input()));
    match receiver.recv_timeout(patience) {
        Ok(input) => input.map(Some),
        Err(_) => Ok(None),
    }
}

/// Reads the next line of standard input, without its newline. Returns `None` at the end of the input.
///
/// # Errors
/// Returns [`WrongArgument`] if the line is not UTF-8, and the system's error if the line cannot be read.
pub fn read_line() -> Result<Option<String>, Error> {
    let mut bytes = Vec::new();
    if io::BufRead::read_until(&mut io::stdin().lock(), b'\n', &mut bytes)? == 0 {
        return Ok(None);
    }
    let mut text = utf8(bytes)?;
    trim_newline(&mut text);
    Ok(Some(text))
}

fn utf8(bytes: Vec<u8>) -> Result<String, WrongArgument> {
    String::from_utf8(bytes).map_err(|_| WrongArgument("standard input is not UTF-8".into()))
}

fn trim_newline(text: &mut String) {
    let end = text.strip_suffix('\n').unwrap_or(text);
    let end = end.strip_suffix('\r').unwrap_or(end).len();
    text.truncate(end);
}

/// Standard output, which is flushed after each written text.
#[derive(Default)]
pub struct Output {
    fault: Option<io::Error>,
}

impl Output {
    /// Prints `text` and flushes standard output. Returns [`ControlFlow::Break`] if the output is closed.
    pub fn write(&mut self, text: &str) -> ControlFlow<()> {
        if self.fault.is_none() {
            let mut out = io::stdout().lock();
            let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
            self.fault = written.err();
        }
        match self.fault {
            None => ControlFlow::Continue(()),
            Some(_) => ControlFlow::Break(()),
        }
    }

    /// True if standard output is closed.
    pub fn is_closed(&self) -> bool {
        self.fault.is_some()
    }

    /// Prints the text while `generate` generates it: the answer on standard output, thoughts and tool calls on standard
    /// error. Generation stops on Ctrl-C, or if standard output is closed.
    ///
    /// # Errors
    /// Passes on the errors of `generate`.
    pub fn stream(
        &mut self,
        interrupt: &Interrupt,
        generate: impl FnOnce(
            &mut dyn FnMut(&Token<'_>) -> ControlFlow<()>,
        ) -> Result<Generation, Gemma4Error>,
    ) -> Result<Generation, Gemma4Error> {
        let (mut answered, mut thought, mut called) = (0, 0, 0);
        let mut apart = Apart::default();
        let generation = interrupt.catch(|| {
            generate(&mut |token| {
                apart.write(token.kind, token.text);
                match token.kind {
                    TextKind::Answer => {
                        answered += token.text.len();
                        self.write(token.text)?;
                    }
                    TextKind::Thought => thought += token.text.len(),
                    TextKind::ToolCall => called += token.text.len(),
                }
                interrupt.flow()
            })
        })?;
        // Print the text that the callback has not printed yet. The callback is called once per token, but the last
        // piece of text may become complete only after the last call.
        let rest = |text: &str, written| text.get(written..).unwrap_or_default().to_owned();
        let calls = generation.tool_calls.concat();
        apart.write(TextKind::Thought, &rest(&generation.thoughts, thought));
        apart.write(TextKind::ToolCall, &rest(&calls, called));
        let rest = rest(&generation.text, answered);
        apart.write(TextKind::Answer, &rest);
        apart.end();
        let _ = self.write(&format!("{rest}\n"));
        Ok(generation)
    }

    /// Returns the error of an earlier write. A closed pipe, as with `head`, is not an error.
    ///
    /// # Errors
    /// Returns the system's error, for example because the disk is full.
    pub fn finish(self) -> Result<(), Error> {
        match self.fault {
            Some(fault) if fault.kind() != ErrorKind::BrokenPipe => {
                Err(format!("standard output: {fault}").into())
            }
            _ => Ok(()),
        }
    }
}

/// A printer of thoughts and tool calls on standard error. Thoughts and tool calls have separate headings.
#[derive(Default)]
struct Apart {
    kind: TextKind,
    /// True if text was printed on the current line and no newline has ended the line yet.
    is_open: bool,
}

impl Apart {
    fn write(&mut self, kind: TextKind, text: &str) {
        if text.is_empty() {
            return;
        }
        if self.kind != kind {
            self.end();
            self.kind = kind;
            note(match kind {
                TextKind::Answer => "[answer]",
                TextKind::Thought => "[thought]",
                TextKind::ToolCall => "[tool call]",
            });
        }
        if kind != TextKind::Answer {
            prompt(text);
            self.is_open = !text.ends_with('\n');
        }
    }

    fn end(&mut self) {
        if std::mem::take(&mut self.is_open) {
            prompt("\n");
        }
    }
}

/// The handling of signals that request the end of the program, in three phases:
///
/// - During work, the first signal cancels the work, and a second signal ends the program.
/// - After the work, the program saves its state. A signal is only stored, and [`rest`](Self::rest) returns the signal.
/// - At rest, a signal ends the program at once.
pub struct Interrupt {
    state: Arc<Mutex<State>>,
    cancellation: Cancellation,
}

/// The phase of the program, and the signal that the program has received.
struct State {
    phase: Phase,
    /// The signal that was received since the work began. Any later signal replaces a Ctrl-C. No signal replaces a
    /// `SIGTERM` or `SIGHUP`.
    received: Option<Signal>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Resting,
    Working,
    Stopping,
    Saving,
}

impl State {
    /// Stores a signal and returns how the program must react to the signal.
    fn receive(&mut self, signal: Signal) -> Reaction {
        if self
            .received
            .is_none_or(|former| former == Signal::Interrupt)
        {
            self.received = Some(signal);
        }
        match self.phase {
            Phase::Resting | Phase::Stopping => Reaction::Exit,
            Phase::Working => {
                self.phase = Phase::Stopping;
                Reaction::Cancel
            }
            Phase::Saving => Reaction::Wait,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reaction {
    Exit,
    Cancel,
    Wait,
}

impl Interrupt {
    /// Installs the signal handlers.
    ///
    /// # Errors
    /// Returns an error if the system cannot install the handlers.
    pub fn new() -> Result<Self, Error> {
        let interrupt = Self {
            state: Arc::new(Mutex::new(State {
                phase: Phase::Resting,
                received: None,
            })),
            cancellation: Cancellation::new(),
        };
        let state = Arc::clone(&interrupt.state);
        let cancellation = interrupt.cancellation.clone();
        signals::handle(move |signal| {
            let mut state = lock(&state);
            match state.receive(signal) {
                // The process exits while it holds the lock, so that no thread can begin to save the state before the exit.
                Reaction::Exit => std::process::exit(signal.exit_code().into()),
                Reaction::Cancel => cancellation.cancel(),
                Reaction::Wait => (),
            }
        })?;
        Ok(interrupt)
    }

    /// Runs work. A signal during the work cancels the work through [`flow`](Self::flow) and
    /// [`cancellation`](Self::cancellation). A signal after the work is stored until [`rest`](Self::rest) is called.
    pub fn catch<O>(&self, work: impl FnOnce() -> O) -> O {
        self.cancellation.reset();
        *lock(&self.state) = State {
            phase: Phase::Working,
            received: None,
        };
        let output = work();
        lock(&self.state).phase = Phase::Saving;
        output
    }

    /// Ends the phase in which the program saves its state. Returns the signal that was received since the work began, if any.
    pub fn rest(&self) -> Option<Signal> {
        let mut state = lock(&self.state);
        state.phase = Phase::Resting;
        state.received.take()
    }

    /// Returns `Continue` as long as the work should continue, and `Break` after a signal.
    pub fn flow(&self) -> ControlFlow<()> {
        match self.cancellation.is_cancelled() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    /// Returns the handle through which a signal cancels the work.
    pub fn cancellation(&self) -> Cancellation {
        self.cancellation.clone()
    }
}

/// Locks the state. A poisoned lock cannot occur in practice, because no thread panics while it holds the lock.
fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_cancels_work_then_exits_and_waits_while_saving() {
        let mut state = State {
            phase: Phase::Working,
            received: None,
        };
        assert_eq!(state.receive(Signal::Interrupt), Reaction::Cancel);
        assert_eq!(state.receive(Signal::Interrupt), Reaction::Exit);
        state.phase = Phase::Saving;
        assert_eq!(state.receive(Signal::Terminate), Reaction::Wait);
        assert_eq!(state.receive(Signal::Interrupt), Reaction::Wait);
        assert_eq!(state.received, Some(Signal::Terminate));
        state.phase = Phase::Resting;
        assert_eq!(state.receive(Signal::HangUp), Reaction::Exit);
    }

    #[test]
    fn code_of_each_kind_of_error_is_distinct() {
        // The failure of an engine has no error type of its own. A failure is reported as a text.
        let codes = [
            Error::from("the engine has failed"),
            WrongArgument("--port".into()).into(),
            Stopped(Signal::Terminate).into(),
        ];
        assert_eq!(codes.map(|error| code_of(&error)), [1, 2, 143]);
    }

    #[test]
    fn trim_newline_removes_one_line_end() {
        for (input, text) in [
            ("a\n", "a"),
            ("a\r\n", "a"),
            ("a\n\n", "a\n"),
            ("a", "a"),
            ("\n", ""),
        ] {
            let mut trimmed = input.to_string();
            trim_newline(&mut trimmed);
            assert_eq!(trimmed, text);
        }
    }
}
