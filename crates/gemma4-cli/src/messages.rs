//! The program's messages on standard error: notes, errors and log records. Each message is a line of text, or a JSON object
//! on one line.

use burn_gemma4::Escaped;
use log::{Level, LevelFilter, Log, Metadata, Record};
use serde_json::json;
use std::fmt::Display;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// The values of `--log-format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Lines of text.
    #[default]
    Text,
    /// One JSON object per line, also for each request.
    Json,
}

/// True if messages are JSON objects.
static IS_JSON: AtomicBool = AtomicBool::new(false);
/// The rank of this process. Only the process with the rank 0 prints notes.
static RANK: AtomicUsize = AtomicUsize::new(0);

/// Sets the format of all further messages.
pub fn set_log_format(format: LogFormat) {
    IS_JSON.store(format == LogFormat::Json, Ordering::Relaxed);
}

/// Sets the rank of this process in a run of several processes. Error messages then name the rank, and only rank 0 prints
/// notes.
pub fn speak_as(rank: usize) {
    RANK.store(rank, Ordering::Relaxed);
}

/// Prints a note on standard error, if this process has rank 0. Unlike `eprintln!`, this function does not panic if standard
/// error is closed.
pub fn note(line: impl Display) {
    if RANK.load(Ordering::Relaxed) == 0 {
        match is_json() {
            true => say(&json_line(Level::Info, &line.to_string())),
            false => say(&Escaped::lines(line).to_string()),
        }
    }
}

/// Prints an error to standard error.
pub fn fault(message: &str) {
    let message = one_line(message);
    let message = match RANK.load(Ordering::Relaxed) {
        0 => message,
        rank => format!("process {rank}: {message}"),
    };
    match is_json() {
        true => say(&json_line(Level::Error, &message)),
        false => say(&format!("error: {}", Escaped::line(message))),
    }
}

fn is_json() -> bool {
    IS_JSON.load(Ordering::Relaxed)
}

/// Writes the line in a single call, so that output of other processes on the same terminal does not split the line.
fn say(line: &str) {
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Returns a message as a JSON object, with the seconds since 1970. JSON escapes line ends and control characters.
fn json_line(level: Level, message: &str) -> String {
    let time = SystemTime::now().duration_since(UNIX_EPOCH);
    let time = time.unwrap_or_default().as_secs_f64();
    let level = level.as_str().to_lowercase();
    json!({"time": time, "level": level, "message": message}).to_string()
}

/// Joins the lines of an error message to one line, because drivers report errors in several paragraphs.
fn one_line(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join(" ")
}

/// Installs a logger, which prints the log records of training in the form of the program's own notes and errors.
/// Records of the request log are printed with `--log-format json`. Records of other crates are printed only if
/// `RUST_LOG` is set, because drivers log errors from which they recover.
pub(crate) fn install_logger() {
    let others =
        std::env::var_os("RUST_LOG").map(|_| env_logger::Builder::from_default_env().build());
    let level = others
        .as_ref()
        .map_or(LevelFilter::Off, env_logger::Logger::filter);
    // If another logger is installed already, that logger stays in use.
    if log::set_boxed_logger(Box::new(Logger { others })).is_ok() {
        log::set_max_level(level.max(LevelFilter::Info));
    }
}

struct Logger {
    others: Option<env_logger::Logger>,
}

#[cfg(feature = "training")]
fn is_of_training(metadata: &Metadata<'_>) -> bool {
    metadata.target() == gemma4_train::LOG_TARGET
}

#[cfg(not(feature = "training"))]
fn is_of_training(_: &Metadata<'_>) -> bool {
    false
}

#[cfg(feature = "serve")]
fn is_of_requests(metadata: &Metadata<'_>) -> bool {
    metadata.target() == gemma4_serve::LOG_TARGET
}

#[cfg(not(feature = "serve"))]
fn is_of_requests(_: &Metadata<'_>) -> bool {
    false
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let others = self.others.as_ref();
        is_of_training(metadata)
            || (is_json() && is_of_requests(metadata))
            || others.is_some_and(|others| others.enabled(metadata))
    }

    fn log(&self, record: &Record<'_>) {
        // The trace of the HTTP client has all bytes on the wire, also the token.
        if record.level() == Level::Trace && record.target().starts_with("ureq") {
            return;
        }
        let others = self.others.as_ref();
        if is_of_training(record.metadata()) {
            match record.level() {
                Level::Error => fault(&record.args().to_string()),
                _ => note(record.args()),
            }
        } else if is_json() && is_of_requests(record.metadata()) {
            // The text of the record is a JSON object already.
            say(&record.args().to_string());
        } else if let Some(others) = others.filter(|others| others.matches(record)) {
            match is_json() {
                true => {
                    let message = format!("{}: {}", record.target(), record.args());
                    say(&json_line(record.level(), &message));
                }
                false => others.log(record),
            }
        }
    }

    fn flush(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_joins_the_lines_of_a_message() {
        assert_eq!(one_line("a driver:\n\n  is gone\n"), "a driver: is gone");
    }

    #[test]
    fn json_line_is_one_line_for_every_message() {
        let line = json_line(Level::Error, "a\n\"b\"\u{1b}");
        assert_eq!(line.lines().count(), 1, "{line}");
        let value: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!(value["message"], "a\n\"b\"\u{1b}");
        assert_eq!(value["level"], "error");
        assert!(value["time"].as_f64() > Some(1e9), "{line}");
    }
}
