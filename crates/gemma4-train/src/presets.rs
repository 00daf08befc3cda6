//! The model shapes that `--config` offers, from a tiny test model to the published models.

use burn_gemma4::{Gemma4Config, LayerType};

/// The values of `--config`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Preset {
    /// 67 thousand parameters, for a quick test.
    Tiny,
    /// 1.4 million parameters.
    #[value(name = "1m")]
    M1,
    /// 6 million parameters.
    #[value(name = "6m")]
    M6,
    /// 55 million parameters.
    #[value(name = "55m")]
    M55,
    /// 170 million parameters.
    #[value(name = "170m")]
    M170,
    /// Gemma 4 E2B.
    E2b,
    /// Gemma 4 E4B.
    E4b,
    /// Gemma 4 12B.
    #[value(name = "12b")]
    B12,
    /// Gemma 4 26B-A4B.
    #[value(name = "26b-a4b")]
    B26A4b,
    /// Gemma 4 31B.
    #[value(name = "31b")]
    B31,
}

/// The settings in which the small models differ. Most other settings equal those of Gemma 4 E2B.
struct Small {
    hidden_size: usize,
    intermediate_size: usize,
    /// The number of sliding layers before each full-attention layer.
    sliding: usize,
    /// The number of periods. A period is a group of layers: the sliding layers, and the full-attention layer after them. The
    /// last period shares the KV cache of the period before it.
    periods: usize,
    heads: usize,
    /// The head dimension of sliding layers. Full layers have twice this head dimension.
    head_dim: usize,
    window: usize,
    /// The size of the per-layer embeddings.
    own_inputs: usize,
}

impl Preset {
    /// Returns the vocabulary size that suits the preset.
    pub fn vocabulary(self) -> usize {
        match self {
            Self::Tiny => 512,
            Self::M1 => 2048,
            Self::M6 => 4096,
            Self::M55 => 8192,
            Self::M170 => 16_384,
            _ => 65_536,
        }
    }

    /// Returns the peak learning rate that suits the preset, for batches of a few thousand tokens.
    pub fn learning_rate(self) -> f64 {
        match self {
            Self::Tiny | Self::M1 => 5e-3,
            Self::M6 => 3e-3,
            Self::M55 => 1e-3,
            Self::M170 => 6e-4,
            _ => 3e-4,
        }
    }

    /// Returns the model's configuration with the vocabulary size `vocabulary`. The published models ignore the argument and
    /// keep their own vocabulary.
    pub fn config(self, vocabulary: usize) -> Gemma4Config {
        let small = match self {
            Self::Tiny => Small {
                hidden_size: 32,
                intermediate_size: 64,
                sliding: 1,
                periods: 2,
                heads: 2,
                head_dim: 16,
                window: 16,
                own_inputs: 4,
            },
            Self::M1 => Small {
                hidden_size: 128,
                intermediate_size: 320,
                sliding: 2,
                periods: 2,
                heads: 4,
                head_dim: 32,
                window: 128,
                own_inputs: 8,
            },
            Self::M6 => Small {
                hidden_size: 256,
                intermediate_size: 768,
                sliding: 2,
                periods: 2,
                heads: 4,
                head_dim: 64,
                window: 256,
                own_inputs: 16,
            },
            Self::M55 => Small {
                hidden_size: 512,
                intermediate_size: 2048,
                sliding: 3,
                periods: 3,
                heads: 4,
                head_dim: 128,
                window: 512,
                own_inputs: 32,
            },
            Self::M170 => Small {
                hidden_size: 768,
                intermediate_size: 3072,
                sliding: 4,
                periods: 3,
                heads: 4,
                head_dim: 256,
                window: 512,
                own_inputs: 64,
            },
            Self::E2b => return Gemma4Config::e2b(),
            Self::E4b => return Gemma4Config::e4b(),
            Self::B12 => return Gemma4Config::dense_12b(),
            Self::B26A4b => return Gemma4Config::moe_26b_a4b(),
            Self::B31 => return Gemma4Config::dense_31b(),
        };
        let period = [
            vec![LayerType::Sliding; small.sliding],
            vec![LayerType::Full],
        ]
        .concat();
        Gemma4Config {
            vocab_size: vocabulary,
            vocab_size_per_layer_input: vocabulary,
            hidden_size: small.hidden_size,
            intermediate_size: small.intermediate_size,
            use_double_wide_mlp: false,
            layer_types: period.repeat(small.periods),
            num_kv_shared_layers: period.len(),
            num_attention_heads: small.heads,
            sliding_head_dim: small.head_dim,
            global_head_dim: 2 * small.head_dim,
            sliding_window: small.window,
            hidden_size_per_layer_input: small.own_inputs,
            max_position_embeddings: 32_768,
            ..Gemma4Config::e2b()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::{module::Module, tensor::Device};
    use burn_gemma4::Gemma4Model;
    use clap::ValueEnum;

    #[test]
    fn presets_have_the_parameter_counts_of_their_names() {
        for preset in Preset::value_variants() {
            let config = preset.config(preset.vocabulary());
            config.validate().expect("a preset is valid");
            config
                .to_json()
                .expect("config.json can represent the preset");
            let model = Gemma4Model::new(&config, &Device::default());
            let expected = match preset {
                Preset::Tiny => 60_000..75_000,
                Preset::M1 => 1_350_000..1_450_000,
                Preset::M6 => 6_000_000..6_500_000,
                Preset::M55 => 54_000_000..56_000_000,
                Preset::M170 => 165_000_000..175_000_000,
                _ => continue,
            };
            let parameters = model.num_params();
            assert!(
                expected.contains(&parameters),
                "{preset:?} has {parameters}"
            );
        }
    }
}
