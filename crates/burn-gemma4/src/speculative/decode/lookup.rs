//! Prompt lookup (Saxena 2023): finds an earlier occurrence of the text's last few tokens, and proposes the tokens
//! after that occurrence.

use std::collections::HashMap;

/// The lengths of the n-grams that are looked up, the longest first. A single token says too little about the next
/// tokens.
const LENGTHS: [usize; 3] = [4, 3, 2];

/// A text with an index of its n-grams.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lookup {
    text: Vec<u32>,
    /// A map from each n-gram to the position after its newest occurrence.
    followers: HashMap<Vec<u32>, usize>,
}

impl Lookup {
    /// Appends tokens to the text. For each appended token, the index gets the n-grams that end just before this token.
    pub fn read(&mut self, tokens: &[u32]) {
        for token in tokens {
            let end = self.text.len();
            for length in LENGTHS {
                if let Some(start) = end.checked_sub(length) {
                    self.followers.insert(self.text[start..].to_vec(), end);
                }
            }
            self.text.push(*token);
        }
    }

    /// Proposes up to `most` draft tokens, or none if the text's last tokens have not occurred before. If the text
    /// repeats a phrase, the draft continues the repetition.
    pub fn draft(&self, most: usize) -> Vec<u32> {
        let end = self.text.len();
        let suffixes = LENGTHS.iter().filter_map(|length| end.checked_sub(*length));
        let found = suffixes
            .filter_map(|start| self.followers.get(&self.text[start..]))
            .next();
        let Some(next) = found else {
            return Vec::new();
        };
        let period = end - next;
        (0..most)
            .map(|index| self.text[next + index % period])
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(text: &[u32], most: usize) -> Vec<u32> {
        let mut lookup = Lookup::default();
        lookup.read(text);
        lookup.draft(most)
    }

    #[test]
    fn draft_without_earlier_match_is_empty() {
        assert!(draft(&[], 3).is_empty());
        assert!(draft(&[1], 3).is_empty());
        assert!(draft(&[1, 2, 3, 4, 5], 3).is_empty());
        // The last token of this text has occurred before, but the last two tokens have not. A match needs at least two
        // tokens.
        assert!(draft(&[1, 2, 1], 3).is_empty());
    }

    #[test]
    fn draft_with_several_matches_uses_the_newest() {
        assert_eq!(draft(&[1, 2, 7, 1, 2, 8, 1, 2], 1), [8]);
    }

    #[test]
    fn draft_with_several_lengths_uses_the_longest() {
        assert_eq!(draft(&[5, 1, 2, 7, 9, 1, 2, 8, 5, 1, 2], 2), [7, 9]);
    }

    #[test]
    fn draft_of_a_repeating_text_repeats_it() {
        assert_eq!(draft(&[4, 4, 4], 5), [4; 5]);
        assert_eq!(draft(&[1, 2, 3, 1, 2, 3, 1], 7), [2, 3, 1, 2, 3, 1, 2]);
    }

    #[test]
    fn read_in_portions_gives_the_same_drafts() {
        let mut lookup = Lookup::default();
        lookup.read(&[1, 2, 3]);
        assert!(lookup.draft(2).is_empty());
        lookup.read(&[1]);
        lookup.read(&[2]);
        assert_eq!(lookup.draft(2), [3, 1]);
        assert!(lookup.draft(0).is_empty());
    }
}
