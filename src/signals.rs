//! Signals that ask a program to end: which one came, and the exit code that it means.
//!
//! Unix has three: `SIGINT` (Ctrl-C), `SIGTERM` (Slurm, `docker stop`, `torchrun`) and `SIGHUP` (a terminal that closes).
//! Windows has Ctrl-C alone.

use crate::Error;
use std::{
    fmt,
    sync::atomic::{AtomicU8, Ordering},
};

/// A signal that asks a program to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// `SIGINT`, which Ctrl-C sends.
    Interrupt,
    /// `SIGTERM`.
    Terminate,
    /// `SIGHUP`.
    HangUp,
}

impl Signal {
    const ALL: [Self; 3] = [Self::Interrupt, Self::Terminate, Self::HangUp];

    /// The number that POSIX gives it.
    pub fn number(self) -> u8 {
        match self {
            Self::HangUp => 1,
            Self::Interrupt => 2,
            Self::Terminate => 15,
        }
    }

    /// The exit code that shells expect of a program that the signal has ended: 128 and the signal's number.
    pub fn exit_code(self) -> u8 {
        128 + self.number()
    }

    fn from_number(number: i32) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|signal| i32::from(signal.number()) == number)
    }
}

/// The number of the first signal that came; 0 before.
static FIRST: AtomicU8 = AtomicU8::new(0);

/// The first signal that came since [`handle`] was called.
pub fn first() -> Option<Signal> {
    Signal::from_number(FIRST.load(Ordering::SeqCst).into())
}

/// A program that a signal has ended, after the program has saved what it had to save. As an error it ends the program with
/// the signal's exit code and prints nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped(pub Signal);

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stopped by signal {}", self.0.number())
    }
}

impl std::error::Error for Stopped {}

/// The end of a program that has stopped: [`Stopped`] where a signal of this process was the reason.
///
/// # Errors
/// [`Stopped`].
pub fn end_of_stopped() -> Result<(), Error> {
    match first() {
        Some(signal) => Err(Stopped(signal).into()),
        None => Ok(()),
    }
}

/// Calls `handler` with each signal that comes, in a thread of its own, so that the handler may do what it likes. A `SIGHUP`
/// that the process ignores from its beginning, as `nohup` has it, stays ignored.
///
/// # Errors
/// The system's errors.
pub fn handle(mut handler: impl FnMut(Signal) + Send + 'static) -> Result<(), Error> {
    listen(move |signal| {
        let _ = FIRST.compare_exchange(0, signal.number(), Ordering::SeqCst, Ordering::SeqCst);
        handler(signal);
    })
}

#[cfg(unix)]
fn listen(mut handler: impl FnMut(Signal) + Send + 'static) -> Result<(), Error> {
    let heard = Signal::ALL
        .into_iter()
        .filter(|signal| *signal != Signal::HangUp || !is_ignored(libc::SIGHUP));
    let mut signals =
        signal_hook::iterator::Signals::new(heard.map(|signal| i32::from(signal.number())))?;
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            let known = signals.forever().filter_map(Signal::from_number);
            known.for_each(&mut handler);
        })?;
    Ok(())
}

/// True if the process ignores a signal.
#[cfg(unix)]
fn is_ignored(number: libc::c_int) -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a null action changes nothing; the former action is written where the call returns 0.
    unsafe {
        libc::sigaction(number, std::ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

#[cfg(not(unix))]
fn listen(mut handler: impl FnMut(Signal) + Send + 'static) -> Result<(), Error> {
    ctrlc::set_handler(move || handler(Signal::Interrupt))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_code_of_each_signal_is_the_shells() {
        let codes = Signal::ALL.map(Signal::exit_code);
        assert_eq!(codes, [130, 143, 129]);
        for signal in Signal::ALL {
            assert_eq!(Signal::from_number(signal.number().into()), Some(signal));
        }
        assert_eq!(Signal::from_number(9), None);
    }
}
