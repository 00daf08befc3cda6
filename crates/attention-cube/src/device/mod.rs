//! Device profiles, which engines use for their plans, and environment variables that override parts of a profile.

#[cfg(feature = "cube")]
pub(crate) mod env_override;
mod query;

pub use self::query::*;
