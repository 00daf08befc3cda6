//! Helpers for tests of calls that are refused: the call, the expected error, and a check that every function of the
//! operator refuses the call with this error.

use attention_cube::{
    AttentionError, AttentionOptions, attention_with_lse, fused_attention, reference,
    try_fused_attention,
};
use burn::tensor::{Bool, DType, Device, Int, Tensor};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The tensors and options of one call.
#[derive(Clone)]
pub struct Call {
    pub query: Tensor<4>,
    pub key: Tensor<4>,
    pub value: Tensor<4>,
    pub options: AttentionOptions,
}

impl Call {
    /// Returns a valid call: queries `[2, 4, 3, 8]` over keys `[2, 2, 5, 8]` and values `[2, 2, 5, 6]`.
    pub fn fitting(device: &Device) -> Self {
        Self {
            query: floats([2, 4, 3, 8], device),
            key: floats([2, 2, 5, 8], device),
            value: floats([2, 2, 5, 6], device),
            options: AttentionOptions::new(),
        }
    }

    pub fn with_options(&self, options: AttentionOptions) -> Self {
        Self {
            options,
            ..self.clone()
        }
    }

    pub fn of<R>(
        &self,
        operator: impl Fn(Tensor<4>, Tensor<4>, Tensor<4>, AttentionOptions) -> R,
    ) -> R {
        let Self {
            query,
            key,
            value,
            options,
        } = self.clone();
        operator(query, key, value, options)
    }
}

pub fn floats<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::ones(shape, (device, DType::F32))
}

pub fn ints<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    Tensor::ones(shape, device)
}

pub fn bools(shape: [usize; 4], device: &Device) -> Tensor<4, Bool> {
    Tensor::<4, Int>::ones(shape, device).bool()
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Shape,
    Dtype,
    Device,
    Checkpointing,
    Value,
    Combination,
}

/// The expected error of a refused call: the variant of the error, the name of the wrong argument, and texts that the
/// error's message must contain.
pub struct Expected {
    pub kind: Kind,
    pub argument: &'static str,
    pub texts: Vec<String>,
}

fn kind_and_argument(error: &AttentionError) -> (Kind, &'static str) {
    match error {
        AttentionError::Shape { argument, .. } => (Kind::Shape, argument),
        AttentionError::Dtype { argument, .. } => (Kind::Dtype, argument),
        AttentionError::Device { argument, .. } => (Kind::Device, argument),
        AttentionError::Checkpointing { argument, .. } => (Kind::Checkpointing, argument),
        AttentionError::Value { argument, .. } => (Kind::Value, argument),
        AttentionError::Combination { argument, .. } => (Kind::Combination, argument),
        other => panic!("a new kind of error: {other}"),
    }
}

/// Returns the expected error for an argument with a wrong shape. The error's message names the wrong dimension by
/// number and by name, and states the expected size.
pub fn shape(
    argument: &'static str,
    has: &[usize],
    (dim, dimension): (usize, &str),
    want: &str,
) -> Expected {
    let texts = vec![
        format!("{argument} has shape {has:?}"),
        format!("its {dimension} is {}, ", has[dim]),
        format!("should be {want}"),
    ];
    Expected {
        kind: Kind::Shape,
        argument,
        texts,
    }
}

pub fn number(argument: &'static str, has: f64, want: &str) -> Expected {
    let texts = vec![
        format!("{argument} is {has}, "),
        format!("should be {want}"),
    ];
    Expected {
        kind: Kind::Value,
        argument,
        texts,
    }
}

pub fn dtype(argument: &'static str) -> Expected {
    let texts = vec![
        format!("{argument} has dtype F16, "),
        "should have F32 (the query's)".into(),
    ];
    Expected {
        kind: Kind::Dtype,
        argument,
        texts,
    }
}

pub fn check(device: &str, call: &Call, expected: &Expected) {
    let Expected {
        kind,
        argument,
        texts,
    } = expected;
    let context = format!("{device}: {kind:?} of {argument}, {texts:?}");
    let error = match call.of(try_fused_attention) {
        Ok(output) => panic!(
            "{context}: no error, but an output of shape {:?}",
            output.dims()
        ),
        Err(error) => error,
    };
    let found = kind_and_argument(&error);
    assert_eq!(found, (*kind, *argument), "{context}: {error}");
    let message = error.to_string();
    for text in texts {
        assert!(
            message.contains(text),
            "{context}: {text:?} is not in {message:?}"
        );
    }

    for (form, result) in [
        ("attention_with_lse", call.of(attention_with_lse)),
        ("reference::attention", call.of(reference::attention)),
    ] {
        let other = result
            .map(|_| "no error")
            .map_err(|error| error.to_string());
        assert_eq!(other, Err(message.clone()), "{context}: {form}");
    }
    let text = match catch_unwind(AssertUnwindSafe(|| call.of(fused_attention))) {
        Ok(_) => panic!("{context}: no panic"),
        Err(payload) => payload
            .downcast_ref::<String>()
            .cloned()
            .unwrap_or_default(),
    };
    assert!(text.contains(&message), "{context}: panicked with {text:?}");
}
