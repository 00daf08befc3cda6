//! The fields of a `config.json` that concern rotary embeddings.

use crate::config::RopeConfig;
use crate::error::Gemma4Error;
use serde::Deserialize;

/// The rotation of one type of layers, an entry of `rope_parameters`.
#[derive(Deserialize)]
pub(super) struct Rope {
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
}

impl Rope {
    /// Creates the rotation of all channel pairs with the frequency base `theta`.
    pub fn of(theta: f64) -> Self {
        Self {
            rope_type: None,
            rope_theta: Some(theta),
            partial_rotary_factor: None,
            factor: None,
        }
    }

    /// Returns the rotation of the layers of the type `kind`. A missing frequency base has its value in `default`.
    pub fn config(&self, kind: &str, default: RopeConfig) -> Result<RopeConfig, Gemma4Error> {
        let partial_rotary_factor = match self.rope_type.as_deref() {
            None | Some("default") => match self.factor {
                // Refuse a factor other than 1 for the `rope_type` "default". Hugging Face Transformers ignores the
                // factor, so the meaning of such a file is unclear.
                Some(factor) if factor != 1.0 => {
                    return Err(Gemma4Error::Config(format!(
                        "rope_parameters.{kind}.factor is {factor} beside the rope_type \"default\", which has no factor; only \"proportional\" has one"
                    )));
                }
                _ => 1.0,
            },
            Some("proportional") => self.partial_rotary_factor.unwrap_or(1.0),
            Some(other) => {
                return Err(Gemma4Error::Config(format!(
                    "rope_parameters.{kind}.rope_type is {other:?}; expected \"default\" or \"proportional\""
                )));
            }
        };
        Ok(RopeConfig {
            theta: self.rope_theta.unwrap_or(default.theta),
            partial_rotary_factor,
            factor: self.factor.unwrap_or(1.0),
        })
    }
}

/// True if the value of a `rope_scaling` field changes the positions. Older versions of Hugging Face Transformers write
/// the field even if its value has no effect.
pub(super) fn scales(scaling: &serde_json::Value) -> bool {
    let Some(fields) = scaling.as_object() else {
        return !scaling.is_null();
    };
    let of = |name: &str| fields.get(name).filter(|value| !value.is_null());
    let is_default = |name| of(name).is_none_or(|kind| kind == "default");
    let factor = of("factor").is_none_or(|factor| factor.as_f64() == Some(1.0));
    !(is_default("rope_type") && is_default("type") && factor)
}
