//! Drafts from the text itself (prompt lookup, Saxena 2023): what came after the last few tokens where they were before.

use std::collections::HashMap;

/// How many of the last tokens are looked for, the most first. One alone says too little.
const LENGTHS: [usize; 3] = [4, 3, 2];

/// A text, and where in it each short sequence of tokens was last followed by another token.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lookup {
    text: Vec<u32>,
    /// By its tokens: the place of the token after the newest such sequence.
    followers: HashMap<Vec<u32>, usize>,
}

impl Lookup {
    /// Adds tokens to the end of the text.
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

    /// Up to `most` tokens that may come next; none where the text's last tokens are new. A text that repeats itself goes on
    /// doing so.
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
    fn what_is_new_has_no_draft() {
        assert!(draft(&[], 3).is_empty());
        assert!(draft(&[1], 3).is_empty());
        assert!(draft(&[1, 2, 3, 4, 5], 3).is_empty());
        // One token alone is not looked for.
        assert!(draft(&[1, 2, 1], 3).is_empty());
    }

    #[test]
    fn the_newest_match_counts() {
        assert_eq!(draft(&[1, 2, 7, 1, 2, 8, 1, 2], 1), [8]);
    }

    #[test]
    fn the_longest_match_counts() {
        assert_eq!(draft(&[5, 1, 2, 7, 9, 1, 2, 8, 5, 1, 2], 2), [7, 9]);
    }

    #[test]
    fn what_repeats_goes_on() {
        assert_eq!(draft(&[4, 4, 4], 5), [4; 5]);
        assert_eq!(draft(&[1, 2, 3, 1, 2, 3, 1], 7), [2, 3, 1, 2, 3, 1, 2]);
    }

    #[test]
    fn text_comes_in_portions() {
        let mut lookup = Lookup::default();
        lookup.read(&[1, 2, 3]);
        assert!(lookup.draft(2).is_empty());
        lookup.read(&[1]);
        lookup.read(&[2]);
        assert_eq!(lookup.draft(2), [3, 1]);
        assert!(lookup.draft(0).is_empty());
    }
}
