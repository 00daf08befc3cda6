//! Reads the `quantization_config` in a `config.json`. The object lists packing schemes, but does not say which matrix
//! has which scheme. The loader finds the scheme of a matrix from the shapes of the matrix's tensors.

use super::unknown_models::{refuse_quantized, says_something};
use crate::error::Gemma4Error;
use crate::json;
use crate::quant::packed::Scheme;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// The only supported quantization method (`METHOD`), and the only supported format of that method (`FORMAT`).
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

/// The quantization of a group of modules, such as linear layers.
#[derive(Deserialize)]
struct Group {
    weights: Option<QuantizedWeights>,
    #[serde(default)]
    input_activations: Value,
    #[serde(default)]
    output_activations: Value,
    format: Option<String>,
}

/// The quantization of the weights in a group of modules.
#[derive(Deserialize)]
struct QuantizedWeights {
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

/// Returns the packing schemes in the text of a `config.json`: see [`schemes`].
pub(crate) fn schemes_of(json: &str) -> Result<Vec<Scheme>, Gemma4Error> {
    schemes(&json::from_slice(json.as_bytes()).map_err(Gemma4Error::Config)?)
}

/// Returns the packing schemes of the weights. The list is empty if the weights are not packed.
///
/// # Errors
/// Returns [`Gemma4Error::Config`], which names the method or the feature that is not supported.
fn schemes(config: &Value) -> Result<Vec<Scheme>, Gemma4Error> {
    let mut schemes = Vec::new();
    // A multimodal model has `quantization_config` at the top level or in `text_config`. Read both.
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
    // Ignore a `sparsity_config` with the format `dense`. This format means that no weights are pruned.
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
            return Err(format!("{name} is set, which is not supported"));
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
        Some(other) => Err(format!("format is {other:?}; only {FORMAT:?} is supported")),
        None => Err(format!("format is missing; only {FORMAT:?} is supported")),
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
            return Err(format!("{name} are quantized, which is not supported"));
        }
    }
    weights.map(|weights| weights.scheme()).transpose()
}

impl QuantizedWeights {
    fn scheme(&self) -> Result<Scheme, String> {
        if ![4, 8].contains(&self.num_bits) {
            return Err(format!(
                "num_bits is {}; only 4 and 8 are supported",
                self.num_bits
            ));
        }
        match self.r#type.as_deref() {
            None | Some("int") => (),
            Some(other) => return Err(format!("type is {other:?}; only \"int\" is supported")),
        }
        match &self.actorder {
            Value::Null | Value::Bool(false) => (),
            // Accept the `actorder` values "weight" and "static". With these values, the columns of the packed matrix
            // are in the original order.
            Value::String(order) if ["weight", "static"].contains(&order.as_str()) => (),
            other => {
                return Err(format!(
                    "actorder is {other}; reordered columns are not supported"
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
                    "strategy is {other:?}; only \"group\" and \"channel\" are supported"
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
