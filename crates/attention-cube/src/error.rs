//! The error that a call returns if an argument has a wrong shape, dtype, device or value.

use crate::types::quantized::CodeFormat;
use burn::tensor::DType;

/// The reason why a call was refused: the argument, its value, and the expected value.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AttentionError {
    /// A tensor's shape does not fit the other tensors.
    #[error(
        "{argument} has shape {has:?}: its {dimension} is {found}, and it should be {expected}"
    )]
    Shape {
        /// The argument's name.
        argument: &'static str,
        /// The argument's shape.
        has: Vec<usize>,
        /// The dimension that does not fit.
        dimension: &'static str,
        /// The size of the dimension that does not fit.
        found: usize,
        /// The expected size, and the reason for this size.
        expected: String,
    },
    /// A tensor's dtype does not fit the other tensors, or no kernel supports the dtype.
    #[error("{argument} has dtype {has:?}, and it should have {expected}")]
    Dtype {
        /// The argument's name.
        argument: &'static str,
        /// The argument's dtype.
        has: DType,
        /// The supported dtypes.
        expected: String,
    },
    /// A tensor is on a device other than the device of the argument that `whose` names.
    #[error("{argument} is on {has}, and it should be on the {whose}'s device, {expected}")]
    Device {
        /// The argument's name.
        argument: &'static str,
        /// The argument's device.
        has: String,
        /// The name of the argument (such as `query`) on whose device the tensor must be.
        whose: &'static str,
        /// The device of the argument that `whose` names.
        expected: String,
    },
    /// Two tensors that autodiff tracks have different gradient checkpointing strategies. Burn cannot mix these
    /// strategies.
    #[error(
        "{argument} has gradient checkpointing {has}, and it should have the {whose}'s, {expected}"
    )]
    Checkpointing {
        /// The argument's name.
        argument: &'static str,
        /// The argument's checkpointing strategy.
        has: String,
        /// The name of the first argument that autodiff tracks. All tracked tensors must have the checkpointing
        /// strategy of this argument.
        whose: &'static str,
        /// The checkpointing strategy of the first argument that autodiff tracks.
        expected: String,
    },
    /// The codes of keys and values have different formats.
    #[error("value has codes in {value}, and it should have the key's format, {key}")]
    CodeFormats {
        /// The format of the keys.
        key: CodeFormat,
        /// The format of the values.
        value: CodeFormat,
    },
    /// The tensors are on a device whose backend does not implement attention.
    #[error(
        "the tensors are on {device}, and this build of attention supports {served}; the `reference` module runs on every device"
    )]
    Backend {
        /// The tensors' device.
        device: String,
        /// The devices that this build of attention supports.
        served: &'static str,
    },
    /// An option's value is outside of its valid range.
    #[error("{argument} is {has}, and it should be {expected}")]
    Value {
        /// The option's name.
        argument: &'static str,
        /// The option's value.
        has: f64,
        /// The valid range.
        expected: &'static str,
    },
    /// The call sets two options that cannot be used together.
    #[error("{argument} cannot be combined with {with}")]
    Combination {
        /// The name of one of the two options.
        argument: &'static str,
        /// The name of the second option. If the first option is not allowed in a certain kind of call, this field
        /// instead names the kind of call.
        with: &'static str,
    },
}
