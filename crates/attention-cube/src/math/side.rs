//! The two sides of the score matrix (queries and keys), and the gradients that a kernel accumulates over one of them.

/// The stationary side of a kernel, queries or keys: a tile keeps rows of this side, and blocks of the opposite side stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The tile holds queries and streams keys.
    Queries,
    /// The tile holds keys and streams queries.
    Keys,
}

impl Side {
    /// Returns the opposite side, from which blocks are streamed.
    pub(crate) const fn other(self) -> Self {
        match self {
            Self::Queries => Self::Keys,
            Self::Keys => Self::Queries,
        }
    }
}

/// The gradients that a kernel accumulates in registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sums {
    /// The gradient of the queries or of the keys, whichever side is stationary.
    QOrK,
    /// The gradient of the values.
    Values,
    /// The gradients of keys and values.
    Both,
}

impl Sums {
    /// True if the kernel computes dS, the gradient of the scores.
    pub const fn has_q_or_k(self) -> bool {
        matches!(self, Self::QOrK | Self::Both)
    }

    /// True if the kernel multiplies with P, to compute the gradient of the values.
    pub const fn has_values(self) -> bool {
        matches!(self, Self::Values | Self::Both)
    }
}
