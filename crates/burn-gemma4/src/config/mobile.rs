//! Reads the `quantization_config` of Google's mobile checkpoints (`-qat-mobile-transformers`), whose `quant_method` is
//! "gemma". Regular expressions over module names give the widths of the codes.

use crate::json;
use fancy_regex::Regex;
use serde::Deserialize;
use serde_json::{Map, Value};

/// The name of the quantization method.
pub(super) const METHOD: &str = "gemma";

/// The largest number of regular expressions in a `quantization_config`. Each module's name is compared with all of them.
const MAX_EXPRESSIONS: usize = 1024;
/// The largest number of characters that an error message repeats of a regular expression.
const SHOWN: usize = 100;

/// The fields of a `quantization_config`.
#[derive(Deserialize)]
struct File {
    num_bits: Option<usize>,
    quantize_embeddings: Option<bool>,
    module_quant_configs: Option<Map<String, Value>>,
    modules_to_not_convert: Option<Vec<String>>,
}

/// The options of the modules whose names match a regular expression.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Module {
    num_bits: Option<usize>,
}

/// The width of the codes of each module.
#[derive(Debug)]
pub(crate) struct MobileScheme {
    /// The width in modules that no regular expression matches, in bits.
    default_bits: usize,
    has_embeddings: bool,
    /// All regular expressions, joined. A match has the named group `g` and the index of its expression.
    modules: Option<Regex>,
    /// The width of each regular expression.
    bits: Vec<usize>,
    /// The modules that keep their floats.
    floats: Vec<(Regex, String)>,
}

impl MobileScheme {
    /// Reads a `quantization_config`.
    pub(super) fn of(quantization: &Value) -> Result<Self, String> {
        let file: File = json::from_value(quantization)?;
        let default_bits = width("num_bits", file.num_bits.unwrap_or(4))?;
        let configs = file.module_quant_configs.unwrap_or_default();
        // Without the field, Hugging Face Transformers leaves the output head as it is.
        let floats = file.modules_to_not_convert;
        let floats = floats.unwrap_or_else(|| vec!["lm_head".to_owned()]);
        let expressions = configs.len() + floats.len();
        if expressions > MAX_EXPRESSIONS {
            return Err(format!(
                "module_quant_configs and modules_to_not_convert have {expressions} regular expressions; at most {MAX_EXPRESSIONS} are supported"
            ));
        }
        let (mut joined, mut bits) = (Vec::new(), Vec::new());
        for (pattern, options) in configs {
            let field = format!("module_quant_configs: {:?}", cut(&pattern));
            let options: Module =
                json::from_value(&options).map_err(|reason| format!("{field}: {reason}"))?;
            bits.push(match options.num_bits {
                Some(bits) => width(&format!("{field}: num_bits"), bits)?,
                None => default_bits,
            });
            // Compile each expression alone too, so that an error names it.
            regex("module_quant_configs", &pattern, &pattern)?;
            joined.push(format!("(?P<g{}>{pattern})", joined.len()));
        }
        let modules = match joined.is_empty() {
            true => None,
            false => {
                let joined = joined.join("|");
                Some(regex("module_quant_configs", &joined, &joined)?)
            }
        };
        let floats = floats.into_iter().map(|name| {
            let whole = format!(r"\A(?:{name})(?:(?<=\.)|(?=\.|$))");
            Ok((regex("modules_to_not_convert", &name, &whole)?, name))
        });
        Ok(Self {
            default_bits,
            has_embeddings: file.quantize_embeddings.unwrap_or(false),
            modules,
            bits,
            floats: floats.collect::<Result<_, String>>()?,
        })
    }

    /// Returns the width of the codes of the module `module`, or `None` if the module keeps its floats. The rules are
    /// those of `replace_with_quant_layers` in Hugging Face Transformers.
    pub(crate) fn bits(&self, module: &str, is_embedding: bool) -> Result<Option<usize>, String> {
        if is_embedding && !self.has_embeddings {
            return Ok(None);
        }
        for (regex, name) in &self.floats {
            if module.ends_with(name.as_str()) || regex.is_match(module).map_err(too_slow)? {
                return Ok(None);
            }
        }
        let Some(modules) = &self.modules else {
            return Ok(Some(self.default_bits));
        };
        let found = modules.captures(module).map_err(too_slow)?;
        let bits = found.and_then(|found| {
            let mut bits = self.bits.iter().enumerate();
            bits.find_map(|(index, bits)| found.name(&format!("g{index}")).map(|_| *bits))
        });
        Ok(Some(bits.unwrap_or(self.default_bits)))
    }
}

fn width(field: &str, bits: usize) -> Result<usize, String> {
    match bits {
        2 | 4 | 8 => Ok(bits),
        _ => Err(format!("{field} is {bits}; only 2, 4 and 8 are supported")),
    }
}

/// Compiles the regular expression `whole`, which is made of `pattern` in the field `field`.
fn regex(field: &str, pattern: &str, whole: &str) -> Result<Regex, String> {
    Regex::new(whole).map_err(|error| {
        // The error may repeat the expression.
        let (pattern, error) = (cut(pattern), cut(&error.to_string()));
        format!("{field}: {pattern:?} is not a supported regular expression: {error}")
    })
}

/// Returns the first [`SHOWN`] characters of a text, with dots for the rest.
fn cut(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}

fn too_slow(error: fancy_regex::Error) -> String {
    format!("a regular expression of quantization_config cannot be matched: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The rules of `gemma-4-E2B-it-qat-mobile-transformers`.
    fn e2b() -> MobileScheme {
        let config = json!({
            "quant_method": "gemma",
            "num_bits": 4,
            "quantize_embeddings": true,
            "modules_to_not_convert": [
                "model.vision_tower.patch_embedder",
                "model.audio_tower.subsample_conv_projection",
                "relative_k_proj",
                "model.embed_audio",
                "per_layer_model_projection"
            ],
            "module_quant_configs": {
                "^lm_head$": {"num_bits": 2},
                "audio_tower(?!.*lconv1d\\.linear_start)": {"num_bits": 2},
                "audio_tower\\.layers\\.\\d+\\.lconv1d\\.linear_start\\.": {"num_bits": 4},
                "language_model\\.embed_tokens$": {"num_bits": 2},
                "language_model\\.layers\\.(\\d|1[0-4])\\.mlp\\.": {"num_bits": 4},
                "language_model\\.layers\\.\\d+\\.mlp\\.": {"num_bits": 2},
                "language_model\\.layers\\.\\d+\\.per_layer_projection$": {"num_bits": 8},
                "vision_tower": {}
            }
        });
        MobileScheme::of(&config).expect("the configuration is valid")
    }

    #[test]
    fn bits_of_modules_are_those_of_their_first_expression() {
        let scheme = e2b();
        for (module, bits) in [
            ("lm_head", Some(2)),
            ("model.language_model.layers.14.mlp.up_proj", Some(4)),
            ("model.language_model.layers.15.mlp.up_proj", Some(2)),
            ("model.language_model.layers.3.self_attn.q_proj", Some(4)),
            (
                "model.language_model.layers.3.per_layer_projection",
                Some(8),
            ),
            ("model.language_model.per_layer_model_projection", None),
            (
                "model.audio_tower.layers.0.lconv1d.linear_start.linear",
                Some(4),
            ),
            (
                "model.audio_tower.layers.0.lconv1d.linear_end.linear",
                Some(2),
            ),
            ("model.audio_tower.layers.0.self_attn.relative_k_proj", None),
            ("model.vision_tower.patch_embedder.input_proj", None),
            (
                "model.vision_tower.encoder.layers.0.mlp.up_proj.linear",
                Some(4),
            ),
            ("model.embed_audio.embedding_projection", None),
            ("model.embed_audios.embedding_projection", Some(4)),
        ] {
            assert_eq!(scheme.bits(module, false), Ok(bits), "{module}");
        }
        let table = "model.language_model.embed_tokens";
        assert_eq!(scheme.bits(table, true), Ok(Some(2)));
        let without = MobileScheme::of(&json!({"quant_method": "gemma"}));
        let without = without.expect("all fields are optional");
        assert_eq!(without.bits(table, true), Ok(None));
        assert_eq!(without.bits("lm_head", false), Ok(None));
        assert_eq!(
            without.bits("model.layers.0.mlp.up_proj", false),
            Ok(Some(4))
        );
    }

    /// As in Python, the expression that matches at the leftmost place wins, and the first of those at the same place.
    #[test]
    fn bits_of_module_with_two_matches_are_those_of_the_leftmost() {
        let scheme = MobileScheme::of(&json!({
            "quant_method": "gemma",
            "module_quant_configs": {"mlp": {"num_bits": 2}, "layers": {"num_bits": 8}}
        }));
        let scheme = scheme.expect("the configuration is valid");
        assert_eq!(
            scheme.bits("model.layers.0.mlp.up_proj", false),
            Ok(Some(8))
        );
        assert_eq!(scheme.bits("model.mlp", false), Ok(Some(2)));
    }
}
