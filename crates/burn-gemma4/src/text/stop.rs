//! Texts that end a text.

use crate::{Gemma4Error, TextStream, Tokenizer};

/// Refuses texts that every text has.
pub(crate) fn validate(strings: &[String]) -> Result<(), Gemma4Error> {
    match strings.iter().any(String::is_empty) {
        true => Err(Gemma4Error::Argument {
            argument: "stop_strings",
            reason: "one of them is empty".into(),
        }),
        false => Ok(()),
    }
}

/// Looks for texts in what is generated, wherever its tokens begin and end. Special tokens count by their names.
pub(crate) struct StopStrings<'a> {
    tokenizer: &'a Tokenizer,
    strings: &'a [String],
    stream: TextStream<'a>,
    /// The end of the text, long enough for what may still become one of them.
    end: String,
}

impl<'a> StopStrings<'a> {
    pub fn new(strings: &'a [String], tokenizer: &'a Tokenizer) -> Self {
        Self {
            tokenizer,
            strings,
            stream: tokenizer.stream(),
            end: String::new(),
        }
    }

    /// Whether one of them is complete with `token`.
    pub fn end_with(&mut self, token: u32) -> Result<bool, Gemma4Error> {
        let Some(longest) = self.strings.iter().map(String::len).max() else {
            return Ok(false);
        };
        match self.tokenizer.special(token) {
            Some(special) => {
                self.end += &self.stream.finish()?;
                self.end += &special;
            }
            None => self.end += &self.stream.push(token)?,
        }
        let held = self.stream.held()?;
        let text = match held.contains(char::REPLACEMENT_CHARACTER) {
            // Bytes of a character whose others may still come.
            true => self.end.clone(),
            false => self.end.clone() + &held,
        };
        let found = self.strings.iter().any(|string| text.contains(string));
        let mut start = self.end.len().saturating_sub(longest - 1);
        while !self.end.is_char_boundary(start) {
            start -= 1;
        }
        self.end.drain(..start);
        Ok(found)
    }
}
