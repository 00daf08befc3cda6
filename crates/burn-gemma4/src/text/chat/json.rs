//! JSON as Python writes it.

use super::limits::{Limited, keep};
use minijinja::{ErrorKind, State, Value, value::Kwargs};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use std::io;

/// The widest indent.
const MOST_INDENT: usize = 100;

/// Python's `json.dumps`: minijinja's own filter escapes for HTML and leaves out spaces.
pub(super) fn tojson(
    state: &State<'_, '_>,
    value: &Value,
    options: Kwargs,
) -> Result<Value, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    options.assert_all_used()?;
    if let Some(indent) = indent
        && indent > MOST_INDENT
    {
        let reason = format!("tojson: the indent is {indent}; it should be at most {MOST_INDENT}");
        return Err(minijinja::Error::new(ErrorKind::InvalidOperation, reason));
    }
    let mut json = Limited::default();
    let written = match indent.map(|width| " ".repeat(width)) {
        Some(indent) => {
            let formatter = PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut json, formatter))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut json, OneLine)),
    };
    written.map_err(|error| {
        let reason = format!("tojson: {error}");
        minijinja::Error::new(ErrorKind::BadSerialization, reason)
    })?;
    keep(state, Value::from(json.into_string()))
}

/// Spaces as Python writes them.
struct OneLine;

impl Formatter for OneLine {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
