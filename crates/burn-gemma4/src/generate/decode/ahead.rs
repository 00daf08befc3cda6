//! A pass that is under way before anybody has asked for it.

use crate::op::reading::Reading;

/// A pass over tokens that the pass before it chose.
///
/// It writes the column behind the cache's last one. Nobody sees what was there: of a ring's columns, the one whose slot it takes is
/// out of every window that may still be asked for.
pub(super) struct Ahead {
    /// What it reads.
    tokens: Vec<Option<u32>>,
    /// What it chooses. Whoever lets go of it waits for it.
    chosen: Reading,
}

impl Ahead {
    pub fn new(tokens: Vec<Option<u32>>, chosen: Reading) -> Self {
        Self { tokens, chosen }
    }

    /// What comes after `tokens`, if these are what it reads.
    pub fn after(self, tokens: &[u32]) -> Option<Reading> {
        let tokens = tokens.iter().copied().map(Some);
        self.tokens
            .iter()
            .copied()
            .eq(tokens)
            .then_some(self.chosen)
    }
}
