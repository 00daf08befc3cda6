//! What a program in a terminal needs: output that copes with closed pipes, Ctrl-C, exit codes.

use crate::layers::leave_out_device_selection;
use crate::{
    Error, guarded,
    signals::{self, Signal, Stopped},
};
use burn_gemma4::{Cancellation, Escaped, Gemma4Error, Generation, TextKind, Token};
use std::fmt::Display;
use std::io::{self, ErrorKind, Read, Write};
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

/// The exit code of wrong arguments, which is also clap's.
const USAGE: u8 = 2;
/// The exit code of other failures.
const FAILURE: u8 = 1;

/// An argument that cannot be right, where the command line's parser does not see it.
#[derive(Debug)]
pub struct WrongArgument(pub String);

impl Display for WrongArgument {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongArgument {}

/// Runs a program to its exit code: 0, that of the signal that [`Stopped`] it, 2 for wrong arguments, or 1 for other failures.
/// It prints the message of a failure.
pub fn exit_code(program: impl FnOnce() -> Result<(), Error>) -> ExitCode {
    leave_out_device_selection();
    log_to_stderr();
    let outcome = guarded(program).unwrap_or_else(|panic| Err(panic.into()));
    let Err(error) = outcome else {
        return ExitCode::SUCCESS;
    };
    if !error.is::<Stopped>() {
        fault(&error.to_string());
    }
    ExitCode::from(code_of(&error))
}

/// Prints log messages to standard error where `RUST_LOG` says which. Without the variable, programs print their own notes
/// alone, because drivers log errors about what they then do without.
fn log_to_stderr() {
    if std::env::var_os("RUST_LOG").is_some() {
        // A second logger is refused, and the first one stays.
        let _ = env_logger::try_init();
    }
}

/// The exit code of an error: 2 for wrong arguments, that of the signal of [`Stopped`], else 1.
pub fn code_of(error: &Error) -> u8 {
    if let Some(Stopped(signal)) = error.downcast_ref() {
        return signal.exit_code();
    }
    let wrong_argument = error.is::<WrongArgument>()
        || matches!(error.downcast_ref(), Some(Gemma4Error::Argument { .. }));
    if wrong_argument { USAGE } else { FAILURE }
}

/// Which of several processes this is: only the first one has notes.
static RANK: AtomicUsize = AtomicUsize::new(0);

/// Makes this process one of several, whose errors say which, and whose notes are left to the first.
pub fn speak_as(rank: usize) {
    RANK.store(rank, Ordering::Relaxed);
}

/// Drivers report in paragraphs.
fn one_line(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join(" ")
}

/// Prints a line to standard error, in the first of several processes. Nobody may be listening there, which `eprintln!` would
/// panic about.
pub fn note(line: impl Display) {
    if RANK.load(Ordering::Relaxed) == 0 {
        say(format!("{}\n", Escaped::lines(line)));
    }
}

/// In one piece: other processes may write there, too.
fn say(line: String) {
    let _ = io::stderr().write_all(line.as_bytes());
}

/// Prints an error to standard error.
pub fn fault(message: &str) {
    let message = Escaped::line(one_line(message));
    say(match RANK.load(Ordering::Relaxed) {
        0 => format!("error: {message}\n"),
        rank => format!("error: process {rank}: {message}\n"),
    });
}

/// Prints what asks a person for a line. It is no output, so it goes to standard error.
pub fn prompt(text: &str) {
    let _ = write!(io::stderr(), "{text}");
}

/// Everything on standard input, without the newline that ends it.
///
/// # Errors
/// [`WrongArgument`] where it is not UTF-8; else what the system says.
pub fn read_input() -> Result<String, Error> {
    let mut bytes = Vec::new();
    io::stdin().lock().read_to_end(&mut bytes)?;
    let mut text = utf8(bytes)?;
    trim_newline(&mut text);
    Ok(text)
}

/// Everything on standard input as [`read_input`] gives it, if it ends within `patience`. Whoever started the program may have
/// left a pipe open that nobody writes to.
///
/// # Errors
/// As [`read_input`].
pub fn read_input_within(patience: Duration) -> Result<Option<String>, Error> {
    let (sender, receiver) = mpsc::channel();
    // It outlives the patience where the pipe stays open, and ends with the program.
    thread::spawn(move || sender.send(read_input()));
    match receiver.recv_timeout(patience) {
        Ok(input) => input.map(Some),
        Err(_) => Ok(None),
    }
}

/// The next line of standard input, without its newline; none at the end.
///
/// # Errors
/// [`WrongArgument`] where it is not UTF-8; else what the system says.
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

/// Standard output, written as text comes.
#[derive(Default)]
pub struct Output {
    fault: Option<io::Error>,
}

impl Output {
    /// Prints `text` at once. [`ControlFlow::Break`] says that nothing can be printed any more.
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

    /// Whether nothing can be printed any more.
    pub fn is_closed(&self) -> bool {
        self.fault.is_some()
    }

    /// Prints what `generate` generates while it does: the answer, and on standard error thoughts and calls of tools. It stops
    /// early where standard output is closed, and on Ctrl-C.
    ///
    /// # Errors
    /// Those of `generate`.
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
        // The end may have completed text without a token of its own.
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

    /// What went wrong with the output. A reader that has gone, such as `head`, is nothing wrong.
    ///
    /// # Errors
    /// What the system says, for example that the disk is full.
    pub fn finish(self) -> Result<(), Error> {
        match self.fault {
            Some(fault) if fault.kind() != ErrorKind::BrokenPipe => {
                Err(format!("standard output: {fault}").into())
            }
            _ => Ok(()),
        }
    }
}

/// What a model writes beside its answer, on standard error, each kind under a line of its own.
#[derive(Default)]
struct Apart {
    kind: TextKind,
    /// Whether a line has begun.
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

/// Signals that ask the program to end. While work is under way, the first one asks the work to stop; a second one ends the
/// program. Between the work and [`rest`](Self::rest) the program saves, and signals wait. At rest a signal ends the program.
pub struct Interrupt {
    state: Arc<Mutex<State>>,
    cancellation: Cancellation,
}

/// The state of a program that signals come to.
struct State {
    phase: Phase,
    /// The signal that came since the work began. `SIGTERM` and `SIGHUP` outlast Ctrl-C.
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
    /// Remembers a signal; what to do about it.
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
    /// Takes the signals over.
    ///
    /// # Errors
    /// What the system says.
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
                // The lock stays taken, so that no saving begins meanwhile.
                Reaction::Exit => std::process::exit(signal.exit_code().into()),
                Reaction::Cancel => cancellation.cancel(),
                Reaction::Wait => (),
            }
        })?;
        Ok(interrupt)
    }

    /// Runs work that a signal asks to stop, by [`flow`](Self::flow) and [`cancellation`](Self::cancellation). Signals then wait
    /// until [`rest`](Self::rest).
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

    /// Ends the time in which signals wait; the signal that came since the work began.
    pub fn rest(&self) -> Option<Signal> {
        let mut state = lock(&self.state);
        state.phase = Phase::Resting;
        state.received.take()
    }

    /// Whether the work should go on.
    pub fn flow(&self) -> ControlFlow<()> {
        match self.cancellation.is_cancelled() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    /// What Ctrl-C cancels.
    pub fn cancellation(&self) -> Cancellation {
        self.cancellation.clone()
    }
}

/// No thread panics while it has the lock.
fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_first_cancels_then_exits_and_waits_for_saving() {
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
    fn one_newline_ends_the_input() {
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

    #[test]
    fn messages_take_one_line() {
        assert_eq!(one_line("a driver:\n\n  is gone\n"), "a driver: is gone");
    }
}
