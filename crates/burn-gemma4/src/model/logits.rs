//! The choice of positions for which a call computes logits.

/// The positions for which a call computes logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// All positions.
    All,
    /// The given number of last positions.
    Last(usize),
    /// No position. The call only fills the KV cache.
    None,
}

impl Logits {
    pub(crate) fn of(self, positions: usize) -> usize {
        match self {
            Self::All => positions,
            Self::Last(count) => count.min(positions),
            Self::None => 0,
        }
    }
}
