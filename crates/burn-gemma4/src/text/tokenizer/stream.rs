//! Text of tokens that come one by one.

use super::Tokenizer;
use crate::Gemma4Error;
use tokenizers::DecoderWrapper;

/// Turns tokens into text as they come, and never gives out half a UTF-8 character.
///
/// What [`push`](Self::push) gives out, followed by what [`finish`](Self::finish) gives out, is what
/// [`Tokenizer::decode`] makes of all tokens without special ones.
#[derive(Clone, Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// A run of byte tokens. Its text is known at its end only: one byte that is out of place turns the
    /// whole run into U+FFFD.
    held: Vec<u32>,
}

impl TextStream<'_> {
    /// The text that becomes complete with `token`; often all of the token's, sometimes none.
    ///
    /// # Errors
    /// [`Gemma4Error::Tokenizer`] where the tokenizer does not take the token.
    pub fn push(&mut self, token: u32) -> Result<String, Gemma4Error> {
        match self.tokenizer.kind(token) {
            Kind::Silent => Ok(String::new()),
            Kind::Byte => {
                self.held.push(token);
                Ok(String::new())
            }
            Kind::Text => {
                self.held.push(token);
                self.finish()
            }
        }
    }

    /// The text that is held back so far.
    pub(crate) fn held(&self) -> Result<String, Gemma4Error> {
        self.tokenizer.decode(&self.held, true)
    }

    /// The text that was held back. Bytes of a character that did not become complete are U+FFFD.
    ///
    /// # Errors
    /// [`Gemma4Error::Tokenizer`] where the tokenizer does not take the tokens.
    pub fn finish(&mut self) -> Result<String, Gemma4Error> {
        let text = self.held();
        self.held.clear();
        text
    }
}

/// What a token is to a [`TextStream`].
enum Kind {
    /// Special or unknown: no text, and no end to a run of bytes.
    Silent,
    /// One byte, such as `<0xE2>`.
    Byte,
    /// Whole characters.
    Text,
}

impl Tokenizer {
    /// A decoder for tokens that come one by one.
    ///
    /// # Examples
    /// ```no_run
    /// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
    /// # let tokenizer = burn_gemma4::Tokenizer::from_file("tokenizer.json")?;
    /// # let tokens = tokenizer.encode("text")?;
    /// let mut stream = tokenizer.stream();
    /// for token in tokens {
    ///     print!("{}", stream.push(token)?);
    /// }
    /// println!("{}", stream.finish()?);
    /// # Ok(())
    /// # }
    /// ```
    pub fn stream(&self) -> TextStream<'_> {
        TextStream {
            tokenizer: self,
            held: Vec::new(),
        }
    }

    fn kind(&self, id: u32) -> Kind {
        if self.special(id).is_some() {
            return Kind::Silent;
        }
        match self.inner.id_to_token(id) {
            None => Kind::Silent,
            Some(token) if is_byte(&token) => Kind::Byte,
            Some(_) => Kind::Text,
        }
    }
}

/// The decoder's own test for a byte token.
fn is_byte(token: &str) -> bool {
    token.len() == 6
        && token
            .strip_prefix("<0x")
            .and_then(|rest| rest.strip_suffix('>'))
            .is_some_and(|digits| u8::from_str_radix(digits, 16).is_ok())
}

/// Whether a token's text depends on no other token, except for runs of bytes. [`TextStream`] is exact for
/// such decoders only.
pub(super) fn decodes_token_by_token(decoder: &DecoderWrapper) -> bool {
    let is_one = |decoder: &DecoderWrapper| {
        matches!(
            decoder,
            DecoderWrapper::Replace(_) | DecoderWrapper::ByteFallback(_)
        )
    };
    match decoder {
        DecoderWrapper::Sequence(sequence) => match sequence.get_decoders() {
            [before @ .., DecoderWrapper::Fuse(_)] => before.iter().all(is_one),
            all => all.iter().all(is_one),
        },
        decoder => is_one(decoder) || matches!(decoder, DecoderWrapper::Fuse(_)),
    }
}

#[cfg(test)]
mod tests {
    use crate::text::tokenizer::tests::{EOS, H, HI, SPACE, byte, tokenizer};

    /// What each push gave out, and what was left.
    fn streamed(tokens: &[u32]) -> (Vec<String>, String) {
        let tokenizer = tokenizer();
        let mut stream = tokenizer.stream();
        let pushed: Vec<String> = tokens
            .iter()
            .map(|&token| stream.push(token).expect("text"))
            .collect();
        let rest = stream.finish().expect("text");
        let all = tokenizer.decode(tokens, true).expect("text");
        assert_eq!(pushed.concat() + &rest, all, "{tokens:?}");
        (pushed, rest)
    }

    #[test]
    fn text_comes_as_soon_as_it_is_certain() {
        let (pushed, rest) = streamed(&[HI, byte(0xC3), byte(0xA9), SPACE, H]);
        assert_eq!(pushed, ["hi", "", "", "é ", "h"]);
        assert_eq!(rest, "");
    }

    #[test]
    fn a_character_that_stays_incomplete_comes_last() {
        let (pushed, rest) = streamed(&[H, byte(0xE2), byte(0x82)]);
        assert_eq!(pushed, ["h", "", ""]);
        assert_eq!(rest, "\u{FFFD}\u{FFFD}");
    }

    #[test]
    fn a_late_wrong_byte_spoils_its_run() {
        let (pushed, _) = streamed(&[byte(0xC3), byte(0xA9), byte(0xFF), H]);
        assert_eq!(pushed, ["", "", "", "\u{FFFD}\u{FFFD}\u{FFFD}h"]);
    }

    #[test]
    fn special_and_unknown_tokens_do_not_end_a_run() {
        let (pushed, _) = streamed(&[byte(0xC3), EOS, 100_000, byte(0xA9), H]);
        assert_eq!(pushed, ["", "", "", "", "éh"]);
    }

    #[test]
    fn a_stream_starts_again_after_its_end() {
        let tokenizer = tokenizer();
        let mut stream = tokenizer.stream();
        assert_eq!(stream.push(byte(b'a')).expect("text"), "");
        assert_eq!(stream.finish().expect("text"), "a");
        assert_eq!(stream.finish().expect("text"), "");
        assert_eq!(stream.push(HI).expect("text"), "hi");
    }
}
