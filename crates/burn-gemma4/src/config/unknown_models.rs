//! Refuses configurations that do not describe a supported text model. These are the configurations of drafters, of
//! embedding models, and of models whose weights were quantized by an unsupported method.

use crate::error::Gemma4Error;
use serde::Deserialize;
use serde_json::Value;

/// The model types of drafters, the small models that propose draft tokens in speculative decoding.
pub(super) const DRAFTERS: [&str; 2] = ["gemma4_assistant", "gemma4_unified_assistant"];

/// The model types of embedding models, which compute embeddings of texts and generate nothing.
pub(super) const EMBEDDING_MODELS: [&str; 2] = ["embedding_gemma2", "embedding_gemma2_text"];

/// Returns an error if the model type is that of a drafter or of an embedding model.
pub(super) fn refuse_other_model(model_type: &str) -> Result<(), Gemma4Error> {
    if DRAFTERS.contains(&model_type) {
        return Err(Gemma4Error::Config(format!(
            "model_type is {model_type:?}, a drafter; it reads the KV cache of its target model and cannot run alone"
        )));
    }
    match EMBEDDING_MODELS.contains(&model_type) {
        true => Err(Gemma4Error::Config(format!(
            "model_type is {model_type:?}, an embedding model, which generates no text; use EmbeddingGemma, or the command `gemma4 embed`"
        ))),
        false => Ok(()),
    }
}

/// The fields that describe quantized weights, either at the top level of a configuration or in its `text_config`.
#[derive(Deserialize)]
struct Quantized {
    quantization_config: Option<Value>,
    /// MLX's own description of the quantization. MLX also writes a `quantization_config`, which names no method.
    quantization: Option<Value>,
}

/// True if the value of an optional field is neither `null` nor an object without fields.
pub(super) fn says_something(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Object(fields) => !fields.is_empty(),
        _ => true,
    }
}

/// Returns an error that names the quantization method if the weights are quantized.
pub(super) fn refuse_quantized(config: &Value) -> Result<(), Gemma4Error> {
    // If the configuration is not an object, return no error here. The code that parses the configuration then returns
    // the error.
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
            // Accept a `quantization_config` without a method, because the weights of such a checkpoint are still
            // floats.
            None | Some(Value::Null) => return Ok(()),
            Some(Value::String(method)) => ("quantization_config", format!("{method:?}")),
            Some(other) => ("quantization_config", other.to_string()),
        },
        (None, None) => return Ok(()),
    };
    Err(Gemma4Error::Config(format!(
        "{name}: the weights are quantized by {method}; use {}",
        nearest(&method)
    )))
}

/// Returns the supported checkpoint that is nearest to one of another method. The text of `method` is in JSON.
fn nearest(method: &str) -> &'static str {
    match method {
        "\"fp8\"" | "\"modelopt\"" | "\"fbgemm_fp8\"" => {
            "an FP8 or NVFP4 checkpoint of compressed-tensors, or the original one in f32, f16 or bf16"
        }
        _ => "the original checkpoint in f32, f16 or bf16",
    }
}
