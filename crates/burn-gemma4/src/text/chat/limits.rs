//! Limits on the number of minijinja instructions, the time and the memory of a chat template. Templates come with
//! checkpoints and are not trusted.

use super::python;
use crate::cancellation::Cancellation;
use minijinja::{
    Environment, Error, ErrorKind, Output, State, Value, value::Object, value::ValueKind,
};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The maximum number of minijinja instructions in one rendering. A rendering with this many instructions takes
/// seconds. Gemma 4's templates search all earlier messages for each message, so 1,000 messages take 4 million
/// instructions.
const MOST_INSTRUCTIONS: u64 = 100_000_000;

/// The maximum number of bytes that one rendering may create, including intermediate texts and lists. Templates copy
/// each message about ten times, and the longest prompts have a few million bytes.
pub(super) const MOST_BYTES: usize = 128 << 20;

/// The assumed sizes of lists in bytes, for the limit on created bytes. A list or a namespace counts as `LIST` bytes,
/// plus `ELEMENT` bytes for each element, including the elements of nested lists.
pub(super) const LIST: usize = 64;
const ELEMENT: usize = 8;

/// A text in a list counts as `1 + length / TEXT_OF_ELEMENT` elements, with the length in bytes. For example, a text of
/// 1024 bytes counts as three elements.
const TEXT_OF_ELEMENT: usize = 512;

/// The maximum duration of one rendering. The limit on instructions does not bound the time, because a single
/// instruction may read 128 MB of text.
const LONGEST_RENDERING: Duration = Duration::from_secs(10);

/// The template variable that holds the rendering's [`Watch`]. The name is not a valid identifier, so no template can
/// access the variable.
pub(super) const WATCH: &str = " watch";

/// The maximum nesting depth of lists. The stack has room for thousands of levels.
const DEEPEST: usize = 100;

/// Sets the limit on instructions in the environment. Also sets the formatter, which counts the printed bytes.
pub(super) fn set(environment: &mut Environment<'_>) {
    environment.set_fuel(Some(MOST_INSTRUCTIONS));
    environment.set_formatter(format);
}

/// Writes a value as Python prints the value, and counts the written bytes. No characters are escaped, because chat
/// templates do not produce HTML.
fn format(output: &mut Output<'_>, state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    let text = python::text(value)?;
    spend(state, text.len())?;
    output.write_str(&text)?;
    Ok(())
}

/// The deadline of a rendering, and the flag that cancels it.
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
        // The first call is at the beginning of the template. This call copies the watch (the deadline and the
        // cancellation flag) from the template variable to the state. Later calls may come from macros, which cannot
        // see the template variable.
        state.get_or_set_temp_object("watch", || {
            let found = state.lookup(WATCH);
            let watch = found.and_then(|watch| watch.downcast_object::<Self>());
            watch.map_or_else(|| Self::new(None), |watch| Self::clone(&watch))
        })
    }
}

/// Returns an error if the rendering is cancelled or exceeds its time limit.
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

/// The number of bytes that a rendering has created so far.
#[derive(Debug, Default)]
struct Spent(AtomicUsize);

impl Object for Spent {}

/// Adds `bytes` to the created bytes. Returns an error if the total exceeds the limit.
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

/// Counts the bytes of `value`, which an instruction has just created, and returns the value. Converts a lazy sequence
/// to a list, because a lazy sequence recomputes its elements at each access.
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

/// Returns the length in bytes of the text that is printed for a value.
pub(super) fn length(value: &Value) -> Result<usize, Error> {
    match value.as_str() {
        Some(text) => Ok(text.len()),
        None => Ok(python::text(value)?.len()),
    }
}

/// Returns the number of elements of a list and its nested lists. A long text counts as several elements, because its
/// comparison takes time.
///
/// # Errors
/// Returns an error if lists nest too deeply or have too many elements.
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

/// Calls `visit` for each element of a list, and for each element of the lists nested in the list. Returns an error if
/// lists nest more than `depth` deep.
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

/// Checks a value before it is assigned to an attribute of a namespace. The value must not contain a namespace.
/// Otherwise a namespace could contain itself.
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

/// A text buffer with a maximum length of [`MOST_BYTES`].
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

/// Returns the error's text. If the limit on instructions was exceeded, the text also states this limit.
pub(super) fn explain(error: &Error) -> String {
    match error.kind() {
        ErrorKind::OutOfFuel => {
            format!("it runs more than {MOST_INSTRUCTIONS} instructions: {error}")
        }
        _ => error.to_string(),
    }
}
