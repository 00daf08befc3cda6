//! Writes a configuration as a `config.json` in the dialect of the Hugging Face Hub.

use super::{Gemma4Config, LayerType, RopeConfig};
use crate::error::Gemma4Error;
use burn::tensor::DType;
use serde_json::{Value, json};

impl Gemma4Config {
    /// Returns the text of a `config.json` with this configuration. [`from_json`](Self::from_json) and Hugging Face
    /// Transformers can read it.
    ///
    /// ```
    /// use burn_gemma4::Gemma4Config;
    ///
    /// let config = Gemma4Config::e2b();
    /// assert_eq!(Gemma4Config::from_json(&config.to_json()?)?, config);
    /// # Ok::<(), burn_gemma4::Gemma4Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Config`] if [`validate`](Self::validate) refuses the configuration. Returns the same
    /// error if a `config.json` cannot express the configuration, in these cases:
    ///
    /// - The last layer is not a full layer.
    /// - Full and sliding layers have different numbers of KV heads, but `attention_k_eq_v` is false.
    pub fn to_json(&self) -> Result<String, Gemma4Error> {
        self.validate()?;
        if self.layer_types.last() != Some(&LayerType::Full) {
            return Err(Gemma4Error::Config(
                "layer_types ends with a sliding layer, but every reader of config.json makes the last layer full"
                    .into(),
            ));
        }
        if !self.attention_k_eq_v && self.num_global_key_value_heads != self.num_key_value_heads {
            return Err(Gemma4Error::Config(format!(
                "num_global_key_value_heads is {} and num_key_value_heads is {}; they may differ only with attention_k_eq_v",
                self.num_global_key_value_heads, self.num_key_value_heads
            )));
        }
        let experts = self.experts.as_ref();
        let layer_types: Vec<String> = self.layer_types.iter().map(ToString::to_string).collect();
        let json = json!({
            "architectures": ["Gemma4ForCausalLM"],
            "attention_bias": false,
            "attention_dropout": 0.0,
            "attention_k_eq_v": self.attention_k_eq_v,
            "bos_token_id": self.bos_token,
            "dtype": self.dtype.map(name_of),
            "enable_moe_block": experts.is_some(),
            "eos_token_id": match self.eos_tokens[..] {
                [token] => json!(token),
                _ => json!(self.eos_tokens),
            },
            "final_logit_softcapping": self.final_logit_softcapping,
            "global_head_dim": self.global_head_dim,
            "head_dim": self.sliding_head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": self.hidden_size,
            "hidden_size_per_layer_input": self.hidden_size_per_layer_input,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            "layer_types": layer_types,
            "max_position_embeddings": self.max_position_embeddings,
            "model_type": "gemma4_text",
            "moe_intermediate_size": experts.map(|experts| experts.moe_intermediate_size),
            "num_attention_heads": self.num_attention_heads,
            "num_experts": experts.map(|experts| experts.num_experts),
            "num_global_key_value_heads": self.attention_k_eq_v.then_some(self.num_global_key_value_heads),
            "num_hidden_layers": self.num_layers(),
            "num_key_value_heads": self.num_key_value_heads,
            "num_kv_shared_layers": self.num_kv_shared_layers,
            "pad_token_id": self.pad_token,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {
                "full_attention": self.global_rope.to_json(),
                "sliding_attention": self.sliding_rope.to_json(),
            },
            "sliding_window": self.sliding_window,
            "tie_word_embeddings": self.tie_word_embeddings,
            "top_k_experts": experts.map(|experts| experts.top_k_experts),
            "use_bidirectional_attention": null,
            "use_cache": true,
            "use_double_wide_mlp": self.use_double_wide_mlp,
            "vocab_size": self.vocab_size,
            "vocab_size_per_layer_input": self.vocab_size_per_layer_input,
        });
        Ok(format!("{json:#}\n"))
    }
}

impl RopeConfig {
    fn to_json(&self) -> Value {
        if self.partial_rotary_factor == 1.0 && self.factor == 1.0 {
            return json!({"rope_type": "default", "rope_theta": self.theta});
        }
        let mut json = json!({
            "rope_type": "proportional",
            "rope_theta": self.theta,
            "partial_rotary_factor": self.partial_rotary_factor,
        });
        if self.factor != 1.0 {
            json["factor"] = self.factor.into();
        }
        json
    }
}

/// Returns the name that Hugging Face Transformers gives to a dtype.
pub(crate) fn name_of(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        _ => "float32",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn to_json_then_from_json_gives_same_configuration() {
        for config in [
            Gemma4Config::e2b(),
            Gemma4Config::e4b(),
            Gemma4Config::dense_12b(),
            Gemma4Config::moe_26b_a4b(),
            Gemma4Config::dense_31b(),
            Gemma4Config {
                tie_word_embeddings: false,
                final_logit_softcapping: None,
                eos_tokens: vec![1, 106],
                dtype: Some(DType::F32),
                global_rope: RopeConfig {
                    factor: 8.0,
                    ..RopeConfig::GLOBAL
                },
                ..Gemma4Config::e2b()
            },
        ] {
            let json = config
                .to_json()
                .expect("config.json can express the configuration");
            assert_eq!(
                Gemma4Config::from_json(&json).expect("the written JSON parses"),
                config
            );
        }
    }

    #[test]
    fn to_json_of_inexpressible_configuration_fails() {
        let mut sliding = Gemma4Config::e2b();
        sliding.layer_types.push(LayerType::Sliding);
        let heads = Gemma4Config {
            num_global_key_value_heads: 2,
            ..Gemma4Config::e2b()
        };
        for (config, word) in [
            (sliding, "layer_types"),
            (heads, "num_global_key_value_heads"),
        ] {
            let error = config
                .to_json()
                .expect_err("config.json cannot express the configuration")
                .to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
