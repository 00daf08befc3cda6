//! The two sides of the scores.

/// What the rows of a tile are; the blocks that it visits are of the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The tile holds queries, and sees keys.
    Queries,
    /// The tile holds keys, and is seen by queries.
    Keys,
}

impl Side {
    /// The blocks' side.
    #[cfg(feature = "cuda")]
    pub(crate) const fn other(self) -> Self {
        match self {
            Self::Queries => Self::Keys,
            Self::Keys => Self::Queries,
        }
    }
}
