//! Handles signals that request the end of a program, and defines the exit code for each signal.
//!
//! Unix has three of these signals: `SIGINT` (Ctrl-C), `SIGTERM` (sent by Slurm, `docker stop` and `torchrun`) and `SIGHUP`
//! (sent by a terminal that closes). Windows has only Ctrl-C.

use crate::Error;
use std::{
    fmt,
    sync::atomic::{AtomicU8, Ordering},
};

/// A signal that requests the end of a program.
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

    /// Returns the number of the signal in POSIX.
    pub fn number(self) -> u8 {
        match self {
            Self::HangUp => 1,
            Self::Interrupt => 2,
            Self::Terminate => 15,
        }
    }

    /// Returns the exit code that shells expect from a program that the signal has ended: 128 plus the signal's number.
    pub fn exit_code(self) -> u8 {
        128 + self.number()
    }

    fn from_number(number: i32) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|signal| i32::from(signal.number()) == number)
    }
}

/// The number of the first signal that was received, or 0 if no signal was received yet.
static FIRST: AtomicU8 = AtomicU8::new(0);

/// Returns the first signal that was received since [`handle`] was called, or `None` if no signal was received.
pub fn first() -> Option<Signal> {
    Signal::from_number(FIRST.load(Ordering::SeqCst).into())
}

/// The error of a program that has saved its state after a signal. The program exits with the signal's exit code and prints
/// no error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped(pub Signal);

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stopped by signal {}", self.0.number())
    }
}

impl std::error::Error for Stopped {}

/// Returns [`Stopped`] if this process has received a signal, and `Ok` otherwise. A program calls this function after
/// its work, because a signal may have ended the work early.
///
/// # Errors
/// Returns [`Stopped`].
pub fn end_of_stopped() -> Result<(), Error> {
    match first() {
        Some(signal) => Err(Stopped(signal).into()),
        None => Ok(()),
    }
}

/// Calls `handler` for each received signal, on a separate thread. If the process ignored `SIGHUP` at its start, as
/// under `nohup`, `SIGHUP` stays ignored.
///
/// # Errors
/// Returns an error if the system cannot install the handler.
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
        .filter(|signal| *signal != Signal::HangUp || !ignores_hang_up());
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

/// True if the process ignores `SIGHUP`, as under `nohup`. Programs that the process starts then ignore `SIGHUP` too.
#[cfg(unix)]
pub fn ignores_hang_up() -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: `sigaction` changes no handler, because the pointer to the new action is null. `action` has room for one
    // `sigaction`. The code reads `action` only if the call returns 0, which means that the call has written `action`.
    unsafe {
        libc::sigaction(libc::SIGHUP, std::ptr::null(), action.as_mut_ptr()) == 0
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
    fn exit_code_of_each_signal_is_that_of_shells() {
        let codes = Signal::ALL.map(Signal::exit_code);
        assert_eq!(codes, [130, 143, 129]);
        for signal in Signal::ALL {
            assert_eq!(Signal::from_number(signal.number().into()), Some(signal));
        }
        assert_eq!(Signal::from_number(9), None);
    }
}
