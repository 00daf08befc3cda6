//! The error that a call that does not fit gets.

use burn::tensor::DType;

/// Why a call was refused: which argument, what it has, and what it should have.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AttentionError {
    /// A tensor's shape does not fit the others.
    #[error(
        "{argument} has shape {has:?}: its {dimension} is {found}, and it should be {expected}"
    )]
    Shape {
        /// The argument's name.
        argument: &'static str,
        /// Its shape.
        has: Vec<usize>,
        /// The dimension that does not fit.
        dimension: &'static str,
        /// The size found there.
        found: usize,
        /// The size wanted, and why.
        expected: String,
    },
    /// A tensor's dtype does not fit, or no kernel takes it.
    #[error("{argument} has dtype {has:?}, and it should have {expected}")]
    Dtype {
        /// The argument's name.
        argument: &'static str,
        /// Its dtype.
        has: DType,
        /// The dtypes wanted.
        expected: String,
    },
    /// A tensor is on another device than the first one.
    #[error("{argument} is on {has}, and it should be on the {whose}'s device, {expected}")]
    Device {
        /// The argument's name.
        argument: &'static str,
        /// Its device.
        has: String,
        /// The first one: the query.
        whose: &'static str,
        /// Its device.
        expected: String,
    },
    /// Two tensors are under autodiff by different strategies of gradient checkpointing, which Burn does not mix.
    #[error(
        "{argument} has gradient checkpointing {has}, and it should have the {whose}'s, {expected}"
    )]
    Checkpointing {
        /// The argument's name.
        argument: &'static str,
        /// Its strategy.
        has: String,
        /// The first argument under autodiff.
        whose: &'static str,
        /// Its strategy.
        expected: String,
    },
    /// The tensors are on a device whose backend has no attention.
    #[error(
        "the tensors are on {device}, and attention runs on {served}; its reference runs on every device"
    )]
    Backend {
        /// The device.
        device: String,
        /// The devices that it runs on.
        served: &'static str,
    },
    /// A number that makes no sense.
    #[error("{argument} is {has}, and it should be {expected}")]
    Value {
        /// The option's name.
        argument: &'static str,
        /// Its value.
        has: f64,
        /// What it should be.
        expected: &'static str,
    },
}
