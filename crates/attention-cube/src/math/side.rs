//! The two sides of the score matrix (queries and keys), and the gradients that a kernel accumulates.

/// The side of the score matrix whose rows a kernel's tile keeps: queries or keys. The kernel streams blocks of rows of
/// the opposite side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// A tile keeps queries, and the kernel streams keys.
    Queries,
    /// A tile keeps keys, and the kernel streams queries.
    Keys,
}

impl Side {
    /// Returns `Keys` for `Queries`, and `Queries` for `Keys`.
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
    /// The gradient of the rows that a tile keeps: dQ for queries, or dK for keys.
    QOrK,
    /// The gradient of the values.
    Values,
    /// The gradients of keys and values.
    Both,
}

impl Sums {
    /// True if the kernel accumulates dQ or dK. The kernel then computes dS, the gradient of the scores.
    pub const fn has_q_or_k(self) -> bool {
        matches!(self, Self::QOrK | Self::Both)
    }

    /// True if the kernel accumulates dV, the gradient of the values. The kernel then multiplies by P.
    pub const fn has_values(self) -> bool {
        matches!(self, Self::Values | Self::Both)
    }
}
