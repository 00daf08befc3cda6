//! LoRA adapters (low-rank adaptation, Hu et al. 2021, arXiv:2106.09685), in PEFT's file format: adapters that are
//! trained, adapters that become part of a model, and adapters that each request selects.

mod config;
mod description;
mod files;
mod merge;
mod request;
mod towers;

pub use description::{Adapter, TowerTargets};
pub(crate) use files::AdaptedParts;
pub(crate) use merge::Placement;
pub use request::{AdapterTargets, AdapterWeights};
pub(super) use towers::{PartNames, check_tower_adapter, merge_tower_adapter};
