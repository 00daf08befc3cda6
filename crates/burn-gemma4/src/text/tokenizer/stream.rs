//! Streaming decoding: converts tokens to text while the model generates them.

use super::Tokenizer;
use crate::error::Gemma4Error;
use tokenizers::DecoderWrapper;

/// A streaming decoder, which decodes tokens one by one and never returns an incomplete UTF-8 character.
///
/// The results of all [`push`](Self::push) calls and of [`finish`](Self::finish) together equal [`Tokenizer::decode`]
/// without special tokens.
#[derive(Clone, Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The current run of byte tokens. One invalid byte turns the whole run into U+FFFD, so the text is known only at
    /// the end of the run.
    held: Vec<u32>,
}

impl TextStream<'_> {
    /// Adds a token and returns the text that the token completes, which may be empty.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Tokenizer`] if the tokenizer rejects the token.
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

    /// Returns the text of the tokens that are currently held back.
    pub(crate) fn held(&self) -> Result<String, Gemma4Error> {
        self.tokenizer.decode(&self.held, true)
    }

    /// Ends the stream. Returns the text that was held back. The bytes of an incomplete character become U+FFFD.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Tokenizer`] if the tokenizer rejects the tokens.
    pub fn finish(&mut self) -> Result<String, Gemma4Error> {
        let text = self.held();
        self.held.clear();
        text
    }
}

/// The kind of a token, which decides how a [`TextStream`] decodes the token.
enum Kind {
    /// A special or unknown token, which has no text and does not end a run of byte tokens.
    Silent,
    /// A token that stands for one byte, such as `<0xE2>`.
    Byte,
    /// A token of whole characters.
    Text,
}

impl Tokenizer {
    /// Creates a streaming decoder.
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

    /// Returns the bytes that a token adds to a text, or `None` if the token is special or unknown. The bytes may be a
    /// part of a character.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Tokenizer`] if the tokenizer rejects the token.
    pub fn token_bytes(&self, id: u32) -> Result<Option<Vec<u8>>, Gemma4Error> {
        match self.kind(id) {
            Kind::Silent => Ok(None),
            Kind::Byte => Ok(self
                .inner
                .id_to_token(id)
                .and_then(|token| byte_of(&token))
                .map(|byte| vec![byte])),
            Kind::Text => Ok(Some(self.decode(&[id], false)?.into_bytes())),
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

/// True if the token is a byte token. The condition is the same as in the tokenizers library.
fn is_byte(token: &str) -> bool {
    byte_of(token).is_some()
}

/// Returns the byte for which a byte token stands, or `None` if the token is not a byte token.
fn byte_of(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let byte = u8::from_str_radix(digits, 16).ok()?;
    (token.len() == 6).then_some(byte)
}

/// True if the decoder gives each token, except byte tokens, a text that does not depend on the neighboring tokens.
/// [`TextStream`] is exact only for such decoders.
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

    /// Returns the texts that the calls of `push` returned, and the text that `finish` returned.
    fn streamed(tokens: &[u32]) -> (Vec<String>, String) {
        let tokenizer = tokenizer();
        let mut stream = tokenizer.stream();
        let pushed: Vec<String> = tokens
            .iter()
            .map(|&token| stream.push(token).expect("the tokens decode"))
            .collect();
        let rest = stream.finish().expect("the tokens decode");
        let all = tokenizer.decode(tokens, true).expect("the tokens decode");
        assert_eq!(pushed.concat() + &rest, all, "{tokens:?}");
        (pushed, rest)
    }

    #[test]
    fn token_bytes_of_a_byte_token_is_its_byte() {
        let tokenizer = tokenizer();
        let bytes = |token| tokenizer.token_bytes(token).expect("the token decodes");
        assert_eq!(bytes(byte(0xC3)), Some(vec![0xC3]));
        assert_eq!(bytes(HI), Some(b"hi".to_vec()));
        assert_eq!(bytes(EOS), None);
        assert_eq!(bytes(100_000), None);
    }

    #[test]
    fn push_returns_text_as_soon_as_it_is_certain() {
        let (pushed, rest) = streamed(&[HI, byte(0xC3), byte(0xA9), SPACE, H]);
        assert_eq!(pushed, ["hi", "", "", "é ", "h"]);
        assert_eq!(rest, "");
    }

    #[test]
    fn finish_returns_an_incomplete_character() {
        let (pushed, rest) = streamed(&[H, byte(0xE2), byte(0x82)]);
        assert_eq!(pushed, ["h", "", ""]);
        assert_eq!(rest, "\u{FFFD}\u{FFFD}");
    }

    #[test]
    fn push_of_an_invalid_byte_replaces_its_run() {
        let (pushed, _) = streamed(&[byte(0xC3), byte(0xA9), byte(0xFF), H]);
        assert_eq!(pushed, ["", "", "", "\u{FFFD}\u{FFFD}\u{FFFD}h"]);
    }

    #[test]
    fn push_of_special_and_unknown_tokens_does_not_end_a_run() {
        let (pushed, _) = streamed(&[byte(0xC3), EOS, 100_000, byte(0xA9), H]);
        assert_eq!(pushed, ["", "", "", "", "éh"]);
    }

    #[test]
    fn push_after_finish_starts_again() {
        let tokenizer = tokenizer();
        let mut stream = tokenizer.stream();
        assert_eq!(stream.push(byte(b'a')).expect("the tokens decode"), "");
        assert_eq!(stream.finish().expect("the tokens decode"), "a");
        assert_eq!(stream.finish().expect("the tokens decode"), "");
        assert_eq!(stream.push(HI).expect("the tokens decode"), "hi");
    }
}
