//! What a `config.json` says about packed weights. How each matrix is packed, its tensors tell; the configuration says which ways there are,
//! and what else was done, all of which is refused.

use super::foreign::{refuse_quantized, says_something};
use crate::{Gemma4Error, json, quantized::packed::Scheme};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// The method that is read, and its format.
const METHOD: &str = "compressed-tensors";
const FORMAT: &str = "pack-quantized";

/// The fields of a `quantization_config`.
#[derive(Deserialize)]
struct Quantization {
    format: Option<String>,
    config_groups: BTreeMap<String, Value>,
    #[serde(default)]
    kv_cache_scheme: Value,
    #[serde(default)]
    sparsity_config: Value,
    #[serde(default)]
    transform_config: Value,
}

/// Some modules and what was done to them.
#[derive(Deserialize)]
struct Group {
    weights: Option<Weights>,
    #[serde(default)]
    input_activations: Value,
    #[serde(default)]
    output_activations: Value,
    format: Option<String>,
}

/// What was done to their weights.
#[derive(Deserialize)]
struct Weights {
    num_bits: usize,
    r#type: Option<String>,
    #[serde(default = "yes")]
    symmetric: bool,
    strategy: Option<String>,
    group_size: Option<i64>,
    #[serde(default)]
    actorder: Value,
}

fn yes() -> bool {
    true
}

/// [`schemes`] of the text of a `config.json`.
pub(crate) fn schemes_of(json: &str) -> Result<Vec<Scheme>, Gemma4Error> {
    schemes(&json::from_slice(json.as_bytes()).map_err(Gemma4Error::Config)?)
}

/// The ways in which the weights of the `config.json` are packed; none where they are as they were.
///
/// # Errors
/// [`Gemma4Error::Config`] naming the method, or what of it is not read.
fn schemes(config: &Value) -> Result<Vec<Scheme>, Gemma4Error> {
    let mut schemes = Vec::new();
    // Of a multimodal model either the whole says it or its text part.
    for part in [Some(config), config.get("text_config")]
        .into_iter()
        .flatten()
    {
        let quantization = part.get("quantization_config");
        let method = quantization.and_then(|quantization| quantization.get("quant_method"));
        match quantization {
            Some(quantization) if method.and_then(Value::as_str) == Some(METHOD) => {
                let read = of_method(quantization);
                schemes.extend(read.map_err(|reason| {
                    Gemma4Error::Config(format!("quantization_config: {METHOD}: {reason}"))
                })?);
            }
            _ => refuse_quantized(part)?,
        }
    }
    Ok(schemes)
}

fn of_method(quantization: &Value) -> Result<Vec<Scheme>, String> {
    let Quantization {
        format,
        config_groups,
        kv_cache_scheme,
        sparsity_config,
        transform_config,
    } = json::from_value(quantization)?;
    refuse_format(format.as_deref())?;
    // Weights of which none are left out.
    let is_dense = sparsity_config.get("format").and_then(Value::as_str) == Some("dense");
    let sparsity_config = if is_dense {
        Value::Null
    } else {
        sparsity_config
    };
    for (name, value) in [
        ("kv_cache_scheme", kv_cache_scheme),
        ("sparsity_config", sparsity_config),
        ("transform_config", transform_config),
    ] {
        if says_something(&value) {
            return Err(format!("{name} is set, which is not computed"));
        }
    }
    let mut schemes = Vec::new();
    for (name, group) in config_groups {
        let scheme = scheme(group).map_err(|reason| format!("{name}: {reason}"))?;
        schemes.extend(scheme);
    }
    match schemes.is_empty() {
        true => Err("config_groups have no weights".into()),
        false => Ok(schemes),
    }
}

fn refuse_format(format: Option<&str>) -> Result<(), String> {
    match format {
        Some(FORMAT) => Ok(()),
        Some(other) => Err(format!("format is {other:?}; only {FORMAT:?} is read")),
        None => Err(format!("format is missing; only {FORMAT:?} is read")),
    }
}

fn scheme(group: Value) -> Result<Option<Scheme>, String> {
    let Group {
        weights,
        input_activations,
        output_activations,
        format,
    } = json::from_value(&group)?;
    if format.is_some() {
        refuse_format(format.as_deref())?;
    }
    for (name, value) in [
        ("input_activations", input_activations),
        ("output_activations", output_activations),
    ] {
        if says_something(&value) {
            return Err(format!("{name} are quantized, which is not computed"));
        }
    }
    weights.map(|weights| weights.scheme()).transpose()
}

impl Weights {
    fn scheme(&self) -> Result<Scheme, String> {
        if ![4, 8].contains(&self.num_bits) {
            return Err(format!(
                "num_bits is {}; only 4 and 8 are read",
                self.num_bits
            ));
        }
        match self.r#type.as_deref() {
            None | Some("int") => (),
            Some(other) => return Err(format!("type is {other:?}; only \"int\" is read")),
        }
        match &self.actorder {
            Value::Null | Value::Bool(false) => (),
            // Columns are where they were.
            Value::String(order) if ["weight", "static"].contains(&order.as_str()) => (),
            other => {
                return Err(format!(
                    "actorder is {other}; columns in another order are not read"
                ));
            }
        }
        let strategy = self.strategy.as_deref().or(match self.group_size {
            Some(-1) => Some("channel"),
            Some(_) => Some("group"),
            None => None,
        });
        let group = match (strategy, self.group_size) {
            (Some("channel"), _) => None,
            (Some("group"), Some(size)) => match usize::try_from(size) {
                Ok(size) if size > 0 => Some(size),
                _ => return Err(format!("group_size is {size}")),
            },
            (Some("group"), None) => return Err("group_size is missing".into()),
            (other, _) => {
                let other = other.unwrap_or("tensor");
                return Err(format!(
                    "strategy is {other:?}; only \"group\" and \"channel\" are read"
                ));
            }
        };
        Ok(Scheme {
            bits: self.num_bits,
            group,
            is_symmetric: self.symmetric,
        })
    }
}
