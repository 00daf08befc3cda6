//! Checks that the configurations of a model's vision and audio share.

use super::Gemma4Config;
use crate::error::Gemma4Error;

/// The value of `model_type` of models without towers, such as 12B.
pub(super) const UNIFIED: &str = "gemma4_unified";

/// The largest value of any size in `vision_config` or `audio_config`.
const LARGEST_SIZE: usize = 1 << 20;

/// The largest number of layers of a tower. The largest published tower has 27.
pub(super) const MOST_LAYERS: usize = 256;

pub(super) fn refuse<T>(reason: String) -> Result<T, Gemma4Error> {
    Err(Gemma4Error::Config(reason))
}

/// Refuses sizes of 0, and sizes that no model has. `field` is the name of the configuration in `config.json`.
pub(super) fn check_sizes(field: &str, sizes: &[(&str, usize)]) -> Result<(), Gemma4Error> {
    match sizes
        .iter()
        .find(|(_, size)| !(1..=LARGEST_SIZE).contains(size))
    {
        Some((name, size)) => refuse(format!(
            "{field}.{name} is {size}, which is not a number from 1 to {LARGEST_SIZE}"
        )),
        None => Ok(()),
    }
}

/// Refuses a number of layers of 0, and a number that no tower has.
pub(super) fn check_layers(field: &str, layers: usize) -> Result<(), Gemma4Error> {
    match (1..=MOST_LAYERS).contains(&layers) {
        true => Ok(()),
        false => refuse(format!(
            "{field}.num_hidden_layers is {layers}, which is not a number from 1 to {MOST_LAYERS}"
        )),
    }
}

/// Returns the epsilon of a tower's RMS norms. The default is that of Hugging Face Transformers.
pub(super) fn epsilon(field: &str, value: Option<f64>) -> Result<f64, Gemma4Error> {
    let epsilon = value.unwrap_or(1e-6);
    match (epsilon as f32).is_normal() && epsilon > 0.0 {
        true => Ok(epsilon),
        false => refuse(format!(
            "{field}.rms_norm_eps is {epsilon}, which is not a positive number in f32"
        )),
    }
}

/// Refuses tokens outside of the vocabulary.
pub(super) fn check_tokens(tokens: &[(&str, u32)], text: &Gemma4Config) -> Result<(), Gemma4Error> {
    match tokens
        .iter()
        .find(|(_, token)| *token as usize >= text.vocab_size)
    {
        Some((name, token)) => refuse(format!(
            "{name} is {token}, which is outside the vocabulary: vocab_size is {}",
            text.vocab_size
        )),
        None => Ok(()),
    }
}
