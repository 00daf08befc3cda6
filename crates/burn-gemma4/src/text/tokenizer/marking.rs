//! Texts that go through a chat template without becoming special tokens by what they spell.

use super::Tokenizer;
use crate::Gemma4Error;
use std::collections::HashSet;
use std::ops::RangeInclusive;
use tokenizers::{OffsetReferential, OffsetType};

/// Unicode's last two planes, which are for private use.
const MARKS: RangeInclusive<char> = '\u{F0000}'..='\u{10FFFD}';

/// Tells what messages spell from the special tokens that a chat template writes around them: it marks the ones before the template has them, and
/// takes the marks away where the rendered text becomes tokens. See [`Tokenizer::marking`].
#[derive(Clone, Copy, Debug)]
pub struct Marking<'a> {
    tokenizer: &'a Tokenizer,
    mark: char,
}

impl Tokenizer {
    /// A marking for `texts`, which are all that is going to be rendered.
    ///
    /// # Errors
    /// [`Gemma4Error::Argument`] where the texts have every character of Unicode's last two planes, which are for private use: one has to be left for the mark.
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
        // A special token with the mark in it could be what marking another one makes.
        let mut taken = HashSet::new();
        let mut take = |text: &str| taken.extend(text.chars().filter(|char| MARKS.contains(char)));
        texts.into_iter().for_each(&mut take);
        added.values().for_each(|token| take(&token.content));
        let mark = MARKS
            .into_iter()
            .find(|mark| !taken.contains(mark))
            .ok_or_else(|| Gemma4Error::Argument {
                argument: "messages",
                reason: "have every character for private use; one should be left".into(),
            })?;
        let tokenizer = self;
        Ok(Marking { tokenizer, mark })
    }
}

impl Marking<'_> {
    /// `text`, marked where it would become special tokens.
    ///
    /// # Errors
    /// [`Gemma4Error::Tokenizer`] where the text has a special token of one character, in which nothing has room.
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
            // Breaking one occurrence may leave another that overlapped with it. No special token has the mark, so that each round
            // leaves fewer.
            while !token.content.is_empty() && text.contains(&token.content) {
                let (Some(first), false) = (first, rest.as_str().is_empty()) else {
                    return Err(Gemma4Error::Tokenizer(format!(
                        "{:?} in a text cannot be told from the special token",
                        token.content
                    )));
                };
                let broken = format!("{first}{}{}", self.mark, rest.as_str());
                text = text.replace(&token.content, &broken);
            }
        }
        // A normalizer may make a special token of a text that does not spell it.
        match self.first_special(&text) {
            Some(token) => Err(Gemma4Error::Tokenizer(format!(
                "{token:?} in a text cannot be told from the special token"
            ))),
            None => Ok(text),
        }
    }

    /// The first special token that `text` would become.
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

    /// The tokens of a text, or of a part of one, that was rendered of what is marked.
    ///
    /// # Errors
    /// As [`Tokenizer::encode_text`].
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
