//! Checks that a model with a given configuration can exist.

use super::{Gemma4Config, LayerType, RopeConfig};
use crate::error::Gemma4Error;
use std::ops::RangeInclusive;

/// The maximum number of layers. The largest published model has 60.
pub(crate) const MOST_LAYERS: usize = 1024;
/// The largest value that any size in a configuration may have. The reason is that devices store tokens and positions
/// as i32.
const LARGEST_SIZE: usize = i32::MAX as usize;
/// The maximum size of the sliding window, in positions.
const WIDEST_WINDOW: usize = 1 << 20;
/// The maximum number of elements in a tensor. A 64-bit integer can then hold the total size, in bytes, of a thousand
/// tensors.
pub(super) const LARGEST_TENSOR: usize = 1 << 45;
/// The range of valid softcaps, which lies within the range of f16.
const SOFTCAPS: RangeInclusive<f64> = 1e-4..=65_504.0;

fn refuse<T>(reason: String) -> Result<T, Gemma4Error> {
    Err(Gemma4Error::Config(reason))
}

/// Refuses a number of layers above [`MOST_LAYERS`], before memory is allocated for the layers.
pub(crate) fn number_of_layers(layers: usize) -> Result<(), Gemma4Error> {
    match layers > MOST_LAYERS {
        true => refuse(format!(
            "num_hidden_layers is {layers}, which is more than {MOST_LAYERS}"
        )),
        false => Ok(()),
    }
}

impl Gemma4Config {
    /// Checks that a model with this configuration can exist.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Config`], which names the wrong field of `config.json`.
    pub fn validate(&self) -> Result<(), Gemma4Error> {
        self.validate_with(Self::validate_shared_layers)
    }

    /// Checks the configuration like [`validate`](Self::validate), but calls `validate_shared_layers` to check the layers
    /// that share an earlier layer's KV cache.
    pub(super) fn validate_with(
        &self,
        validate_shared_layers: impl FnOnce(&Self) -> Result<(), Gemma4Error>,
    ) -> Result<(), Gemma4Error> {
        number_of_layers(self.num_layers())?;
        self.validate_sizes()?;
        self.validate_heads()?;
        validate_shared_layers(self)?;
        self.validate_experts()?;
        self.validate_tensors()?;
        self.validate_tokens()?;
        self.validate_numbers()?;
        for (kind, rope, head_dim) in [
            (
                LayerType::Sliding,
                &self.sliding_rope,
                self.sliding_head_dim,
            ),
            (LayerType::Full, &self.global_rope, self.global_head_dim),
        ] {
            rope.validate(kind, head_dim)?;
        }
        Ok(())
    }

    fn validate_sizes(&self) -> Result<(), Gemma4Error> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_layers()),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            (
                "num_global_key_value_heads",
                self.num_global_key_value_heads,
            ),
            ("head_dim", self.sliding_head_dim),
            ("global_head_dim", self.global_head_dim),
            ("sliding_window", self.sliding_window),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        if let Some((name, size)) = sizes
            .iter()
            .find(|(_, size)| !(1..=LARGEST_SIZE).contains(size))
        {
            return refuse(format!(
                "{name} is {size}, which is not a number from 1 to {LARGEST_SIZE}"
            ));
        }
        match self.sliding_window > WIDEST_WINDOW {
            true => refuse(format!(
                "sliding_window is {}, which is more than {WIDEST_WINDOW}",
                self.sliding_window
            )),
            false => Ok(()),
        }
    }

    fn validate_heads(&self) -> Result<(), Gemma4Error> {
        for (name, head_dim) in [
            ("head_dim", self.sliding_head_dim),
            ("global_head_dim", self.global_head_dim),
        ] {
            if head_dim % 2 != 0 || head_dim > attention_cube::MAX_HEAD_DIM {
                return refuse(format!(
                    "{name} is {head_dim}, which is not an even number up to {}",
                    attention_cube::MAX_HEAD_DIM
                ));
            }
        }
        for (name, heads) in [
            ("num_key_value_heads", self.num_key_value_heads),
            (
                "num_global_key_value_heads",
                self.num_global_key_value_heads,
            ),
        ] {
            if !self.num_attention_heads.is_multiple_of(heads) {
                return refuse(format!(
                    "num_attention_heads is {}, which is not a multiple of {name} {heads}",
                    self.num_attention_heads
                ));
            }
        }
        Ok(())
    }

    fn validate_shared_layers(&self) -> Result<(), Gemma4Error> {
        if self.num_kv_shared_layers >= self.num_layers() {
            return refuse(format!(
                "num_kv_shared_layers is {}, which leaves none of {} layers with a KV cache of its own",
                self.num_kv_shared_layers,
                self.num_layers()
            ));
        }
        let own = &self.layer_types[..self.first_shared_layer()];
        let shared = &self.layer_types[self.first_shared_layer()..];
        match shared.iter().find(|kind| !own.contains(kind)) {
            Some(kind) => refuse(format!(
                "num_kv_shared_layers is {}, but no earlier layer is {kind}",
                self.num_kv_shared_layers
            )),
            None => Ok(()),
        }
    }

    fn validate_experts(&self) -> Result<(), Gemma4Error> {
        match &self.experts {
            Some(experts)
                if experts.top_k_experts == 0
                    || experts.top_k_experts > experts.num_experts
                    || experts.moe_intermediate_size == 0 =>
            {
                refuse(format!(
                    "top_k_experts {} of num_experts {} with moe_intermediate_size {} do not describe a valid mixture of experts",
                    experts.top_k_experts, experts.num_experts, experts.moe_intermediate_size
                ))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a configuration with a tensor that has too many elements, even if each size alone is valid.
    fn validate_tensors(&self) -> Result<(), Gemma4Error> {
        let hidden = ("hidden_size", self.hidden_size);
        let layers = ("num_hidden_layers", self.num_layers());
        let own = (
            "hidden_size_per_layer_input",
            self.hidden_size_per_layer_input,
        );
        let vocabulary = (
            "vocab_size_per_layer_input",
            self.vocab_size_per_layer_input,
        );
        let heads = ("num_attention_heads", self.num_attention_heads);
        // Double the number of elements, because some feed-forward networks are twice as wide. Experts need the factor
        // 2 too, because two of their projections form one tensor.
        let two = ("2", 2);
        let mut tensors = vec![
            vec![("vocab_size", self.vocab_size), hidden],
            vec![layers, own, hidden],
            vec![layers, own, vocabulary],
            vec![heads, ("head_dim", self.sliding_head_dim), hidden],
            vec![heads, ("global_head_dim", self.global_head_dim), hidden],
            vec![two, ("intermediate_size", self.intermediate_size), hidden],
        ];
        if let Some(experts) = &self.experts {
            tensors.push(vec![
                two,
                ("num_experts", experts.num_experts),
                ("moe_intermediate_size", experts.moe_intermediate_size),
                hidden,
            ]);
        }
        let fits = |sizes: &[(&str, usize)]| {
            let elements = sizes
                .iter()
                .try_fold(1usize, |product, (_, size)| product.checked_mul(*size));
            elements.is_some_and(|elements| elements <= LARGEST_TENSOR)
        };
        match tensors.iter().find(|sizes| !fits(sizes)) {
            Some(sizes) => {
                let factors: Vec<String> = sizes
                    .iter()
                    .map(|(name, size)| match *name == two.0 {
                        true => format!("{size}"),
                        false => format!("{name} {size}"),
                    })
                    .collect();
                refuse(format!(
                    "a tensor of {} elements exceeds the maximum",
                    factors.join(" × ")
                ))
            }
            None => Ok(()),
        }
    }

    /// Checks that each special token has a row in the embedding table and in the per-layer embedding table.
    fn validate_tokens(&self) -> Result<(), Gemma4Error> {
        let eos = self.eos_tokens.iter().map(|token| ("eos_token_id", *token));
        let mut tokens = eos.chain([
            ("bos_token_id", self.bos_token),
            ("pad_token_id", self.pad_token),
        ]);
        if let Some((name, token)) = tokens.find(|(_, token)| *token as usize >= self.vocab_size) {
            return refuse(format!(
                "{name} is {token}, which is outside the vocabulary: vocab_size is {}",
                self.vocab_size
            ));
        }
        match self.has_per_layer_embeddings() && self.vocab_size_per_layer_input < self.vocab_size {
            true => refuse(format!(
                "vocab_size_per_layer_input is {}, which leaves tokens without inputs: vocab_size is {}",
                self.vocab_size_per_layer_input, self.vocab_size
            )),
            false => Ok(()),
        }
    }

    fn validate_numbers(&self) -> Result<(), Gemma4Error> {
        match self.final_logit_softcapping {
            Some(cap) if !SOFTCAPS.contains(&cap) => {
                return refuse(format!(
                    "final_logit_softcapping is {cap}, which is not a number from {} to {}",
                    SOFTCAPS.start(),
                    SOFTCAPS.end()
                ));
            }
            _ => (),
        }
        if !is_positive_in_f32(self.rms_norm_eps) {
            return refuse(format!(
                "rms_norm_eps is {}, which is not a positive number in f32",
                self.rms_norm_eps
            ));
        }
        let deviation = self.initializer_range;
        match deviation == 0.0 || is_positive_in_f32(deviation) {
            true => Ok(()),
            false => refuse(format!(
                "initializer_range is {deviation}, which is not a number from 0 in f32"
            )),
        }
    }
}

impl RopeConfig {
    fn validate(&self, kind: LayerType, head_dim: usize) -> Result<(), Gemma4Error> {
        let Self {
            theta,
            partial_rotary_factor,
            factor,
        } = *self;
        let field = |name: &str, number: f64| format!("rope_parameters.{kind}.{name} is {number}");
        for (name, number) in [("rope_theta", theta), ("factor", factor)] {
            if !is_positive_in_f32(number) {
                let field = field(name, number);
                return refuse(format!("{field}, which is not a positive number in f32"));
            }
        }
        if !(0.0..=1.0).contains(&partial_rotary_factor) {
            let field = field("partial_rotary_factor", partial_rotary_factor);
            return refuse(format!("{field}, which is not a share from 0 to 1"));
        }
        let furthest = LARGEST_SIZE as f32;
        let angles = self.inverse_frequencies(head_dim);
        match angles.iter().all(|angle| (furthest * angle).is_finite()) {
            true => Ok(()),
            false => refuse(format!(
                "{} with a factor of {factor}, which gives angles that are not finite",
                field("rope_theta", theta)
            )),
        }
    }
}

/// True if a value, after a cast to f32, is positive, finite and not subnormal. Models compute in f32 or in a smaller
/// dtype.
fn is_positive_in_f32(number: f64) -> bool {
    let number = number as f32;
    number.is_normal() && number > 0.0
}
