//! The configurations of the published models.

use super::{ExpertsConfig, Gemma4Config, LayerType, RopeConfig};
use burn::tensor::DType;

impl RopeConfig {
    /// The rotary embedding of sliding layers. All channel pairs are rotated.
    pub(crate) const SLIDING: Self = Self {
        theta: 1e4,
        partial_rotary_factor: 1.0,
        factor: 1.0,
    };
    /// The rotary embedding of full layers. The first quarter of the channel pairs is rotated.
    pub(super) const GLOBAL: Self = Self {
        theta: 1e6,
        partial_rotary_factor: 0.25,
        factor: 1.0,
    };
}

/// Returns the layer types of a model that repeats `sliding` sliding layers and one full layer `periods` times.
fn pattern(sliding: usize, periods: usize) -> Vec<LayerType> {
    let period = [vec![LayerType::Sliding; sliding], vec![LayerType::Full]].concat();
    period.repeat(periods)
}

/// Returns a configuration with the values that all published models share. The remaining values are those of E2B.
fn common() -> Gemma4Config {
    Gemma4Config {
        vocab_size: 262_144,
        vocab_size_per_layer_input: 262_144,
        hidden_size: 1536,
        intermediate_size: 6144,
        use_double_wide_mlp: false,
        layer_types: pattern(4, 7),
        num_kv_shared_layers: 0,
        num_attention_heads: 8,
        num_key_value_heads: 1,
        num_global_key_value_heads: 1,
        sliding_head_dim: 256,
        global_head_dim: 512,
        sliding_window: 512,
        attention_k_eq_v: false,
        hidden_size_per_layer_input: 0,
        experts: None,
        sliding_rope: RopeConfig::SLIDING,
        global_rope: RopeConfig::GLOBAL,
        rms_norm_eps: 1e-6,
        final_logit_softcapping: Some(30.0),
        tie_word_embeddings: true,
        max_position_embeddings: 131_072,
        initializer_range: 0.02,
        bos_token: 2,
        eos_tokens: vec![1],
        pad_token: 0,
        dtype: Some(DType::BF16),
    }
}

impl Gemma4Config {
    /// Returns the configuration of Gemma 4 E2B, which has 4.6 billion parameters.
    pub fn e2b() -> Self {
        Self {
            use_double_wide_mlp: true,
            num_kv_shared_layers: 20,
            hidden_size_per_layer_input: 256,
            ..common()
        }
    }

    /// Returns the configuration of Gemma 4 E4B, which has 7.5 billion parameters.
    pub fn e4b() -> Self {
        Self {
            hidden_size: 2560,
            intermediate_size: 10_240,
            layer_types: pattern(5, 7),
            num_kv_shared_layers: 18,
            num_key_value_heads: 2,
            num_global_key_value_heads: 2,
            hidden_size_per_layer_input: 256,
            ..common()
        }
    }

    /// Returns the configuration of Gemma 4 12B.
    pub fn dense_12b() -> Self {
        Self {
            hidden_size: 3840,
            intermediate_size: 15_360,
            layer_types: pattern(5, 8),
            num_attention_heads: 16,
            num_key_value_heads: 8,
            num_global_key_value_heads: 1,
            sliding_window: 1024,
            attention_k_eq_v: true,
            max_position_embeddings: 262_144,
            ..common()
        }
    }

    /// Returns the configuration of Gemma 4 26B-A4B, a mixture of 128 experts. Each token uses 4 billion of 25 billion
    /// parameters.
    pub fn moe_26b_a4b() -> Self {
        Self {
            hidden_size: 2816,
            intermediate_size: 2112,
            layer_types: pattern(5, 5),
            num_attention_heads: 16,
            num_key_value_heads: 8,
            num_global_key_value_heads: 2,
            sliding_window: 1024,
            attention_k_eq_v: true,
            experts: Some(ExpertsConfig {
                num_experts: 128,
                top_k_experts: 8,
                moe_intermediate_size: 704,
            }),
            max_position_embeddings: 262_144,
            ..common()
        }
    }

    /// Returns the configuration of Gemma 4 31B.
    pub fn dense_31b() -> Self {
        Self {
            hidden_size: 5376,
            intermediate_size: 21_504,
            layer_types: pattern(5, 10),
            num_attention_heads: 32,
            num_key_value_heads: 16,
            num_global_key_value_heads: 4,
            sliding_window: 1024,
            attention_k_eq_v: true,
            max_position_embeddings: 262_144,
            ..common()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Gemma4Model;
    use burn::{module::Module, tensor::Device};

    /// Checks the presets' parameter counts against the counts of Hugging Face Transformers. The counts of Hugging Face
    /// Transformers do not include the output scalar of each layer.
    #[test]
    fn presets_have_published_parameter_counts() {
        let cases = [
            (Gemma4Config::e2b(), 4_628_569_344),
            (Gemma4Config::e4b(), 7_463_013_376),
            (Gemma4Config::moe_26b_a4b(), 25_233_141_760),
            (Gemma4Config::dense_31b(), 30_697_345_280),
        ];
        for (config, parameters) in cases {
            config.validate().expect("a preset is valid");
            let model = Gemma4Model::new(&config, &Device::default());
            assert_eq!(model.num_params() - config.num_layers(), parameters);
        }
        Gemma4Config::dense_12b()
            .validate()
            .expect("a preset is valid");
    }
}
