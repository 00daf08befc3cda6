//! Stop strings: strings that end a generated text.

use crate::error::Gemma4Error;
use crate::text::tokenizer::Tokenizer;
use crate::text::tokenizer::stream::TextStream;

/// A search for stop strings in generated text. A stop string may begin and end in the middle of a token. If a stop
/// string contains the name of a special token, the name matches this token.
pub(crate) struct StopStrings<'a> {
    tokenizer: &'a Tokenizer,
    strings: &'a [String],
    stream: TextStream<'a>,
    /// The last part of the text so far. This part is long enough to contain every stop string that has begun and is
    /// not yet complete.
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

    /// Adds `token` to the text. Returns true if the token completes a stop string.
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
            // The stream holds back an incomplete character at the end of the text. Search without the bytes of this
            // character, because the next tokens may complete the character.
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
