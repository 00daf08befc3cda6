//! Warns about fields of `generation_config.json` that Hugging Face Transformers supports but this crate does not.

use crate::escaped::Escaped;
use serde_json::{Map, Value};

/// The maximum length of a value in a warning, in characters.
const MOST_CHARACTERS: usize = 80;

/// A predicate that is true if a field with the given value changes the generated text.
type IsOn = fn(&Value) -> bool;

/// The fields of `GenerationConfig` in Hugging Face Transformers 5 that can change the text of a single sequence that
/// is generated without an assistant model. An entry holds the field's name and a predicate, which is true if the
/// field's value changes the text. Fields that need `num_beams` are omitted.
const FIELDS: [(&str, IsOn); 23] = [
    ("constraints", any),
    ("dola_layers", any),
    ("encoder_no_repeat_ngram_size", |value| is_not(value, 0.0)),
    ("encoder_repetition_penalty", |value| is_not(value, 1.0)),
    ("epsilon_cutoff", is_cutoff),
    ("eta_cutoff", is_cutoff),
    ("exponential_decay_length_penalty", any),
    ("force_words_ids", any),
    ("forced_bos_token_id", any),
    ("forced_eos_token_id", any),
    ("guidance_scale", |value| is_not(value, 1.0)),
    ("max_time", any),
    ("no_repeat_ngram_size", |value| is_not(value, 0.0)),
    ("num_beam_groups", |value| is_not(value, 1.0)),
    ("num_beams", |value| is_not(value, 1.0)),
    ("num_return_sequences", |value| is_not(value, 1.0)),
    ("penalty_alpha", |value| is_not(value, 0.0)),
    ("remove_invalid_values", is_true),
    ("sequence_bias", any),
    ("token_healing", is_true),
    ("top_h", any),
    // A `typical_p` of 1 or more has no effect, because it keeps all tokens.
    ("typical_p", |value| {
        value.as_f64().is_none_or(|mass| mass < 1.0)
    }),
    ("watermarking_config", any),
];

/// Returns the warnings about fields that would change the text, but that this crate does not support. Each warning is
/// one sentence about one field.
pub(super) fn unsupported(fields: &Map<String, Value>) -> Vec<String> {
    FIELDS
        .iter()
        .filter_map(|(name, is_on)| {
            let value = fields.get(*name).filter(|value| !value.is_null())?;
            is_on(value).then(|| sentence(name, value))
        })
        .collect()
}

/// Returns the warning about one field and its value, a sentence.
pub(super) fn sentence(name: &str, value: &Value) -> String {
    let text = value.to_string();
    let cut: String = text.chars().take(MOST_CHARACTERS).collect();
    let rest = if cut.len() < text.len() { "…" } else { "" };
    let value = Escaped::line(cut);
    format!(
        "generation_config.json: {name} is {value}{rest}, which is not supported and has no effect"
    )
}

fn any(value: &Value) -> bool {
    match value {
        Value::Array(values) => !values.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        _ => true,
    }
}

fn is_true(value: &Value) -> bool {
    *value != Value::Bool(false)
}

fn is_not(value: &Value, neutral: f64) -> bool {
    value.as_f64() != Some(neutral)
}

/// True if the value of a cutoff option, such as `epsilon_cutoff`, lies between 0 and 1. Hugging Face Transformers
/// ignores all other values.
fn is_cutoff(value: &Value) -> bool {
    value
        .as_f64()
        .is_none_or(|cutoff| 0.0 < cutoff && cutoff < 1.0)
}
