//! Device profiles, from which engines plan, and overrides of a profile by environment variables.

#[cfg(feature = "cube")]
pub(crate) mod env_override;
mod query;

pub use self::query::*;
