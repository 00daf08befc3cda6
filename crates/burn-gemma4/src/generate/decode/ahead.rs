//! A pass that is under way before anybody has asked for it.

use crate::op::reading::Reading;

/// A pass over tokens that the pass before it chose.
///
/// It writes the column behind the cache's last one. Nobody sees what was there: of a ring's columns, the one whose slot it takes is
/// out of every window that may still be asked for.
pub(super) struct Ahead {
    /// What it reads.
    tokens: Vec<Option<u32>>,
    /// What it chooses; `None` once it is taken up.
    chosen: Option<Reading>,
}

impl Ahead {
    pub fn new(tokens: Vec<Option<u32>>, chosen: Reading) -> Self {
        Self {
            tokens,
            chosen: Some(chosen),
        }
    }

    /// What comes after `tokens`, if these are what it reads.
    pub fn after(mut self, tokens: &[u32]) -> Option<Reading> {
        let tokens = tokens.iter().copied().map(Some);
        match self.tokens.iter().copied().eq(tokens) {
            true => self.chosen.take(),
            false => None,
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        // Whoever has the cache next may be another thread, whose work the device does not order after this.
        if let Some(chosen) = self.chosen.take() {
            // A device that failed says so to whoever asks it next.
            let _ = chosen.wait();
        }
    }
}
