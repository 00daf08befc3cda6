//! Defines the shapes of the models. Counts the weights and KV cache elements that a decode step reads.

use burn_gemma4::{DrafterConfig, Gemma4Config, LayerType, OrderedEmbeddings};

/// The shape of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Shape {
    E2b,
    E4b,
    #[value(name = "12b")]
    Dense12b,
    #[value(name = "26b", alias = "26b-a4b")]
    Moe26b,
    #[value(name = "31b")]
    Dense31b,
    /// A small model for a CPU, with the same kinds of layers as E2B.
    Small,
    /// A small model for a CPU, with the same kinds of layers as the larger dense models.
    SmallDense,
    /// A model of 420 million parameters for a CPU: 10 layers of E2B, and a vocabulary of 32,768 tokens.
    Medium,
}

impl Shape {
    pub fn config(self) -> Gemma4Config {
        match self {
            Self::E2b => Gemma4Config::e2b(),
            Self::E4b => Gemma4Config::e4b(),
            Self::Dense12b => Gemma4Config::dense_12b(),
            Self::Moe26b => Gemma4Config::moe_26b_a4b(),
            Self::Dense31b => Gemma4Config::dense_31b(),
            Self::Small => Gemma4Config {
                num_kv_shared_layers: 3,
                hidden_size_per_layer_input: 16,
                use_double_wide_mlp: true,
                ..small()
            },
            Self::Medium => Gemma4Config {
                layer_types: [LayerType::Sliding; 4]
                    .into_iter()
                    .chain([LayerType::Full])
                    .cycle()
                    .take(10)
                    .collect(),
                num_kv_shared_layers: 0,
                hidden_size_per_layer_input: 0,
                use_double_wide_mlp: false,
                vocab_size: 32_768,
                ..Gemma4Config::e2b()
            },
            Self::SmallDense => Gemma4Config {
                num_kv_shared_layers: 0,
                hidden_size_per_layer_input: 0,
                use_double_wide_mlp: false,
                attention_k_eq_v: true,
                num_key_value_heads: 2,
                num_global_key_value_heads: 1,
                ..small()
            },
        }
    }
}

impl Shape {
    /// Returns the configuration of the drafter that is published for this model. For the small shapes that run on a
    /// CPU, the drafter is small too.
    pub fn drafter(self) -> DrafterConfig {
        let target = self.config();
        let (hidden_size, intermediate_size, heads, has_groups) = match self {
            Self::E2b | Self::E4b | Self::Medium => (256, 2048, 4, true),
            Self::Dense12b | Self::Moe26b => (1024, 8192, 16, false),
            Self::Dense31b => (1024, 8192, 32, false),
            Self::Small => (32, 64, 4, true),
            Self::SmallDense => (32, 64, 4, false),
        };
        use LayerType::{Full, Sliding};
        let layer_types = vec![Sliding, Sliding, Sliding, Full];
        let ordered_embeddings = has_groups.then(|| OrderedEmbeddings {
            num_centroids: target.vocab_size / 128,
            top_k: (target.vocab_size / 8192).max(1),
        });
        DrafterConfig {
            backbone_hidden_size: target.hidden_size,
            ordered_embeddings,
            text: Gemma4Config {
                hidden_size,
                intermediate_size,
                num_attention_heads: heads,
                num_kv_shared_layers: layer_types.len(),
                layer_types,
                hidden_size_per_layer_input: 0,
                use_double_wide_mlp: false,
                experts: None,
                final_logit_softcapping: None,
                ..target
            },
        }
    }
}

fn small() -> Gemma4Config {
    use LayerType::{Full, Sliding};
    Gemma4Config {
        vocab_size: 2048,
        vocab_size_per_layer_input: 2048,
        hidden_size: 128,
        intermediate_size: 256,
        layer_types: vec![Sliding, Sliding, Full, Sliding, Sliding, Full],
        num_attention_heads: 4,
        sliding_head_dim: 64,
        global_head_dim: 128,
        sliding_window: 64,
        ..Gemma4Config::e2b()
    }
}

/// Returns the number of weights that a decode step multiplies. `all` is the number of the model's parameters. The
/// result excludes experts that the router does not select, and embedding tables that are not also the output head.
pub fn weights_read(config: &Gemma4Config, all: usize) -> usize {
    let layers = config.num_layers();
    let per_layer_embeddings = match config.has_per_layer_embeddings() {
        true => config.vocab_size_per_layer_input * layers * config.hidden_size_per_layer_input,
        false => 0,
    };
    let untied = match config.tie_word_embeddings {
        true => 0,
        false => config.vocab_size * config.hidden_size,
    };
    let idle_experts = config.experts.as_ref().map_or(0, |experts| {
        let expert = 3 * experts.moe_intermediate_size * config.hidden_size;
        layers * (experts.num_experts - experts.top_k_experts) * expert
    });
    all - per_layer_embeddings - untied - idle_experts
}

/// Returns the number of key and value elements that a decode step reads in all layers if `context` tokens precede the step.
pub fn keys_read(config: &Gemma4Config, context: usize, compact_keys: bool) -> usize {
    let of_layer = |layer: usize| {
        let columns = match config.layer_types[layer] {
            LayerType::Sliding => (context + 1).min(config.sliding_window),
            LayerType::Full => context + 1,
        };
        let head_dim = config.head_dim(layer);
        let of_key = match compact_keys && config.values_are_keys(layer) {
            true => 2 * config.global_rope.rotated_pairs(head_dim),
            false => head_dim,
        };
        columns * config.key_value_heads(layer) * (of_key + head_dim)
    };
    (0..config.num_layers()).map(of_layer).sum()
}
