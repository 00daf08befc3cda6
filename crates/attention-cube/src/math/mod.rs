//! The mathematical definitions of attention, which all engines share.

pub(crate) mod dropout;
#[cfg(feature = "cube")]
pub(crate) mod gradient;
#[cfg(feature = "cube")]
pub(crate) mod inputs;
#[cfg(feature = "cube")]
pub(crate) mod layout;
#[cfg(feature = "cube")]
pub(crate) mod longest_first;
pub(crate) mod lse_form;
#[cfg(feature = "cube")]
pub(crate) mod rounding;
#[cfg(feature = "cube")]
pub(crate) mod schedule;
#[cfg(feature = "cube")]
pub(crate) mod score;
pub(crate) mod score_mod;
pub(crate) mod side;
pub(crate) mod softcap;
#[cfg(feature = "cube")]
pub(crate) mod visibility;
