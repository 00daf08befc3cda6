//! Bounds on what a chat template computes, keeps and writes: templates come with checkpoints, from anybody.

use super::python;
use crate::Cancellation;
use minijinja::{
    Environment, Error, ErrorKind, Output, State, Value, value::Object, value::ValueKind,
};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Instructions that a rendering runs at most: seconds' worth. Gemma 4's own templates look back from every message, so that a
/// conversation of 1,000 messages takes 4 million of them.
const MOST_INSTRUCTIONS: u64 = 100_000_000;

/// Bytes that a rendering makes at most, all texts and lists on the way to the prompt together. Templates copy a message some
/// ten times; the longest prompts of any model are a few million bytes.
pub(super) const MOST_BYTES: usize = 128 << 20;

/// What a list or a namespace counts for, and a list's elements, those of lists in it among them.
pub(super) const LIST: usize = 64;
const ELEMENT: usize = 8;

/// Bytes of a list's texts that count as one more element.
const TEXT_OF_ELEMENT: usize = 512;

/// How long a rendering takes at most. Instructions do not bound it: one may read 128 MB of text.
const LONGEST_RENDERING: Duration = Duration::from_secs(10);

/// The context's name for the rendering's [`Watch`]: no identifier, so that no template can name it.
pub(super) const WATCH: &str = " watch";

/// How deeply lists may nest. A stack holds thousands of levels.
const DEEPEST: usize = 100;

/// Bounds what the environment's templates do.
pub(super) fn set(environment: &mut Environment<'_>) {
    environment.set_fuel(Some(MOST_INSTRUCTIONS));
    environment.set_formatter(format);
}

/// Writes a value as Python prints it, and counts it. Chat templates are not HTML: nothing is escaped.
fn format(output: &mut Output<'_>, state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    let text = python::text(value)?;
    spend(state, text.len())?;
    output.write_str(&text)?;
    Ok(())
}

/// When a rendering has to end.
#[derive(Clone, Debug)]
pub(super) struct Watch {
    deadline: Instant,
    cancellation: Option<Cancellation>,
}

impl Object for Watch {}

impl Watch {
    pub fn new(cancellation: Option<&Cancellation>) -> Self {
        Self {
            deadline: Instant::now() + LONGEST_RENDERING,
            cancellation: cancellation.cloned(),
        }
    }

    fn of(state: &State<'_, '_>) -> Arc<Self> {
        // Macros do not see the context: the first look, which is at the template's begin, keeps it for them.
        state.get_or_set_temp_object("watch", || {
            let found = state.lookup(WATCH);
            let watch = found.and_then(|watch| watch.downcast_object::<Self>());
            watch.map_or_else(|| Self::new(None), |watch| Self::clone(&watch))
        })
    }
}

/// Ends a rendering that is cancelled, or that takes too long.
pub(super) fn assert_in_time(state: &State<'_, '_>) -> Result<(), Error> {
    let watch = Watch::of(state);
    let is_cancelled = watch
        .cancellation
        .as_ref()
        .is_some_and(Cancellation::is_cancelled);
    if is_cancelled {
        let reason = "the rendering was cancelled";
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    if Instant::now() > watch.deadline {
        let reason = format!(
            "its instructions take more than {} s",
            LONGEST_RENDERING.as_secs()
        );
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    Ok(())
}

/// Bytes that a rendering has made.
#[derive(Debug, Default)]
struct Spent(AtomicUsize);

impl Object for Spent {}

/// Counts `bytes`.
pub(super) fn spend(state: &State<'_, '_>, bytes: usize) -> Result<(), Error> {
    let spent = state.get_or_set_temp_object("spent", Spent::default);
    let before = spent
        .0
        .fetch_add(bytes.min(MOST_BYTES + 1), Ordering::Relaxed);
    match before.saturating_add(bytes) > MOST_BYTES {
        true => Err(too_much()),
        false => Ok(()),
    }
}

/// A value that a step has made, counted. Sequences that compute their elements anew whenever they are asked become lists.
pub(super) fn keep(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    let value = match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            let mut elements = Vec::new();
            for element in value.try_iter()? {
                spend(state, ELEMENT)?;
                elements.push(element);
            }
            Value::from(elements)
        }
        _ => value,
    };
    let bytes = match value.as_str() {
        Some(text) => text.len(),
        None if value.as_object().is_some() => LIST + ELEMENT * elements(&value)?,
        None => 0,
    };
    spend(state, bytes)?;
    Ok(value)
}

/// The bytes of a value's text.
pub(super) fn length(value: &Value) -> Result<usize, Error> {
    match value.as_str() {
        Some(text) => Ok(text.len()),
        None => Ok(python::text(value)?.len()),
    }
}

/// How many elements a list has, those of the lists in it among them: a list that is in another twice counts twice. Long texts
/// count as more elements, since sorting or comparing the list reads them.
///
/// # Errors
/// Where lists nest too deeply, as what has itself among its elements does, or have too many elements.
pub(super) fn elements(value: &Value) -> Result<usize, Error> {
    let mut count = 0;
    look_through(value, DEEPEST, &mut |element| {
        count += 1 + element.as_str().map_or(0, str::len) / TEXT_OF_ELEMENT;
        match count > MOST_BYTES / ELEMENT {
            true => Err(too_much()),
            false => Ok(()),
        }
    })?;
    Ok(count)
}

/// Calls `visit` with what is in a list, and in the lists in it.
pub(super) fn look_through(
    value: &Value,
    depth: usize,
    visit: &mut dyn FnMut(&Value) -> Result<(), Error>,
) -> Result<(), Error> {
    if value.as_object().is_none() {
        return Ok(());
    }
    let Some(depth) = depth.checked_sub(1) else {
        let reason = format!("lists nest more than {DEEPEST} deep");
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    };
    let Ok(elements) = value.try_iter() else {
        return Ok(());
    };
    for element in elements {
        visit(&element)?;
        look_through(&element, depth, visit)?;
        if value.kind() == ValueKind::Map {
            let value = value.get_item(&element)?;
            visit(&value)?;
            look_through(&value, depth, visit)?;
        }
    }
    Ok(())
}

/// A value that is to be an attribute of a namespace: neither one nor a list that has one, so that no value has itself in it.
pub(super) fn assert_no_namespace(value: &Value) -> Result<(), Error> {
    let mut visit = |value: &Value| {
        let is_namespace = value
            .as_object()
            .is_some_and(|object| object.type_name().ends_with("::Namespace"));
        match is_namespace {
            true => {
                let reason = "a namespace cannot have another among its attributes";
                Err(Error::new(ErrorKind::InvalidOperation, reason))
            }
            false => Ok(()),
        }
    };
    visit(value)?;
    look_through(value, DEEPEST, &mut visit)
}

/// Text that takes no more than [`MOST_BYTES`].
#[derive(Default)]
pub(super) struct Limited(Vec<u8>);

impl Limited {
    pub fn into_string(self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }
}

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MOST_BYTES {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, TOO_MUCH));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Write for Limited {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        io::Write::write_all(self, text.as_bytes()).map_err(|_| fmt::Error)
    }
}

const TOO_MUCH: &str = "it makes more than 128 MiB (134217728 bytes) of text and lists";

pub(super) fn too_much() -> Error {
    Error::new(ErrorKind::InvalidOperation, TOO_MUCH)
}

/// What went wrong, in words that say which bound it was.
pub(super) fn explain(error: &Error) -> String {
    match error.kind() {
        ErrorKind::OutOfFuel => {
            format!("it runs more than {MOST_INSTRUCTIONS} instructions: {error}")
        }
        _ => error.to_string(),
    }
}
