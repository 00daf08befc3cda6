//! Derives the model's configuration from a GGUF file's metadata. The keys are those of llama.cpp's architecture `gemma4`.

use super::{Gguf, metadata::Metadata};
use crate::config::validate::{MOST_LAYERS, number_of_layers};
use crate::config::{ExpertsConfig, Gemma4Config, LayerType, RopeConfig};

/// The only supported architecture. In a file's metadata, the keys of the model begin with this name.
const ARCHITECTURE: &str = "gemma4";
/// The architecture of drafters, the small models that propose tokens in speculative decoding.
const DRAFTER: &str = "gemma4-assistant";
/// If the divisor of a channel pair's rotary angle is at least this number, the channel pair is not rotated.
/// llama.cpp's converter writes the divisor 1e30 for such pairs.
const STANDS_STILL: f32 = 1e20;
/// The logit softcap that llama.cpp uses if a file has no key for the softcap.
const SOFTCAP: f64 = 30.0;
const SLIDING_THETA: f64 = 1e4;

/// The metadata of the file. The methods prefix each key with the architecture's name.
struct Keys<'a>(Metadata<'a>);

impl Keys<'_> {
    fn key(name: &str) -> String {
        format!("{ARCHITECTURE}.{name}")
    }

    fn optional_size(&self, name: &str) -> Result<Option<usize>, String> {
        self.0.size(&Self::key(name))
    }

    fn size(&self, name: &str) -> Result<usize, String> {
        required(&Self::key(name), self.optional_size(name)?)
    }

    fn sizes(&self, name: &str, layers: usize) -> Result<Vec<usize>, String> {
        let key = Self::key(name);
        required(&key, self.0.sizes(&key, layers)?)
    }

    /// Returns a size that all layers share. The file holds this size either as one number or as a list with one number
    /// per layer.
    fn size_of_layers(&self, name: &str, layers: usize) -> Result<usize, String> {
        required(&Self::key(name), same(name, self.sizes(name, layers)?)?)
    }

    fn optional_float(&self, name: &str) -> Result<Option<f64>, String> {
        self.0.float(&Self::key(name))
    }

    fn float(&self, name: &str) -> Result<f64, String> {
        required(&Self::key(name), self.optional_float(name)?)
    }
}

fn required<T>(key: &str, value: Option<T>) -> Result<T, String> {
    value.ok_or_else(|| format!("{key} is missing"))
}

/// Returns the common value of all elements of `values`, or `None` if `values` is empty. Returns an error if two
/// elements differ.
fn same(name: &str, values: impl IntoIterator<Item = usize>) -> Result<Option<usize>, String> {
    let mut values = values.into_iter();
    let Some(first) = values.next() else {
        return Ok(None);
    };
    match values.find(|value| *value != first) {
        None => Ok(Some(first)),
        Some(other) => Err(format!(
            "{} is {first} of one layer and {other} of another of the same type",
            Keys::key(name)
        )),
    }
}

/// Refuses files of an unsupported architecture.
pub(super) fn refuse_others(metadata: Metadata<'_>) -> Result<(), String> {
    match metadata.text("general.architecture")? {
        Some(ARCHITECTURE) => Ok(()),
        Some(DRAFTER) => Err(format!(
            "its architecture is {DRAFTER:?}, a drafter; it reads the KV cache of its target model and cannot run alone"
        )),
        Some(other) => Err(format!(
            "is GGUF of the architecture {other:?}; only {ARCHITECTURE:?} is loaded"
        )),
        None => Err("is not a model in GGUF: general.architecture is missing".into()),
    }
}

/// Returns the model's configuration. Some properties have no key in GGUF. The function derives these properties from
/// the tensors.
pub(super) fn config(gguf: &Gguf) -> Result<Gemma4Config, String> {
    let metadata = gguf.metadata();
    let keys = Keys(metadata);
    let layers = keys.size("block_count")?;
    number_of_layers(layers).map_err(|_| {
        format!(
            "{} is {layers}, which is more than {MOST_LAYERS}",
            Keys::key("block_count")
        )
    })?;
    refuse_scaled_positions(&keys)?;
    let layer_types = layer_types(&keys, layers)?;
    let num_kv_shared_layers = keys
        .optional_size("attention.shared_kv_layers")?
        .unwrap_or(0);
    let first_shared = layers
        .checked_sub(num_kv_shared_layers)
        .filter(|own| *own > 0)
        .ok_or_else(|| {
            format!(
                "{} is {num_kv_shared_layers}, which leaves none of {layers} layers with a KV cache of its own",
                Keys::key("attention.shared_kv_layers")
            )
        })?;
    let (intermediate_size, use_double_wide_mlp) = widths(&keys, layers, first_shared)?;
    let (sliding_heads, global_heads) = key_value_heads(&keys, &layer_types)?;
    let (sliding_head_dim, global_head_dim) = head_dims(&keys)?;
    let token = |name: &str, default: u32| -> Result<u32, String> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let token = metadata.size(&key)?.unwrap_or(default as usize);
        u32::try_from(token).map_err(|_| format!("{key} is {token}"))
    };
    Ok(Gemma4Config {
        vocab_size: gguf.rows("token_embd.weight")?,
        vocab_size_per_layer_input: match gguf.find("per_layer_token_embd.weight") {
            Some((table, _)) => table.shape[0],
            None => gguf.rows("token_embd.weight")?,
        },
        hidden_size: keys.size("embedding_length")?,
        intermediate_size,
        use_double_wide_mlp,
        num_kv_shared_layers,
        num_attention_heads: keys.size_of_layers("attention.head_count", layers)?,
        num_key_value_heads: sliding_heads,
        num_global_key_value_heads: global_heads,
        sliding_head_dim,
        global_head_dim,
        sliding_window: keys.size("attention.sliding_window")?,
        attention_k_eq_v: values_are_keys(gguf, &layer_types[..first_shared]),
        hidden_size_per_layer_input: keys
            .optional_size("embedding_length_per_layer_input")?
            .unwrap_or(0),
        experts: experts(&keys, layers)?,
        sliding_rope: RopeConfig {
            theta: keys
                .optional_float("rope.freq_base_swa")?
                .unwrap_or(SLIDING_THETA),
            ..RopeConfig::SLIDING
        },
        global_rope: global_rope(gguf, &keys, &layer_types, global_head_dim)?,
        rms_norm_eps: keys.float("attention.layer_norm_rms_epsilon")?,
        final_logit_softcapping: match keys.optional_float("final_logit_softcapping")? {
            Some(0.0) => None,
            softcap => softcap.or(Some(SOFTCAP)),
        },
        tie_word_embeddings: !gguf.has("output.weight"),
        max_position_embeddings: keys.size("context_length")?,
        initializer_range: 0.02,
        bos_token: token("bos", 2)?,
        eos_tokens: vec![token("eos", 1)?],
        pad_token: token("padding", 0)?,
        dtype: None,
        layer_types,
    })
}

/// Refuses scaled rotary positions, which extend a model to longer contexts than it was trained for.
fn refuse_scaled_positions(keys: &Keys<'_>) -> Result<(), String> {
    match keys.0.text(&Keys::key("rope.scaling.type"))? {
        None | Some("none") => Ok(()),
        Some(other) => Err(format!(
            "{} is {other:?}; only \"none\" is supported",
            Keys::key("rope.scaling.type")
        )),
    }
}

fn layer_types(keys: &Keys<'_>, layers: usize) -> Result<Vec<LayerType>, String> {
    let key = Keys::key("attention.sliding_window_pattern");
    let slides = required(&key, keys.0.booleans(&key, layers)?)?;
    Ok(slides
        .into_iter()
        .map(|slides| match slides {
            true => LayerType::Sliding,
            false => LayerType::Full,
        })
        .collect())
}

/// Returns the hidden size of the feed-forward networks in layers that have their own KV cache, and a flag. The flag is
/// true if the layers that share an earlier layer's KV cache have twice this hidden size.
fn widths(keys: &Keys<'_>, layers: usize, first_shared: usize) -> Result<(usize, bool), String> {
    const KEY: &str = "feed_forward_length";
    let widths = keys.sizes(KEY, layers)?;
    let (own, shared) = widths.split_at(first_shared);
    let own = required(&Keys::key(KEY), same(KEY, own.iter().copied())?)?;
    match same(KEY, shared.iter().copied())? {
        None => Ok((own, false)),
        Some(shared) if shared == own => Ok((own, false)),
        Some(shared) if Some(shared) == own.checked_mul(2) => Ok((own, true)),
        Some(shared) => Err(format!(
            "{} is {own} of layers with their own KV cache and {shared} of the others, which is neither as much nor twice as much",
            Keys::key(KEY)
        )),
    }
}

/// Returns the number of KV heads in sliding layers, and the number of KV heads in full layers.
fn key_value_heads(keys: &Keys<'_>, layer_types: &[LayerType]) -> Result<(usize, usize), String> {
    const KEY: &str = "attention.head_count_kv";
    let heads = keys.sizes(KEY, layer_types.len())?;
    let of = |kind: LayerType| {
        let layers = layer_types.iter().zip(&heads);
        same(
            KEY,
            layers
                .filter(|(layer, _)| **layer == kind)
                .map(|(_, heads)| *heads),
        )
    };
    match (of(LayerType::Sliding)?, of(LayerType::Full)?) {
        (Some(sliding), Some(full)) => Ok((sliding, full)),
        // The model has only sliding layers or only full layers. No layer uses the number of heads for the missing
        // type.
        (Some(heads), None) | (None, Some(heads)) => Ok((heads, heads)),
        (None, None) => Err(format!("{} is missing", Keys::key("block_count"))),
    }
}

/// Returns the head sizes of sliding layers and of full layers. Keys and values must have the same head size.
fn head_dims(keys: &Keys<'_>) -> Result<(usize, usize), String> {
    let of = |suffix: &str| {
        let key = keys.size(&format!("attention.key_length{suffix}"))?;
        for name in ["attention.value_length", "rope.dimension_count"] {
            let name = format!("{name}{suffix}");
            if let Some(other) = keys.optional_size(&name)?
                && other != key
            {
                return Err(format!(
                    "{} is {other}, but {} is {key}; only equal sizes are supported",
                    Keys::key(&name),
                    Keys::key(&format!("attention.key_length{suffix}")),
                ));
            }
        }
        Ok(key)
    };
    Ok((of("_swa")?, of("")?))
}

/// True if full layers have no V projection and compute V from the output of the K projection.
fn values_are_keys(gguf: &Gguf, own_layers: &[LayerType]) -> bool {
    let full = own_layers.iter().position(|kind| *kind == LayerType::Full);
    full.is_some_and(|layer| {
        let values = format!("blk.{layer}.attn_v.weight");
        !gguf.has(&values)
    })
}

fn experts(keys: &Keys<'_>, layers: usize) -> Result<Option<ExpertsConfig>, String> {
    match keys.optional_size("expert_count")? {
        None | Some(0) => Ok(None),
        Some(num_experts) => Ok(Some(ExpertsConfig {
            num_experts,
            top_k_experts: keys.size("expert_used_count")?,
            moe_intermediate_size: keys.size_of_layers("expert_feed_forward_length", layers)?,
        })),
    }
}

/// Returns the rotary embedding of full layers. For each channel pair, the file holds a number that divides the pair's
/// rotary angle. A channel pair with a huge divisor is not rotated. All rotated channel pairs must have the same
/// divisor.
fn global_rope(
    gguf: &Gguf,
    keys: &Keys<'_>,
    layer_types: &[LayerType],
    head_dim: usize,
) -> Result<RopeConfig, String> {
    const NAME: &str = "rope_freqs.weight";
    let theta = keys.float("rope.freq_base")?;
    if !layer_types.contains(&LayerType::Full) {
        return Ok(RopeConfig {
            theta,
            ..RopeConfig::SLIDING
        });
    }
    let divisors = gguf.floats(NAME)?;
    let pairs = head_dim / 2;
    if divisors.len() != pairs {
        return Err(format!(
            "{NAME} has {} numbers, but full layers have {pairs} channel pairs",
            divisors.len()
        ));
    }
    let stands_still = |divisor: &f32| *divisor >= STANDS_STILL;
    let rotated = divisors.iter().position(stands_still).unwrap_or(pairs);
    let (rotates, stands) = divisors.split_at(rotated);
    let factor = rotates.first().copied().unwrap_or(1.0);
    if rotates.iter().any(|divisor| *divisor != factor) || !stands.iter().all(stands_still) {
        return Err(format!(
            "{NAME} does not have one number for the first channel pairs and a huge one for the others"
        ));
    }
    let rope = RopeConfig {
        theta,
        partial_rotary_factor: rotated as f64 / pairs.max(1) as f64,
        factor: f64::from(factor),
    };
    // The fraction `rotated pairs / all pairs` is rounded, and may be slightly too small. The model would then rotate
    // one pair fewer. In this case, use the next larger f64.
    Ok(RopeConfig {
        partial_rotary_factor: match rope.rotated_pairs(head_dim) == rotated {
            true => rope.partial_rotary_factor,
            false => rope.partial_rotary_factor.next_up(),
        },
        ..rope
    })
}
