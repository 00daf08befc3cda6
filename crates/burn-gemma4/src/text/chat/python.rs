//! Formats and tests values as Python does. jinja2 prints a value with Python's `str`, and its tests, such as
//! `is iterable`, follow Python's types.

use super::limits::{Limited, elements, too_much};
use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, Value};
use std::fmt::{self, Write};

/// Formats a value like Python's `str(value)`.
///
/// # Errors
/// Returns an error if the text exceeds the size limit of a rendering, or if lists nest too deeply.
pub(super) fn text(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    elements(value)?;
    let mut output = Limited::default();
    write(&mut output, value).map_err(|_| too_much())?;
    Ok(output.into_string())
}

/// Replaces a list, a map or a float by the text that Python prints for it. Other values stay unchanged. The caller
/// passes the result to a minijinja function that prints its arguments.
pub(super) fn printable(value: &Value) -> Result<Value, Error> {
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    match is_float || value.as_object().is_some() {
        true => text(value).map(Value::from),
        false => Ok(value.clone()),
    }
}

/// Formats a value like Python's `pprint`. Returns an error if the result does not fit into one line.
pub(super) fn pprint(value: &Value) -> Result<String, Error> {
    /// The maximum width of a line of Python's `pprint`, in characters.
    const LINE: usize = 80;
    elements(value)?;
    let mut output = Limited::default();
    write_repr(&mut output, value).map_err(|_| too_much())?;
    let text = output.into_string();
    match text.chars().count() > LINE {
        true => {
            let reason = format!("pprint: values of more than {LINE} characters are not supported");
            Err(Error::new(ErrorKind::InvalidOperation, reason))
        }
        false => Ok(text),
    }
}

fn write(output: &mut Limited, value: &Value) -> fmt::Result {
    match value.as_str() {
        Some(text) => output.write_str(text),
        None => write_repr_or(output, value, ""),
    }
}

fn write_repr(output: &mut Limited, value: &Value) -> fmt::Result {
    write_repr_or(output, value, "Undefined")
}

fn write_repr_or(output: &mut Limited, value: &Value, undefined: &str) -> fmt::Result {
    if let Some(text) = value.as_str() {
        return write_quoted(output, text);
    }
    match value.kind() {
        ValueKind::Undefined => output.write_str(undefined),
        ValueKind::Number => output.write_str(&number(value)),
        ValueKind::Seq => {
            output.write_str("[")?;
            for (index, element) in value.try_iter().map_err(|_| fmt::Error)?.enumerate() {
                output.write_str(if index == 0 { "" } else { ", " })?;
                write_repr(output, &element)?;
            }
            output.write_str("]")
        }
        ValueKind::Map => {
            output.write_str("{")?;
            for (index, key) in value.try_iter().map_err(|_| fmt::Error)?.enumerate() {
                output.write_str(if index == 0 { "" } else { ", " })?;
                write_repr(output, &key)?;
                output.write_str(": ")?;
                write_repr(output, &value.get_item(&key).map_err(|_| fmt::Error)?)?;
            }
            output.write_str("}")
        }
        _ => write!(output, "{value}"),
    }
}

/// Formats a number like Python: an integer with all its digits, a float like `repr`.
pub(super) fn number(value: &Value) -> String {
    match value.is_integer() {
        true => value.to_string(),
        false => f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float),
    }
}

/// Formats a float like Python's `repr`, with the fewest digits that parse to the same float. Magnitudes below 1e-4,
/// and magnitudes of at least 1e16, get an exponent.
pub(super) fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.into();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        exponent if !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
        }
        _ => {
            let plain = value.to_string();
            match plain.contains('.') {
                true => plain,
                false => plain + ".0",
            }
        }
    }
}

/// Writes a string like Python's `repr`, with the quotes and escapes that Python chooses.
fn write_quoted(output: &mut Limited, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    output.write_char(quote)?;
    for char in text.chars() {
        match char {
            '\\' => output.write_str("\\\\")?,
            '\n' => output.write_str("\\n")?,
            '\r' => output.write_str("\\r")?,
            '\t' => output.write_str("\\t")?,
            _ if char == quote => write!(output, "\\{char}")?,
            _ if is_printable(char) => output.write_char(char)?,
            _ => match u32::from(char) {
                code @ 0..=0xFF => write!(output, "\\x{code:02x}")?,
                code @ 0x100..=0xFFFF => write!(output, "\\u{code:04x}")?,
                code => write!(output, "\\U{code:08x}")?,
            },
        }
    }
    output.write_char(quote)
}

/// True if Python's `str.isprintable` is true for the character. The function accepts the characters that Rust's
/// `escape_debug` does not escape. The function also accepts combining marks, which `escape_debug` escapes but Python
/// prints.
fn is_printable(char: char) -> bool {
    match char {
        '\'' | '"' | '\\' | ' ' => true,
        _ if char.is_control() || char.is_whitespace() => false,
        _ => {
            let is_mark =
                char.escape_debug().count() > 1 && format!("a{char}").escape_debug().count() == 2;
            is_mark || char.escape_debug().count() == 1
        }
    }
}

/// Adds template tests, such as `is iterable`, that behave as in jinja2. minijinja's tests of the same names behave
/// differently.
pub(super) fn set(environment: &mut Environment<'_>) {
    use ValueKind::{Bool, Iterable, Map, Number, Seq, String, Undefined};
    // An undefined value is iterable, because jinja2 iterates over it as over an empty list. None is not iterable.
    environment.add_test("iterable", |value: &Value| {
        matches!(value.kind(), Seq | Map | String | Iterable | Undefined)
    });
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), Seq | Map | String | Undefined)
    });
    // Booleans are numbers in Python.
    environment.add_test("number", |value: &Value| {
        matches!(value.kind(), Number | Bool)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn float_of_any_size_is_pythons_repr() {
        for (value, text) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-5, "1e-05"),
            (1.5e-5, "1.5e-05"),
            (0.0001, "0.0001"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.25e120, "1.25e+120"),
            (-0.0, "-0.0"),
            (f64::INFINITY, "inf"),
            (f64::NAN, "nan"),
        ] {
            assert_eq!(float(value), text);
        }
    }

    #[test]
    fn text_of_nested_values_is_pythons() {
        let value = Value::from_serialize(serde_json::json!(["a'b", "c", null, true, {"z": 1e-7}]));
        let expected = r#"["a'b", 'c', None, True, {'z': 1e-07}]"#;
        assert_eq!(text(&value).expect("the text is below the limit"), expected);
        assert_eq!(
            text(&Value::from("it's")).expect("the text is below the limit"),
            "it's"
        );
        assert_eq!(
            text(&Value::UNDEFINED).expect("the text is below the limit"),
            ""
        );
    }
}
