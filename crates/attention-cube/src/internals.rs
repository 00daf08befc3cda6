//! Re-exports of modules below the public API, for this project's other crates, tests and benchmarks. They change without
//! notice.

pub use crate::math::side::Side;

/// See `auxiliary`.
pub mod auxiliary {
    pub use crate::auxiliary::*;
}

/// See `device`.
pub mod device {
    pub use crate::device::*;
}

/// See `engine`.
pub mod engine {
    pub use crate::engine::*;
}

/// See `select`.
pub mod select {
    pub use crate::select::*;
}

/// See `tile_ops`.
pub mod tile_ops {
    pub use crate::tile_ops::*;
}
