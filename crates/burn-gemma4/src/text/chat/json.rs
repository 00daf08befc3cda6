//! Writes JSON like Python's `json.dumps`, with the arguments of the filter `tojson` in Hugging Face Transformers.

use super::limits::{Limited, elements, keep, too_much};
use super::python;
use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use std::fmt::{self, Write};

/// The maximum length of an indent in bytes.
const MOST_INDENT: usize = 100;

/// The maximum length in bytes of the argument `separators`: the item separator and the key separator together.
const LONGEST_SEPARATOR: usize = 100;

/// The filter `tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`. Like the filter of Hugging
/// Face Transformers, this filter does not escape HTML characters. minijinja's own filter escapes them.
pub(super) fn tojson(
    state: &State<'_, '_>,
    value: &Value,
    arguments: Rest<Value>,
) -> Result<Value, Error> {
    let style = Style::from_arguments(&arguments)?;
    elements(value)?;
    let mut json = Limited::default();
    style.write(&mut json, value, 0)?;
    keep(state, Value::from(json.into_string()))
}

fn refused(reason: impl fmt::Display) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {reason}"))
}

struct Style {
    ensure_ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
}

impl Style {
    fn from_arguments(arguments: &[Value]) -> Result<Self, Error> {
        type Positional = (
            Option<Value>,
            Option<Value>,
            Option<Value>,
            Option<Value>,
            Kwargs,
        );
        let (ensure_ascii, indent, separators, sort_keys, named): Positional =
            from_args(arguments)?;
        let argument = |position: Option<Value>, name: &str| -> Result<Value, Error> {
            match (position, named.get::<Option<Value>>(name)?) {
                (Some(_), Some(_)) => Err(refused(format_args!("{name} is given twice"))),
                (found, None) | (None, found) => Ok(found.unwrap_or_else(|| Value::from(()))),
            }
        };
        let ensure_ascii = argument(ensure_ascii, "ensure_ascii")?.is_true();
        let indent = indentation(&argument(indent, "indent")?)?;
        let separators = argument(separators, "separators")?;
        let sort_keys = argument(sort_keys, "sort_keys")?.is_true();
        named.assert_all_used()?;
        let (item, key) = match separators.is_none() {
            true => match indent.is_some() {
                true => (",".to_owned(), ": ".to_owned()),
                false => (", ".to_owned(), ": ".to_owned()),
            },
            false => pair(&separators)?,
        };
        Ok(Self {
            ensure_ascii,
            indent,
            item,
            key,
            sort_keys,
        })
    }

    fn write(&self, output: &mut Limited, value: &Value, depth: usize) -> Result<(), Error> {
        if let Some(text) = value.as_str() {
            return self.write_text(output, text).map_err(|_| too_much());
        }
        match value.kind() {
            ValueKind::None => push(output, "null"),
            ValueKind::Bool => push(output, if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => push(output, &number(value)),
            ValueKind::Map => self.write_map(output, value, depth),
            ValueKind::Seq | ValueKind::Iterable => {
                let elements: Vec<Value> = value.try_iter()?.collect();
                self.write_all(
                    output,
                    ['[', ']'],
                    elements.len(),
                    depth,
                    |output, index| self.write(output, &elements[index], depth + 1),
                )
            }
            kind => Err(refused(format_args!(
                "a value that is {kind} cannot be written as JSON"
            ))),
        }
    }

    fn write_map(&self, output: &mut Limited, value: &Value, depth: usize) -> Result<(), Error> {
        let mut entries = value
            .try_iter()?
            .map(|key| Ok((key_text(&key)?, value.get_item(&key)?)))
            .collect::<Result<Vec<(String, Value)>, Error>>()?;
        if self.sort_keys {
            entries.sort_by(|left, right| left.0.cmp(&right.0));
        }
        self.write_all(output, ['{', '}'], entries.len(), depth, |output, index| {
            let (key, value) = &entries[index];
            self.write_text(output, key).map_err(|_| too_much())?;
            push(output, &self.key)?;
            self.write(output, value, depth + 1)
        })
    }

    /// Writes `count` elements between two brackets. If the style has an indent, each element is on its own line.
    fn write_all(
        &self,
        output: &mut Limited,
        [open, close]: [char; 2],
        count: usize,
        depth: usize,
        mut element: impl FnMut(&mut Limited, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let line = |output: &mut Limited, depth: usize| match &self.indent {
            Some(indent) if count > 0 => push(output, &format!("\n{}", indent.repeat(depth))),
            _ => Ok(()),
        };
        push(output, open.encode_utf8(&mut [0; 4]))?;
        for index in 0..count {
            push(output, if index == 0 { "" } else { &self.item })?;
            line(output, depth + 1)?;
            element(output, index)?;
        }
        line(output, depth)?;
        push(output, close.encode_utf8(&mut [0; 4]))
    }

    fn write_text(&self, output: &mut Limited, text: &str) -> fmt::Result {
        output.write_char('"')?;
        for char in text.chars() {
            match char {
                '"' => output.write_str("\\\"")?,
                '\\' => output.write_str("\\\\")?,
                '\n' => output.write_str("\\n")?,
                '\r' => output.write_str("\\r")?,
                '\t' => output.write_str("\\t")?,
                '\u{8}' => output.write_str("\\b")?,
                '\u{C}' => output.write_str("\\f")?,
                '\0'..='\u{1F}' => write!(output, "\\u{:04x}", u32::from(char))?,
                // Escape DEL too, like Python's ASCII-only encoder.
                '\u{7F}'.. if self.ensure_ascii => {
                    for unit in char.encode_utf16(&mut [0; 2]) {
                        write!(output, "\\u{unit:04x}")?;
                    }
                }
                _ => output.write_char(char)?,
            }
        }
        output.write_char('"')
    }
}

fn push(output: &mut Limited, text: &str) -> Result<(), Error> {
    output.write_str(text).map_err(|_| too_much())
}

/// Formats a number. Floats without a representation in JSON get the names that Python gives them, such as `NaN`.
fn number(value: &Value) -> String {
    match python::number(value).as_str() {
        "nan" => "NaN".into(),
        "inf" => "Infinity".into(),
        "-inf" => "-Infinity".into(),
        number => number.into(),
    }
}

/// Converts the key of a map to text, as Python's `json.dumps` does.
fn key_text(key: &Value) -> Result<String, Error> {
    if let Some(text) = key.as_str() {
        return Ok(text.to_owned());
    }
    match key.kind() {
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.into()),
        ValueKind::Number => Ok(number(key)),
        kind => Err(refused(format_args!("a key is {kind}; expected a text"))),
    }
}

/// Returns the text that indents by one level, or `None` without an indent. The argument `indent` is a number of
/// spaces, or the text itself.
fn indentation(indent: &Value) -> Result<Option<String>, Error> {
    if indent.is_none() {
        return Ok(None);
    }
    let text = match (indent.as_str(), indent.as_usize()) {
        (Some(text), _) => text.to_owned(),
        (None, Some(width)) if width <= MOST_INDENT => " ".repeat(width),
        _ => {
            let reason = format!("the indent is {indent}; expected at most {MOST_INDENT}");
            return Err(refused(reason));
        }
    };
    match text.len() > MOST_INDENT {
        true => Err(refused(format_args!(
            "the indent has {} bytes; expected at most {MOST_INDENT}",
            text.len()
        ))),
        false => Ok(Some(text)),
    }
}

fn pair(separators: &Value) -> Result<(String, String), Error> {
    let found: Vec<Value> = separators.try_iter()?.take(3).collect();
    match &found[..] {
        [item, key] => match (item.as_str(), key.as_str()) {
            (Some(item), Some(key)) if item.len() + key.len() <= LONGEST_SEPARATOR => {
                Ok((item.into(), key.into()))
            }
            _ => Err(refused("separators: expected two short texts")),
        },
        _ => Err(refused("separators: expected two texts")),
    }
}
