//! Marks are characters that split the special tokens in the text of a message. A chat template can then render the
//! message, and no part of its text becomes a special token.

use super::Tokenizer;
use crate::error::Gemma4Error;
use std::collections::HashSet;
use std::ops::RangeInclusive;
use tokenizers::{AddedToken, OffsetReferential, OffsetType};

/// The characters of the last two planes of Unicode, which are reserved for private use.
const MARKS: RangeInclusive<char> = '\u{F0000}'..='\u{10FFFD}';

/// The mark character that distinguishes special tokens in messages from special tokens of the chat template. Before
/// the rendering, [`mark`](Self::mark) inserts the mark into each special token in a message. After the rendering,
/// [`encode`](Self::encode) removes the marks. See [`Tokenizer::marking`].
#[derive(Clone, Copy, Debug)]
pub struct Marking<'a> {
    tokenizer: &'a Tokenizer,
    mark: char,
}

impl Tokenizer {
    /// Chooses a mark character for `texts`, which must contain every text that is rendered with the returned
    /// [`Marking`].
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the texts contain every character of Unicode's last two planes. The mark is
    /// a character of these planes that no text contains.
    ///
    /// # Examples
    /// ```no_run
    /// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
    /// use burn_gemma4::{ChatOptions, ChatTemplate, Message, Tokenizer};
    ///
    /// let tokenizer = Tokenizer::from_file("gemma-4-E2B-it/tokenizer.json")?;
    /// let said = "What does <turn|> do?";
    /// let marking = tokenizer.marking([said])?;
    /// let message = Message::user(marking.mark(said)?);
    /// let text = ChatTemplate::gemma4().render(&[message], ChatOptions::default())?;
    /// let tokens = marking.encode(&text)?;
    /// let end = tokenizer.id("<turn|>");
    /// assert_eq!(tokens.iter().filter(|token| Some(**token) == end).count(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn marking<'t>(
        &self,
        texts: impl IntoIterator<Item = &'t str>,
    ) -> Result<Marking<'_>, Gemma4Error> {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        // Do not choose a character that occurs in a special token. If this character were inserted into a special
        // token, the result could be another special token.
        let mut taken = HashSet::new();
        let mut take = |text: &str| taken.extend(text.chars().filter(|char| MARKS.contains(char)));
        texts.into_iter().for_each(&mut take);
        added.values().for_each(|token| take(&token.content));
        let mark = MARKS
            .into_iter()
            .find(|mark| !taken.contains(mark))
            .ok_or_else(|| Gemma4Error::Argument {
                argument: "messages",
                reason: "use every private-use character; one must be left for the mark".into(),
            })?;
        let tokenizer = self;
        Ok(Marking { tokenizer, mark })
    }
}

impl Marking<'_> {
    /// Inserts a mark into each special token in `text`.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Tokenizer`] if the text contains a special token of one character, which a mark cannot
    /// split.
    pub fn mark(&self, text: &str) -> Result<String, Gemma4Error> {
        let mut text = text.to_owned();
        let added = self
            .tokenizer
            .inner
            .get_added_vocabulary()
            .get_added_tokens_decoder();
        for token in added.values().filter(|token| token.special) {
            let mut rest = token.content.chars();
            let first = rest.next();
            // Repeat the replacement, because `replace` splits only the first of two overlapping occurrences. Each
            // iteration leaves fewer occurrences, because no special token contains the mark.
            while !token.content.is_empty() && text.contains(&token.content) {
                let (Some(first), false) = (first, rest.as_str().is_empty()) else {
                    return Err(Gemma4Error::Tokenizer(format!(
                        "{:?} in a text can only be encoded as the special token",
                        token.content
                    )));
                };
                let broken = format!("{first}{}{}", self.mark, rest.as_str());
                text = text.replace(&token.content, &broken);
            }
        }
        // A tokenizer may search for special tokens in the normalized text instead of the original text. In this case,
        // encode the text and look for special tokens, because the normalizer could create a special token that the
        // text does not contain literally.
        let is_sought = |token: &AddedToken| token.special && token.normalized;
        if !added.values().any(is_sought) {
            return Ok(text);
        }
        match self.first_special(&text) {
            Some(token) => Err(Gemma4Error::Tokenizer(format!(
                "{token:?} in a text can only be encoded as the special token"
            ))),
            None => Ok(text),
        }
    }

    /// Returns the name of the first special token that would result from encoding `text`, or `None` if there is no
    /// such token.
    fn first_special(&self, text: &str) -> Option<String> {
        let inner = &self.tokenizer.inner;
        let pieces = inner
            .get_added_vocabulary()
            .extract_and_normalize(inner.get_normalizer(), text);
        let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits
            .into_iter()
            .flat_map(|(_, _, tokens)| tokens.iter().flatten())
            .find_map(|token| self.tokenizer.special(token.id))
    }

    /// Returns a lower bound of the number of tokens that [`encode`](Self::encode) gives for the rendered text. See
    /// [`Tokenizer::fewest_tokens`].
    pub fn fewest_tokens(&self, rendered: &str) -> usize {
        let chars = rendered.chars().filter(|char| *char != self.mark);
        self.tokenizer.fewest_tokens_of(chars.count())
    }

    /// Removes the marks from `rendered`, and encodes the text. `rendered` is a rendered text, or a part of a rendered
    /// text.
    ///
    /// # Errors
    /// Passes on the errors of [`Tokenizer::encode_text`].
    pub fn encode(&self, rendered: &str) -> Result<Vec<u32>, Gemma4Error> {
        let inner = &self.tokenizer.inner;
        let pieces = inner
            .get_added_vocabulary()
            .extract_and_normalize(inner.get_normalizer(), rendered);
        let mut tokens = Vec::new();
        let mut plain = String::new();
        for (_, (start, end), added) in
            pieces.get_splits(OffsetReferential::Original, OffsetType::Byte)
        {
            let special = added
                .iter()
                .flatten()
                .find(|token| self.tokenizer.special(token.id).is_some());
            match special {
                Some(special) => {
                    tokens.extend(self.tokenizer.encode_text(&plain)?);
                    tokens.push(special.id);
                    plain.clear();
                }
                None => {
                    let chars = rendered[start..end].chars();
                    plain.extend(chars.filter(|char| *char != self.mark));
                }
            }
        }
        tokens.extend(self.tokenizer.encode_text(&plain)?);
        Ok(tokens)
    }
}
