//! Escapes text from files for display. Control characters in a checkpoint's files could otherwise control the user's
//! terminal.

use std::fmt::{self, Display, Write};

/// A text for display. Escapes such as `\u{1b}` replace control characters and characters that change the direction of
/// text.
///
/// ```
/// use burn_gemma4::Escaped;
///
/// assert_eq!(Escaped::line("a\x1b[2Jb\n").to_string(), r"a\u{1b}[2Jb\u{a}");
/// assert_eq!(Escaped::lines("a\tb\n").to_string(), "a\tb\n");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Escaped<T> {
    text: T,
    keeps_lines: bool,
}

impl<T: Display> Escaped<T> {
    /// Wraps a text that must stay on one line, such as a name. Line feeds and tabs are escaped too.
    pub fn line(text: T) -> Self {
        Self {
            text,
            keeps_lines: false,
        }
    }

    /// Wraps a message of several lines. Line feeds and tabs are not escaped.
    pub fn lines(text: T) -> Self {
        Self {
            text,
            keeps_lines: true,
        }
    }
}

impl<T: Display> Display for Escaped<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keeps_lines = self.keeps_lines;
        write!(Escaping { f, keeps_lines }, "{}", self.text)
    }
}

/// A writer that escapes text and passes it on to a formatter.
struct Escaping<'a, 'b> {
    f: &'a mut fmt::Formatter<'b>,
    keeps_lines: bool,
}

impl Write for Escaping<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars() {
            match character {
                '\n' | '\t' if self.keeps_lines => self.f.write_char(character)?,
                _ if is_obeyed(character) => write!(self.f, "{}", character.escape_unicode())?,
                _ => self.f.write_char(character)?,
            }
        }
        Ok(())
    }
}

/// True for control characters, line separators and characters that set the writing direction. A terminal obeys these
/// characters instead of showing them.
fn is_obeyed(character: char) -> bool {
    const DIRECTIONS: [char; 12] = [
        '\u{61c}', '\u{200e}', '\u{200f}', '\u{202a}', '\u{202b}', '\u{202c}', '\u{202d}',
        '\u{202e}', '\u{2066}', '\u{2067}', '\u{2068}', '\u{2069}',
    ];
    character.is_control()
        || matches!(character, '\u{2028}' | '\u{2029}')
        || DIRECTIONS.contains(&character)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Gemma4Error, TensorProblem};

    const HOSTILE: &str = "a\x1b]0;owned\x07\u{9b}2J\u{202e}\rz";

    fn assert_harmless(text: &str) {
        assert!(!text.chars().any(is_obeyed), "{text:?}");
        assert!(
            text.contains(r"a\u{1b}]0;owned\u{7}\u{9b}2J\u{202e}\u{d}z"),
            "{text}"
        );
    }

    #[test]
    fn errors_with_control_characters_display_them_escaped() {
        let text = || HOSTILE.to_owned();
        let io = || std::io::Error::other("gone");
        for error in [
            Gemma4Error::Io {
                path: HOSTILE.into(),
                source: io(),
            },
            Gemma4Error::Malformed {
                path: "file".into(),
                reason: text(),
            },
            Gemma4Error::Malformed {
                path: HOSTILE.into(),
                reason: String::new(),
            },
            Gemma4Error::Unsupported {
                path: "file".into(),
                reason: text(),
            },
            Gemma4Error::Config(text()),
            Gemma4Error::Tokenizer(text()),
            Gemma4Error::ChatTemplate(text()),
            Gemma4Error::Argument {
                argument: "model",
                reason: text(),
            },
            Gemma4Error::Device(text()),
        ] {
            assert_harmless(&error.to_string());
        }
        let name = text;
        for problem in [
            TensorProblem::Missing { name: name() },
            TensorProblem::Extra { name: name() },
            TensorProblem::Shape {
                name: name(),
                found: vec![1],
                expected: vec![2],
            },
            TensorProblem::Rank {
                name: name(),
                found: 1,
                expected: 2,
            },
            TensorProblem::Dtype {
                name: name(),
                found: "U8".into(),
            },
            TensorProblem::NoNumber { name: name() },
            TensorProblem::Packing {
                name: "tensor".into(),
                reason: text(),
            },
            TensorProblem::Encoding {
                name: name(),
                found: "IQ1".into(),
                nearest: "Q4_K",
            },
        ] {
            let problems = vec![problem];
            let error = Gemma4Error::Tensors {
                path: "file".into(),
                problems,
            };
            assert_harmless(&error.to_string());
        }
    }
}
