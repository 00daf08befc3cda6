//! Re-exports of modules that are not part of the public API, for this project's other crates, tests and benchmarks.
//! These modules change without notice.

pub use crate::math::side::Side;

/// Re-exports of the crate's private module `auxiliary`.
pub mod auxiliary {
    pub use crate::auxiliary::*;
}

/// Re-exports of the crate's private module `device`.
pub mod device {
    pub use crate::device::*;
}

/// Re-exports of the crate's private module `engine`.
pub mod engine {
    pub use crate::engine::*;
}

/// Re-exports of the crate's private module `select`.
pub mod select {
    pub use crate::select::*;
}

/// Re-exports of the crate's private module `tile_ops`.
pub mod tile_ops {
    pub use crate::tile_ops::*;
}
