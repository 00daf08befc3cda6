//! The two sides of the scores, and what is summed over one of them.

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

/// Which gradients a kernel sums in registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sums {
    /// Of the dots that it holds: queries, or keys.
    Dots,
    /// Of the values that it holds.
    Values,
    /// Of keys and values.
    Both,
}

impl Sums {
    /// Whether the gradients of the scores are needed.
    pub const fn has_dots(self) -> bool {
        matches!(self, Self::Dots | Self::Both)
    }

    /// Whether P is multiplied.
    pub const fn has_values(self) -> bool {
        matches!(self, Self::Values | Self::Both)
    }
}
