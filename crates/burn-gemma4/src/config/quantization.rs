//! Reads the `quantization_config` in a `config.json`. The object of compressed-tensors lists schemes, but does not say
//! which matrix has which scheme. The loader finds the scheme of a matrix from the shapes of the matrix's tensors.

use super::mobile::{self, MobileScheme};
use super::unknown_models::{refuse_quantized, says_something};
use crate::error::Gemma4Error;
use crate::json;
use crate::quant::packed::Scheme;
use crate::quant::scheme::{Fp4Scheme, Fp8Scheme, WeightScheme};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// The quantization method whose schemes this module reads. [`mobile`] reads the other supported method.
const METHOD: &str = "compressed-tensors";
/// The supported formats of that method.
const PACKED: &str = "pack-quantized";
const FP8: [&str; 2] = ["float-quantized", "naive-quantized"];
const NVFP4: &str = "nvfp4-pack-quantized";
const MXFP4: &str = "mxfp4-pack-quantized";
/// The format of a checkpoint whose groups have formats of their own.
const MIXED: &str = "mixed-precision";

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
    block_structure: Option<[usize; 2]>,
    #[serde(default)]
    actorder: Value,
}

fn yes() -> bool {
    true
}

/// The quantization of a checkpoint's weights, by one of the supported methods. Without a method, the weights are floats.
#[derive(Debug, Default)]
pub(crate) struct QuantizationSchemes {
    /// The schemes of compressed-tensors.
    pub matrices: Vec<WeightScheme>,
    /// The scheme of the method "gemma".
    pub mobile: Option<MobileScheme>,
}

impl QuantizationSchemes {
    /// True if the weights are floats.
    pub fn is_empty(&self) -> bool {
        self.matrices.is_empty() && self.mobile.is_none()
    }

    /// Refuses the method "gemma" for a model that does not round activations by static scales. `model` says which model
    /// this is, such as `a drafter`.
    pub fn refuse_mobile(self, model: &str) -> Result<Self, Gemma4Error> {
        match self.mobile {
            None => Ok(self),
            Some(_) => Err(Gemma4Error::Config(format!(
                "quantization_config: {model} quantized by {:?} is not supported; use the original checkpoint in f32, f16 or bf16",
                mobile::METHOD
            ))),
        }
    }
}

/// Returns the schemes in the text of a `config.json`: see [`schemes`].
pub(crate) fn schemes_of(json: &str) -> Result<QuantizationSchemes, Gemma4Error> {
    schemes(&json::from_slice(json.as_bytes()).map_err(Gemma4Error::Config)?)
}

/// Returns the schemes of the weights. They are empty if the weights are not quantized.
///
/// # Errors
/// Returns [`Gemma4Error::Config`], which names the method or the feature that is not supported.
fn schemes(config: &Value) -> Result<QuantizationSchemes, Gemma4Error> {
    let mut schemes = QuantizationSchemes::default();
    let mut of_mobile: Option<&Value> = None;
    // A multimodal model has `quantization_config` at the top level or in `text_config`. Read both.
    for part in [Some(config), config.get("text_config")]
        .into_iter()
        .flatten()
    {
        let quantization = part.get("quantization_config");
        let method = quantization.and_then(|quantization| quantization.get("quant_method"));
        let named = |method: &'static str| {
            move |reason| Gemma4Error::Config(format!("quantization_config: {method}: {reason}"))
        };
        match (quantization, method.and_then(Value::as_str)) {
            (Some(quantization), Some(METHOD)) => {
                let read = of_method(quantization).map_err(named(METHOD))?;
                schemes.matrices.extend(read);
            }
            (Some(quantization), Some(mobile::METHOD)) => {
                if part.get("quantization").is_some_and(says_something) {
                    return Err(two_methods("MLX"));
                }
                match of_mobile.replace(quantization) {
                    None => {
                        let read = MobileScheme::of(quantization).map_err(named(mobile::METHOD))?;
                        schemes.mobile = Some(read);
                    }
                    Some(other) if other == quantization => (),
                    Some(_) => {
                        let reason = "text_config has another quantization_config than the top level; expected one";
                        return Err(named(mobile::METHOD)(reason.into()));
                    }
                }
            }
            _ => refuse_quantized(part)?,
        }
    }
    match schemes.mobile.is_some() && !schemes.matrices.is_empty() {
        true => Err(two_methods(METHOD)),
        false => Ok(schemes),
    }
}

/// Returns the error for a configuration with the method "gemma" and another method.
fn two_methods(other: &str) -> Gemma4Error {
    Gemma4Error::Config(format!(
        "quantization_config: the weights are quantized by both {:?} and {other:?}; expected one method",
        mobile::METHOD
    ))
}

fn of_method(quantization: &Value) -> Result<Vec<WeightScheme>, String> {
    let Quantization {
        format,
        config_groups,
        kv_cache_scheme,
        sparsity_config,
        transform_config,
    } = json::from_value(quantization)?;
    if format.as_deref() != Some(MIXED) {
        refuse_format(format.as_deref())?;
    }
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
        let scheme =
            scheme(group, format.as_deref()).map_err(|reason| format!("{name}: {reason}"))?;
        schemes.extend(scheme);
    }
    match schemes.is_empty() {
        true => Err("config_groups have no weights".into()),
        false => Ok(schemes),
    }
}

/// Returns a supported format, or an error that names the format.
fn refuse_format(format: Option<&str>) -> Result<&str, String> {
    let supported = [PACKED, FP8[0], FP8[1], NVFP4, MXFP4];
    match format {
        Some(format) if supported.contains(&format) => Ok(format),
        Some(other) => Err(format!("format is {other:?}; supported are {supported:?}")),
        None => Err(format!("format is missing; supported are {supported:?}")),
    }
}

/// Returns the scheme of a group, or `None` if the group has no quantized weights. `format` is the checkpoint's format.
fn scheme(group: Value, of_all: Option<&str>) -> Result<Option<WeightScheme>, String> {
    let Group {
        weights,
        input_activations,
        output_activations,
        format,
    } = json::from_value(&group)?;
    let format = refuse_format(format.as_deref().or(of_all))?;
    // The method rounds such activations to 8 or 4 bits by scales of the activations themselves. The program leaves the
    // activations as they are, which is more exact. Other scales clip activations, so that results would differ.
    let is_dynamic = |value: &Value| {
        let dynamic = value.get("dynamic");
        dynamic == Some(&Value::Bool(true)) || dynamic.and_then(Value::as_str) == Some("local")
    };
    for (name, value, may_be_dynamic) in [
        ("input_activations", input_activations, format != PACKED),
        ("output_activations", output_activations, false),
    ] {
        if says_something(&value) && !(may_be_dynamic && is_dynamic(&value)) {
            let reason = match may_be_dynamic {
                true => {
                    "are quantized by static scales, which is not supported; use a checkpoint with dynamic ones"
                }
                false => {
                    "are quantized, which is not supported; of Google's mobile checkpoints, use the one whose name ends with -qat-mobile-transformers"
                }
            };
            return Err(format!("{name} {reason}"));
        }
    }
    let scheme = |weights: QuantizedWeights| match format {
        PACKED => weights.scheme().map(WeightScheme::Packed),
        NVFP4 => weights.fp4(Fp4Scheme::Nv).map(WeightScheme::Fp4),
        MXFP4 => weights.fp4(Fp4Scheme::Mx).map(WeightScheme::Fp4),
        _ => weights.fp8().map(WeightScheme::Fp8),
    };
    weights.map(scheme).transpose()
}

impl QuantizedWeights {
    /// Refuses weights that are not symmetric floats of `bits` bits.
    fn refuse_others(&self, bits: usize) -> Result<(), String> {
        if self.num_bits != bits {
            return Err(format!(
                "num_bits is {}; only {bits} is supported",
                self.num_bits
            ));
        }
        match (self.r#type.as_deref(), self.symmetric) {
            (Some("float"), true) => Ok(()),
            (Some("float"), false) => Err("symmetric is false; only true is supported".into()),
            (other, _) => {
                let other = other.unwrap_or("int");
                Err(format!("type is {other:?}; only \"float\" is supported"))
            }
        }
    }

    fn fp8(&self) -> Result<Fp8Scheme, String> {
        self.refuse_others(8)?;
        match (self.strategy.as_deref(), self.block_structure) {
            (None | Some("tensor"), _) => Ok(Fp8Scheme::Tensor),
            (Some("channel"), _) => Ok(Fp8Scheme::Channel),
            (Some("block"), Some(block)) if !block.contains(&0) => Ok(Fp8Scheme::Block(block)),
            (Some("block"), block) => Err(format!("block_structure is {block:?}")),
            (Some(other), _) => Err(format!(
                "strategy is {other:?}; only \"tensor\", \"channel\" and \"block\" are supported"
            )),
        }
    }

    fn fp4(&self, scheme: Fp4Scheme) -> Result<Fp4Scheme, String> {
        self.refuse_others(4)?;
        match self.group_size == Some(scheme.group() as i64) {
            true => Ok(scheme),
            false => Err(format!(
                "group_size is {:?}; only {} is supported",
                self.group_size,
                scheme.group()
            )),
        }
    }

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
