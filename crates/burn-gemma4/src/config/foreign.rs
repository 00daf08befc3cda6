//! Configurations of checkpoints that are not ours to load: what drafters are, and who made weights that are no numbers.

use crate::Gemma4Error;
use serde::Deserialize;
use serde_json::Value;

/// The model types of the small models that guess tokens for a large one.
pub(super) const DRAFTERS: [&str; 2] = ["gemma4_assistant", "gemma4_unified_assistant"];

/// Refuses a drafter by its name.
pub(super) fn refuse_drafter(model_type: &str) -> Result<(), Gemma4Error> {
    match DRAFTERS.contains(&model_type) {
        true => Err(Gemma4Error::Config(format!(
            "model_type is {model_type:?}, a drafter: it reads the keys and values of the model that it guesses for, and is none alone"
        ))),
        false => Ok(()),
    }
}

/// What a configuration, or the text part of one, says about how its weights were made smaller.
#[derive(Deserialize)]
struct Quantized {
    quantization_config: Option<Value>,
    /// MLX's own, beside a `quantization_config` without a method.
    quantization: Option<Value>,
}

/// Whether a field that may be there says anything.
pub(super) fn says_something(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Object(fields) => !fields.is_empty(),
        _ => true,
    }
}

/// Refuses weights that are quantized, by the method.
pub(super) fn refuse_quantized(config: &Value) -> Result<(), Gemma4Error> {
    // What is no object is refused for that elsewhere.
    let Ok(quantized) = Quantized::deserialize(config) else {
        return Ok(());
    };
    let field = |value: Option<Value>| value.filter(says_something);
    let (name, method) = match (
        field(quantized.quantization),
        field(quantized.quantization_config),
    ) {
        (Some(_), _) => ("quantization", "MLX".to_owned()),
        (None, Some(config)) => match config.get("quant_method") {
            // Weights that were trained for quantization and are still floats. Tensors of another dtype are refused by their names.
            None | Some(Value::Null) => return Ok(()),
            Some(Value::String(method)) => ("quantization_config", format!("{method:?}")),
            Some(other) => ("quantization_config", other.to_string()),
        },
        (None, None) => return Ok(()),
    };
    Err(Gemma4Error::Config(format!(
        "{name}: the weights are quantized by {method}; take the checkpoint that they were made of, in f32, f16 or bf16"
    )))
}
